"""Times the options of our training step, and the host's share of small calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F

from bench.harness.inputs import Inputs, draw
from bench.harness.library import EINSUM, OURS, training_step
from bench.harness.measuring import (
    Bench,
    Function,
    Settings,
    Tensors,
    Timed,
    check_gradients,
    function,
    judged,
)
from bench.harness.named_shapes import COMPILED_STEPS
from bench.harness.parity import reference_scores
from bench.harness.planted import every_pair, gradients, known_step, plant_shape
from bench.harness.results import Row
from bench.harness.shape import PAIRS, Shape
from late_interaction._doctor.timing import Call, gpu_time, wall_times

# ---- the options of a step ----

PLAIN, RECOMPUTE, HIGH, AUTOCAST = "plain", "winners recomputed", "float32, high", "float32, autocast"
WEIGHTS, LEARNED = "q_weights", "q_weights learned"
ONE_THREAD, COMPILED, GRAPH = "one thread", "torch.compile", "CUDA graph"
STEPS = (PLAIN, WEIGHTS, LEARNED, RECOMPUTE, HIGH, AUTOCAST, ONE_THREAD, COMPILED, GRAPH)


def _maxsim(shape: Shape) -> Function:
    return function("late_interaction", "maxsim_pairs" if shape.layout == PAIRS else "maxsim")


def _autocast(maxsim: Function) -> Function:
    def scores(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        with torch.autocast(Q.device.type, torch.bfloat16):
            return maxsim(Q, D)

    return scores


def _compiled(maxsim: Function) -> Function:
    torch.compiler.reset()
    compiled: Function = torch.compile(maxsim, fullgraph=True, dynamic=False)
    return compiled


def _in_one_thread(call: Call) -> object:
    """The call without autograd's own thread for the device."""
    with torch.autograd.set_multithreading_enabled(False):
        return call()


def _replayed(call: Call) -> Call:
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

    return run


def _weighted(b: Bench, learned: bool) -> Timed:
    """With weights of the query tokens, and with their gradient where they are learned."""
    maxsim, sets, shape = _maxsim(b.shape), b.sets(torch.bfloat16), b.shape
    weights = [0.5 + torch.rand(shape.q_shape[:-1], device=b.settings.device) for _ in sets]
    grad = sets[0].grad_scores
    planted = plant_shape(shape, b.settings.device, torch.bfloat16)
    tokens, each = planted.Q.double(), weights[0].double().view(-1, 1)
    of_weighted, of_D = gradients(replace(planted, Q=tokens * each), every_pair(shape, grad))
    exact = [of_weighted * each, of_D, (of_weighted * tokens).sum(-1)][: 3 if learned else 2]
    wanted = reference_scores(shape, *sets[0].tokens, weights[0])[0]
    known_tokens = planted.Q.view(shape.q_shape), planted.D.view(shape.d_shape)

    def step(x: Tensors, w: torch.Tensor, g: torch.Tensor) -> Callable[[], Tensors]:
        def scores(Q: torch.Tensor, D: torch.Tensor, learned: torch.Tensor | None = None) -> torch.Tensor:
            return maxsim(Q, D, q_weights=w if learned is None else learned)

        leaves = tuple(t.detach().clone().requires_grad_() for t in (*x, *([w] if learned else [])))
        return training_step(scores, leaves, g)

    calls = [step(x.tokens, w, x.grad_scores) for x, w in zip(sets, weights, strict=True)]
    check = check_gradients(step(known_tokens, weights[0], grad), exact)
    row = b.row(OURS, "fwd+bwd", LEARNED if learned else WEIGHTS, torch.bfloat16, input_sets=len(sets))
    return Timed(row, lambda: calls, [wanted], check)


