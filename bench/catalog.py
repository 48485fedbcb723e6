"""Every suite of `python -m bench`: its shapes, those of a dry run, its variants, and who measures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import (
    first_call,
    fp32,
    heads,
    hidden,
    pairs,
    plaid,
    quantized,
    retrieval,
    shapes,
    steps,
    variants,
    varlen,
)
from .results import Row
from .shapes import Shape
from .suites import WINNER_KINDS, Settings

Take = Callable[[Settings, Shape], list[Row]]
CPU = "cpu"


@dataclass(frozen=True)
class Suite:
    shapes: Sequence[Shape]
    tiny: Sequence[Shape] = ()
    variants: tuple[str | None, ...] = (None,)
    op: str | None = None  # of a suite of every implementation, one after the other
    winners: tuple[str | None, ...] = (None,)
    take: Take | None = None  # of one whose calls take turns
    ratio: str = ""  # what each row of that is a ratio to


_TRAINING = (*shapes.TRAINING, *shapes.LONG)
_TINY_TRAINING = (*shapes.TINY_TRAINING, shapes.TINY_LONG)

SUITES: dict[str, Suite] = {
    "forward": Suite(shapes.FORWARD, (*shapes.TINY_FORWARD, shapes.TINY_LONG), op="fwd"),
    variants.SUITE: Suite(
        shapes.named(shapes.VARIANTS), shapes.TINY_FORWARD, variants.ALL,
        take=variants.take, ratio="over_plain",
    ),
    fp32.SUITE: Suite(
        shapes.named(shapes.FP32), shapes.TINY_FORWARD, (fp32.HIGH, fp32.HIGHEST),
        take=fp32.take, ratio="over_einsum",
    ),
    quantized.SUITE: Suite(
        shapes.named(shapes.QUANTIZED), shapes.TINY_FORWARD, quantized.ALL,
        take=quantized.take, ratio="over_bf16",
    ),
    plaid.SUITE: Suite(
        shapes.PLAID, shapes.TINY_PLAID, (plaid.PACKED, plaid.CENTROIDS), take=plaid.take, ratio="over_lik",
    ),
    hidden.SUITE: Suite(
        shapes.FUSED_HEAD, shapes.TINY_FUSED_HEAD, (hidden.FUSED, hidden.UNFUSED),
        take=hidden.take, ratio="over_unfused",
    ),
    retrieval.SUITE: Suite(
        shapes.RETRIEVE, shapes.TINY_RETRIEVE, retrieval.ALL, take=retrieval.take, ratio="over_scores",
    ),
    varlen.SUITE: Suite(
        shapes.VARLEN, shapes.TINY_VARLEN, varlen.ALL, take=varlen.take, ratio="over_ours",
    ),
    pairs.SUITE: Suite(
        shapes.PAIR_LISTS, shapes.TINY_PAIR_LISTS, (pairs.FORWARD, pairs.STEP, pairs.DENSE),
        take=pairs.take, ratio="over_ours",
    ),
    "training": Suite(_TRAINING, _TINY_TRAINING, op="fwd+bwd", winners=WINNER_KINDS),
    steps.SUITE: Suite(
        shapes.TRAINING, shapes.TINY_TRAINING, steps.ALL, take=steps.take, ratio="over_plain",
    ),
    "backward": Suite(_TRAINING, _TINY_TRAINING, op="bwd", winners=WINNER_KINDS),
    heads.SUITE: Suite(
        shapes.HEADS, shapes.TINY_HEADS, heads.ALL, take=heads.take, ratio="over_einsum",
    ),
    first_call.SUITE: Suite(tuple(first_call.OPS.values())),
}  # fmt: skip

# Measured where there is no GPU; what the suite is called in its rows.
ON_CPU = Suite((*shapes.CPU, *shapes.CPU_TRAINING))
