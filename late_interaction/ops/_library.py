"""Loads the compiled libraries: they bring the schemas of all operators, and kernels.

The namespace of the operators, ``torch.ops.<namespace>``, is an option of the build (setup.py). This module
reads it in the library's file, and is the only one of the package that knows it: the others take
:data:`operators`, or a name by :func:`qualified`.
"""

import importlib.util
import mmap
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from late_interaction._torch import when_cuda_starts
from late_interaction.ops._gpu_fit import Build, driver_cuda, why_not_with_driver, why_on_no_gpu


def _path(name: str) -> str | None:
    """Return where the compiled library ``late_interaction/<name>.abi3.so`` lies, if it was built."""
    package = __package__.rpartition(".")[0]
    spec = importlib.util.find_spec(f"{package}.{name}")
    return spec.origin if spec else None


def _embedded(path: str, name: str) -> str | None:
    """Read a text that a library was built with (csrc/common/registration.h), without loading it."""
    key = f"late_interaction_{name}=".encode()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(key)
        return content[start + len(key) : content.find(b"\0", start)].decode() if start >= 0 else None


def _build_of(path: str) -> Build:
    """Read what a CUDA library was built with."""
    archs = _embedded(path, "cuda_archs") or ""
    return Build(int(_embedded(path, "cuda_version") or 0), tuple(filter(None, archs.split("_"))))


def _ways_to_one() -> str:
    """Say how to have a compiled library where this folder holds none.

    Python imports what is first on its path, which is a checkout where it was started in one, though a built
    copy be installed.
    """
    package = __package__.partition(".")[0]
    here = Path(__file__).resolve().parents[1]
    in_place = "build in place with `pip install --no-build-isolation -e .` (or `make build`)."
    for entry in sys.path:
        there = (Path(entry) / package).resolve()
        if there != here and any(there.glob("_C.*.so")):
            hidden = f"the source folder {here} hides the copy that is installed in {there}"
            return f"{hidden}. Start Python in another folder, or {in_place}"
    return f"build it with `pip install .` and start Python in another folder, or {in_place}"


def _load_cpu() -> str:
    """Load the operators. Returns their namespace."""
    path = _path("_C")
    if path is None:
        raise ImportError(f"late_interaction has no compiled library _C: {_ways_to_one()}")
    namespace = _embedded(path, "namespace")
    if namespace is None:
        raise ImportError(f"{path} is not of this release of late_interaction: build it again.")
    if hasattr(getattr(torch.ops, namespace), "maxsim"):  # PyTorch would crash
        libraries = filter(os.path.exists, torch.ops.loaded_libraries)
        loaded = [x for x in libraries if _embedded(x, "namespace") == namespace] or ["another build of it"]
        if os.path.realpath(path) in loaded:
            way = "Import late_interaction once, under one name, and do not reload it."
        else:
            way = (
                f"Import it or {path}; or build one with another LATE_INTERACTION_NAMESPACE, and both can be."
            )
        raise ImportError(
            f"torch.ops.{namespace} exists already: this process has loaded {' and '.join(loaded)}. {way}"
        )
    torch.ops.load_library(path)
    return namespace


def _load_cuda(namespace: str) -> str | None:
    """Load the CUDA kernels where PyTorch is a CUDA build. Returns why they are missing, or None."""
    if not torch.version.cuda:
        return "this PyTorch is not a CUDA build"
    path = _path("_cuda")
    if path is None:
        return (
            "late_interaction was built without them; build it again with nvcc and"
            " LATE_INTERACTION_WITH_CUDA=1, or install a CUDA wheel"
        )
    if (theirs := _embedded(path, "namespace")) != namespace:
        return f"{path} was built for torch.ops.{theirs}, and the operators are torch.ops.{namespace}"
    if too_new := why_not_with_driver(_build_of(path), driver_cuda()):
        return too_new
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} does not load ({error})"
    return None


_namespace = _load_cpu()
cuda_missing = _load_cuda(_namespace)
_cuda = _path("_cuda")
cuda_build = None if _cuda is None else _build_of(_cuda)
library = torch.library.Library(_namespace, "IMPL")
operators = getattr(torch.ops, _namespace)


def qualified(name: str) -> str:
    return f"{_namespace}::{name}"


def cuda_capability(force: int | None = None) -> int:
    """Return the compute capability that calls on the current GPU are planned for, as 10 * major + minor.

    Args:
        force: plan all calls of this process as for a GPU of this capability, with its kernels and its shared
            memory; 0 plans for the GPU that is here again. None changes nothing.

    Raises:
        ValueError: no GPU of that capability is known, or this one lacks its instructions.
        RuntimeError: there is no GPU, or no CUDA library.
    """
    try:
        capability: int = operators.cuda_capability.default(force)
    except RuntimeError as error:
        if "cuda_capability takes" in str(error):
            raise ValueError(str(error)) from None
        raise
    return capability


def _refuse(op: Any, reason: str, where: str = "for these CUDA tensors", key: str = "CUDA") -> None:
    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"late_interaction has no CUDA kernels {where}: {reason}.")

    library.impl(op, kernel, key)


if cuda_missing is not None:
    for _name in ("cuda_capability", "forced_plan"):
        _refuse(_name, cuda_missing, "here", "CompositeExplicitAutograd")

_of_cuda: list[Any] = []


def refuse_without_cuda(op: Any) -> None:
    """Have the operator refuse CUDA tensors where the CUDA library is missing, or no GPU can run it."""
    _of_cuda.append(op)
    if cuda_missing is not None:
        _refuse(op, cuda_missing)


def watch_for_gpus() -> None:
    """Have all operators refuse CUDA tensors once CUDA starts, if no GPU that is here can run the library.

    A call pays nothing for it. Where some GPUs can, CUDA's own error speaks for the others.
    """
    if cuda_missing is None and cuda_build is not None:
        when_cuda_starts(partial(_refuse_on_these_gpus, cuda_build))


def _refuse_on_these_gpus(build: Build) -> None:
    reason = why_on_no_gpu(build)
    if reason is not None:
        with warnings.catch_warnings():  # PyTorch warns of a kernel that takes another's place
            warnings.simplefilter("ignore")
            for op in _of_cuda:
                _refuse(op, reason)