def measure_steps(b: Bench) -> list[Row]:
    """Weights of query tokens and their gradient, recomputed winners, float32 inputs at "high" and under
    autocast. And what the host adds, in wall time alone: eager, in one thread, compiled, as a CUDA graph."""
    maxsim = _maxsim(b.shape)

    def known(dtype: torch.dtype) -> tuple[list[Any], torch.Tensor, Any]:
        sets = b.sets(dtype)
        wanted = reference_scores(b.shape, *sets[0].tokens)[0]
        return [x.step for x in sets], wanted, known_step(b.shape, sets[0].grad_scores, dtype)

    halves, singles = known(torch.bfloat16), known(torch.float32)

    def step(variant: str, make: Callable[[], Function], inputs: Any = halves, **options: Any) -> Timed:
        dtype = torch.bfloat16 if inputs is halves else torch.float32
        return b.step(OURS, variant, make, *inputs, dtype=dtype, **options)

    def host(variant: str, change: Callable[[Call], Call]) -> Timed:
        timed = step(variant, lambda: maxsim, on_gpu=False)
        prepare = timed.prepare
        timed.prepare = lambda: [change(call) for call in prepare()[: 1 if variant == GRAPH else None]]
        return timed

    timed = [
        step(PLAIN, lambda: maxsim), _weighted(b, learned=False), _weighted(b, learned=True),
        step(RECOMPUTE, lambda: partial(maxsim, winners="recompute")),
        step(HIGH, lambda: partial(maxsim, precision="high"), singles),
        step(AUTOCAST, lambda: _autocast(maxsim), singles),
        host(ONE_THREAD, lambda call: partial(_in_one_thread, call)),
    ]  # fmt: skip
    if b.settings.on_gpu:
        timed.append(host(GRAPH, _replayed))
    if b.settings.compiles and (b.shape.name in COMPILED_STEPS or b.settings.compile_all):
        compiled = _compiled(maxsim)
        timed.append(step(COMPILED, lambda: compiled, on_gpu=False))
    return b.measure(timed)


# ---- small calls beside PyTorch's own product of two matrices, on which the GPU spends next to nothing ----

EAGER, LOSS, LOSS_COMPILED, REDUCED = "eager", "loss", "loss, compiled", "loss, reduce-overhead"
HOST = (EAGER, LOSS, LOSS_COMPILED, REDUCED)
HOST_PEERS = (EINSUM,)  # PyTorch's own operators
EDGE = 128  # rows and columns of the matrices

Step = Callable[[Inputs], Tensors]


