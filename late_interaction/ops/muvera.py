"""The operator that makes MUVERA's fixed dimensional encodings.

``muvera_encode(tokens, mask, cu_seqlens, hyperplanes, projection, buckets, signs, k_sim, repetitions, d_proj,
d_final, average, fill_empty, scale) -> encodings``
    One float32 row for each sequence of ``tokens``: ``[N, L, d]`` with a bool ``mask`` ``[N, L]`` or None, or
    packed, ``[tokens, d]`` with int32 ``cu_seqlens`` ``[N + 1]``. In each of ``repetitions`` a token belongs
    to the partition whose number has bit ``b`` set where ``<token, hyperplane b> > 0``, of ``k_sim``
    hyperplanes. Tokens of a partition are summed, with ``average`` divided by their number; with ``average``
    and ``fill_empty`` an empty partition takes the token nearest in Hamming distance, the lowest of several.
    ``projection`` maps each partition's ``d`` dims to ``d_proj``; ``buckets`` and ``signs`` are a count
    sketch of all dims, ``[repetitions, 2**k_sim, d or d_proj]``, to ``d_final``. ``scale`` multiplies the
    result. ``hyperplanes`` are ``[d, columns]``, ``projection`` ``[repetitions, d, columns]``: columns are
    the least multiple of 16 that holds ``repetitions * k_sim``, and ``d_proj``; the others are zeros.

A sequence with a token that counts and is not finite becomes NaN; one without tokens becomes zeros.
Arithmetic is in float32, to which float64 tokens are rounded first.

A CPU has kernels of its own. On other devices the function of this module computes the same by operations of
PyTorch: products with hyperplanes in float64, sums in the order of the tokens, so that every run has the same
bits. It does not wait for the device. Sums of products round differently there: a token whose product with a
hyperplane is 0 but for rounding may lie on the other side of it.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import FLOATS
from late_interaction._precision import without_autocast
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import register_helper

_op = operators.muvera_encode.default

_FURTHER = 1 << 32  # a step of Hamming distance, above every index of a token
_NONE = 1 << 62


def _sequence_of_tokens(tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, int]:
    """The sequence of each token, or their number where it does not count."""
    if cu_seqlens is not None:
        count = len(cu_seqlens) - 1
        places = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        found = torch.searchsorted(cu_seqlens, places, right=True) - 1
        return torch.where(found < 0, count, found), count
    count, length, _ = tokens.shape
    owner = torch.arange(count, device=tokens.device).unsqueeze(1).expand(-1, length)
    return (owner if mask is None else torch.where(mask, owner, count)).reshape(-1), count


def _partitions(tokens: Tensor, hyperplanes: Tensor, k_sim: int, repetitions: int) -> Tensor:
    """int64 ``[tokens, repetitions]``."""
    columns = hyperplanes[:, : repetitions * k_sim].double()
    signs = (tokens.double() @ columns > 0).view(len(tokens), repetitions, k_sim)
    powers = 1 << torch.arange(k_sim, device=tokens.device)
    numbers: Tensor = (signs * powers).sum(-1)
    return numbers


def _nearest(first: Tensor, sizes: Tensor, k_sim: int) -> Tensor:
    """The token that is nearest to each partition ``[N, partitions]``, from the first ones of those that have
    tokens: for each bit, partitions that differ in it exchange what they have found, one step further
    away."""
    keys = torch.where(sizes > 0, first, _NONE)
    for bit in range(k_sim):
        pairs = keys.view(len(keys), -1, 2, 1 << bit)
        a, b = pairs.unbind(2)
        keys = torch.stack((a.minimum(b + _FURTHER), b.minimum(a + _FURTHER)), 2).view(keys.shape)
    return keys & (_FURTHER - 1)


def _blocks(tokens: Tensor, owner: Tensor, rows: Tensor, count: int, k_sim: int, how: Any) -> Tensor:
    """``[count, partitions, d]`` of one repetition. rows: the partition of each token."""
    average, fill_empty, scale = how
    parts = 1 << k_sim
    bags = owner * parts + torch.where(owner < count, rows, 0)
    sizes = torch.zeros(count * parts + 1, dtype=torch.int64, device=tokens.device)
    sizes.scatter_add_(0, bags, torch.ones_like(bags))
    order = bags.argsort(stable=True)
    sums = torch.nn.functional.embedding_bag(order, tokens, sizes.cumsum(0) - sizes, mode="sum")[:-1]
    factors = scale / sizes[:-1].clamp_min(1).float() if average else torch.full_like(sums[:, 0], scale)
    sums = (sums * factors.unsqueeze(-1)).view(count, parts, -1)
    if not (average and fill_empty):
        return sums
    first = torch.full_like(sizes, _NONE).scatter_reduce_(
        0, bags, torch.arange(len(tokens), device=tokens.device), "amin"
    )
    own_sizes = sizes[:-1].view(count, parts)
    nearest = _nearest(first[:-1].view(count, parts), own_sizes, k_sim)
    empty = (own_sizes == 0) & (own_sizes.sum(1, keepdim=True) > 0)
    filled = tokens[torch.where(empty, nearest, 0)] * scale
    return torch.where(empty.unsqueeze(-1), filled, sums)


def _muvera_encode(
    tokens: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    hyperplanes: Tensor,
    projection: Tensor | None,
    buckets: Tensor | None,
    signs: Tensor | None,
    k_sim: int,
    repetitions: int,
    d_proj: int,
    d_final: int,
    average: bool,
    fill_empty: bool,
    scale: float,
) -> Tensor:
    _check(tokens, cu_seqlens)
    owner, count = _sequence_of_tokens(tokens, mask, cu_seqlens)
    x = tokens.detach().reshape(-1, tokens.shape[-1]).float()
    d_block = tokens.shape[-1] if projection is None else d_proj
    size = (1 << k_sim) * d_block
    encodings = x.new_zeros(count, d_final if buckets is not None else repetitions * size)
    if not len(x) or not count:
        return encodings
    with torch.no_grad(), without_autocast(tokens.device.type):
        bad = torch.zeros(count + 1, dtype=torch.int64, device=x.device)
        bad.scatter_reduce_(0, owner, (~x.isfinite().all(-1)).long(), "amax")
        rows = _partitions(x, hyperplanes, k_sim, repetitions)
        for r in range(repetitions):
            block = _blocks(x, owner, rows[:, r], count, k_sim, (average, fill_empty, scale))
            if projection is not None:
                block = (block.double() @ projection[r, :, :d_proj].double()).float()
            at = slice(r * size, (r + 1) * size)
            if buckets is None or signs is None:
                encodings[:, at] = block.reshape(count, size)
            else:
                encodings += _sketch(block.reshape(count, size) * signs[at], buckets[at], d_final)
        return encodings.masked_fill_(bad[:-1, None] > 0, torch.nan)


def _sketch(x: Tensor, buckets: Tensor, d_final: int) -> Tensor:
    """Sums of the columns of x that have the same bucket, in their order."""
    sizes = torch.zeros(d_final, dtype=torch.int64, device=x.device)
    sizes.scatter_add_(0, buckets.long(), torch.ones_like(buckets, dtype=torch.int64))
    order = buckets.argsort(stable=True)
    sums: Tensor = torch.nn.functional.embedding_bag(
        order, x.t().contiguous(), sizes.cumsum(0) - sizes, mode="sum"
    )
    return sums.t()


def _check(tokens: Tensor, cu_seqlens: Tensor | None) -> None:
    if tokens.dim() != (3 if cu_seqlens is None else 2) or tokens.dtype not in FLOATS:
        raise RuntimeError(
            "late_interaction: tokens must be floating point [N, L, d], or [tokens, d] with cu_seqlens, got"
            f" {tokens.dtype} of rank {tokens.dim()}"
        )


def _fake(
    tokens: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    hyperplanes: Tensor,
    projection: Tensor | None,
    buckets: Tensor | None,
    signs: Tensor | None,
    k_sim: int,
    repetitions: int,
    d_proj: int,
    d_final: int,
    *_: Any,
) -> Tensor:
    count = tokens.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dims = repetitions * (1 << k_sim) * (tokens.shape[-1] if projection is None else d_proj)
    return tokens.new_empty((count, dims if buckets is None else d_final), dtype=torch.float32)


def register() -> None:
    register_helper(_op, _fake)
    library.impl(_op, _muvera_encode, "CompositeExplicitAutograd")
