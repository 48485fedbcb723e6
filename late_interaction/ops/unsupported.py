"""What the operators cannot do, each said in one sentence: vmap of a forward, and CUDA without the CUDA
library; and vmap of a backward, which torch.func.jacrev needs: one call an entry of the batch."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

_library = torch.library.Library("late_interaction", "IMPL")
_ops = torch.ops.late_interaction
_OPS = (
    "maxsim",
    "maxsim_winners",
    "maxsim_quantized",
    "maxsim_dequantized",
    "maxsim_from_hidden",
    "maxsim_from_hidden_winners",
    "maxsim_residual",
    "maxsim_residual_winners",
    "plaid_approx_score",
)
_PACKED_OPS = (
    "maxsim_varlen",
    "maxsim_varlen_winners",
    "maxsim_pairs_packed",
    "maxsim_pairs_packed_winners",
    "maxsim_spans",
)
_BACKWARD_OPS = (
    "maxsim_backward",
    "maxsim_backward_recompute",
    "maxsim_from_hidden_backward",
    "maxsim_residual_backward",
    "maxsim_varlen_backward",
    "maxsim_pairs_packed_backward",
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


def _one_by_one(op: Any) -> Callable[..., Any]:
    """``op`` for each entry of the batch in turn. Its results have the batch as their first dim."""

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def entry(i: int) -> Any:
            return op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))

        results = [entry(i) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

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
    vmaps = {name: _no_vmap(name) for name in _OPS + _PACKED_OPS}
    vmaps |= {name: _one_by_one(getattr(_ops, name).default) for name in _BACKWARD_OPS}
    for name, vmap in vmaps.items():
        torch.library.register_vmap(f"late_interaction::{name}", vmap)
        if cuda_missing is not None:
            _library.impl(name, _no_cuda(cuda_missing), "CUDA")
    if cuda_missing is not None:
        for name in ("cuda_capability", "forced_plan"):
            _library.impl(name, _no_capability(cuda_missing), "CompositeExplicitAutograd")
