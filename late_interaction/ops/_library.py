"""Loads the compiled libraries: they bring the schemas of all operators, and kernels.

The namespace of the operators, ``torch.ops.<namespace>``, is an option of the build (setup.py). This module
reads it in the library's file, and is the only one of the package that knows it: the others take
:data:`operators`, or a name by :func:`qualified`.
"""

import importlib.util
import mmap
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch


def _path(name: str) -> str | None:
    """Return where the compiled library ``late_interaction/<name>.abi3.so`` lies, if it was built."""
    package = __package__.rpartition(".")[0]
    spec = importlib.util.find_spec(f"{package}.{name}")
    return spec.origin if spec else None


def _namespace_of(path: str) -> str | None:
    """Read the namespace that a library was built for (csrc/common/registration.h)."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = re.search(rb"late_interaction_namespace=(\w+)\0", content)
        return found[1].decode() if found else None


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
    namespace = _namespace_of(path)
    if namespace is None:
        raise ImportError(f"{path} is not of this release of late_interaction: build it again.")
    if hasattr(getattr(torch.ops, namespace), "maxsim"):  # PyTorch would crash
        libraries = filter(os.path.exists, torch.ops.loaded_libraries)
        loaded = [x for x in libraries if _namespace_of(x) == namespace] or ["another build of it"]
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
    if (theirs := _namespace_of(path)) != namespace:
        return f"{path} was built for torch.ops.{theirs}, and the operators are torch.ops.{namespace}"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} does not load ({error})"
    return None


_namespace = _load_cpu()
cuda_missing = _load_cuda(_namespace)
library = torch.library.Library(_namespace, "IMPL")
operators = getattr(torch.ops, _namespace)


def qualified(name: str) -> str:
    """Return the operator's name with its namespace, as ``torch.library`` takes it."""
    return f"{_namespace}::{name}"


def _refuse(reason: str) -> Callable[..., NoReturn]:
    def kernel(force: int | str | None = None) -> NoReturn:
        raise RuntimeError(f"late_interaction has no CUDA kernels here: {reason}.")

    return kernel


if cuda_missing is not None:
    for _name in ("cuda_capability", "forced_plan"):
        library.impl(_name, _refuse(cuda_missing), "CompositeExplicitAutograd")
