"""What the patches of other libraries share: which calls they take over, the versions of what they patch, and
their errors."""

import functools
import importlib.metadata
import os
import re
import textwrap

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.tensors import FLOATS, is_autocasting

__all__ = ["brief_cause", "nothing_to_patch", "package_at_least", "served"]


def served(Q: Tensor, D: Tensor) -> bool:
    """Whether the kernels take these embeddings, and ``LATE_INTERACTION_DISABLE=1`` does not forbid it."""
    return (
        os.environ.get("LATE_INTERACTION_DISABLE") != "1"
        and Q.device == D.device
        and _has_kernels(Q.device)
        and Q.dtype in FLOATS
        and D.dtype in FLOATS
        and (Q.dtype == D.dtype or is_autocasting(Q))
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
    installed = _installed(name)
    return installed is not None and _release(installed) >= _release(minimum)


def nothing_to_patch(patch: str, package: str, releases: str, cause: Exception | None) -> ImportError:
    """The error of a patch that patched nothing: names the installed release and why it cannot be patched."""
    needed, installed = f"{patch}() needs {package} {releases}", _installed(package)
    absent = isinstance(cause, ModuleNotFoundError) and cause.name == package.replace("-", "_")
    if installed is None and (absent or cause is None):
        return ImportError(f"{needed}, and found none")
    found = f"found {package} {installed or 'of an unknown release'}"
    if cause is None:
        return ImportError(f"{needed}, and {found}, which has none of what is patched")
    return ImportError(f"{needed}, and {found}, which does not import: {brief_cause(cause)}")


def brief_cause(cause: Exception) -> str:
    """In one line: some exceptions of an import carry a page."""
    return textwrap.shorten(f"{type(cause).__name__}: {cause}", 300, placeholder=" ...")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    number = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, number[0].split("."))) if number else ()
