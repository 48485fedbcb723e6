"""``late_interaction_kernels.plaid``: MaxSim of residual-compressed documents."""

from torch import Tensor

from late_interaction import plaid
from late_interaction.lik.reference import maxsim_residual_reference, plaid_approx_score_reference
from late_interaction.plaid import plaid_approx_score

__all__ = [
    "maxsim_residual",
    "maxsim_residual_reference",
    "maxsim_residual_varlen",
    "plaid_approx_score",
    "plaid_approx_score_reference",
]


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
    """Call :func:`late_interaction.plaid.maxsim_residual`."""
    codec = (centroids, bucket_weights, nbits)
    return plaid.maxsim_residual(Q, codes, residuals, doc_lengths, *codec, normalize=normalize)


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
    """Call :func:`late_interaction.plaid.maxsim_residual_varlen`."""
    return plaid.maxsim_residual_varlen(
        Q, codes_flat, residuals_flat, cu_seqlens_d, centroids, bucket_weights, nbits,
        max_seqlen_d=max_seqlen_d, normalize=normalize,
    )  # fmt: skip
