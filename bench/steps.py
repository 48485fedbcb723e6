"""What a training step of ours costs in other ways than plainly: winners found again, float32 inputs at
"high" and under autocast; and what the host adds: eager, in one thread, compiled, as a CUDA graph."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .impls import OURS
from .inputs import Inputs
from .parity import Reference, reference, relative_error, tolerance
from .results import Row, new_row
from .shapes import COMPILED_STEPS, PAIRS, Shape
from .suites import Settings
from .timing import Call
from .together import Timed, draw_sets, measure, set_ratios

SUITE = "steps"
PLAIN, RECOMPUTE, HIGH, AUTOCAST = "plain", "winners recomputed", "float32, high", "float32, autocast"
ONE_THREAD, COMPILED, GRAPH = "one thread", "torch.compile", "CUDA graph"

Step = Callable[[Inputs], tuple[torch.Tensor, ...]]


def _step(shape: Shape, autocast: bool = False, compiled: bool = False, **options: Any) -> Step:
    lib = importlib.import_module("late_interaction")
    maxsim = lib.maxsim_pairs if shape.layout == PAIRS else lib.maxsim
    if compiled:
        torch.compiler.reset()
        maxsim = torch.compile(maxsim, fullgraph=True, dynamic=False)

    def run(x: Inputs) -> tuple[torch.Tensor, ...]:
        kind = x.Q.device.type
        with torch.autocast(kind, torch.bfloat16) if autocast else contextlib.nullcontext():
            scores = maxsim(x.Q, x.D, **options)
        # Kept with their graph, scores would tie the leaves to the stream of this call.
        return (scores.detach(), *torch.autograd.grad(scores, (x.Q, x.D), x.grad_scores))

    return run


def _calls(step: Step, sets: Sequence[Inputs]) -> list[Call]:
    return [lambda x=x: step(x) for x in sets]  # type: ignore[misc]


def _in_one_thread(calls: Sequence[Call]) -> list[Call]:
    """Without the hand-over to the thread that autograd keeps for each device."""

    def run(call: Call) -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return call()

    return [lambda call=call: run(call) for call in calls]  # type: ignore[misc]


def _replayed(call: Call) -> list[Call]:
    side: Any = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def run() -> object:
        graph.replay()
        return out

    return [run]


def _known(settings: Settings, shape: Shape, dtype: torch.dtype) -> tuple[list[Inputs], Reference]:
    sets = draw_sets(settings, shape, dtype)
    known = reference(shape, sets[0].Q, sets[0].D, sets[0].grad_scores)
    for x in sets:
        x.require_grad()
    return sets, known


def take(settings: Settings, shape: Shape) -> list[Row]:
    halves, of_halves = _known(settings, shape, torch.bfloat16)
    singles, of_singles = _known(settings, shape, torch.float32)

    def timed(
        variant: str,
        prepare: Callable[[], Sequence[Call]],
        known: Reference = of_halves,
        capture: bool = True,
    ) -> Timed:
        dtype = torch.bfloat16 if known is of_halves else torch.float32
        row = new_row(
            SUITE, shape, "fwd+bwd", dtype, OURS, variant=variant,
            floor_us=settings.floor_us(shape, "fwd+bwd"), cublas_tflops=settings.ceilings.cublas_tflops,
            input_sets=len(halves),
        )  # fmt: skip

        def check(row: Row, out: object) -> None:
            assert isinstance(out, tuple) and known.gradients is not None
            errors = [relative_error(o, w) for o, w in zip(out[1:], known.gradients, strict=True)]
            row["grad_err"] = max(errors)
            # A product rounded otherwise moves winners that are near each other.
            if not row["grad_err"] <= tolerance(True, dtype == torch.float32):
                raise ValueError(f"parity: a gradient is off by {row['grad_err']:.2g}, not timed")

        return Timed(row, prepare, known.scores, check, capture)

    plain = _step(shape)
    steps = [
        timed(PLAIN, lambda: _calls(plain, halves)),
        timed(RECOMPUTE, lambda: _calls(_step(shape, winners="recompute"), halves)),
        timed(HIGH, lambda: _calls(_step(shape, precision="high"), singles), of_singles),
        timed(AUTOCAST, lambda: _calls(_step(shape, autocast=True), singles), of_singles),
    ]
    # The host's share shows in the wall time of one call after another; their GPU time is the plain step's.
    hosts = [timed(ONE_THREAD, lambda: _in_one_thread(_calls(plain, halves)), capture=False)]
    if settings.device.type == "cuda":
        hosts.append(timed(GRAPH, lambda: _replayed(lambda: plain(halves[0])), capture=False))
    if settings.compiles and (shape.name in COMPILED_STEPS or settings.compile_all):
        hosts.append(timed(COMPILED, lambda: _calls(_step(shape, compiled=True), halves), capture=False))
    rows = measure(settings, [*steps, *hosts])
    for row in rows[len(steps) :]:
        row["gpu_us"] = rows[0]["gpu_us"]
    set_ratios(rows[1 : len(steps)], "over_plain", rows[0])
    return rows
