"""The arguments of a public loss: checked, prepared for the blocks, and agreed on with the process group."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._contrastive import check, whole
from late_interaction._contrastive.blocks import Kernels, choose
from late_interaction._contrastive.ring import Ring, join

_LOSSES = ("contrastive_loss", "pairwise_loss", "sigmoid_loss", "recall_loss")
_PRECISIONS = ("highest", "high", "medium", "fp16")
_OF_SOME_LOSSES: dict[str, Any] = {
    "symmetric": False, "label_smoothing": 0.0, "tail": 0.0, "bias": 0.0, "k": 1, "rank_temperature": 1.0,
}  # fmt: skip

Inputs = tuple[
    tuple[Tensor, Tensor, Tensor | None],  # queries, documents, hard negatives
    tuple[Tensor | None, Tensor | None, Tensor | None],  # their masks
    tuple[Tensor | None, Tensor | None, Tensor | None],  # their offsets
]


@dataclass(frozen=True)
class Arguments:
    """What every loss takes from its arguments."""

    sides: check.Sides
    options: check.Options
    kernels: Kernels
    ring: Ring
    scale: float  # of the loss: the number of processes, or 1
    learns: tuple[bool, ...]  # whether Q, D, hard negatives, temperature and bias have gradients
    whole: bool  # all scores and winners are kept

    @property
    def keeps(self) -> bool:
        """Whether a backward may follow."""
        return torch.is_grad_enabled() and any(self.learns)


def read(name: str, inputs: Inputs, given: dict[str, Any], *, listed: bool = False) -> Arguments:
    """``given``: the options as the caller gave them. ``listed``: the backward takes listed pairs of a batch
    that is not kept as a whole."""
    given = _OF_SOME_LOSSES | given
    group, alone = given["group"], given["group"] is None
    try:
        sides = check.sides(*inputs)
        options = check.options(sides, given)
        single = check.is_single(sides.q) and check.is_single(sides.d)
        needs = _learns(sides, options)
        if name == "recall_loss" and needs[3]:
            raise ValueError("temperature must not require a gradient: recall_loss has none for it")
        keeps = torch.is_grad_enabled() and any(needs)
        kernels = choose(sides.q, single, False, options.precision)
        is_whole = alone and whole.fits(kernels, sides.q, sides.d, keeps)
        listed = (listed or options.tail > 0) and not is_whole
        sides, normalize = check.prepared(sides, options, alone, listed)
    except (TypeError, ValueError):
        if not alone:
            _refuse(name, group, inputs[0])
        raise
    if alone:
        ring = Ring.alone(len(sides.q), len(sides.d), sides.d.values.requires_grad)
    else:
        ring = _join(name, sides, options, given)
        # Documents of other processes may have other lengths.
        single = single and all(shape[1] == 1 for shape in ring.shapes)
    kernels = choose(sides.q, single and not sides.q.packed, normalize, options.precision)
    scale = float(ring.world) if given["scale_by_world"] else 1.0
    return Arguments(sides, options, kernels, ring, scale, needs, is_whole)


def _learns(sides: check.Sides, options: check.Options) -> tuple[bool, ...]:
    h = None if sides.h is None else sides.h.values
    inputs = (sides.q.values, sides.d.values, h, options.temperature, options.bias)
    return tuple(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def _refuse(name: str, group: Any, tokens: tuple[Any, ...]) -> None:
    """Tells the other processes that this one refused its arguments."""
    device = next((x.device for x in tokens if isinstance(x, Tensor)), torch.device("cpu"))
    with suppress(RuntimeError):  # which says that this process refused
        join(name, group, None, {}, False, device)


def _join(name: str, sides: check.Sides, options: check.Options, given: dict[str, Any]) -> Ring:
    facts = {
        "loss (by number)": _LOSSES.index(name),
        "number of hard negatives": sides.each,
        "symmetric": options.symmetric,
        "normalize": options.normalize,
        "label_smoothing": options.smoothing,
        "tail": options.tail,
        "reduction": check.REDUCTIONS.index(options.reduction),
        "precision": _PRECISIONS.index(options.precision),
        "scale_by_world": given["scale_by_world"],
        "sum of k": sum(options.k),
        "rank_temperature": options.rank_temperature,
    }
    own = (len(sides.q), sides.d)
    return join(name, given["group"], own, facts, sides.d.values.requires_grad, sides.q.values.device)
