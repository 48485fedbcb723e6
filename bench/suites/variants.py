"""What each option of a forward costs: our plain bf16 call, and the same call with saved winners, masks,
weights of query tokens, normalization and fp16, interleaved on one shape."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.harness.inputs import Inputs
from bench.harness.interleaved import Timed, draw_sets, measure, set_ratios
from bench.harness.library import OURS
from bench.harness.parity import Reference, misplaced_winners, reference_scores
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.harness.timing import Call

SUITE = "variants"
PLAIN, WINNERS, D_MASK, MASKS, NORMALIZE, FP16 = "plain", "winners", "d_mask", "masks", "normalize", "fp16"
WEIGHTS = "q_weights"
ALL = (PLAIN, WINNERS, D_MASK, MASKS, WEIGHTS, NORMALIZE, FP16)
KEPT = 0.8  # share of tokens that a mask keeps, at random


def _holes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A random mask in which every row keeps a token."""
    mask = torch.rand(shape, device=device) < KEPT
    mask[..., 0] = True
    return mask


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    maxsim = importlib.import_module("late_interaction").maxsim
    maxsim_winners: Any = torch.ops.late_interaction.maxsim_winners.default
    sets = draw_sets(settings, shape, torch.bfloat16)
    halves = draw_sets(settings, shape, torch.float16)
    masks = [(_holes(x.Q.shape[:-1], x.Q.device), _holes(x.D.shape[:-1], x.D.device)) for x in sets]
    weights = [0.5 + torch.rand(x.Q.shape[:-1], device=x.Q.device) for x in sets]
    first, (q_mask, d_mask) = sets[0], masks[0]
    plain, winners = reference_scores(shape, first.Q, first.D)

    def check_winners(row: Row, out: object) -> None:
        assert isinstance(out, tuple)
        found = Reference(plain, winners)
        row["winners_wrong"] = misplaced_winners(shape, first.Q, first.D, out[1], found)

    def calls(function: Callable[..., object], inputs: Sequence[Inputs], *options: Any, **more: Any) -> Any:
        return lambda: [_bound(function, x.Q, x.D, *options, **more) for x in inputs]

    def masked(q: bool) -> Any:
        return lambda: [
            _bound(maxsim, x.Q, x.D, mq if q else None, md) for x, (mq, md) in zip(sets, masks, strict=True)
        ]

    def weighted() -> list[Call]:
        return [_bound(maxsim, x.Q, x.D, q_weights=w) for x, w in zip(sets, weights, strict=True)]

    def timed(
        variant: str,
        prepare: Any,
        wanted: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
        check: Any = None,
    ) -> Timed:
        row = new_row(
            SUITE, shape, "fwd", dtype, OURS, variant=variant, floor_us=settings.floor_us(shape, "fwd"),
            cublas_tflops=settings.ceilings.cublas_tflops, input_sets=len(sets),
        )  # fmt: skip
        return Timed(row, prepare, wanted, check)

    rows = measure(settings, [
        timed(PLAIN, calls(maxsim, sets), plain),
        timed(WINNERS, calls(maxsim_winners, sets, None, None), plain, check=check_winners),
        timed(D_MASK, masked(False), reference_scores(shape, first.Q, first.D, None, d_mask)[0]),
        timed(MASKS, masked(True), reference_scores(shape, first.Q, first.D, q_mask, d_mask)[0]),
        timed(WEIGHTS, weighted, reference_scores(shape, first.Q, first.D, weights[0])[0]),
        timed(
            NORMALIZE, calls(maxsim, sets, normalize=True),
            reference_scores(shape, first.Q, first.D, normalize=True)[0],
        ),
        timed(
            FP16, calls(maxsim, halves), reference_scores(shape, halves[0].Q, halves[0].D)[0], torch.float16
        ),
    ])  # fmt: skip
    set_ratios(rows[1:], "over_plain", rows[0])
    return rows


def _bound(function: Callable[..., object], *args: Any, **options: Any) -> Call:
    return lambda: function(*args, **options)
