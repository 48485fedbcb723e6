"""Times the bf16 forward on random shapes beside the peers and PyTorch, and lists where it is slower.

Shapes are drawn from a seed, log-uniform in every size, in all three layouts (in-batch, kd, pairs). Our
scores are compared with fp64 on a corner of the problem, those of the peers with ours. The file is written
after every shape, and --merge goes on from it; the exit status is 3 until all shapes are there. A shape that
looks like a loss is timed again, interleaved and for longer, before it counts as one.
`python -m bench report` draws the plot.
"""

import contextlib
import gc
import os
import time
from functools import partial
from pathlib import Path

import torch

from bench.harness import results, run_header
from bench.harness.inputs import draw
from bench.harness.library import COMPILED, OURS
from bench.harness.parity import reference_scores
from bench.harness.results import new_row, size_of
from bench.harness.shape import IN_BATCH, PAIRS, Shape
from bench.peers import triton_tuning
from bench.peers.implementations import KEYS, load
from bench.tuning import random_shapes
from late_interaction._doctor import timing
from late_interaction._doctor.checks import relative_error
from late_interaction._doctor.text import error_text, number

SUITE = "sweep"
LOSS = 1.05  # times the best other's time
SHORT = timing.Effort(gpu_ms=6, min_replays=5, max_replays=20, wall_ms=5, min_walls=5, max_walls=20)
LONG = timing.Effort(gpu_ms=40, min_replays=15, max_replays=60, wall_ms=5, min_walls=5, max_walls=20)
ROUNDS = 5
DOUBTFUL = 1.02  # a ratio above this is measured again
NOISY = 0.1  # so is a ratio near 1 with a spread above this
TOLERANCE = 1e-2
BATCH = 100  # shapes to compile for before they are timed
UNFINISHED = 3  # the exit status where shapes are left for --merge


def clock(row):
    """GPU time, or wall time where there is no GPU."""
    return row["wall_us"] if row["gpu_us"] is None else row["gpu_us"]


def ratio(rows):
    """Our time over the best other's on one shape."""
    ours = [t for r in rows if r["impl"] == OURS and (t := clock(r))]
    others = [t for r in rows if r["impl"] != OURS and (t := clock(r))]
    return ours[0] / min(others) if ours and others else None


def _error_on_a_corner(shape, x, scores):
    """Against fp64, of first and last queries and documents."""
    i, j = (torch.tensor(sorted({0, n - 1}), device=x.Q.device) for n in (shape.Nq, shape.Nd))
    D = x.D[j] if shape.layout == IN_BATCH else x.D[i] if shape.layout == PAIRS else x.D[i][:, j]
    corner = Shape("corner", len(i), len(j), shape.Lq, shape.Ld, shape.d, shape.layout)
    found = scores[i] if shape.layout == PAIRS else scores[i][:, j]
    return relative_error(found, reference_scores(corner, x.Q[i], D)[0])


def plan_of(shape):
    """The kernel, tile and grid of our call, in one line."""
    import late_interaction as li

    d_shape = (shape.Nq, 1, shape.Ld, shape.d) if shape.layout == PAIRS else shape.d_shape
    lines = li.explain_plan(shape.q_shape, d_shape, winners=False).splitlines()
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  ")}
    return "; ".join(found[key] for key in ("kernel", "tile", "grid") if key in found)


def run_shape(shape, implementations, device, limit_s):
    """A row for each implementation, ours first."""
    on_gpu = device.type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
    count = timing.sets_of_bytes(shape.input_bytes(2), cache, limit=32)
    sets = [draw(shape, device, torch.bfloat16) for _ in range(count)]
    rows = []
    calls = {}
    scores = None
    for impl in implementations:
        row = new_row(SUITE, shape, "fwd", torch.bfloat16, impl.name, input_sets=len(sets))
        rows.append(row)
        try:
            with timing.time_limit(limit_s):
                score = impl.score(shape, None, train=False)
                out = score(*sets[0].tokens)
            if impl.name == OURS:
                scores, row["plan"] = out, plan_of(shape)
                row["rel_err"] = _error_on_a_corner(shape, sets[0], out)
            elif scores is not None:
                row["rel_err"] = relative_error(out, scores.double())
            if row["rel_err"] is not None and not row["rel_err"] <= TOLERANCE:
                row["mismatch"] = True  # it is timed all the same, and the row says so
            mine = [partial(score, *x.tokens) for x in sets]
            if on_gpu:
                row.update(timing.gpu_time(mine, SHORT).row())
            row["wall_us"] = timing.wall_time(mine, SHORT, device)
            calls[impl.name] = mine
        except Exception as error:  # one failure must not end the sweep
            row["error"] = error_text(error)
            timing.sync(device)
    if on_gpu:
        with contextlib.suppress(Exception):
            time_again(rows, calls)
    return rows


