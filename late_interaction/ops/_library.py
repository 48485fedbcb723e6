"""Loads the compiled libraries: they bring the schemas of all operators, and kernels."""

import importlib.util
from collections.abc import Callable
from typing import NoReturn

import torch


def _path(name: str) -> str | None:
    """Where the compiled library ``late_interaction/<name>.abi3.so`` lies, if it was built."""
    spec = importlib.util.find_spec(f"late_interaction.{name}")
    return spec.origin if spec else None


def _load_cpu() -> None:
    path = _path("_C")
    if path is None:
        raise ImportError(
            "late_interaction has no compiled library _C: build it with `pip install .`, or in a source tree"
            " with `python setup.py build_ext --inplace`."
        )
    torch.ops.load_library(path)


def _load_cuda() -> str | None:
    """Loads the CUDA kernels where PyTorch is a CUDA build. Returns why they are missing, or None."""
    if not torch.version.cuda:
        return "this PyTorch is not a CUDA build"
    path = _path("_cuda")
    if path is None:
        return (
            "late_interaction was built without them; build it again with nvcc and"
            " LATE_INTERACTION_WITH_CUDA=1, or install a CUDA wheel"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} does not load ({error})"
    return None


_load_cpu()
cuda_missing = _load_cuda()
library = torch.library.Library("late_interaction", "IMPL")
operators = torch.ops.late_interaction


def _refuse(reason: str) -> Callable[..., NoReturn]:
    def kernel(force: int | str | None = None) -> NoReturn:
        raise RuntimeError(f"late_interaction has no CUDA kernels here: {reason}.")

    return kernel


if cuda_missing is not None:
    for _name in ("cuda_capability", "forced_plan"):
        library.impl(_name, _refuse(cuda_missing), "CompositeExplicitAutograd")
