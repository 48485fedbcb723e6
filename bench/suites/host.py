"""What the host's time makes of small calls: our forward and step beside PyTorch's own product of two
matrices, and a loss around maxsim, eager and compiled, beside the same loss around that product.

Wall time is compared, call and synchronization, of calls that take turns in short rounds. The matrices are
small, so that the GPU has next to nothing to do with them. The GPU time of our eager calls says how much of
their wall time is the host's.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F

from bench.harness.inputs import Inputs, draw
from bench.harness.interleaved import Timed, check_gradients, judged
from bench.harness.library import EINSUM, OURS, Score, training_step
from bench.harness.parity import reference_scores
from bench.harness.planted import gradients, plant_shape
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.harness.timing import Call, gpu_time, wall_times

SUITE = "host"
EAGER, LOSS, COMPILED, REDUCED = "eager", "loss", "loss, compiled", "loss, reduce-overhead"
ALL = (EAGER, LOSS, COMPILED, REDUCED)
PEERS = (EINSUM,)  # PyTorch's own operators
EDGE = 128  # rows and columns of the matrices

Step = Callable[[Inputs], Sequence[torch.Tensor]]
Results = Sequence[torch.Tensor]


# ---- what is called ----


def _product(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
    return Q @ D


def _step(score: Score) -> Step:
    return lambda x: training_step(score, (x.Q, x.D), x.grad_scores)()


def _loss(score: Score) -> Score:
    def loss(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        scores = score(Q, D)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return F.cross_entropy(scores / 0.5, torch.arange(len(Q), device=Q.device))

    return loss


def _loss_step(loss: Score) -> Step:
    def step(x: Inputs) -> Sequence[torch.Tensor]:
        value = loss(x.Q, x.D)
        return (value.detach(), *torch.autograd.grad(value, (x.Q, x.D)))

    return step


def _compiled(loss: Score, mode: str | None = None) -> Step:
    """A compiled loss on code of its own: a call would check the guards of all that share its code."""
    found = cast(FunctionType, loss)
    own: Any = FunctionType(
        found.__code__.replace(), found.__globals__, found.__name__, found.__defaults__, found.__closure__
    )
    step = _loss_step(torch.compile(own, fullgraph=True, dynamic=False, mode=mode))

    def run(x: Inputs) -> Sequence[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()  # nobody reads what the step before returned
        return step(x)

    return run if mode else step


def _ways(settings: Settings) -> dict[str, Callable[[Score], Step]]:
    ways = {EAGER: _step, LOSS: lambda score: _loss_step(_loss(score))}
    if settings.compiles:
        ways[COMPILED] = lambda score: _compiled(_loss(score))
    if settings.compiles and settings.device.type == "cuda":
        ways[REDUCED] = lambda score: _compiled(_loss(score), "reduce-overhead")
    return ways


# ---- inputs, and what they must give ----


@dataclass
class _Side:
    """A function of two tensors: inputs to time, inputs whose exact results are known, and these: of a step
    and of a loss's step."""

    impl: str
    score: Score
    timed: Inputs
    known: Inputs
    step: Results
    loss: Results


def _ours(settings: Settings, shape: Shape) -> _Side:
    timed = draw(shape, settings.device, settings.dtype)
    planted = plant_shape(shape, settings.device, settings.dtype)
    known = Inputs(planted.Q.view(shape.q_shape), planted.D.view(shape.d_shape), timed.grad_scores)
    scores = reference_scores(shape, known.Q, known.D)[0].requires_grad_()
    loss = _loss(lambda Q, D: scores)(known.Q, known.D)
    (of_scores,) = torch.autograd.grad(loss, scores)
    step = [scores.detach(), *gradients(planted, known.grad_scores)]
    of_loss = [loss.detach(), *gradients(planted, of_scores)]
    maxsim = importlib.import_module("late_interaction").maxsim
    return _Side(OURS, maxsim, timed, known, step, of_loss)


