"""`python -m bench`: measure late_interaction beside its peers, in one process, on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import cpu, first_call, options, plot, results, shapes, together, triton_tuning
from .catalog import SUITES
from .impls import KEYS, OURS, load
from .suites import Settings, run_suite
from .timing import QUICK, Ceilings, Effort, measure_ceilings


def _target(args: argparse.Namespace, device: torch.device) -> Path:
    """A run of everything is the record; a filtered one goes beside it, unless told to merge."""
    if args.out:
        return Path(args.out)
    name = "cpu" if device.type == "cpu" else results.slug(torch.cuda.get_device_name(device))
    if args.dry_run:
        name = "dry-run"
    partial = options.is_filtered(args) and not args.merge
    return results.DIRECTORY / f"{name}{'.partial' if partial else ''}.json"


def _settings(args: argparse.Namespace, device: torch.device, keys: Sequence[str]) -> Settings:
    implementations, missing = load([*keys], device)
    for absent in missing:
        print(f"{absent.name} is not measured: {absent.why}")
    effort = QUICK if args.quick or args.dry_run else Effort()
    return Settings(
        device=device, dtype=options.DTYPES[args.dtype], implementations=implementations, effort=effort,
        ceilings=measure_ceilings(effort) if device.type == "cuda" else Ceilings(),
        limit_s=args.limit or (options.FULL_LIMIT_S if args.full else options.LIMIT_S),
        retune=args.full, compile_all=args.full, compiles=not args.quick,
    )  # fmt: skip


def _header(args: argparse.Namespace, settings: Settings) -> results.Row:
    tuning = "for each shape" if args.full else "once for each key of their own caches, at the first shape"
    more: dict[str, Any] = {}
    if settings.device.type == "cuda":
        more = {"l2_mib": settings.cache_bytes / 2**20}
    header = results.new_header(settings.device, settings.ceilings, peers_tuned=tuning, **more)
    if settings.ceilings.cublas_tflops:
        c = settings.ceilings
        told = f"cuBLAS bf16 {c.cublas_tflops:.0f} and TF32 {c.cublas_tf32_tflops:.0f} TFLOP/s"
        print(f"{header['gpu']}: {told}, reads {c.read_tbps:.2f} TB/s, copies {c.copy_tbps:.2f} TB/s")
    return header


def _run_gpu(args: argparse.Namespace, device: torch.device, target: Path) -> results.Results:
    keys = args.impl or [k for k in KEYS if not (args.quick and k == "compile")]
    settings = _settings(args, device, keys)
    out = results.Results(target, _header(args, settings), args.merge)
    known = {i.name for i in settings.implementations}
    for name in args.suite or [s for s in SUITES if not (args.quick and s == first_call.SUITE)]:
        suite = SUITES[name]
        chosen = shapes.select(suite.tiny if args.dry_run else suite.shapes, args.shapes)
        if suite.op:
            if args.warm:
                triton_tuning.warm(settings.implementations, chosen, suite.op, args.warm, settings.log)
            run_suite(settings, out, name, chosen, suite.op, suite.winners)
        elif suite.take and OURS in known:
            together.run(settings, out, chosen, suite.ratio, suite.take)
        elif name == first_call.SUITE:
            first_call.run(settings, out, [k for k in keys if KEYS[k].name in known], tiny=args.dry_run)
    return out


def _run_cpu(args: argparse.Namespace, target: Path) -> results.Results:
    out = results.Results(target, results.new_header(torch.device("cpu"), Ceilings()), args.merge)
    cpu.run(
        out, shapes.select(shapes.CPU, args.shapes), shapes.select(shapes.CPU_TRAINING, args.shapes),
        rounds=3 if args.quick else 15, log=lambda line: print(line, flush=True),
    )  # fmt: skip
    return out


def _summary(rows: Sequence[results.Row], device: torch.device) -> str:
    if any(r["suite"] == "cpu" for r in rows):
        return cpu.summary(rows)
    measured = [r for r in rows if SUITES[r["suite"]].op]
    return results.summary(measured, "gpu_us" if device.type == "cuda" else "wall_us") if measured else ""


def main(arguments: Sequence[str] | None = None) -> int:
    args = options.parser().parse_args(arguments)
    problem = options.problem(args)
    if args.device == "cuda" and not args.dry_run and not torch.cuda.is_available():
        problem = problem or "--device cuda, but PyTorch sees no GPU"
    if problem:
        print(problem, file=sys.stderr)
        return 2
    start = time.perf_counter()
    device = torch.device("cpu" if args.dry_run else args.device)
    torch.manual_seed(0)
    target = _target(args, device)
    try:
        run = _run_gpu if device.type == "cuda" or args.dry_run else None
        out = run(args, device, target) if run else _run_cpu(args, target)
    except results.IncompleteError as incomplete:
        print(incomplete, file=sys.stderr)
        return 2
    print(f"\n{_summary(out.rows, device)}")
    if device.type == "cuda" and out.rows and not args.no_plot:
        image = target.parent / ("roofline.png" if ".partial" not in target.name else "roofline.partial.png")
        print(plot.roofline(results.read(target), image) or f"drew {image}")
    for row in (r for r in out.rows if r.get("error")):
        where = " ".join(str(row[k]) for k in ("suite", "shape", "impl", "backward") if row[k])
        print(f"error: {where}: {row['error'][:160]}")
    print(f"{len(out.rows)} rows in {target}, {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
