"""Times late_interaction beside the peers that are installed, in one process, on this machine.

Results are compared with an fp64 reference before anything is timed. On a GPU it runs the suites below, on a
machine without one the CPU suite. A run without filters writes bench/results/<device>.json; a filtered one
writes <device>.partial.json, unless --merge or --out is given. `python -m bench report` makes the pages.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import interleaved, named_shapes, planned, results, run_header
from bench.harness.ceilings import Ceilings, measure_ceilings
from bench.harness.library import OURS
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.harness.timing import QUICK, Effort
from bench.peers import triton_tuning
from bench.peers.implementations import KEYS, load
from bench.suites import first_call, side_by_side
from bench.suites.catalog import ON_CPU, SUITES
from bench.suites.cpu import calls as cpu
from bench.suites.cpu import corpus_search, instruction_sets
from bench.suites.cpu import threads as cpu_threads

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMIT_S, FULL_LIMIT_S = 40.0, 240.0
LISTS = "\n".join([
    "suites:",
    *(f"  {name:13} {suite.about}" for name, suite in SUITES.items()),
    "\nsuites of a CPU:",
    *(f"  {name:13} {suite.about}" for name, suite in ON_CPU.items()),
    "\nimplementations:",
    *(f"  {key:13} {implementation.name}" for key, implementation in KEYS.items()),
])  # fmt: skip


# ---- the command line, which a record's header repeats ----


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def add_arguments(p: argparse.ArgumentParser) -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", choices=["cuda", "cpu"], default=here, help="default: the GPU if there is one")
    p.add_argument("--suite", type=_list, default=[], help="suites, comma-separated; default: all")
    p.add_argument("--shapes", type=_list, default=[], help="names or parts of names, comma-separated")
    p.add_argument("--impl", type=_list, default=[], help=f"some of {','.join(KEYS)}; default: all")
    p.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of the GPU suites")
    p.add_argument("--quick", action="store_true", help="fewer repetitions, no first calls, no torch.compile")
    p.add_argument(
        "--full", action="store_true", help="tune the peers for every shape, torch.compile every shape"
    )
    p.add_argument("--limit", type=float, help="seconds that one implementation may compile and tune a shape")
    p.add_argument(
        "--warm", type=float, default=0.0, metavar="SECONDS",
        help="compile for the Triton peers on all cores first, at most this long for each suite",
    )  # fmt: skip
    p.add_argument("--large", action="store_true", help="also the shapes that take minutes (contrastive)")
    p.add_argument("--out", type=Path, help="the JSON file; default: bench/results/<device>.json")
    p.add_argument(
        "--merge", action="store_true", help="replace the groups of --out that are measured, keep the others"
    )
    p.add_argument("--dry-run", action="store_true", help="the GPU suites on the CPU, in tiny shapes")
    planned.add_argument(p)


def problem(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, in one line."""
    suites = (*SUITES, *ON_CPU)
    for flag, given, known in (("--suite", args.suite, suites), ("--impl", args.impl, (*KEYS,))):
        if unknown := [g for g in given if g not in known]:
            return f"{flag} {','.join(unknown)} is none of {','.join(known)}"
    if args.merge and (args.impl or args.dtype != "bf16"):
        return "--merge replaces whole groups, so it takes neither --impl nor --dtype"
    return None


def _missing_here(args: argparse.Namespace) -> str | None:
    """Why the device cannot do what the arguments ask for."""
    on_gpu = args.device == "cuda" or args.dry_run
    known = SUITES if on_gpu else ON_CPU
    if other := [name for name in args.suite if name not in known]:
        return f"--suite {','.join(other)} is for a {'CPU' if on_gpu else 'GPU'}"
    if args.device == "cuda" and not args.dry_run and not torch.cuda.is_available():
        return "--device cuda, but PyTorch sees no GPU"
    return None


def _is_filtered(args: argparse.Namespace) -> bool:
    """Whether the run leaves out something of what a record holds."""
    return bool(args.suite or args.shapes or args.impl or args.quick or args.dtype != "bf16" or args.dry_run)


# ---- the run ----


def _target(args: argparse.Namespace, device: torch.device) -> Path:
    """The file that is written: the device's record for a whole run, a partial file for a filtered one."""
    if args.out:
        return Path(args.out)
    name = "cpu" if device.type == "cpu" else results.slug(planned.gpu_name(device))
    if args.dry_run:
        name = "dry-run"
    partial = _is_filtered(args) and not args.merge
    return results.DIRECTORY / f"{name}{'.partial' if partial else ''}.json"


