"""The check of the temperature of a smooth maximum."""

import sys
from typing import Any

from late_interaction._checks.messages import abbreviate

_LEAST = 1e-30  # float32 holds its inverse


def is_tau(value: Any) -> bool:
    """Whether this is a temperature that smooth_maxsim takes."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and _LEAST <= value <= sys.float_info.max


def check_tau(tau: Any) -> float:
    """Returns the number."""
    if isinstance(tau, bool) or not isinstance(tau, (int, float)):
        raise TypeError(f"tau must be a float, got {type(tau).__name__}")
    if not is_tau(tau):
        raise ValueError(
            f"tau must be a finite number above 0 (and at least {_LEAST}), got {abbreviate(tau)}"
        )
    return float(tau)
