"""The strings that options take, and checks of arguments that are no tensors."""

import math
import sys
from collections.abc import Collection
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate

Backward = Literal["auto", "unified", "lowmem"]
MultiPositive = Literal["mean", "softmax"]
Precision = Literal["highest", "high", "medium"]
Reduction = Literal["mean", "sum", "none"]
Rule = Literal["paper", "pylate"]  # of xtr_scores
Winners = Literal["save", "recompute"]
BACKWARDS: tuple[Backward, ...] = get_args(Backward)
MULTI_POSITIVES: tuple[MultiPositive, ...] = get_args(MultiPositive)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
RULES: tuple[Rule, ...] = get_args(Rule)
WINNERS: tuple[Winners, ...] = get_args(Winners)


OPERATOR_PRECISIONS = (*PRECISIONS, "fp16")  # the last under autocast


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {abbreviate(value)}")


def is_integer(value: Any) -> bool:
    """Tell numbers that are indices, or symbols for one, from bools and from arrays, which have a length."""
    if isinstance(value, (bool, Tensor)):
        return False
    if isinstance(value, (int, torch.SymInt)):  # Dynamo breaks a graph at hasattr of a symbol
        return True
    return hasattr(value, "__index__") and not hasattr(value, "__len__")


def check_integer(name: str, value: Any, wanted: str = "an int") -> None:
    if not is_integer(value):
        got = repr(value) if isinstance(value, bool) else type(value).__name__
        raise TypeError(f"{name} must be {wanted}, got {got}")


def check_positive(name: str, value: Any) -> None:
    check_integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {abbreviate(value)}")


def check_seed(seed: Any) -> int:
    check_integer("seed", seed)
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed must lie in [-2**63, 2**64), got {abbreviate(seed)}")
    return int(seed)


def is_one_of(value: Any, choices: Collection[str]) -> bool:
    """Tell whether value is one of these strings: compared with an array it is an array."""
    return isinstance(value, str) and value in choices


def check_one_of(name: str, value: Any, choices: Collection[str], optional: bool = False) -> None:
    """Require one of these strings; ``optional``: or None."""
    if not (is_one_of(value, choices) or (optional and value is None)):
        raise ValueError(f"{name} must be one of {choices}{' or None' * optional}, got {abbreviate(value)}")


def check_backward(backward: Backward | None) -> Backward:
    """Return the strategy: "auto" for None."""
    check_one_of("backward", backward, BACKWARDS, optional=True)
    return backward or "auto"


def check_winners(winners: str | None) -> None:
    check_one_of("winners", winners, WINNERS, optional=True)


def check_precision(precision: str | None) -> None:
    check_one_of("precision", precision, PRECISIONS, optional=True)


def as_float(name: str, value: Any) -> float:
    """Require a number of Python's own; an int beyond all floats becomes infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


_LEAST = 1e-30  # float32 holds its inverse


def is_tau(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and _LEAST <= value <= sys.float_info.max


def check_tau(tau: Any) -> float:
    found = as_float("tau", tau)
    if not is_tau(tau):
        raise ValueError(
            f"tau must be a finite number above 0 (and at least {_LEAST}), got {abbreviate(tau)}"
        )
    return found
