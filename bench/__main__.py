"""`python -m bench`: measure late_interaction beside its peers, in one process, on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import (
    cpu,
    first_call,
    fp32,
    heads,
    hidden,
    pairs,
    plaid,
    plot,
    quantized,
    results,
    retrieval,
    shapes,
    steps,
    targets,
    together,
    variants,
    varlen,
)
from .impls import KEYS, OURS, load
from .suites import WINNER_KINDS, Settings, run_suite
from .timing import QUICK, Ceilings, Effort, measure_ceilings

SUITES = (
    "forward",
    "variants",
    "fp32",
    "quantized",
    "plaid",
    "fused-head",
    "retrieve",
    "varlen",
    "pairs-packed",
    "training",
    "steps",
    "backward",
    "heads",
    "first-call",
)
# Calls in turns: the shapes, those of a dry run, what each row is a ratio to, and who measures them.
TOGETHER = {
    variants.SUITE: (shapes.named(shapes.VARIANTS), shapes.TINY_FORWARD, "over_plain", variants.take),
    fp32.SUITE: (shapes.named(shapes.FP32), shapes.TINY_FORWARD, "over_einsum", fp32.take),
    quantized.SUITE: (shapes.named(shapes.QUANTIZED), shapes.TINY_FORWARD, "over_bf16", quantized.take),
    plaid.SUITE: (shapes.PLAID, shapes.TINY_PLAID, "over_lik", plaid.take),
    hidden.SUITE: (shapes.FUSED_HEAD, shapes.TINY_FUSED_HEAD, "over_unfused", hidden.take),
    retrieval.SUITE: (shapes.RETRIEVE, shapes.TINY_RETRIEVE, "over_scores", retrieval.take),
    varlen.SUITE: (shapes.VARLEN, shapes.TINY_VARLEN, "over_ours", varlen.take),
    pairs.SUITE: (shapes.PAIR_LISTS, shapes.TINY_PAIR_LISTS, "over_ours", pairs.take),
    steps.SUITE: (shapes.TRAINING, shapes.TINY_TRAINING, "over_plain", steps.take),
    heads.SUITE: (shapes.HEADS, shapes.TINY_HEADS, "over_einsum", heads.take),
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", choices=["cuda", "cpu"], default=here)
    p.add_argument("--suite", type=_list, default=[], help=f"some of {','.join(SUITES)} (GPU); default: all")
    p.add_argument("--shapes", type=_list, default=[], help="names or parts of names, comma-separated")
    p.add_argument("--impl", type=_list, default=[], help=f"some of {','.join(KEYS)}; default: all")
    p.add_argument("--dtype", choices=list(_DTYPES), default="bf16", help="of the GPU suites")
    p.add_argument("--quick", action="store_true", help="fewer repetitions, no first calls, no torch.compile")
    p.add_argument(
        "--full", action="store_true", help="tune the peers for every shape, torch.compile every shape"
    )
    p.add_argument("--limit", type=float, help="seconds that one implementation may compile and tune a shape")
    p.add_argument("--out", type=Path, help="the JSON file; default: bench/results/<device>.json")
    p.add_argument("--merge", action="store_true", help="keep what --out holds of shapes not measured now")
    p.add_argument("--no-plot", action="store_true")
    p.add_argument("--dry-run", action="store_true", help="the GPU suites on the CPU, in tiny shapes")
    return p


def _check(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, in one line."""
    for flag, given, known in (("--suite", args.suite, SUITES), ("--impl", args.impl, tuple(KEYS))):
        if unknown := [g for g in given if g not in known]:
            return f"{flag} {','.join(unknown)} is none of {','.join(known)}"
    if args.device == "cuda" and not args.dry_run and not torch.cuda.is_available():
        return "--device cuda, but PyTorch sees no GPU"
    return None


def _target(args: argparse.Namespace, device: torch.device) -> Path:
    """A run of everything is the record; a filtered one goes beside it, unless told to merge."""
    if args.out:
        return Path(args.out)
    name = "cpu" if device.type == "cpu" else results.slug(torch.cuda.get_device_name(device))
    if args.dry_run:
        name = "dry-run"
    filtered = args.suite or args.shapes or args.impl or args.quick or args.dtype != "bf16" or args.dry_run
    return results.DIRECTORY / f"{name}{'.partial' if filtered and not args.merge else ''}.json"


