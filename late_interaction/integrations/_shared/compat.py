"""Say which calls the patches of other libraries take over, and what turns them off.

With the versions of what they patch, and their errors.
"""

import functools
import importlib.metadata
import os
import re
import textwrap

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.tensors import FLOATS, is_autocasting

DISABLE = "LATE_INTERACTION_DISABLE"
TURNED_OFF = f"{DISABLE} turns the patch off"


def disabled(package: str) -> bool:
    """Tell whether the environment turns the patch of this package off.

    ``LATE_INTERACTION_DISABLE`` is 1, which turns off all, or names it, as in ``pylate,mteb``.
    """
    said = os.environ.get(DISABLE)
    return said is not None and (said == "1" or package in _names(said))


@functools.lru_cache
def _names(said: str) -> frozenset[str]:
    return frozenset(name.strip().lower().replace("_", "-") for name in said.split(","))


def turned_off(package: str) -> str | None:
    """Return what of the environment turns off whatever is to be done to the package, if anything does."""
    return f"{DISABLE}={os.environ[DISABLE]} turns it off" if disabled(package) else None


def why_left(Q: Tensor, D: Tensor, package: str = "") -> str | None:
    """Say why a call with these embeddings is left to the library, or None if the kernels take them."""
    if disabled(package):
        return TURNED_OFF
    if Q.device != D.device:
        return "queries and documents are on different devices"
    if not has_kernels(Q.device):
        return f"no kernels for {Q.device.type} tensors"
    for x in (Q, D):
        if x.dtype not in FLOATS:
            return f"{x.dtype} embeddings"
    if Q.dtype != D.dtype and not is_autocasting(Q):
        return f"{Q.dtype} queries and {D.dtype} documents"
    if Q.shape[-1:] != D.shape[-1:]:
        return "queries and documents differ in d"
    if Q.numel() == 0 or D.numel() == 0:
        return "no embeddings"
    return None


def why_unfit(Q: Tensor, D: Tensor, package: str, document_rank: int, own_documents: bool) -> str | None:
    """Say why the kernels do not take queries and documents of so many dims, or each query's own ones."""
    if Q.dim() != 3 or D.dim() != document_rank:
        return f"queries of {Q.dim()} dims and documents of {D.dim()}"
    if own_documents and Q.shape[0] != D.shape[0]:
        return "other documents than each query's own"
    return why_left(Q, D, package)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "cpu"
    return ops.cuda_missing is None and torch.cuda.get_device_capability(device) >= (7, 5)


def package_at_least(name: str, minimum: str) -> bool:
    """Tell whether the installed release of a package is ``minimum`` or later; one not installed is not."""
    installed = installed_release(name)
    return installed is not None and _release(installed) >= _release(minimum)


def nothing_to_patch(package: str, releases: str, cause: Exception | None) -> ImportError:
    """Make the error of a patch that patched nothing: names the installed release and why."""
    needed, installed = f'patch("{package}") needs {package} {releases}', installed_release(package)
    absent = isinstance(cause, ModuleNotFoundError) and cause.name == package.replace("-", "_")
    if installed is None and (absent or cause is None):
        return ImportError(f"{needed}, and found none")
    found = f"found {package} {installed or 'of an unknown release'}"
    if cause is None:
        return ImportError(f"{needed}, and {found}, which has none of what is patched")
    return ImportError(f"{needed}, and {found}, which does not import: {brief_cause(cause)}")


def brief_cause(cause: Exception) -> str:
    """Say it in one line: some exceptions of an import carry a page."""
    return textwrap.shorten(f"{type(cause).__name__}: {cause}", 300, placeholder=" ...")


def installed_release(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    number = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, number[0].split("."))) if number else ()
