"""`python -m bench.sweep`: random shapes, our bf16 forward beside the peers and PyTorch, and where it loses.

Three hundred shapes from a seed, log-uniform in every size: in batch, with candidates for each query, in
pairs. GPU time and wall time of everyone who takes the layout; its scores are compared with ours,
ours with fp64. The file is written after every shape, and `--merge` goes on from it. A loss is timed again,
at length, before it is one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import plot, results, triton_tuning
from .draws import draw_shapes
from .impls import COMPILED, KEYS, OURS, Implementation, Score, load
from .inputs import Inputs, draw, sets_to_beat_cache
from .parity import reference_scores, relative_error
from .results import Row, align, new_row, number, told
from .shapes import IN_BATCH, PAIRS, Shape
from .timing import Call, Ceilings, Effort, by_one_clock, gpu_time, time_in_turns, time_limit, wall_time

SUITE = "sweep"
SHORT = Effort(gpu_ms=6, min_replays=5, max_replays=20, wall_ms=5, min_walls=5, max_walls=20)
LONG = Effort(gpu_ms=40, min_replays=15, max_replays=60, wall_ms=5, min_walls=5, max_walls=20)
ROUNDS = 5
LOSS = 1.05  # times the best other's time
DOUBTFUL = 1.02  # from here a ratio is taken again
NOISY = 0.1  # spread above which it is too, while it is near
TOLERANCE = 1e-2
BATCH = 100  # shapes that are compiled for and then timed


def _sample(shape: Shape, x: Inputs) -> tuple[Shape, torch.Tensor, torch.Tensor, Any]:
    """A corner of the problem small enough for fp64: first and last queries and documents."""
    i = torch.tensor(sorted({0, shape.Nq - 1}), device=x.Q.device)
    j = torch.tensor(sorted({0, shape.Nd - 1}), device=x.Q.device)
    Q = x.Q[i]
    D = x.D[j] if shape.layout == IN_BATCH else x.D[i] if shape.layout == PAIRS else x.D[i][:, j]
    corner = Shape("corner", len(i), len(j), shape.Lq, shape.Ld, shape.d, shape.layout)

    def pick(scores: torch.Tensor) -> torch.Tensor:
        return scores[i] if shape.layout == PAIRS else scores[i][:, j]

    return corner, Q, D, pick


def _bound(score: Score, x: Inputs) -> Call:
    return lambda: score(x.Q, x.D)


def plan_of(shape: Shape) -> str:
    """Kernel, tile and grid that our call gets here, in one line."""
    import late_interaction as li

    d_shape = (shape.Nq, 1, shape.Ld, shape.d) if shape.layout == PAIRS else shape.d_shape
    lines = li.explain_plan(shape.q_shape, d_shape, winners=False).splitlines()
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  ")}
    return "; ".join(found[key] for key in ("kernel", "tile", "grid") if key in found)


def clock(row: Row) -> float | None:
    """GPU time, or wall time where there is no GPU."""
    time_us = row["gpu_us"] if row["gpu_us"] is not None else row["wall_us"]
    return None if time_us is None else float(time_us)


def ratio(rows: Sequence[Row], key: str = "") -> float | None:
    """Our time over the best other's."""

    def of(row: Row) -> float | None:
        return row[key] if key else clock(row)

    ours = [t for r in rows if r["impl"] == OURS and (t := of(r))]
    peers = [t for r in rows if r["impl"] != OURS and (t := of(r))]
    return ours[0] / min(peers) if ours and peers else None


