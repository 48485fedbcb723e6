"""Checks of pool_tokens."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag, check_integer, check_positive, is_one_of
from late_interaction._checks.packed import check_offsets, check_sequences
from late_interaction._checks.tensors import check_mask, check_not_meta, check_rising, check_rows

Method = Literal["ward", "kmeans"]
METHODS: tuple[Method, ...] = get_args(Method)


def check_pool_tokens(D: Any, d_mask: Any, cu_seqlens: Any) -> tuple[Tensor | None, Tensor | None]:
    """Documents as a list, packed, padded or as one tensor. A bool mask and int32 offsets come back."""
    if isinstance(D, (list, tuple)):
        check_sequences("D", D)
        check_rows("D[0]", D[0])
    else:
        check_rows("D", D)
        if D.dim() not in (2, 3):
            raise ValueError(f"D must be [tokens, d] or [Nd, Ld, d], got {shape_of(D)}")
    rank = None if isinstance(D, (list, tuple)) else D.dim()
    if d_mask is not None and rank != 3:
        raise ValueError("d_mask is for D [Nd, Ld, d], got one with D " + _kind(D))
    if cu_seqlens is not None and rank != 2:
        raise ValueError("cu_seqlens is for D [tokens, d], got one with D " + _kind(D))
    if cu_seqlens is not None:
        cu_seqlens = check_offsets("cu_seqlens", cu_seqlens, "D", D)
        check_rising("cu_seqlens", cu_seqlens, len(D))  # pooling waits for a GPU anyway
    return (None if rank != 3 else check_mask("d_mask", d_mask, "D", D)), cu_seqlens


def _kind(D: Any) -> str:
    return shape_of(D) if isinstance(D, Tensor) else "a list"


def check_pooling(
    pool_factor: Any, method: Any, protected_tokens: Any, normalize: Any, iterations: Any
) -> None:
    number = isinstance(pool_factor, (int, float)) and not isinstance(pool_factor, bool)
    if not number:
        raise TypeError(f"pool_factor must be a number, got {type(pool_factor).__name__}")
    if not 1 <= pool_factor < math.inf:
        raise ValueError(f"pool_factor must be at least 1 and finite, got {pool_factor}")
    if not is_one_of(method, METHODS):
        raise ValueError(f"method must be one of {METHODS}, got {abbreviate(method)}")
    check_integer("protected_tokens", protected_tokens)
    if protected_tokens < 0:
        raise ValueError(f"protected_tokens must not be negative, got {abbreviate(protected_tokens)}")
    check_flag("normalize", normalize)
    check_positive("iterations", iterations)


def check_finite(tokens: Tensor) -> None:
    """Clusters of tokens with NaN or infinity have no meaning. Waits for the device."""
    check_not_meta("D", tokens)
    finite = torch.isfinite(tokens)
    if not bool(finite.all()):
        bad = int((~finite.all(-1)).sum())
        raise ValueError(f"D must be finite, got {bad} of {len(tokens)} tokens with NaN or infinity")
