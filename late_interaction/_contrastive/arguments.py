"""The arguments of a public loss: checked, prepared for the blocks, and agreed on with the process group."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._contrastive import check, whole
from late_interaction._contrastive.blocks import Kernels, choose
from late_interaction._contrastive.ring import Ring, join
from late_interaction._scoring.norm_warning import look

_LOSSES = ("contrastive_loss", "pairwise_loss", "sigmoid_loss", "recall_loss")
_PRECISIONS = ("highest", "high", "medium", "fp16")

# What check.options asks of every loss, as losses give it that have none of these.
OF_CROSS_ENTROPY: dict[str, Any] = {
    "symmetric": False, "label_smoothing": 0.0, "tail": 0.0, "kept_bytes": None,
}  # fmt: skip

Inputs = tuple[
    tuple[Tensor, Tensor, Tensor | None],  # queries, documents, hard negatives
    tuple[Tensor | None, Tensor | None, Tensor | None],  # their masks
    tuple[Tensor | None, Tensor | None, Tensor | None],  # their offsets
]


@dataclass
class Arguments:
    """What every loss takes from its arguments."""

    sides: check.Sides
    options: check.Options
    kernels: Kernels
    ring: Ring
    scale: float  # of the loss: the number of processes, or 1
    keeps: bool  # a backward may follow
    learns_numbers: bool  # the temperature or the bias has a gradient
    whole: bool  # all scores and winners are kept


def read(name: str, inputs: Inputs, given: dict[str, Any], *, listed: bool = False) -> Arguments:
    """``given``: the options as the caller gave them. ``listed``: the backward takes listed pairs of a batch
    that is not kept as a whole."""
    group = given["group"]
    alone = group is None
    try:
        sides = check.sides(*inputs)
        options = check.options(sides, given)
        single = check.is_single(sides.q) and check.is_single(sides.d)
        numbers, keeps = _learns(sides, options)
        kernels = choose(sides.q, single, False, options.precision)
        listed = listed or options.tail > 0
        is_whole = alone and whole.fits(kernels, sides.q, sides.d, keeps, options.kept_bytes, listed)
        sides, normalize = check.prepared(sides, options, alone, listed and not is_whole)
    except (TypeError, ValueError):
        if not alone:
            _refuse(name, group, inputs[0])
        raise
    if alone:
        ring = Ring.alone(len(sides.q), len(sides.d), sides.d.values.requires_grad)
    else:
        ring = _join(name, sides, options, given)
        single = ring.single  # tokens of other processes may have other lengths, and masks
        if listed and ring.any_mask:
            sides = check.packed(sides)
        if sides.d.packed:
            ring = ring.with_packed(sides.d)
    if normalize or not is_whole:
        kernels = choose(sides.q, single, normalize, options.precision)
    if not options.normalize:
        look(name, sides.q.values, sides.q.mask)
    scale = float(ring.world) if given["scale_by_world"] else 1.0
    return Arguments(sides, options, kernels, ring, scale, keeps, numbers and keeps, is_whole)


def _learns(sides: check.Sides, options: check.Options) -> tuple[bool, bool]:
    """Whether temperature or bias have gradients, and whether anything has while gradients are enabled."""
    numbers = isinstance(options.temperature, Tensor) and options.temperature.requires_grad
    if options.own is not None and isinstance(options.own.bias, Tensor):
        numbers = numbers or options.own.bias.requires_grad
    tokens = sides.q.values.requires_grad or sides.d.values.requires_grad
    if sides.h is not None:
        tokens = tokens or sides.h.values.requires_grad
    return numbers, (numbers or tokens) and torch.is_grad_enabled()


def _refuse(name: str, group: Any, tokens: tuple[Any, ...]) -> None:
    """Tells the other processes that this one refused its arguments."""
    device = next((x.device for x in tokens if isinstance(x, Tensor)), torch.device("cpu"))
    with suppress(RuntimeError):  # which says that this process refused
        join(name, group, None, {}, device)


def _join(name: str, sides: check.Sides, options: check.Options, given: dict[str, Any]) -> Ring:
    facts: dict[str, float] = {
        "loss (by number)": _LOSSES.index(name),
        "number of hard negatives": sides.each if len(sides.q) else math.nan,
        "symmetric": options.symmetric,
        "normalize": options.normalize,
        "label_smoothing": options.smoothing,
        "tail": options.tail,
        "reduction": check.REDUCTIONS.index(options.reduction),
        "precision": _PRECISIONS.index(options.precision),
        "scale_by_world": given["scale_by_world"],
    }
    if options.own is not None:
        facts |= {"sum of k": sum(options.own.k), "rank_temperature": options.own.rank_temperature}
    return join(name, given["group"], sides, facts, sides.q.values.device)
