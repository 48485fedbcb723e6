"""Nsight Compute's figures of our forward on a few shapes, into bench/results/ncu-<device>.json.

Profile, then extract (the kernels run one by one, at the clocks that the GPU has):

    ncu --clock-control none --profile-from-start off --kernel-name regex:maxsim_forward \\
        --section SpeedOfLight --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis \\
        --section SchedulerStats --section LaunchStats --print-units base --csv --page raw \\
        python -m bench.ncu run > ncu.csv
    python -m bench.ncu extract ncu.csv

`run --shapes a,b,c` takes other forward shapes, and `extract` the same ones in the same order.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import results
from .results import Row
from .shapes import named
from .timing import Ceilings

SHAPES = ("text-long", "train-256", "colpali-lq128")
_PERCENT = r"\.avg\.pct_of_peak_sustained_(?:active|elapsed)"
# Patterns of metrics, the first that a report holds: their names differ between GPUs and versions. Of several
# that match one pattern (a pipe's kinds of instruction) the busiest is meant.
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


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _metric(name: str, row: dict[str, str], units: dict[str, str]) -> float | None:
    for pattern in METRICS[name]:
        found = []
        for column, text in row.items():
            if re.fullmatch(pattern, column) and (value := _number(text)) is not None:
                unit = units.get(column, "")[:1] if name == "duration_us" else ""
                found.append(value * _MICROSECONDS.get(unit, 1.0))
        if found:
            return max(found)
    return None


def extract(text: str, shapes: Sequence[str]) -> list[Row]:
    """A row a shape, from what `ncu --csv --page raw` wrote: its own lines, the program's, a row of units."""
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
        found: dict[str, Any] = {name: _metric(name, row, units) for name in METRICS}
        where = {
            "shape": shape,
            "kernel": kernel[0] if kernel else row["Kernel Name"],
            "grid": row.get("Grid Size"),
        }
        out.append({**where, **found})
    return out


def run(shapes: Sequence[str]) -> None:
    """One profiled call of each shape, after one that loads its kernel."""
    import late_interaction as li

    from .inputs import draw

    for shape in named(shapes):
        x = draw(shape, torch.device("cuda"), torch.bfloat16)
        li.maxsim(x.Q, x.D)
        torch.cuda.synchronize()
        profiler: Any = torch.cuda.profiler
        profiler.start()
        li.maxsim(x.Q, x.D)
        torch.cuda.synchronize()
        profiler.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ncu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["run", "extract"])
    parser.add_argument("csv", type=Path, nargs="?")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--out", type=Path, help="default: bench/results/ncu-<device>.json")
    args = parser.parse_args(arguments)
    shapes = args.shapes.split(",")
    if args.step == "run":
        run(shapes)
        return 0
    if args.csv is None:
        parser.error("extract takes the file that ncu wrote")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if args.out is None and not on_gpu:
        parser.error("name the file with --out where there is no GPU")
    try:
        rows = extract(args.csv.read_text(), shapes)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    target = args.out or results.DIRECTORY / f"ncu-{results.slug(torch.cuda.get_device_name(device))}.json"
    header = results.new_header(device, Ceilings(), program="bench.ncu")
    out = results.Results(target, header)
    out.rows = [{**row, "run": header["run"]} for row in rows]
    out.write()
    head = ["shape", *METRICS]
    body = [[str(r["shape"]), *(results.number(r[m]) for m in METRICS)] for r in rows]
    print(results.align(head, body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
