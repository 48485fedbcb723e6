"""Training steps of `smooth_maxsim` beside those of `maxsim` on the same inputs, and beside PyTorch's own:
all similarities by one einsum, `logsumexp`, and autograd.

Scores are compared with exact ones, gradients with those of float64 on a corner of the inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from bench.harness.inputs import Inputs
from bench.harness.interleaved import Timed, draw_sets, measure, set_ratios
from bench.harness.library import EINSUM, OURS, Score, training_step
from bench.harness.parity import GRADIENTS, reference_scores, worst_error
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.harness.timing import Call

SUITE = "smooth"
MAXSIM, SMOOTH = "maxsim", "tau = 0.1"
ALL = (MAXSIM, SMOOTH)
TAU = 0.1
# Limits of gradients' relative error. Autograd rounds the similarities' to bfloat16, and sums of them.
LIMITS = {OURS: GRADIENTS, EINSUM: 1e-2}
_CORNER = (4, 8)  # queries and documents whose gradients are compared


def smooth_by_einsum(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
    similarities = torch.einsum("isd,jtd->ijst", Q, D)
    scores: torch.Tensor = similarities.float().div(TAU).logsumexp(-1).sum(-1).mul(TAU)
    return scores


def exact_scores(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
    """[Nq, Nd] in float64, a document at a time."""
    rows = Q.flatten(0, 1).double()
    found = [(rows @ document.double().t()).div(TAU).logsumexp(-1).mul(TAU) for document in D]
    return torch.stack(found, 1).unflatten(0, Q.shape[:2]).sum(1)


def _step(
    score: Score, Q: torch.Tensor, D: torch.Tensor, grad: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    return training_step(score, (Q.detach().requires_grad_(), D.detach().requires_grad_()), grad)


def _check(score: Score, exact: Score, x: Inputs) -> Callable[[Row, object], None]:
    def check(row: Row, _: object) -> None:
        q, n = _CORNER
        corner = x.Q[:q], x.D[:n], x.grad_scores[:q, :n].contiguous()
        wide = [each.double() for each in corner]
        found, wanted = _step(score, *corner)(), _step(exact, wide[0], wide[1], wide[2])()
        row["grad_err"] = worst_error(found[1:], wanted[1:])
        if not row["grad_err"] <= LIMITS[row["impl"]]:
            raise ValueError(f"parity: a gradient is off by {row['grad_err']:.2g}, not timed")

    return check


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    sets = draw_sets(settings, shape, settings.dtype)
    lib, reference = (
        importlib.import_module("late_interaction"),
        importlib.import_module("late_interaction.reference"),
    )

    def smooth(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = lib.smooth_maxsim(Q, D, tau=TAU)
        return scores

    def exact_smooth(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = reference.smooth_maxsim_reference(Q, D, tau=TAU)
        return scores

    def timed(impl: str, name: str, score: Score, exact: Score, wanted: torch.Tensor) -> Timed:
        row = new_row(
            SUITE, shape, "fwd+bwd", settings.dtype, impl, variant=name, input_sets=len(sets),
            cublas_tflops=settings.ceilings.cublas_tflops,
        )  # fmt: skip

        def calls() -> list[Call]:
            return [_step(score, x.Q, x.D, x.grad_scores) for x in sets]

        return Timed(row, calls, wanted, _check(score, exact, sets[0]))

    wanted = exact_scores(sets[0].Q, sets[0].D)
    best = reference_scores(shape, sets[0].Q, sets[0].D)[0]
    every = [
        timed(OURS, MAXSIM, lib.maxsim, reference.maxsim_reference, best),
        timed(OURS, SMOOTH, smooth, exact_smooth, wanted),
    ]
    if any(i.name == EINSUM for i in settings.implementations):
        every.append(timed(EINSUM, SMOOTH, smooth_by_einsum, exact_smooth, wanted))
    rows = measure(settings, every)
    set_ratios(rows[1:], "over_maxsim", rows[0])
    return rows
