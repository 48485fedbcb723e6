"""The arguments of a public loss: checked, prepared for the blocks, and agreed on with the process group."""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import has_values_on_cpu
from late_interaction._contrastive import check, whole
from late_interaction._contrastive.blocks import Kernels, choose
from late_interaction._contrastive.ring import Ring, join
from late_interaction._group import gathered
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.sequences import is_sequences
from late_interaction.tokens import Tokens, TokensLike

# What check.options asks of every loss, as losses give it that have none of these.
OF_CROSS_ENTROPY: dict[str, Any] = {
    "symmetric": False, "label_smoothing": 0.0, "tail": 0.0, "kept_bytes": None,
}  # fmt: skip

Inputs = tuple[TokensLike, TokensLike, TokensLike | None]  # queries, documents, hard negatives


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
            _refuse(name, group, inputs)
        raise
    if alone:
        ring = Ring.alone(len(sides.q), len(sides.d), sides.d.values.requires_grad)
    else:
        ring = _join(name, sides, options, given)
        options = _same_on_device(name, group, options)
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
    with suppress(RuntimeError):  # which says that this process refused
        join(name, group, None, {}, _device_of(tokens))


def _device_of(tokens: tuple[Any, ...]) -> torch.device:
    """The device of what came, of whatever kind it is."""
    for x in tokens:
        first = x[0] if is_sequences(x) and not isinstance(x, Tokens) else x
        if isinstance(first, (Tensor, Tokens)):
            return first.device
    return torch.device("cpu")


def _join(name: str, sides: check.Sides, options: check.Options, given: dict[str, Any]) -> Ring:
    """Options that are compared come as they are read, so that 1 and 1.0 are the same."""
    agreed = {
        "loss": name,
        "temperature": _shown(options.temperature, options),
        "symmetric": options.symmetric,
        "normalize": options.normalize,
        "label_smoothing": options.smoothing,
        "tail": options.tail,
        "reduction": options.reduction,
        "precision": options.precision,
        "scale_by_world": given["scale_by_world"],
    }
    if options.own is not None:
        own = options.own
        agreed |= {"bias": _shown(own.bias, options), "k": own.k, "rank_temperature": own.rank_temperature}
    return join(name, given["group"], sides, agreed, sides.q.values.device)


def _shown(number: Tensor | float, options: check.Options) -> str:
    """A temperature or bias, as processes compare it. A symmetric loss exchanges sums for its gradient."""
    if not isinstance(number, Tensor):
        return repr(number)
    value = repr(number.item()) if has_values_on_cpu(number) else f"a number on {number.device.type}"
    learned = options.symmetric and number.requires_grad and torch.is_grad_enabled()
    return f"{value}, which requires a gradient" if learned else value


def _same_on_device(name: str, group: Any, options: check.Options) -> check.Options:
    """NaN in place of a GPU's temperature and bias where processes have different ones: such a number is not
    waited for."""
    bias = None if options.own is None else options.own.bias
    numbers = {"temperature": options.temperature, "bias": bias}
    on_device = {k: x for k, x in numbers.items() if isinstance(x, Tensor) and not has_values_on_cpu(x)}
    if not on_device:
        return options
    own = torch.stack([x.detach() for x in on_device.values()])
    every = gathered(name, group, own, " and ".join(on_device))
    differ = (every != every[0]).any(0)
    found = {k: x.masked_fill(differ[i], math.nan) for i, (k, x) in enumerate(on_device.items())}
    if options.own is not None and "bias" in found:
        options = replace(options, own=replace(options.own, bias=found["bias"]))
    return replace(options, temperature=found.get("temperature", options.temperature))
