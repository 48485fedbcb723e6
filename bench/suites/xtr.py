"""Training steps of XTR scores: `xtr_scores` beside the step of `maxsim` on the same inputs, and beside
Sentence Transformers' grid of all similarities (bench/peers/xtr.py).

Scores of the inputs that are timed are compared with exact ones. Scores and gradients are compared on planted
inputs, whose selection no rounding moves. The grid is of bfloat16: on random inputs rounding moves tokens
over the threshold, and a document of one selected token may lose it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.harness.inputs import Inputs
from bench.harness.interleaved import Timed, check_gradients, draw_sets, measure, set_ratios
from bench.harness.library import EINSUM, OURS, SENTENCE_TRANSFORMERS, Score, training_step
from bench.harness.parity import GRADIENTS, SCORES, reference_scores, worst_error
from bench.harness.planted import gradients, plant_shape
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.harness.timing import Call
from bench.harness.xtr import Known, exact_scores, plant_selection
from bench.peers.xtr import grid_scores

SUITE = "xtr"
MAXSIM = "maxsim"
SELECTED = (32, 256)  # similarities that a query token selects
PEERS = (SENTENCE_TRANSFORMERS,)  # which no other suite measures
# Limits of relative error: of scores on random inputs, of all results on planted ones. Gradients of the grid
# are products over all tokens of the other side, of which cuBLAS may round partial sums to bfloat16.
LIMITS = {OURS: (SCORES, GRADIENTS), SENTENCE_TRANSFORMERS: (0.3, 1e-2)}


def variant(k: int) -> str:
    return f"k = {k}"


ALL = (MAXSIM, *map(variant, SELECTED))


def _step(score: Score, x: Inputs) -> Callable[[], tuple[torch.Tensor, ...]]:
    leaves = x.Q.detach().requires_grad_(), x.D.detach().requires_grad_()
    return training_step(score, leaves, x.grad_scores)


def _calls(score: Score, sets: Sequence[Inputs]) -> list[Call]:
    return [_step(score, x) for x in sets]


def _maxsim(settings: Settings, shape: Shape, row: Row, sets: Sequence[Inputs]) -> Timed:
    score = importlib.import_module("late_interaction").maxsim
    row["floor_us"] = settings.floor_us(shape, "fwd+bwd")
    grad = sets[0].grad_scores
    planted = plant_shape(shape, settings.device, settings.dtype)
    known = Inputs(planted.Q.view(shape.q_shape), planted.D.view(shape.d_shape), grad)
    check = check_gradients(_step(score, known), gradients(planted, grad))
    wanted = reference_scores(shape, sets[0].Q, sets[0].D)[0]
    return Timed(row, lambda: _calls(score, sets), wanted, check)


def _xtr(row: Row, score: Score, sets: Sequence[Inputs], wanted: torch.Tensor, known: Known) -> Timed:
    tolerance, limit = LIMITS[row["impl"]]

    def check(row: Row, _: object) -> None:
        row["grad_err"] = worst_error(_step(score, known.inputs)(), known.results)
        if not row["grad_err"] <= limit:
            raise ValueError(f"parity: a score or gradient is off by {row['grad_err']:.2g}, not timed")

    return Timed(row, lambda: _calls(score, sets), wanted, check, tolerance=tolerance)


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    sets = draw_sets(settings, shape, settings.dtype)

    def row(impl: str, name: str) -> Row:
        return new_row(
            SUITE, shape, "fwd+bwd", settings.dtype, impl, variant=name, input_sets=len(sets),
            cublas_tflops=settings.ceilings.cublas_tflops,
        )  # fmt: skip

    xtr_scores = importlib.import_module("late_interaction").xtr_scores
    functions: dict[str, Callable[..., torch.Tensor]] = {OURS: partial(xtr_scores, rule="paper")}
    if any(i.name == EINSUM for i in settings.implementations):  # the grid goes with PyTorch's own operators
        functions[SENTENCE_TRANSFORMERS] = grid_scores
    timed = [_maxsim(settings, shape, row(OURS, MAXSIM), sets)]
    for k in SELECTED:
        wanted = exact_scores(sets[0].Q, sets[0].D, k)
        known = plant_selection(shape, k, sets[0].grad_scores, settings.dtype)
        for impl, function in functions.items():
            timed.append(_xtr(row(impl, variant(k)), partial(function, k=k), sets, wanted, known))
    rows = measure(settings, timed)
    set_ratios(rows[1:], "over_maxsim", rows[0])
    return rows
