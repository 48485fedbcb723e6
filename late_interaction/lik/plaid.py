"""``late_interaction_kernels.plaid``: MaxSim of residual-compressed documents, as tensors.

:class:`late_interaction.codecs.Residual` makes and scores the same.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import check_flag
from late_interaction._checks.plaid import check_compressed
from late_interaction._checks.tensors import has_values
from late_interaction._scoring import quantized
from late_interaction._scoring.norm_warning import look
from late_interaction.lik.reference import maxsim_residual_reference, plaid_approx_score_reference

__all__ = [
    "maxsim_residual",
    "maxsim_residual_reference",
    "maxsim_residual_varlen",
    "plaid_approx_score",
    "plaid_approx_score_reference",
]


def plaid_approx_score(query_centroid_scores: Tensor, codes: Tensor, doc_lengths: Tensor) -> Tensor:
    """Score documents with every token replaced by its centroid: ``[B]``, float32 (float64 for float64).

    ``score[j] = sum_s max_t query_centroid_scores[codes[j, t], s]`` over the first ``doc_lengths[j]`` tokens,
    of ``[n_centroids, Lq]`` scores of centroids and ``[B, Ld]`` integers. An empty document scores 0.
    """
    return quantized.approximate(query_centroid_scores, codes, doc_lengths)


def maxsim_residual(
    Q: Tensor,
    codes: Tensor,
    residuals: Tensor,
    doc_lengths: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    *,
    normalize: bool = True,
) -> Tensor:
    """Score documents padded at the end: ``[Nd, Ld]`` codes, ``[Nd, Ld, bytes]`` residuals, ``[Nd]`` lengths.

    Differentiable in ``Q``. A code that is out of range counts as 0. An empty document scores 0, and is an
    error where ``Q`` wants a gradient: finding out waits for the GPU.
    """
    stored = ("codes", codes), ("residuals", residuals), ("doc_lengths", doc_lengths)
    args = check_compressed(Q, *stored, centroids, bucket_weights, nbits)
    if _wants_gradient(Q) and bool((args[3] < 1).any()):
        raise _empty("doc_lengths")
    return _score("maxsim_residual", Q, args, normalize)


def maxsim_residual_varlen(
    Q: Tensor,
    codes_flat: Tensor,
    residuals_flat: Tensor,
    cu_seqlens_d: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    *,
    max_seqlen_d: int | None = None,
    normalize: bool = True,
) -> Tensor:
    """Score documents that lie end to end, with offsets ``[Nd + 1]``. ``max_seqlen_d`` cuts nothing."""
    if max_seqlen_d is not None and (isinstance(max_seqlen_d, bool) or not isinstance(max_seqlen_d, int)):
        raise TypeError(f"max_seqlen_d must be an int or None, got {type(max_seqlen_d).__name__}")
    stored = ("codes_flat", codes_flat), ("residuals_flat", residuals_flat), ("cu_seqlens_d", cu_seqlens_d)
    args = check_compressed(Q, *stored, centroids, bucket_weights, nbits)
    if _wants_gradient(Q) and bool((args[3].diff() < 1).any()):
        raise _empty("cu_seqlens_d")
    return _score("maxsim_residual_varlen", Q, args, normalize)


def _wants_gradient(Q: Tensor) -> bool:
    # A traced graph cannot look at values. There an empty document scores 0 and sends no gradient.
    return Q.requires_grad and torch.is_grad_enabled() and has_values(Q)


def _empty(name: str) -> ValueError:
    return ValueError(
        f"{name} holds a zero-length document, which has no gradient for Q: leave it out, or call under"
        " torch.no_grad(), where it scores 0"
    )


def _score(name: str, Q: Tensor, args: tuple[Any, ...], normalize: bool) -> Tensor:
    check_flag("normalize", normalize)
    scores = quantized.score(args, normalize)
    if not normalize:
        look(name, Q)
    return scores.squeeze(0) if Q.dim() == 2 else scores
