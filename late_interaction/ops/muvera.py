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

CPUs and GPUs have kernels that add every sum in the same order: products with hyperplanes and projections by
the dims, partitions by their tokens, buckets by the dims before them. So every run has the same bits, and a
GPU those of a CPU with fused multiply-adds: both find the same partitions. On a GPU nothing waits for the
device. Beside the result it takes 2 bytes for each token and repetition, and with ``buckets`` up to 256 MiB
or one sequence before the sketch. It raises no error where ``cu_seqlens`` or ``buckets`` are wrong, as a CPU
does: offsets are clamped to the tokens, and a bucket outside of ``[0, d_final)`` takes part in nothing.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction.ops._library import operators, refuse_without_cuda
from late_interaction.ops._registration import count_sequences, register_helper

_op = operators.muvera_encode.default


def _fake(
    tokens: Tensor, cu_seqlens: Tensor | None, projection: Tensor | None, buckets: Tensor | None,
    k_sim: int, repetitions: int, d_proj: int, d_final: int, **_: Any,
) -> Tensor:  # fmt: skip
    count = tokens.shape[0] if cu_seqlens is None else count_sequences("cu_seqlens", cu_seqlens)
    dims = repetitions * (1 << k_sim) * (tokens.shape[-1] if projection is None else d_proj)
    return tokens.new_empty((count, dims if buckets is None else d_final), dtype=torch.float32)


register_helper(_op, _fake)
refuse_without_cuda(_op)
