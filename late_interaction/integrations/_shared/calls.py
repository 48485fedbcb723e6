"""What patches count: calls that the kernels served, and those that were left to the library, with reasons.

A call that :func:`torch.compile` traces is not counted: a graph that reads a count would compile anew.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch.compiler import is_compiling

T = TypeVar("T")

LOGGER = logging.getLogger("late_interaction")


@dataclass
class Calls:
    served: int = 0
    left: Counter[str] = field(default_factory=Counter)  # by the function and the reason


_CALLS: dict[str, Calls] = {}


def calls_of(package: str) -> Calls:
    return _CALLS.setdefault(package, Calls())


def forget(package: str) -> None:
    _CALLS.pop(package, None)


def scored(package: str) -> None:
    if not is_compiling():
        calls_of(package).served += 1


def left(package: str, function: str, reason: str) -> None:
    """Count a call that is left to the library, and log the first one of its kind."""
    if is_compiling():
        return
    calls = calls_of(package).left
    kind = f"{function}: {reason}"
    calls[kind] += 1
    if calls[kind] == 1:
        LOGGER.warning("%s scores a call of %s itself: %s (logged once)", package, function, reason)


def scores_or_own(package: str, function: str, scores: T | str, own: Callable[[], T]) -> T:
    """Return the scores of a call, or what the library computes where they are the reason to leave it."""
    if isinstance(scores, str):
        left(package, function, scores)
        return own()
    scored(package)
    return scores
