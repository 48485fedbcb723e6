"""kernel_costs.py [--records FILE]: what each family of CUDA kernels costs, and what it gains.

    LATE_INTERACTION_CUDA_ARCHS=9.0a make build
    .venv/bin/python tools/kernel_costs.py

Costs are read from the last build: kernels and ptxas seconds from its resource report (ptxas.log), machine
code from the library (needs cuobjdump, which comes with the CUDA toolkit and with Triton), and the seconds
of each translation unit, the compiler's front end included, from ninja's log.

Gains are read from the record of `python -m bench plans`, which timed every plan that a forward could have
on random shapes, a table for each variant of the call: `needed` counts the shapes on which a call without
the family would take over 1% longer, `mean` and `worst` say how much longer it would take. A family that no
shape needs is a candidate for deletion.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "late_interaction" / "_cuda.abi3.so"
RECORD = ROOT / "bench" / "results" / "plans-nvidia-h200.json"
NEEDED = 1.01
# Template arguments that tell the families of a kernel apart: (kernel, pattern of its arguments, family).
FAMILIES = (
    (r"maxsim_forward_sm90_q", r"(?:E4m3|E5m2|Int8),[^,]*, (\d+)", r"rows \1, 8 bit"),
    (r"maxsim_forward_sm90_q", r"Wgmma\w+,[^,]*, (\d+)", r"rows \1"),
    (r"maxsim_forward_sm90_q_short", r"Wgmma\w+,[^,]*, (\d+), (\d+)", r"short \1x\2"),
    (r"maxsim_forward_sm90_q_longd", r"Wgmma\w+,[^,]*, (\d+)", r"split \1"),
    (r"maxsim_forward_sm90_d", r"PairsTile", r"documents, listed pairs"),
    (r"maxsim_forward_sm90_d", r"Wgmma\w+,[^,]*, (\d+)", r"documents, \1 query rows"),
    (r"maxsim_forward_sm80_short_docs", r"DirectTile<[^,]*, \d+, 2,", r"short documents, 64 bytes at a time"),
    (r"maxsim_forward_sm80_short_docs", r"DirectTile<[^,]*, (\d+)", r"short documents, \1 x 8 tokens"),
    ("maxsim_forward_sm80_q", r"Sm80QTile<[^,]*, (\d+), (\d+), (\d+)", r"registers, \1 x 32 bytes, \3 warps"),
    ("maxsim_forward_sm80_d", r"Sm80DTile<[^,]*, (\d+), \d+, 8>", r"registers, \1 x 32 bytes, 64 query rows"),
    (r"maxsim_forward_sm80_d", r"Sm80DTile<[^,]*, (\d+)", r"registers, \1 x 32 bytes, 32 query rows"),
    (r"maxsim_forward_sm80", r"Listed", r"mma, listed pairs"),
    (r"maxsim_forward_sm80", r"Shared<MmaTile<1, 4", "thin shared"),
    (r"maxsim_forward_sm80", r"Shared<MmaTile<4, 2", "wide shared"),
    (r"maxsim_forward_sm80", r"MmaTile<1, 4", "thin"),
    (r"maxsim_forward_sm80", r"MmaTile<4, 2", "wide"),
    (r"backward_(lowmem|few|unified)", r"double", r"backward_\1, fp64"),
    (r"backward_(lowmem|few|unified)", r", true, (true|false)", r"backward_\1"),
)
# Families of the record: plans whose names match.
PLANS = (
    *(f"rows {width}" for width in (160, 152, 144, 128, 112, 104, 80)), "rows .* copied",
    *(f"split {width}" for width in (152, 144, 128, 112, 104, 80)), "split .* paired",
    "short .*", "documents", "documents .x4", "documents [234]x", "direct", "direct 8", "direct 32",
    "registers 32 .*", "registers (128|256|512)", "thin", "wide",
)  # fmt: skip


def ptxas_reports():
    """(kernel's symbol, GPU) -> seconds of ptxas."""
    logs = [Path(sys.prefix) / "build" / "ptxas.log", ROOT / "build" / "ptxas.log"]
    log = next((path for path in logs if path.exists()), None)
    if log is None:
        sys.exit("no ptxas.log: build the CUDA library first (make build)")
    found, kernel = {}, None
    for line in log.read_text().splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            kernel = match.groups()
        elif match := re.search(r"Compile time = ([\d.]+) ms", line):
            found[kernel] = float(match[1]) / 1e3
    return found, log.parent


def code_bytes():
    """(kernel's symbol, GPU) -> bytes of machine code; empty without cuobjdump."""
    if not shutil.which("cuobjdump") or not LIBRARY.exists():
        return {}
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["cuobjdump", "-xelf", "all", LIBRARY], cwd=folder, check=True, capture_output=True)
        for cubin in Path(folder).glob("*.cubin"):
            gpu = re.search(r"(sm_\w+?)\.cubin", cubin.name)[1]
            table = subprocess.run(
                ["readelf", "-SW", cubin], capture_output=True, text=True, check=True
            ).stdout
            for name, size in re.findall(r"\] \.text\.(\S+)\s+PROGBITS\s+\S+\s+\S+\s+([0-9a-f]+)", table):
                sizes[name, gpu.rstrip("a")] = int(size, 16)
    return sizes


