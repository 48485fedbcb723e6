"""What the options of our training step cost: weights of query tokens and their gradient, recomputed winners,
float32 inputs at "high" and under autocast. And what the host adds: eager, in one thread, compiled, as a CUDA
graph."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.harness.inputs import Inputs
from bench.harness.interleaved import Timed, check_gradients, draw_sets, measure, set_ratios
from bench.harness.library import OURS, training_step
from bench.harness.named_shapes import COMPILED_STEPS
from bench.harness.parity import reference_scores
from bench.harness.planted import every_pair, gradients, plant_shape
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import PAIRS, Shape
from bench.harness.timing import Call

SUITE = "steps"
PLAIN, RECOMPUTE, HIGH, AUTOCAST = "plain", "winners recomputed", "float32, high", "float32, autocast"
WEIGHTS, LEARNED = "q_weights", "q_weights learned"
ONE_THREAD, COMPILED, GRAPH = "one thread", "torch.compile", "CUDA graph"
ALL = (PLAIN, WEIGHTS, LEARNED, RECOMPUTE, HIGH, AUTOCAST, ONE_THREAD, COMPILED, GRAPH)

Step = Callable[[Inputs], tuple[torch.Tensor, ...]]


def _maxsim(shape: Shape) -> Callable[..., torch.Tensor]:
    lib = importlib.import_module("late_interaction")
    found: Callable[..., torch.Tensor] = lib.maxsim_pairs if shape.layout == PAIRS else lib.maxsim
    return found


def _step(shape: Shape, autocast: bool = False, compiled: bool = False, **options: Any) -> Step:
    maxsim = _maxsim(shape)
    if compiled:
        torch.compiler.reset()
        maxsim = torch.compile(maxsim, fullgraph=True, dynamic=False)

    def scores(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        with torch.autocast(Q.device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
            out: torch.Tensor = maxsim(Q, D, **options)
        return out

    return lambda x: training_step(scores, (x.Q, x.D), x.grad_scores)()


def _weighted_step(shape: Shape) -> Step:
    """With a gradient of the weights where they require one."""
    maxsim = _maxsim(shape)

    def step(x: Inputs) -> tuple[torch.Tensor, ...]:
        assert x.weights is not None
        leaves = (x.Q, x.D, x.weights) if x.weights.requires_grad else (x.Q, x.D)
        return training_step(lambda Q, D, _=None: maxsim(Q, D, q_weights=x.weights), leaves, x.grad_scores)()

    return step


def _calls(step: Step, sets: Sequence[Inputs]) -> list[Call]:
    return [lambda x=x: step(x) for x in sets]  # type: ignore[misc]


def _in_one_thread(calls: Sequence[Call]) -> list[Call]:
    """The calls without autograd's own thread for the device."""

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


@dataclass
class _Known:
    """Inputs of one dtype, the scores of the first, and planted ones with their gradients."""

    sets: list[Inputs]
    scores: torch.Tensor
    planted: Inputs
    of_planted: list[torch.Tensor]


def _known(settings: Settings, shape: Shape, dtype: torch.dtype) -> _Known:
    sets = draw_sets(settings, shape, dtype)
    first = sets[0]
    scores = reference_scores(shape, first.Q, first.D)[0]
    planted = plant_shape(shape, settings.device, dtype)
    wanted = gradients(planted, every_pair(shape, first.grad_scores))
    known = Inputs(planted.Q.view(shape.q_shape), planted.D.view(shape.d_shape), first.grad_scores)
    for x in (*sets, known):
        x.require_grad()
    return _Known(sets, scores, known, wanted)


def _weighted(settings: Settings, shape: Shape, learned: bool) -> _Known:
    """Inputs with weights of the query tokens."""
    sets = draw_sets(settings, shape, torch.bfloat16)
    for x in sets:
        x.weights = 0.5 + torch.rand(shape.q_shape[:-1], device=settings.device)
    first = sets[0]
    assert first.weights is not None
    scores = reference_scores(shape, first.Q, first.D, first.weights)[0]
    planted = plant_shape(shape, settings.device, torch.bfloat16)
    tokens, each = planted.Q.double(), first.weights.double().view(-1, 1)
    of_weighted, of_D = gradients(replace(planted, Q=tokens * each), every_pair(shape, first.grad_scores))
    wanted = [of_weighted * each, of_D]
    if learned:
        wanted.append((of_weighted * tokens).sum(-1))
    known = replace(first, Q=planted.Q.view(shape.q_shape), D=planted.D.view(shape.d_shape))
    known.weights = first.weights.clone()
    for x in (*sets, known):
        x.require_grad()
        assert x.weights is not None
        x.weights.requires_grad_(learned)
    return _Known(sets, scores, known, wanted)


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    halves = _known(settings, shape, torch.bfloat16)
    singles = _known(settings, shape, torch.float32)

    def timed(
        variant: str, step: Step, known: _Known, prepare: Callable[[], Sequence[Call]], on_gpu: bool = True
    ) -> Timed:
        row = new_row(
            SUITE, shape, "fwd+bwd", known.planted.Q.dtype, OURS, variant=variant,
            floor_us=settings.floor_us(shape, "fwd+bwd"), cublas_tflops=settings.ceilings.cublas_tflops,
            input_sets=len(halves.sets),
        )  # fmt: skip
        check = check_gradients(lambda: step(known.planted), known.of_planted)
        return Timed(row, prepare, known.scores, check, on_gpu=on_gpu)

    def eager(variant: str, known: _Known, **options: Any) -> Timed:
        step = _step(shape, **options)
        return timed(variant, step, known, lambda: _calls(step, known.sets))

    def host(variant: str, step: Step, prepare: Callable[[], Sequence[Call]]) -> Timed:
        """A step whose wall time alone is taken: it shows the share of the host."""
        return timed(variant, step, halves, prepare, on_gpu=False)

    def weighted(variant: str) -> Timed:
        step, known = _weighted_step(shape), _weighted(settings, shape, variant == LEARNED)
        return timed(variant, step, known, lambda: _calls(step, known.sets))

    plain = _step(shape)
    steps = [
        eager(PLAIN, halves),
        weighted(WEIGHTS),
        weighted(LEARNED),
        eager(RECOMPUTE, halves, winners="recompute"),
        eager(HIGH, singles, precision="high"),
        eager(AUTOCAST, singles, autocast=True),
        host(ONE_THREAD, plain, lambda: _in_one_thread(_calls(plain, halves.sets))),
    ]
    if settings.device.type == "cuda":
        steps.append(host(GRAPH, plain, lambda: _replayed(lambda: plain(halves.sets[0]))))
    if settings.compiles and (shape.name in COMPILED_STEPS or settings.compile_all):
        compiled = _step(shape, compiled=True)
        steps.append(host(COMPILED, compiled, lambda: _calls(compiled, halves.sets)))
    rows = measure(settings, steps)
    on_gpu = (WEIGHTS, LEARNED, RECOMPUTE, HIGH, AUTOCAST)
    set_ratios([r for r in rows[1:] if r["variant"] in on_gpu], "over_plain", rows[0])
    return rows
