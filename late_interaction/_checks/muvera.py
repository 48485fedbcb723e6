"""Checks of MUVERA's encodings."""

from typing import Any

from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag, check_integer, check_positive
from late_interaction._checks.packed import check_offsets, check_sequences
from late_interaction._checks.tensors import check_mask, check_rows

MOST_BITS = 16
_MOST_DIMS = (1 << 31) - 1


def check_parameters(
    d: Any, k_sim: Any, repetitions: Any, d_proj: Any, d_final: Any, fill_empty: Any, seed: Any
) -> None:
    check_positive("d", d)
    if d > _MOST_DIMS:
        raise ValueError(f"d must be below 2**31, got {abbreviate(d)}")
    check_integer("k_sim", k_sim)
    if not 0 <= k_sim <= MOST_BITS:
        raise ValueError(f"k_sim must lie in [0, {MOST_BITS}], got {abbreviate(k_sim)}")
    check_positive("repetitions", repetitions)
    for name, value in (("d_proj", d_proj), ("d_final", d_final)):
        if value is not None:
            check_positive(name, value)
            if value > _MOST_DIMS:
                raise ValueError(f"{name} must be below 2**31, got {abbreviate(value)}")
    check_flag("fill_empty", fill_empty)
    check_integer("seed", seed)
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must lie in [0, 2**63), got {abbreviate(seed)}")
    dims = repetitions * 2**k_sim * (d if d_proj is None else d_proj)
    if dims > _MOST_DIMS:
        raise ValueError(
            f"repetitions * 2**k_sim * {'d' if d_proj is None else 'd_proj'} must be below 2**31, got {dims}"
        )


def check_tokens(
    name: str, x: Any, mask_name: str, mask: Any, cu_seqlens: Any, d: int
) -> tuple[Tensor | None, Tensor | None]:
    """Sequences as a list, packed, padded or as one tensor. A bool mask and int32 offsets come back."""
    if isinstance(x, (list, tuple)):
        check_sequences(name, x)
        first, rank = x[0], None
    else:
        check_rows(name, x)
        first, rank = x, x.dim()
        if rank not in (2, 3):
            raise ValueError(f"{name} must be [N, L, d], [L, d] or a list of [L, d], got {shape_of(x)}")
    if first.shape[-1] != d:
        raise ValueError(f"{name} must have the d of this Muvera, {d}, got {shape_of(first)}")
    got = "a list" if rank is None else f"{name} {shape_of(x)}"
    if cu_seqlens is not None:
        if rank != 2 or mask is not None:
            raise ValueError(
                f"cu_seqlens is for {name} [tokens, d] without {mask_name}, got one with"
                f" {got if rank != 2 else mask_name}"
            )
        return None, check_offsets("cu_seqlens", cu_seqlens, name, x)
    if mask is not None and rank is None:
        raise ValueError(f"{mask_name} is for {name} [N, L, d] or [L, d], got one with {got}")
    if mask is None:
        return None, None
    padded = x.unsqueeze(0) if rank == 2 else x
    return check_mask(mask_name, mask, name, padded), None
