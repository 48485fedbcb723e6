"""`python -m bench.plans`: the planner's choice beside every other plan that a forward could have.

The shapes of `bench.sweep`, some more with a fifth of the document tokens masked, and some in other
variants of the call (saved winners, normalize, 8-bit codes), which have kernels of their own. For each,
every plan that the library can name for it (`explain_plan`'s alternatives, forced one after the other) is
compared with the chosen one's scores and timed. The regret is what the choice costs: its time over the best
one's, less 1. The thresholds in csrc/plan/forward_select.cpp are where the figures of plain and masked
calls say that one plan overtakes another; tools/kernel_costs.py reads all of them, for what a family of
kernels gains.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import kernels, results
from .draws import draw_shapes
from .impls import OURS
from .inputs import Inputs, draw, sets_to_beat_cache
from .parity import relative_error
from .quantized import quantize
from .results import Row, align, new_row, number, told
from .shapes import IN_BATCH, PAIRS, Shape
from .sweep import size_of
from .timing import QUICK, Call, Ceilings, wall_time

SUITE = "plans"


@dataclass(frozen=True)
class Variant:
    """What a call asks for beside its shape."""

    dtype: str = "bf16"
    masked: bool = False
    normalize: bool = False
    winners: bool = False


PLAIN, MASKED = "plain", "d_mask"
JUDGED = {PLAIN: Variant(), MASKED: Variant(masked=True)}
OTHERS = {
    "winners": Variant(winners=True),
    "winners, d_mask": Variant(winners=True, masked=True),
    "normalize": Variant(normalize=True),
    "normalize, d_mask": Variant(normalize=True, masked=True),
    "e4m3": Variant("e4m3"),
    "int8": Variant("int8"),
    "int8, d_mask": Variant("int8", masked=True),
}
VARIANTS = JUDGED | OTHERS
COPIES = "copies"  # the plan of codes that no kernel multiplies
CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
GRAPH_US = 500.0  # of GPU work in a graph, about
ROUNDS = 5
CLOSE = 1.15  # times the best: timed again, in turns
FAR = 2.5  # times the best so far, by a first glance: not looked at twice
GLANCE_US = 200.0  # and no glance at less, which may be the time that the host takes
REGRET = 0.05
TOLERANCE = 1e-2
H200 = (90, 132)  # compute capability, multiprocessors

_cuda: Any = torch.cuda


def names(shape: Shape, variant: Variant, sm: int, sm_count: int) -> list[str]:
    """Every plan that our forward can have on this shape, the planner's own first."""
    from late_interaction import ops

    text: str = ops.explain_plan(
        shape.layout != IN_BATCH, shape.Nq, shape.Nd, shape.Lq, shape.Ld, shape.d, variant.dtype, "highest",
        variant.masked, variant.normalize, "alternatives", "auto", sm, sm_count,
    )  # fmt: skip
    return text.split("\n")[:-1]


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Every forward in the body takes this plan."""
    from late_interaction import ops

    ops.forced_plan(name)
    try:
        yield
    finally:
        ops.forced_plan("")


# ---- time ----


class Clock:
    """GPU time by small CUDA graphs that share their memory. A few milliseconds a plan."""

    def __init__(self) -> None:
        self.stream = _cuda.Stream()
        self.pool = _cuda.graph_pool_handle()
        # Without a graph of its own the pool would end with the graphs of a shape.
        self.anchor = self.capture([lambda: torch.zeros(1, device="cuda")])

    def capture(self, calls: Sequence[Call]) -> Any:
        graph = _cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool)
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        return graph

    def glance(self, calls: Sequence[Call]) -> float:
        """Microseconds of a call, or of enqueueing it."""
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return float(1e3 * start.elapsed_time(end) / len(calls))

    def graph(self, calls: Sequence[Call], about_us: float) -> Callable[[], float]:
        """What replays `calls`, at least once each, and returns the microseconds of one."""
        rounds = max(1, round(GRAPH_US / about_us / len(calls)))
        graph = self.capture([*calls] * rounds)

        def replay() -> float:
            return self.glance([graph.replay]) / (rounds * len(calls))

        replay()
        return replay


def time_plans(plans: Sequence[str], calls: Sequence[Call], clock: Clock | None) -> tuple[Row, list[str]]:
    """(plan -> microseconds, the plans that only got a glance). Without a clock: wall time, unforced."""
    if clock is None:
        return {name: wall_time(calls, QUICK, torch.device("cpu")) for name in plans}, []
    gc.disable()  # freeing another graph's memory in the middle would spoil a capture
    try:
        return _time_in_turns(plans, calls, clock)
    finally:
        gc.enable()


def _time_in_turns(plans: Sequence[str], calls: Sequence[Call], clock: Clock) -> tuple[Row, list[str]]:
    times: dict[str, float] = {}
    replays: dict[str, Callable[[], float]] = {}
    rough = []
    for name in plans:
        with forced(name):
            about = clock.glance(calls)  # a first one may load the kernel
            about = min(about, clock.glance(calls)) if about > GLANCE_US else about
            if times and about > max(GLANCE_US, FAR * min(times.values())):
                times[name] = about
                rough.append(name)
                continue
            replays[name] = clock.graph(calls, about)
        times[name] = statistics.median(replays[name]() for _ in range(2))
    best = min(times.values())
    close = {name: replay for name, replay in replays.items() if times[name] < CLOSE * best}
    again: dict[str, list[float]] = {name: [] for name in close}
    for _ in range(ROUNDS):
        for name, replay in close.items():
            again[name].append(replay())
    return times | {name: statistics.median(found) for name, found in again.items()}, rough


# ---- a shape ----


def _calls(shape: Shape, variant: Variant, sets: Sequence[Inputs], mask: torch.Tensor | None) -> list[Call]:
    ops: Any = torch.ops.late_interaction

    def call(x: Inputs) -> Call:
        D = x.D.unsqueeze(1) if shape.layout == PAIRS else x.D
        if variant.dtype in CODES:
            (q, scale_q), (c, scale_d) = (quantize(t, CODES[variant.dtype], True) for t in (x.Q, D))
            return lambda: ops.maxsim_quantized(q, c, scale_q, scale_d, None, mask)
        op = ops.maxsim_winners.default if variant.winners else ops.maxsim.default
        return lambda: op(x.Q, D, None, mask, variant.normalize)

    return [call(x) for x in sets]


def _scores(out: Any) -> torch.Tensor:
    scores: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return scores


def run_shape(shape: Shape, variant_name: str, device: torch.device, clock: Clock | None) -> Row:
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    here = H200
    if properties is not None:
        here = 10 * properties.major + properties.minor, properties.multi_processor_count
    cache = 0 if properties is None else properties.L2_cache_size
    variant = VARIANTS[variant_name]
    plans = names(shape, variant, *here)
    if plans == [COPIES]:
        row = new_row(SUITE, shape, "fwd", torch.bfloat16, OURS, variant=variant_name, plan=COPIES)
        return {**row, "skipped": "no kernel multiplies such codes: float32 copies are scored"}
    count = sets_to_beat_cache(shape, torch.bfloat16, cache, limit=32)
    sets = [draw(shape, device, torch.bfloat16) for _ in range(count)]
    mask = None
    if variant.masked:
        documents = (shape.Nd,) if shape.layout == IN_BATCH else (shape.Nq, shape.Nd)
        mask = torch.rand(*documents, shape.Ld, device=device) < 0.8
    calls = _calls(shape, variant, sets, mask)
    row = new_row(SUITE, shape, "fwd", torch.bfloat16, OURS, variant=variant_name, plan=plans[0])
    with torch.no_grad():
        wanted = _scores(calls[0]())
        wrong = []
        for name in plans if on_gpu else ():
            with forced(name):
                found = _scores(calls[0]())
            if not relative_error(found, wanted.double()) <= TOLERANCE:
                wrong.append(name)
        times, rough = time_plans(plans, calls, clock)
    best = min(times, key=times.__getitem__)
    row.update(device=here, best=best, regret=times[plans[0]] / times[best] - 1)
    row.update(gpu_us=times[plans[0]] if on_gpu else None, rough=rough)
    row["times"] = {name: float(f"{us:.4g}") for name, us in times.items()}
    if wrong:
        row["mismatch"] = wrong
    return row


# ---- what it comes to ----


def judged(row: Row) -> Row:
    """A recorded row as the planner chooses today: its rules may have changed, what plans take has not."""
    if not row.get("times"):
        return row
    shape = Shape(*(row[k] for k in ("shape", "Nq", "Nd", "Lq", "Ld", "d", "layout")))
    plan = names(shape, VARIANTS[row["variant"]], *row.get("device", H200))[0]
    if plan not in row["times"]:
        return {**row, "plan": plan, "regret": None, "error": f"{plan} was not timed"}
    return {**row, "plan": plan, "regret": row["times"][plan] / min(row["times"].values()) - 1}


def figures(rows: Sequence[Row]) -> list[str]:
    """Median, 95th percentile and worst regret, and how many shapes are above REGRET."""
    regrets = sorted(r["regret"] for r in rows)
    p95 = regrets[min(len(regrets) - 1, int(0.95 * len(regrets)))]
    over = sum(regret > REGRET for regret in regrets)
    shown = (statistics.median(regrets), p95, regrets[-1])
    return [*(f"{100 * regret:.1f}%" for regret in shown), f"{over} of {len(regrets)}"]


FIGURES = ["median", "95th percentile", "worst", f"over {100 * REGRET:.0f}%"]


def by_variant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    timed = [r for r in rows if r.get("regret") is not None]
    return {v: found for v in VARIANTS if (found := [r for r in timed if r["variant"] == v])}


def missed(rows: Sequence[Row]) -> list[list[str]]:
    """Shapes above REGRET, worst first: size, variant, chosen plan and its time, best plan and its time."""
    over = [r for r in rows if (r.get("regret") or 0) > REGRET and r["variant"] in JUDGED]
    return [
        [
            size_of(r), r["variant"], r["plan"], number(r["times"][r["plan"]]), r["best"],
            number(r["times"][r["best"]]), f"{100 * r['regret']:.0f}%",
        ]
        for r in sorted(over, key=lambda r: -float(r["regret"]))
    ]  # fmt: skip


MISSED = ["shape", "variant", "chosen", "us", "best", "us", "regret"]


def summary(rows: Sequence[Row]) -> str:
    body = [[variant, *figures(found)] for variant, found in by_variant(rows).items()]
    parts = [align(["regret of the planner's choice", *FIGURES], body)]
    for row in rows:
        if row.get("mismatch"):
            parts.append(f"{', '.join(row['mismatch'])} differ from {row['plan']} on {size_of(row)}")
        if row.get("error"):
            parts.append(f"{size_of(row)}: {row['error']}")
    if lines := missed(rows):
        parts.append(align(MISSED, lines, left=3))
    return "\n".join(parts)


# ---- the run ----


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench.plans", description=__doc__)
    p.add_argument("--count", type=int, default=300)
    p.add_argument("--masked", type=int, default=60, help="shapes more, with a mask")
    p.add_argument("--others", type=int, default=0, help="shapes in each of the other variants")
    p.add_argument("--seed", type=int, default=0, help="0: the shapes of bench.sweep")
    p.add_argument("--seconds", type=float, default=1e9, help="stop in time; --merge goes on later")
    p.add_argument("--out", type=Path, help="default: bench/results/plans-<device>.json")
    p.add_argument("--merge", action="store_true", help="keep what --out holds and measure what it lacks")
    p.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, nothing forced")
    return p


def jobs_of(args: argparse.Namespace) -> list[tuple[Shape, str]]:
    """Every shape and variant of a run; the masked ones spread out, for a run that is stopped in time."""
    jobs = [(s, PLAIN) for s in draw_shapes(args.count, args.seed, small=args.dry_run)]
    for n, shape in enumerate(draw_shapes(args.masked, args.seed + 1, small=args.dry_run)):
        jobs.insert(n * (1 + args.count // max(1, args.masked)), (shape, MASKED))
    others = draw_shapes(args.others, args.seed + 2, small=args.dry_run)
    return jobs + [(shape, variant) for shape in others for variant in OTHERS]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    start = time.perf_counter()
    device = torch.device("cpu" if args.dry_run else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("plans are timed on a GPU; --dry-run checks the harness", file=sys.stderr)
        return 2
    torch.manual_seed(args.seed)
    name = "dry-run" if args.dry_run else results.slug(torch.cuda.get_device_name(device))
    path = args.out or results.DIRECTORY / f"plans-{name}.json"
    jobs = jobs_of(args)
    earlier = results.split(results.read(path))[1] if args.merge and path.exists() else []
    done = {(r["shape"], r["variant"]) for r in earlier}
    header = results.new_header(
        device, Ceilings(), program="bench.plans", seed=args.seed, kernels=kernels.fingerprint()
    )
    out = results.Results(path, header, args.merge)
    clock = None if args.dry_run else Clock()
    rows: list[Row] = []
    for shape, variant in jobs:
        if (shape.name, variant) in done:
            continue
        if time.perf_counter() - start > args.seconds:
            print(f"stopped in time, after {len(rows)} of {len(jobs) - len(done)} shapes")
            break
        try:
            rows.append(run_shape(shape, variant, device, clock))
        except Exception as error:  # one shape must not end the run
            rows.append(new_row(SUITE, shape, "fwd", torch.bfloat16, OURS, variant=variant))
            rows[-1]["error"] = told(error)
        if device.type == "cuda" and torch.cuda.memory_reserved(device) > 20e9:
            torch.cuda.empty_cache()
    out.add(rows)
    rows = results.split(results.read(path))[1]
    print(summary(rows))
    print(f"{len(rows)} shapes in {path}, {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
