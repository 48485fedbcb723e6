"""MaxSim of documents stored as centroids and residual codes (PLAID), by definition: decompress, score.

A token is ``centroids[code] + bucket_weights[bucket codes]``. A byte of residuals holds ``8 / nbits`` bucket
codes, the lowest bits first. A centroid's code that is out of range counts as 0.
"""

import torch
from torch import Tensor

from late_interaction._checks.plaid import check_nbits
from late_interaction._checks.tensors import scores_dtype
from late_interaction.reference.dense import maxsim_reference, sum_of_maxima
from late_interaction.reference.packed import maxsim_reference_varlen

__all__ = [
    "maxsim_residual_reference",
    "maxsim_residual_varlen_reference",
    "plaid_approx_score_reference",
    "unpack_residuals_reference",
]


def plaid_approx_score_reference(query_centroid_scores: Tensor, codes: Tensor, doc_lengths: Tensor) -> Tensor:
    """MaxSim with each document token replaced by its centroid, by definition.

    Args:
        query_centroid_scores: ``[n_centroids, Lq]``, ``centroids @ Q.T`` of one query.
        codes: integers, ``[B, Ld]``: each token's centroid.
        doc_lengths: ``[B]``: a document's first so many tokens count. An empty one scores 0.

    Returns:
        ``[B]``, float32 (float64 for float64 scores).

    Raises:
        ValueError: shapes that do not fit, or no centroid at all.

    Example:
        >>> import torch
        >>> from late_interaction.reference import plaid_approx_score_reference
        >>> scores = torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]])
        >>> plaid_approx_score_reference(scores, torch.tensor([[0, 1, 2], [0, 2, 2]]), torch.tensor([2, 1]))
        tensor([3., 1.])
    """
    if query_centroid_scores.dim() != 2 or len(query_centroid_scores) == 0:
        raise ValueError(
            f"query_centroid_scores must be [n_centroids, Lq], got {list(query_centroid_scores.shape)}"
        )
    d_mask = _first(codes, doc_lengths)
    table = query_centroid_scores.to(scores_dtype(query_centroid_scores))
    similarity = table[_in_range(codes, len(table))].transpose(1, 2)  # [B, Lq, Ld]
    scores, _ = sum_of_maxima(similarity.unsqueeze(0), None, d_mask)
    return scores.squeeze(0)


def unpack_residuals_reference(residuals: Tensor, nbits: int, d: int) -> Tensor:
    """Unpack the bucket codes that packed residuals hold.

    Args:
        residuals: uint8, ``[..., ceil(d * nbits / 8)]``.
        nbits: bits a code: 1, 2, 4 or 8.
        d: codes a token.

    Returns:
        int32, ``[..., d]``, each in ``[0, 2**nbits)``.

    Raises:
        TypeError, ValueError: another ``nbits``, or residuals too short for ``d``.

    Example:
        >>> import torch
        >>> from late_interaction.reference import unpack_residuals_reference
        >>> unpack_residuals_reference(torch.tensor([0b11100100], dtype=torch.uint8), nbits=2, d=4)
        tensor([0, 1, 2, 3], dtype=torch.int32)
    """
    check_nbits(nbits)
    if residuals.shape[-1] != (d * nbits + 7) // 8:
        raise ValueError(
            f"residuals must be [..., {(d * nbits + 7) // 8}] for d = {d} and nbits = {nbits},"
            f" got {list(residuals.shape)}"
        )
    shifts = torch.arange(0, 8, nbits, dtype=torch.int32, device=residuals.device)
    codes: Tensor = (residuals.to(torch.int32).unsqueeze(-1) >> shifts) & (2**nbits - 1)
    return codes.flatten(-2).narrow(-1, 0, d)


