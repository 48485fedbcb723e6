"""Checks of arguments that are no tensors."""

from typing import Any

from torch import Tensor

from late_interaction._checks.messages import abbreviate

BACKWARDS = ("auto", "unified", "lowmem")
WINNERS = ("save", "recompute")
PRECISIONS = ("highest", "high", "medium")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {abbreviate(value)}")


def check_integer(name: str, value: Any, wanted: str = "an int") -> None:
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        got = repr(value) if isinstance(value, bool) else type(value).__name__
        raise TypeError(f"{name} must be {wanted}, got {got}")


def check_positive(name: str, value: Any) -> None:
    check_integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {abbreviate(value)}")


def check_backward(backward: str | None) -> str:
    """Returns the strategy: "auto" for None."""
    if backward is None:
        return "auto"
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {BACKWARDS} or None, got {abbreviate(backward)}")
    return backward


def check_winners(winners: str | None) -> None:
    if winners is not None and winners not in WINNERS:
        raise ValueError(f"winners must be one of {WINNERS} or None, got {abbreviate(winners)}")


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS} or None, got {abbreviate(precision)}")
