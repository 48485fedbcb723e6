"""``late_interaction_kernels.reference``: the definitions, in plain PyTorch."""

from torch import Tensor

from late_interaction import reference
from late_interaction.reference import (
    NEG_INF,
    maxsim_reference,
    plaid_approx_score_reference,
    unpack_residuals_reference,
)

__all__ = [
    "NEG_INF",
    "maxsim_from_hidden_reference",
    "maxsim_padded_reference",
    "maxsim_reference",
    "maxsim_reference_scatter",
    "maxsim_reference_varlen",
    "maxsim_residual_reference",
    "plaid_approx_score_reference",
    "unpack_residuals_reference",
]


def maxsim_residual_reference(
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
    """Call :func:`late_interaction.reference.maxsim_residual_reference`."""
    codec = (centroids, bucket_weights, nbits)
    return reference.maxsim_residual_reference(Q, codes, residuals, doc_lengths, *codec, normalize=normalize)


def maxsim_from_hidden_reference(
    Q: Tensor,
    H_d: Tensor,
    W: Tensor,
    b: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = True,
) -> Tensor:
    """Call :func:`late_interaction.reference.maxsim_from_hidden_reference`."""
    return reference.maxsim_from_hidden_reference(Q, H_d, W, b, d_mask, normalize=normalize)


def maxsim_reference_varlen(Q: Tensor, D: Tensor, cu_seqlens_q: Tensor, cu_seqlens_d: Tensor) -> Tensor:
    """Call :func:`late_interaction.reference.maxsim_reference_varlen`."""
    return reference.maxsim_reference_varlen(Q, D, cu_seqlens_q, cu_seqlens_d)


def maxsim_reference_scatter(
    Q_packed: Tensor,
    D_packed: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_d: Tensor,
    pair_q_idx: Tensor,
    pair_d_idx: Tensor,
) -> Tensor:
    """Call :func:`late_interaction.reference.maxsim_reference_scatter`."""
    packed = (Q_packed, D_packed, cu_seqlens_q, cu_seqlens_d)
    return reference.maxsim_reference_scatter(*packed, pair_q_idx, pair_d_idx)


def maxsim_padded_reference(
    queries: Tensor, documents: Tensor, query_lengths: Tensor, doc_lengths: Tensor
) -> Tensor:
    """Call :func:`late_interaction.reference.maxsim_padded_reference`."""
    return reference.maxsim_padded_reference(queries, documents, query_lengths, doc_lengths)
