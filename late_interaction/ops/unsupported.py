"""What the operators cannot do, each said in one sentence: vmap, and CUDA without the CUDA library."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

_library = torch.library.Library("late_interaction", "IMPL")
_OPS = (
    "maxsim",
    "maxsim_winners",
    "maxsim_backward",
    "maxsim_backward_recompute",
    "maxsim_quantized",
    "maxsim_dequantized",
    "maxsim_from_hidden",
    "maxsim_from_hidden_winners",
    "maxsim_from_hidden_backward",
    "maxsim_residual",
    "maxsim_residual_winners",
    "maxsim_residual_backward",
    "plaid_approx_score",
)
_PACKED_OPS = (
    "maxsim_varlen",
    "maxsim_varlen_winners",
    "maxsim_varlen_backward",
    "maxsim_pairs_packed",
    "maxsim_pairs_packed_winners",
    "maxsim_pairs_packed_backward",
    "maxsim_spans",
)


def _no_vmap(name: str) -> Callable[..., NoReturn]:
    def vmap(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> NoReturn:
        how = (
            "pack all sequences"
            if name in _PACKED_OPS
            else "pass Q as [Nq, Lq, d]"
            " and D as [Nd, Ld, d], or [Nq, K, Ld, d] for documents of each query's own"
        )
        raise RuntimeError(f"late_interaction::{name} does not support vmap: it is batched already, so {how}")

    return vmap


def _no_cuda(reason: str) -> Callable[..., NoReturn]:
    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"late_interaction has no CUDA kernels for these CUDA tensors: {reason}.")

    return kernel


def _no_capability(reason: str) -> Callable[..., NoReturn]:
    def kernel(force: int | str | None = None) -> NoReturn:
        raise RuntimeError(f"late_interaction has no CUDA kernels here: {reason}.")

    return kernel


def register(cuda_missing: str | None) -> None:
    for name in _OPS + _PACKED_OPS:
        torch.library.register_vmap(f"late_interaction::{name}", _no_vmap(name))
        if cuda_missing is not None:
            _library.impl(name, _no_cuda(cuda_missing), "CUDA")
    if cuda_missing is not None:
        for name in ("cuda_capability", "forced_plan"):
            _library.impl(name, _no_capability(cuda_missing), "CompositeExplicitAutograd")