def _product(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
    return Q @ D


def _loss(score: Function) -> Function:
    def loss(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        scores = score(Q, D)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return F.cross_entropy(scores / 0.5, torch.arange(len(Q), device=Q.device))

    return loss


def _loss_step(loss: Function) -> Step:
    def step(x: Inputs) -> Tensors:
        value = loss(x.Q, x.D)
        return (value.detach(), *torch.autograd.grad(value, (x.Q, x.D)))

    return step


def _compiled_step(loss: Function, mode: str | None = None) -> Step:
    """A compiled loss on code of its own: a call would check the guards of all that share its code."""
    found = cast(FunctionType, loss)
    own: Any = FunctionType(
        found.__code__.replace(), found.__globals__, found.__name__, found.__defaults__, found.__closure__
    )
    step = _loss_step(torch.compile(own, fullgraph=True, dynamic=False, mode=mode))

    def run(x: Inputs) -> Tensors:
        torch.compiler.cudagraph_mark_step_begin()  # nobody reads what the step before returned
        return step(x)

    return run if mode else step


def _ways(settings: Settings) -> dict[str, Callable[[Function], Step]]:
    ways: dict[str, Callable[[Function], Step]] = {
        EAGER: lambda score: lambda x: training_step(score, x.tokens, x.grad_scores)(),
        LOSS: lambda score: _loss_step(_loss(score)),
    }
    if settings.compiles:
        ways[LOSS_COMPILED] = lambda score: _compiled_step(_loss(score))
    if settings.compiles and settings.on_gpu:
        ways[REDUCED] = lambda score: _compiled_step(_loss(score), "reduce-overhead")
    return ways


@dataclass
class _Side:
    """A function of two tensors: inputs to time, inputs whose exact results are known, and these: of a step
    and of a loss's step."""

    impl: str
    score: Function
    timed: Inputs
    known: Inputs
    step: Tensors
    loss: Tensors


def _ours(b: Bench) -> _Side:
    timed = draw(b.shape, b.settings.device, b.settings.dtype)
    planted = plant_shape(b.shape, b.settings.device, b.settings.dtype)
    known = Inputs(planted.Q.view(b.shape.q_shape), planted.D.view(b.shape.d_shape), timed.grad_scores)
    scores = reference_scores(b.shape, *known.tokens)[0].requires_grad_()
    loss = _loss(lambda Q, D: scores)(*known.tokens)
    (of_scores,) = torch.autograd.grad(loss, scores)
    step = [scores.detach(), *gradients(planted, known.grad_scores)]
    of_loss = [loss.detach(), *gradients(planted, of_scores)]
    return _Side(OURS, function("late_interaction", "maxsim"), timed, known, step, of_loss)


def _theirs(settings: Settings) -> _Side:
    a, b, grad = (torch.randn(EDGE, EDGE, device=settings.device).to(settings.dtype) for _ in range(3))
    inputs = Inputs(a / EDGE**0.5, b / EDGE**0.5, grad)
    exact = Inputs(inputs.Q.double(), inputs.D.double(), grad.double())
    exact.require_grad()
    step = training_step(_product, exact.tokens, exact.grad_scores)()
    return _Side(EINSUM, _product, inputs, inputs, step, _loss_step(_loss(_product))(exact))


def _leaves(x: Inputs) -> Inputs:
    """The same numbers as leaves of their own: a compiled loss may keep its leaves' nodes, on its stream."""
    own = Inputs(x.Q.detach(), x.D.detach(), x.grad_scores)
    own.require_grad()
    return own


def _judged(settings: Settings, side: _Side, row: Row, step: Step | None) -> Sequence[Call]:
    """The call, if its results are right. Eager ones are timed on the GPU before anything is compiled."""
    if step is None:
        first = Timed(row, lambda: [partial(side.score, *side.known.tokens)], side.step[:1])
        call: Call = partial(side.score, *side.timed.tokens)
    else:
        known, timed = _leaves(side.known), _leaves(side.timed)
        wanted = side.step if row["variant"] == EAGER else side.loss
        check = check_gradients(lambda: step(known), wanted[1:])
        first = Timed(row, lambda: [lambda: tuple(step(known))], wanted[:1], check)
        call = partial(step, timed)
    if judged(settings, first) is None:
        return []
    if row["variant"] == EAGER and settings.on_gpu:
        row.update(gpu_time([call], settings.effort).row())
    return [call]


def measure_host(b: Bench) -> list[Row]:
    """Our forward and step, and a loss around maxsim, eager and compiled, beside the same of the product.
    Wall time of calls that take turns in short rounds; the GPU time of eager calls says how much is the
    host's."""
    torch.compiler.reset()
    settings, sides = b.settings, [_ours(b), _theirs(b.settings)]
    ways: dict[str, Callable[[Function], Step] | None] = {"fwd": None, **_ways(settings)}
    ready = []
    rows = []
    for variant, way in ways.items():
        for side in sides:
            row = b.row(side.impl, "fwd+bwd" if way else "fwd", variant if way else EAGER)
            rows.append(row)
            if calls := _judged(settings, side, row, way(side.score) if way else None):
                ready.append((row, calls))
    times = wall_times([calls for _, calls in ready], settings.effort, settings.device)
    for (row, _), mine in zip(ready, times, strict=True):
        row["wall_us"], row["wall_least_us"] = statistics.median(mine), min(mine)
    return rows