def _theirs(settings: Settings) -> _Side:
    a, b, grad = (torch.randn(EDGE, EDGE, device=settings.device).to(settings.dtype) for _ in range(3))
    inputs = Inputs(a / EDGE**0.5, b / EDGE**0.5, grad)
    exact = Inputs(inputs.Q.double(), inputs.D.double(), grad.double())
    exact.require_grad()
    return _Side(EINSUM, _product, inputs, inputs, _step(_product)(exact), _loss_step(_loss(_product))(exact))


# ---- what is measured ----


def _leaves(x: Inputs) -> Inputs:
    """The same numbers as leaves of their own: a compiled loss may keep its leaves' nodes, on its stream."""
    own = Inputs(x.Q.detach(), x.D.detach(), x.grad_scores)
    own.require_grad()
    return own


def _forward(settings: Settings, side: _Side, row: Row) -> Sequence[Call]:
    known, timed = side.known, side.timed
    first = Timed(row, lambda: [lambda: side.score(known.Q, known.D)], side.step[0])
    return [] if judged(settings, first) is None else [lambda: side.score(timed.Q, timed.D)]


def _training(settings: Settings, side: _Side, row: Row, step: Step) -> Sequence[Call]:
    known, timed = _leaves(side.known), _leaves(side.timed)
    wanted = side.step if row["variant"] == EAGER else side.loss
    check = check_gradients(lambda: step(known), wanted[1:])
    first = Timed(row, lambda: [lambda: tuple(step(known))], wanted[0], check)
    return [] if judged(settings, first) is None else [lambda: step(timed)]


def _gpu(settings: Settings, row: Row, calls: Sequence[Call]) -> Sequence[Call]:
    """The calls. Eager ones are timed on the GPU before anything is compiled."""
    if calls and row["variant"] == EAGER and settings.device.type == "cuda":
        found = gpu_time(calls, settings.effort)
        row.update(gpu_us=found.us, gpu_spread=found.spread, gpu_method=found.method)
    return calls


def _wall(settings: Settings, rows: Sequence[Row], calls: Sequence[Sequence[Call]]) -> None:
    """Wall time of what is right, in turns. A ratio is the median of those of the rounds: over_product, of
    our eager call over the product's; over_eager, of a compiled loss over the eager one."""
    ready = [(row, call) for row, call in zip(rows, calls, strict=True) if call]
    times = wall_times([call for _, call in ready], settings.effort, settings.device)
    found = {
        (row["op"], row["impl"], row["variant"]): mine for (row, _), mine in zip(ready, times, strict=True)
    }
    for row, _ in ready:
        mine = found[row["op"], row["impl"], row["variant"]]
        row["wall_us"], row["wall_least_us"] = statistics.median(mine), min(mine)
        eager = row["variant"] == EAGER
        base = found.get((row["op"], EINSUM, EAGER) if eager else (row["op"], row["impl"], LOSS))
        if base is not None and base is not mine:
            ratio = statistics.median(a / b for a, b in zip(mine, base, strict=True))
            row["over_product" if eager else "over_eager"] = ratio


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    torch.compiler.reset()
    sides = [_ours(settings, shape), _theirs(settings)]
    rows: list[Row] = []

    def row(side: _Side, op: str, variant: str) -> Row:
        floor = settings.floor_us(shape, op) if side.impl == OURS else None
        rows.append(new_row(SUITE, shape, op, settings.dtype, side.impl, variant=variant, floor_us=floor))
        return rows[-1]

    calls = []
    for side in sides:
        forward = row(side, "fwd", EAGER)
        calls.append(_gpu(settings, forward, _forward(settings, side, forward)))
    for variant, way in _ways(settings).items():
        for side in sides:
            step = row(side, "fwd+bwd", variant)
            calls.append(_gpu(settings, step, _training(settings, side, step, way(side.score))))
    _wall(settings, rows, calls)
    return rows
