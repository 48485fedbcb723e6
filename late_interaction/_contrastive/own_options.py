"""Options that one loss alone has, and their checks."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate

_MOST_RANK = 1 << 53  # beyond all documents; a float64 holds it


@dataclass(frozen=True)
class OwnOptions:
    """The options that one loss alone has."""

    bias: Tensor | float = 0.0  # of the sigmoid loss
    k: tuple[int, ...] = (1,)  # of the surrogate of recall
    rank_temperature: float = 1.0


def read_own_options(given: dict[str, Any], Q: Tensor) -> OwnOptions | None:
    """Those that are given, checked."""
    if "bias" in given:
        return OwnOptions(bias=bias(given["bias"], Q))
    if "k" in given:
        if isinstance(given["temperature"], Tensor) and given["temperature"].requires_grad:
            raise ValueError("temperature must not require a gradient: losses.recall has none for it")
        rank_temperature = positive("rank_temperature", given["rank_temperature"])
        return OwnOptions(k=ranks(given["k"]), rank_temperature=rank_temperature)
    return None


def bias(value: Any, Q: Tensor) -> Tensor | float:
    """A finite number, or a tensor of one element, which comes back 0-dim."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise ValueError(f"bias must be a float or one floating-point number, got {abbreviate(value)}")
        if value.device != Q.device:
            raise ValueError(f"bias must be on the device of Q, {Q.device}, got {value.device}")
        return value.reshape(()).to(torch.float64 if Q.dtype is torch.float64 else torch.float32)
    return number("bias", value)


def number(name: str, value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    try:
        found = float(value)
    except OverflowError:  # of an int
        found = math.inf
    if not -math.inf < found < math.inf:  # math.isfinite cannot be traced
        raise ValueError(f"{name} must be finite, got {abbreviate(value)}")
    return found


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    found = number(name, value)
    if found <= 0:
        raise ValueError(f"{name} must be above 0, got {abbreviate(value)}")
    return found


def ranks(k: Any) -> tuple[int, ...]:
    """Ranks of at least 1: one, or a sequence of them."""
    found = (k,) if isinstance(k, int) else k
    if not isinstance(found, (tuple, list, range)):
        raise TypeError(f"k must be an int or a sequence of ints, got {type(k).__name__}")
    if not found or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in found):
        raise ValueError(f"k must be at least 1 (and one at least), got {abbreviate(k)}")
    return tuple(min(x, _MOST_RANK) for x in found)