def maxsim_residual_reference(
    Q: Tensor,
    codes: Tensor,
    residuals: Tensor,
    doc_lengths: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    *,
    normalize: bool = False,
) -> Tensor:
    """MaxSim of compressed documents padded at the end, by definition.

    Args:
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``.
        codes: integers, ``[Nd, Ld]``: each token's centroid.
        residuals: uint8, ``[Nd, Ld, ceil(d * nbits / 8)]``.
        doc_lengths: ``[Nd]``: a document's first so many tokens count. An empty one scores 0.
        centroids: ``[n_centroids, d]``.
        bucket_weights: ``[2**nbits]``, what a bucket code adds to its centroid's element.
        nbits: bits a bucket code: 1, 2, 4 or 8.
        normalize: divide the tokens of ``Q`` and of the documents by ``max(norm, 1e-12)``.

    Returns:
        ``[Nq, Nd]`` (``[Nd]`` for a 2-D ``Q``), float32 (float64 where ``Q`` is float64).

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_residual_reference
        >>> centroids, weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 0.1, 0.2, 0.3])
        >>> residuals = torch.tensor([[[0b0001], [0b1100]]], dtype=torch.uint8)  # (0.1, 0) and (0, 0.3)
        >>> maxsim_residual_reference(
        ...     torch.tensor([[1.0, 1.0]]), torch.tensor([[0, 1]]), residuals, torch.tensor([2]),
        ...     centroids, weights, nbits=2)
        tensor([1.3000])
    """
    d_mask = _first(codes, doc_lengths)
    D = decompressed(scores_dtype(Q), codes, residuals, centroids, bucket_weights, nbits)
    return maxsim_reference(Q.to(D.dtype), D, d_mask=d_mask, normalize=normalize)


def maxsim_residual_varlen_reference(
    Q: Tensor,
    codes_flat: Tensor,
    residuals_flat: Tensor,
    cu_seqlens_d: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    *,
    normalize: bool = False,
) -> Tensor:
    """MaxSim of compressed documents that lie end to end, by definition.

    Args:
        Q, centroids, bucket_weights, nbits, normalize: as in :func:`maxsim_residual_reference`.
        codes_flat: integers, ``[tokens]``.
        residuals_flat: uint8, ``[tokens, ceil(d * nbits / 8)]``.
        cu_seqlens_d: integers, ``[Nd + 1]``: document ``j`` is tokens
            ``cu_seqlens_d[j] : cu_seqlens_d[j + 1]``. An empty one scores 0.

    Returns:
        ``[Nq, Nd]`` (``[Nd]`` for a 2-D ``Q``), float32 (float64 where ``Q`` is float64).

    Raises:
        TypeError, ValueError: shapes that do not fit; offsets that are not integers, fall, or lie outside
            the tokens.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_residual_varlen_reference
        >>> centroids, weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 0.1, 0.2, 0.3])
        >>> residuals = torch.tensor([[0b0001], [0b1100]], dtype=torch.uint8)
        >>> maxsim_residual_varlen_reference(
        ...     torch.tensor([[1.0, 1.0]]), torch.tensor([0, 1]), residuals, torch.tensor([0, 1, 2]),
        ...     centroids, weights, nbits=2)
        tensor([1.1000, 1.3000])
    """
    D = decompressed(scores_dtype(Q), codes_flat, residuals_flat, centroids, bucket_weights, nbits)
    queries = (Q.unsqueeze(0) if Q.dim() == 2 else Q).to(D.dtype)
    Nq, Lq, _ = queries.shape
    cu_seqlens_q = torch.arange(Nq + 1, device="cpu") * Lq
    scores = maxsim_reference_varlen(
        queries.flatten(0, 1), D, cu_seqlens_q, cu_seqlens_d, normalize=normalize
    )
    return scores.squeeze(0) if Q.dim() == 2 else scores


def decompressed(
    dtype: torch.dtype,
    codes: Tensor,
    residuals: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
) -> Tensor:
    """Decompress the tokens ``[..., d]`` of ``codes [...]`` and ``residuals [..., bytes]``."""
    if residuals.shape[:-1] != codes.shape:
        raise ValueError(
            f"residuals must be {[*codes.shape, 'bytes']} as codes are {list(codes.shape)},"
            f" got {list(residuals.shape)}"
        )
    check_nbits(nbits)
    if bucket_weights.shape != (2**nbits,):
        raise ValueError(
            f"bucket_weights must be [{2**nbits}] for nbits = {nbits}, got {list(bucket_weights.shape)}"
        )
    buckets = unpack_residuals_reference(residuals, nbits, centroids.shape[-1])
    return centroids.to(dtype)[_in_range(codes, len(centroids))] + bucket_weights.to(dtype)[buckets.long()]


def _in_range(codes: Tensor, n_centroids: int) -> Tensor:
    return torch.where((codes >= 0) & (codes < n_centroids), codes, 0).long()


def _first(codes: Tensor, lengths: Tensor) -> Tensor:
    if codes.dim() != 2 or lengths.shape != codes.shape[:1]:
        raise ValueError(
            f"codes must be [documents, Ld] and doc_lengths [documents], got {list(codes.shape)}"
            f" and {list(lengths.shape)}"
        )
    return torch.arange(codes.shape[1], device=codes.device) < lengths.to(codes.device).unsqueeze(-1)