def _settings(args: argparse.Namespace, device: torch.device, keys: Sequence[str]) -> Settings:
    implementations, missing = load([*keys], device)
    for absent in missing:
        print(f"{absent.name} is not measured: {absent.why}")
    effort = QUICK if args.quick or args.dry_run else Effort()
    return Settings(
        device=device, dtype=DTYPES[args.dtype], implementations=implementations, effort=effort,
        ceilings=measure_ceilings(effort) if device.type == "cuda" else Ceilings(),
        limit_s=args.limit or (FULL_LIMIT_S if args.full else LIMIT_S),
        retune=args.full, compile_all=args.full, compiles=not args.quick,
    )  # fmt: skip


def _header(args: argparse.Namespace, settings: Settings) -> results.Row:
    tuning = "for each shape" if args.full else "once for each key of their own caches, at the first shape"
    more: dict[str, Any] = {}
    if settings.device.type == "cuda":
        more = {"l2_mib": settings.cache_bytes / 2**20}
    header = run_header.new_header(
        settings.device, settings.ceilings, args.arguments, peers_tuned=tuning, **more
    )
    if settings.ceilings.cublas_tflops:
        c = settings.ceilings
        products = f"cuBLAS bf16 {c.cublas_tflops:.0f} and TF32 {c.cublas_tf32_tflops:.0f} TFLOP/s"
        print(f"{header['gpu']}: {products}, reads {c.read_tbps:.2f} TB/s, copies {c.copy_tbps:.2f} TB/s")
    return header


def _run_gpu(args: argparse.Namespace, device: torch.device, target: Path) -> results.Results:
    keys = args.impl or [k for k in KEYS if not (args.quick and k == "compile")]
    settings = _settings(args, device, keys)
    out = results.Results(target, _header(args, settings), args.merge)
    known = {i.name for i in settings.implementations}
    for name in args.suite or [s for s in SUITES if not (args.quick and s == first_call.SUITE)]:
        suite = SUITES[name]
        shapes = [*suite.shapes, *(suite.large if args.large else ())]
        chosen = named_shapes.select(suite.tiny if args.dry_run else shapes, args.shapes)
        if suite.op:
            if args.warm:
                triton_tuning.warm(settings.implementations, chosen, suite.op, args.warm, settings.log)
            side_by_side.run(settings, out, name, chosen, suite.op, suite.winners)
        elif suite.measure_shape and OURS in known:
            interleaved.run(settings, out, chosen, suite.ratio, suite.measure_shape)
        elif name == first_call.SUITE:
            first_call.run(settings, out, [k for k in keys if KEYS[k].name in known], tiny=args.dry_run)
    return out


def _run_cpu(args: argparse.Namespace, target: Path) -> results.Results:
    header = run_header.new_header(torch.device("cpu"), Ceilings(), args.arguments)
    out = results.Results(target, header, args.merge)
    rounds = 3 if args.quick else 15

    def log(line: str) -> None:
        print(line, flush=True)

    def select(shapes: Sequence[Shape]) -> list[Shape]:
        return named_shapes.select(shapes, args.shapes)

    for name in args.suite or ON_CPU:
        if name == cpu.SUITE:
            cpu.run(out, select(named_shapes.CPU), select(named_shapes.CPU_TRAINING), rounds, log)
        elif name == instruction_sets.SUITE:
            instruction_sets.run(out, select(named_shapes.CPU_ISA), rounds, log)
        elif name == cpu_threads.SUITE:
            large, small = select(named_shapes.CPU_THREADS), select(named_shapes.CPU_SMALL)
            cpu_threads.run(out, large, small, rounds, log)
        elif name == corpus_search.SUITE:
            corpus_search.run(out, select(named_shapes.CPU_CORPUS), rounds, log)
    return out


def _summary(rows: Sequence[results.Row], device: torch.device) -> str:
    if any(r["suite"] == cpu.SUITE for r in rows):
        return cpu.summary([r for r in rows if r["suite"] == cpu.SUITE])
    measured = [r for r in rows if r["suite"] in SUITES and SUITES[r["suite"]].op]
    return (
        side_by_side.summary(measured, "gpu_us" if device.type == "cuda" else "wall_us") if measured else ""
    )


def run(args: argparse.Namespace) -> int:
    if wrong := problem(args) or _missing_here(args):
        print(wrong, file=sys.stderr)
        return 2
    start = time.perf_counter()
    device = torch.device("cpu" if args.dry_run else args.device)
    torch.manual_seed(0)
    target = _target(args, device)
    try:
        on_gpu = device.type == "cuda" or args.dry_run
        out = _run_gpu(args, device, target) if on_gpu else _run_cpu(args, target)
    except results.IncompleteError as incomplete:
        print(incomplete, file=sys.stderr)
        return 2
    print(f"\n{_summary(out.rows, device)}")
    for row in (r for r in out.rows if r.get("error")):
        where = " ".join(str(row[k]) for k in ("suite", "shape", "impl", "backward") if row[k])
        print(f"error: {where}: {row['error'][:160]}")
    print(f"{len(out.rows)} rows in {target}, {time.perf_counter() - start:.0f} s")
    return 0