def time_again(rows, calls):
    """Times all implementations again, interleaved, by one clock and for longer, if the first ratio may
    mislead or they were timed by different clocks."""
    first = ratio(rows)
    if first is None:
        return
    timed = [r for r in rows if r["gpu_us"] and r["impl"] in calls]
    peer = min((r for r in timed if r["impl"] != OURS), key=lambda r: float(r["gpu_us"]))
    pair = [next(r for r in timed if r["impl"] == OURS), peer]
    noisy = first > 0.8 and max(float(r["gpu_spread"]) for r in pair) > NOISY
    if first <= DOUBTFUL and not noisy and len({r["gpu_method"] for r in timed}) == 1:
        return
    repetitions = timing.by_one_clock([calls[r["impl"]] for r in timed], True)
    times = timing.time_interleaved(repetitions, LONG, ROUNDS)
    for row, gpu in zip(timed, times, strict=True):
        row.update(gpu.row(), again=True)


# ---- the run ----


def add_arguments(p):
    random_shapes.add_arguments(p, SUITE)
    p.add_argument(
        "--impl", type=run_header.listed(str), default="ours,lik,flash,einsum",
        help=f"some of {','.join(KEYS)}",
    )  # fmt: skip
    p.add_argument("--limit", type=float, default=20.0, help="seconds that a first call may take")
    p.add_argument(
        "--processes", type=int, default=triton_tuning.spare_cores(),
        help="that compile for the peers ahead; 0 where TRITON_CACHE_DIR holds the kernels of an earlier run",
    )  # fmt: skip


def _compile_ahead(compilers, peers, batch, seconds, log):
    try:
        triton_tuning.prepare(peers, batch, compilers, seconds, log)
    except Exception as error:  # then the peers compile at their first calls
        log(f"nothing compiled ahead: {error_text(error)}")


def _still_answers(device):
    """False where the GPU is in an error state, which a new process does not share."""
    try:
        timing.sync(device)
    except Exception:
        return False
    return True


def _measure(args, out, shapes, implementations, device, end):
    start = time.perf_counter()

    def log(line):
        print(f"{time.perf_counter() - start:4.0f} s  {line}", flush=True)

    names = {i.name: i for i in implementations}
    peers = {k: names[KEYS[k].name] for k in ("lik", "flash") if KEYS[k].name in names}
    ahead = peers and device.type == "cuda"
    with contextlib.ExitStack() as stack:
        compilers = None
        if ahead:
            compilers = stack.enter_context(triton_tuning.Compilers(tuple(peers), args.processes))
        for n, shape in enumerate(shapes, 1):
            if n % BATCH == 1:
                if ahead:
                    batch, left = shapes[n - 1 : n - 1 + BATCH], end - time.perf_counter()
                    _compile_ahead(compilers, peers, batch, 0.6 * left, log)
                gc.collect()
                gc.freeze()  # shortens the garbage collections before each measurement
            if time.perf_counter() > end:
                log(f"stopped in time, after {n - 1} of {len(shapes)} shapes")
                return
            try:
                rows = run_shape(shape, implementations, device, args.limit)
            except Exception as error:  # a row of its own, so that --merge does not run into it again
                rows = [new_row(SUITE, shape, "fwd", torch.bfloat16, OURS, error=error_text(error))]
            out.add(rows)
            if not _still_answers(device):
                log("the GPU answers no more; --merge goes on in a new process")
                return
            if n % 20 == 0 or (ratio(rows) or 0) > LOSS:
                us = " | ".join(f"{r['impl']} {number(clock(r))}" for r in rows)
                log(f"{n} of {len(shapes)}: {size_of(rows[0])}: {us}")
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > 20e9:
                torch.cuda.empty_cache()


def _earlier(path):
    return results.split(results.read(path))[1] if path.exists() else []


def run(args):
    start = time.perf_counter()
    device, path = random_shapes.begin(args, SUITE)
    os.environ["LIK_SUPPRESS_NORM_WARN"] = "1"  # its check waits for the device
    # A cache of its own: the peers are tuned here with shorter timings than theirs.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "sweep"))
    keys = ["ours", "einsum"] if args.dry_run else args.impl
    implementations, missing = load(keys, device)
    implementations = [i for i in implementations if i.name != COMPILED]
    for absent, why in missing.items():
        print(f"{absent} is not measured: {why}")
    tuning = f"each key on one shape, {triton_tuning.BENCH_MS['rep']} ms for each configuration"
    header = run_header.new_header(
        device, None, args.arguments, seed=args.seed, count=args.count, tuning=tuning
    )
    out = results.Results(path, header, args.merge)
    shapes = random_shapes.draw_shapes(args.count, args.seed, small=args.dry_run)
    if args.merge:
        done = {r["shape"] for r in _earlier(path)}
        shapes = [s for s in shapes if s.name not in done]
        print(f"{args.count - len(shapes)} of {args.count} shapes are there already")
    _measure(args, out, shapes, implementations, device, start + args.seconds - 3.0)
    results.print_faults(out.rows)
    count = len({row["shape"] for row in _earlier(path)})
    print(f"{count} shapes in {path}, {time.perf_counter() - start:.0f} s")
    return 0 if count >= args.count else UNFINISHED
