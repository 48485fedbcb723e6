"""Profiles our forward on a few shapes with Nsight Compute, into bench/results/ncu-<device>.json.

Profile, then extract (kernels run one by one, at the clocks that the GPU has):

    ncu --clock-control none --profile-from-start off --kernel-name regex:maxsim_forward \\
        --section SpeedOfLight --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis \\
        --section SchedulerStats --section LaunchStats --print-units base --csv --page raw \\
        python -m bench ncu run > ncu.csv
    python -m bench ncu extract ncu.csv

`run --shapes a,b,c` takes other forward shapes; `extract` needs the same ones in the same order.
"""

import csv
import re
import sys
from pathlib import Path

import torch

import late_interaction as li
from bench.harness import results, run_header
from bench.harness.inputs import draw
from bench.harness.named_shapes import named
from late_interaction._doctor.text import align, number

SHAPES = ("text-long", "train-256", "colpali-lq128")
_PERCENT = r"\.avg\.pct_of_peak_sustained_(?:active|elapsed)"
# Names of metrics differ between GPUs and versions: the first pattern that the report has counts. If several
# metrics match it (the instruction kinds of a pipe), the largest counts.
METRICS = {
    "tensor_pct": (
        rf"sm__pipe_tensor\w*_cycles_active{_PERCENT}",
        rf"sm__inst_executed_pipe_tensor\w*{_PERCENT}",
    ),
    "dram_pct": (rf"gpu__dram_throughput{_PERCENT}", rf"dram__throughput{_PERCENT}"),
    "l2_pct": (rf"lts__throughput{_PERCENT}", rf"lts__t_sectors{_PERCENT}"),
    "issue_pct": (rf"sm__inst_issued{_PERCENT}", rf"smsp?__issue_active{_PERCENT}"),
    "registers": (r"launch__registers_per_thread",),
    "duration_us": (r"gpu__time_duration\.sum", r"gpu__time_duration\.avg"),
}  # fmt: skip
_MICROSECONDS = {"n": 1e-3, "u": 1.0, "m": 1e3, "s": 1e6}  # by the first letter of ns, nsecond, ...


def _number(text):
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _metric(name, row, units):
    for pattern in METRICS[name]:
        found = []
        for column, text in row.items():
            if re.fullmatch(pattern, column) and (value := _number(text)) is not None:
                unit = units.get(column, "")[:1] if name == "duration_us" else ""
                found.append(value * _MICROSECONDS.get(unit, 1.0))
        if found:
            return max(found)
    return None


def extract(text, shapes):
    """A row for each shape, from the output of `ncu --csv --page raw` and what the program printed."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table of ncu --csv --page raw in it")
    table = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))
    kernels = [row for row in table if row["ID"].isdigit()]
    units = next((row for row in table if not row["ID"]), {})
    if len(kernels) != len(shapes):
        raise ValueError(f"{len(kernels)} profiled kernels for {len(shapes)} shapes")
    out = []
    for shape, row in zip(shapes, kernels, strict=True):
        kernel = re.search(r"maxsim_\w+", row["Kernel Name"])
        found = {name: _metric(name, row, units) for name in METRICS}
        name = kernel[0] if kernel else row["Kernel Name"]
        out.append({"shape": shape, "kernel": name, "grid": row.get("Grid Size"), **found})
    return out


def _profiled_calls(shapes):
    """One profiled call of each shape, after one that loads its kernel."""
    for shape in named(shapes):
        x = draw(shape, torch.device("cuda"), torch.bfloat16)
        li.maxsim(x.Q, x.D)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        li.maxsim(x.Q, x.D)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def add_arguments(p):
    p.add_argument("step", choices=["run", "extract"], help="what ncu runs, or what reads its output")
    p.add_argument("csv", type=Path, nargs="?", help="the file that ncu wrote, for extract")
    shapes = ",".join(SHAPES)
    p.add_argument("--shapes", type=run_header.listed(str), default=shapes, help=f"default: {shapes}")
    p.add_argument("--out", type=Path, help="default: bench/results/ncu-<device>.json")


def run(args):
    shapes = args.shapes
    if args.step == "run":
        _profiled_calls(shapes)
        return 0
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    missing = None if args.csv else "extract takes the file that ncu wrote"
    if args.out is None and not on_gpu:
        missing = missing or "name the file with --out where there is no GPU"
    if missing:
        print(missing, file=sys.stderr)
        return 2
    try:
        rows = extract(args.csv.read_text(), shapes)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    target = args.out or results.DIRECTORY / f"ncu-{results.slug(torch.cuda.get_device_name(device))}.json"
    header = run_header.new_header(device, None, args.arguments)
    results.write(target, [header, *({**row, "run": header["run"]} for row in rows)])
    head = ["shape", *METRICS]
    body = [[str(r["shape"]), *(number(r[m]) for m in METRICS)] for r in rows]
    print(align(head, body))
    return 0
