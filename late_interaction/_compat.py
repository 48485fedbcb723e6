"""What the patches of other libraries share: which calls they take over, and which version they meet."""

import functools
import importlib.metadata
import os
import re

import torch
from torch import Tensor

from late_interaction import _checks, ops

__all__ = ["package_at_least", "served"]


def served(Q: Tensor, D: Tensor) -> bool:
    """Whether the kernels take these embeddings, and ``LATE_INTERACTION_DISABLE=1`` does not forbid it."""
    return (
        os.environ.get("LATE_INTERACTION_DISABLE") != "1"
        and Q.device == D.device
        and _has_kernels(Q.device)
        and Q.dtype in _checks.FLOATS
        and D.dtype in _checks.FLOATS
        and (Q.dtype == D.dtype or _checks.autocasting(Q))
        and Q.shape[-1:] == D.shape[-1:]
        and Q.numel() > 0
        and D.numel() > 0
    )


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "cpu"
    return ops.cuda_missing is None and torch.cuda.get_device_capability(device) >= (8, 0)


def package_at_least(name: str, minimum: str) -> bool:
    """Whether the installed release of a package is ``minimum`` or later; one not installed is not."""
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _release(installed) >= _release(minimum)


def _release(version: str) -> tuple[int, ...]:
    number = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, number[0].split("."))) if number else ()