def readable(symbols):
    """symbol -> what it is called in the source, without our namespaces."""
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    plain = re.sub(r"late_interaction::|\(anonymous namespace\)::", "", text.stdout)
    return dict(zip(symbols, plain.splitlines(), strict=True))


def family(name):
    kernel = re.match(r"(?:void )?(\w+)", name)[1]
    for wanted, arguments, called in FAMILIES:
        if re.fullmatch(wanted, kernel) and (match := re.search(arguments, name)):
            return re.sub(wanted, called, kernel) if "backward" in wanted else match.expand(called)
    return kernel


def costs():
    """GPU -> family -> [kernels, bytes, seconds]."""
    seconds, build = ptxas_reports()
    sizes = code_bytes()
    names = readable([symbol for symbol, _ in seconds])
    found = defaultdict(lambda: defaultdict(lambda: [0, 0, 0.0]))
    for (symbol, gpu), time in seconds.items():
        row = found[gpu][family(names[symbol])]
        row[0] += 1
        row[1] += sizes.get((symbol, gpu.rstrip("a")), 0)
        row[2] += time
    return found, build


def units(build):
    """Translation unit -> seconds of nvcc, for the sources that there are: the log remembers others too."""
    found = {}
    for log in build.glob("objects/*_cuda/.ninja_log"):
        for line in log.read_text().splitlines()[1:]:
            start, end, _, target, *_ = line.split("\t")
            name = target.partition("/csrc/cuda/")[2].removesuffix(".o")
            if name and (ROOT / "csrc" / "cuda" / f"{name}.cu").exists():
                found[name] = (int(end) - int(start)) / 1e3
    return found


def gains(record):
    """Variant of the call -> plans -> (shapes that have them, shapes that need them, mean, worst).

    Mean and worst are of a call's time without the plans over its time with them.
    """
    calls = defaultdict(list)
    for row in json.loads(record.read_text()):
        if row.get("times"):
            calls[row["variant"]].append(row["times"])
            if row["variant"] == "plain":
                older = [n for n in row["times"] if not re.match("rows|split|documents", n)]
                calls["plain, on a GPU without wgmma"].append({name: row["times"][name] for name in older})
    found = defaultdict(dict)
    for variant, shapes in calls.items():
        for plan in PLANS:
            without = [ratio for times in shapes if (ratio := time_without(plan, times))]
            if without:
                needed = sum(ratio > NEEDED for ratio in without)
                found[variant][plan] = (len(without), needed, sum(without) / len(without), max(without))
    return found


def time_without(plan, times):
    """The best time without plans of this name over the best of all; None where that says nothing."""
    others = [us for name, us in times.items() if not re.match(rf"{plan}\b", name)]
    return min(others) / min(times.values()) if 0 < len(others) < len(times) else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=RECORD)
    arguments = parser.parse_args()
    found, build = costs()
    for gpu, families in found.items():
        print(f"{gpu}: {sum(row[0] for row in families.values())} kernels")
        print(f"  {'family':32} {'kernels':>7} {'MB':>7} {'ptxas s':>8}")
        for name, (count, size, time) in sorted(families.items(), key=lambda item: -item[1][2]):
            print(f"  {name:32} {count:7} {size / 1e6:7.2f} {time:8.1f}")
    slowest = sorted(units(build).items(), key=lambda item: -item[1])
    print(f"{len(slowest)} translation units, {sum(time for _, time in slowest):.0f} s in all; the slowest:")
    for name, time in slowest[:12]:
        print(f"  {name:48} {time:8.1f} s")
    for variant, families in gains(arguments.records).items():
        print(f"{arguments.records.name}, {variant}: what a call takes without a family")
        print(f"  {'plans':32} {'shapes':>7} {'needed':>7} {'mean':>8} {'worst':>7}")
        for name, (count, needed, mean, worst) in families.items():
            print(f"  {name:32} {count:7} {needed:7} {mean:7.4f}x {worst:6.2f}x")


if __name__ == "__main__":
    main()