def _run_gpu(args: argparse.Namespace, device: torch.device, target: Path) -> results.Results:
    keys = args.impl or [k for k in KEYS if not (args.quick and k == "compile")]
    suites = args.suite or [s for s in SUITES if not (args.quick and s == "first-call")]
    implementations, missing = load(keys, device)
    for absent in missing:
        print(f"{absent.name} is not measured: {absent.why}")
    effort = QUICK if args.quick or args.dry_run else Effort()
    ceilings = measure_ceilings(effort) if device.type == "cuda" else Ceilings()
    settings = Settings(
        device=device, dtype=_DTYPES[args.dtype], implementations=implementations, effort=effort,
        ceilings=ceilings, limit_s=args.limit or (240.0 if args.full else 40.0),
        retune=args.full, compile_all=args.full, compiles=not args.quick,
    )  # fmt: skip
    tuning = "for each shape" if args.full else "once for each key of their own caches, at the first shape"
    header = results.new_header(device, ceilings, peers_tuned=tuning, **_l2(device))
    out = results.Results(target, header, args.merge)
    if ceilings.cublas_tflops:
        told = f"cuBLAS bf16 {ceilings.cublas_tflops:.0f} and TF32 {ceilings.cublas_tf32_tflops:.0f} TFLOP/s"
        told += f", reads {ceilings.read_tbps:.2f} TB/s"
        print(f"{header['gpu']}: {told}, copies {ceilings.copy_tbps:.2f} TB/s", flush=True)
    tiny = args.dry_run
    forward = (*shapes.TINY_FORWARD, shapes.TINY_LONG) if tiny else shapes.FORWARD
    training = (*shapes.TINY_TRAINING, shapes.TINY_LONG) if tiny else (*shapes.TRAINING, *shapes.LONG)
    forward, training = (tuple(shapes.select(known, args.shapes)) for known in (forward, training))
    if "forward" in suites:
        run_suite(settings, out, "forward", forward, "fwd")
    for suite, (known, small, ratio, take) in TOGETHER.items():
        if suite in suites and any(i.name == OURS for i in implementations):
            together.run(settings, out, shapes.select(small if tiny else known, args.shapes), ratio, take)
    if "training" in suites:
        run_suite(settings, out, "training", training, "fwd+bwd", WINNER_KINDS)
    if "backward" in suites:
        run_suite(settings, out, "backward", training, "bwd", WINNER_KINDS)
    if "first-call" in suites:
        present = [k for k in keys if any(isinstance(i, KEYS[k]) for i in implementations)]
        first_call.run(settings, out, present, tiny=args.dry_run)
    return out


def _l2(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    return {"l2_mib": torch.cuda.get_device_properties(device).L2_cache_size / 2**20}


def _run_cpu(args: argparse.Namespace, target: Path) -> results.Results:
    out = results.Results(target, results.new_header(torch.device("cpu"), Ceilings()), args.merge)
    cpu.run(
        out, shapes.select(shapes.CPU, args.shapes), shapes.select(shapes.CPU_TRAINING, args.shapes),
        rounds=3 if args.quick else 15, log=lambda line: print(line, flush=True),
    )  # fmt: skip
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if problem := _check(args):
        print(problem, file=sys.stderr)
        return 2
    start = time.perf_counter()
    device = torch.device("cpu" if args.dry_run else args.device)
    torch.manual_seed(0)
    target = _target(args, device)
    if device.type == "cuda" or args.dry_run:
        out = _run_gpu(args, device, target)
        measured = [r for r in out.rows if r["suite"] not in ("first-call", *TOGETHER)]
        told = results.summary(measured, "gpu_us" if device.type == "cuda" else "wall_us") if measured else ""
    else:
        out = _run_cpu(args, target)
        told = cpu.summary(out.rows) if out.rows else ""
    print(f"\n{told}")
    if table := targets.table(targets.judge([out.header, *out.rows])):
        print(f"\n{table}")
    if device.type == "cuda" and not args.no_plot:
        image = target.parent / ("roofline.png" if ".partial" not in target.name else "roofline.partial.png")
        problem = plot.roofline(results.read(target), image)
        print(problem or f"drew {image}")
    errors = [r for r in out.rows if r.get("error")]
    for row in errors:
        where = " ".join(str(row[k]) for k in ("suite", "shape", "impl", "backward") if row[k])
        print(f"error: {where}: {row['error'][:160]}")
    print(f"{len(out.rows)} rows in {target}, {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