def run_shape(
    shape: Shape, implementations: Sequence[Implementation], device: torch.device, limit_s: float
) -> list[Row]:
    """A row for each implementation, ours first."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    sets = [
        draw(shape, device, torch.bfloat16)
        for _ in range(sets_to_beat_cache(shape, torch.bfloat16, cache, limit=32))
    ]
    rows: list[Row] = []
    calls: dict[str, list[Call]] = {}
    scores: torch.Tensor | None = None
    for impl in implementations:
        row = new_row(SUITE, shape, "fwd", torch.bfloat16, impl.name, input_sets=len(sets))
        rows.append(row)
        try:
            with time_limit(limit_s):
                score = impl.score(shape, None, train=False)
                mine = [_bound(score, x) for x in sets]
                out = score(sets[0].Q, sets[0].D)
            if impl.name == OURS:
                scores = out
                row["plan"] = plan_of(shape)
                corner, Q, D, pick = _sample(shape, sets[0])
                row["rel_err"] = relative_error(pick(out), reference_scores(corner, Q, D)[0])
            elif scores is not None:
                row["rel_err"] = relative_error(out, scores.double())
            if row["rel_err"] is not None and not row["rel_err"] <= TOLERANCE:
                row["mismatch"] = True  # recorded, and timed all the same: the ratio says how it was got
            if device.type == "cuda":
                gpu = gpu_time(mine, SHORT)
                row.update(gpu_us=gpu.us, gpu_spread=gpu.spread, gpu_method=gpu.method)
            row["wall_us"] = wall_time(mine, SHORT, device)
            calls[impl.name] = mine
        except Exception as error:  # one that cannot must not end the sweep
            row["error"] = told(error)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    if device.type == "cuda":
        with contextlib.suppress(Exception):
            _again(rows, calls)
    return rows


def _again(rows: Sequence[Row], calls: dict[str, list[Call]]) -> None:
    """Times all once more, in turns, by one clock and for longer, where the first ratio may mislead or they
    were timed by different clocks."""
    first = ratio(rows)
    if first is None:
        return
    timed = [r for r in rows if r["gpu_us"] and r["impl"] in calls]
    peer = min((r for r in timed if r["impl"] != OURS), key=lambda r: float(r["gpu_us"]))
    pair = [next(r for r in timed if r["impl"] == OURS), peer]
    noisy = first > 0.8 and max(float(r["gpu_spread"]) for r in pair) > NOISY
    if first <= DOUBTFUL and not noisy and len({r["gpu_method"] for r in timed}) == 1:
        return
    times = time_in_turns(by_one_clock([calls[r["impl"]] for r in timed], True), LONG, ROUNDS)
    for row, gpu in zip(timed, times, strict=True):
        row.update(gpu_us=gpu.us, gpu_spread=gpu.spread, gpu_method=gpu.method, again=True)


# ---- what it comes to ----


def by_shape(rows: Sequence[Row]) -> dict[str, list[Row]]:
    out: dict[str, list[Row]] = {}
    for row in rows:
        out.setdefault(row["shape"], []).append(row)
    return out


def size_of(row: Row) -> str:
    return f"{row['Nq']} x {row['Nd']}, {row['Lq']}, {row['Ld']}, d={row['d']} {row['layout']}"


def losses(rows: Sequence[Row]) -> list[tuple[float, Row, Row]]:
    """(our time over the best other's, our row, its row) where that is more than LOSS, worst first."""
    out = []
    for group in by_shape(rows).values():
        found = ratio(group)
        if found is not None and found > LOSS:
            ours = next(r for r in group if r["impl"] == OURS)
            peer = min((r for r in group if r["impl"] != OURS and clock(r)), key=lambda r: clock(r) or 0.0)
            out.append((found, ours, peer))
    return sorted(out, key=lambda loss: -loss[0])


PERCENTILES = ("worst", "p5", "p25", "p50", "p75", "p95", "geomean")


def percentiles(ratios: Sequence[float]) -> dict[str, float]:
    """Of how many times faster we are, so the low ones are the bad ones."""
    faster = sorted(1 / r for r in ratios)
    cuts = statistics.quantiles(faster, n=100, method="inclusive") if len(faster) > 1 else faster * 99
    out = {"worst": faster[0], **{f"p{p}": cuts[p - 1] for p in (5, 25, 50, 75, 95)}}
    return {**out, "geomean": math.exp(statistics.fmean(math.log(f) for f in faster))}


def summary(rows: Sequence[Row]) -> str:
    groups = by_shape(rows)
    parts = [f"{len(groups)} shapes"]
    for label, key in (("GPU time", "gpu_us"), ("wall time", "wall_us")):
        ratios = [r for group in groups.values() if (r := ratio(group, key)) is not None]
        if ratios:
            figures = ", ".join(f"{k} {v:.2f}x" for k, v in percentiles(ratios).items())
            lost = sum(r > LOSS for r in ratios)
            told_losses = f"slower by over {100 * (LOSS - 1):.0f}% on {lost} of {len(ratios)}"
            parts.append(f"{label}, best other over ours: {figures}; {told_losses}")
    for row in rows:
        if row.get("mismatch"):
            against = "fp64" if row["impl"] == OURS else "ours"
            parts.append(f"{row['impl']} is {row['rel_err']:.2g} off {against} on {size_of(row)}")
    failed: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("error"):
            failed.setdefault(row["impl"], []).append(row)
    for impl, which in failed.items():
        parts.append(f"{impl} failed on {len(which)}, first {size_of(which[0])}: {which[0]['error'][:120]}")
    if found := losses(rows):
        body = []
        for r, ours, peer in found:
            times = [number(clock(ours)), number(clock(peer)), peer["impl"], f"{r:.2f}"]
            body.append([size_of(ours), *times, str(ours.get("plan", ""))])
        parts.append(align(["losses", "ours us", "other us", "other", "ours/other", "plan"], body))
    return "\n".join(parts)


# ---- the run ----


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench.sweep", description=__doc__)
    p.add_argument("--count", type=int, default=300)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--seconds", type=float, default=1e9, help="stop in time; --merge goes on later")
    p.add_argument("--out", type=Path, help="default: bench/results/sweep-<device>.json")
    p.add_argument("--merge", action="store_true", help="keep what --out holds and measure what it lacks")
    p.add_argument("--impl", default="ours,lik,flash,einsum", help=f"some of {','.join(KEYS)}")
    p.add_argument("--limit", type=float, default=20.0, help="seconds that a first call may take")
    p.add_argument(
        "--no-warm", action="store_true", help="let the peers compile and tune at their first calls"
    )
    p.add_argument(
        "--processes", type=int, default=triton_tuning.spare_cores(),
        help="that compile for the peers ahead; 0 where TRITON_CACHE_DIR holds it all from an earlier run",
    )  # fmt: skip
    p.add_argument("--no-plot", action="store_true")
    p.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, beside the einsum")
    return p


def _measure(
    args: argparse.Namespace, out: results.Results, shapes: Sequence[Shape],
    implementations: Sequence[Implementation], device: torch.device, end: float,
) -> None:  # fmt: skip
    peers = {k: i for k, cls in KEYS.items() for i in implementations if type(i) is cls and i.name != OURS}
    tuned = {k: i for k, i in peers.items() if k in ("lik", "flash")}

    start = time.perf_counter()

    def log(line: str) -> None:
        print(f"{time.perf_counter() - start:4.0f} s  {line}", flush=True)

    with contextlib.ExitStack() as stack:
        compilers = None
        if tuned and device.type == "cuda" and not args.no_warm:
            compilers = stack.enter_context(triton_tuning.Compilers(tuple(tuned), args.processes))
        for first in range(0, len(shapes), BATCH):
            batch = shapes[first : first + BATCH]
            if compilers is not None:
                try:
                    left = end - time.perf_counter()
                    triton_tuning.prepare(tuned, batch, compilers, 0.6 * left, log)
                except Exception as error:  # then the first calls compile, as always
                    log(f"nothing compiled ahead: {told(error)}")
            gc.collect()
            gc.freeze()  # the collections before each measurement then have little to look through
            for n, shape in enumerate(batch, first + 1):
                if time.perf_counter() > end:
                    log(f"stopped in time, after {n - 1} of {len(shapes)} shapes")
                    return
                try:
                    rows = run_shape(shape, implementations, device, args.limit)
                except Exception as error:  # no memory for the inputs, or the GPU itself in error
                    log(f"{shape.name}: {told(error)}")
                    row = new_row(SUITE, shape, "fwd", torch.bfloat16, OURS, error=told(error))
                    out.add([row])  # so that --merge does not run into it again
                    if _gpu_is_lost(device):
                        log("the GPU answers no more; --merge goes on in a new process")
                        return
                    continue
                out.add(rows)
                found = ratio(rows)
                if n % 20 == 0 or (found or 0) > LOSS:
                    us = " | ".join(f"{r['impl']} {number(clock(r))}" for r in rows)
                    log(f"{n} of {len(shapes)}: {size_of(rows[0])}: {us}")
                if device.type == "cuda" and torch.cuda.memory_reserved(device) > 20e9:
                    torch.cuda.empty_cache()


def _gpu_is_lost(device: torch.device) -> bool:
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def _earlier(path: Path) -> list[Row]:
    return results.split(results.read(path))[1] if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    start = time.perf_counter()
    device = torch.device("cpu" if args.dry_run else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("the sweep needs a GPU; --dry-run checks the harness", file=sys.stderr)
        return 2
    os.environ["LIK_SUPPRESS_NORM_WARN"] = "1"  # its check waits for the device
    # Its own cache: what is tuned here is timed for shorter than the peers would by themselves.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "sweep"))
    keys = ["ours", "einsum"] if args.dry_run else [k for k in args.impl.split(",") if k]
    implementations, missing = load(keys, device)
    implementations = [i for i in implementations if i.name != COMPILED]
    for absent in missing:
        print(f"{absent.name} is not measured: {absent.why}")
    name = "dry-run" if args.dry_run else results.slug(torch.cuda.get_device_name(device))
    path = args.out or results.DIRECTORY / f"sweep-{name}.json"
    header = results.new_header(
        device, Ceilings(), program="bench.sweep", seed=args.seed, count=args.count,
        tuning=f"each key on one shape, {triton_tuning.BENCH_MS['rep']} ms for each configuration",
    )  # fmt: skip
    out = results.Results(path, header, args.merge)
    torch.manual_seed(args.seed)
    shapes = draw_shapes(args.count, args.seed, small=args.dry_run)
    if args.merge:
        done = {r["shape"] for r in _earlier(path)}
        shapes = [s for s in shapes if s.name not in done]
        print(f"{args.count - len(shapes)} of {args.count} shapes are there already")
    _measure(args, out, shapes, implementations, device, start + args.seconds - 3.0)
    rows = _earlier(path)
    if rows:
        print(f"\n{summary(rows)}")
    if rows and not args.no_plot and not args.dry_run:
        image = path.with_suffix(".png")
        print(plot.sweep(results.read(path), image) or f"drew {image}")
    print(f"{len(by_shape(rows))} shapes in {path}, {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
