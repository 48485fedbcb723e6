"""Which token of a compressed document each query token matched: :func:`explain_residual`.

The documents asked for are decompressed one at a time, and explained as :func:`late_interaction.explain`
explains dense ones.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from late_interaction._checks.options import check_flag
from late_interaction._checks.plaid import check_compressed
from late_interaction._scoring.norm_warning import look
from late_interaction.alignment import Alignment, check_documents, explain_one
from late_interaction.reference.compressed import decompressed
from late_interaction.reference.dense import working_dtype

__all__ = ["explain_residual"]


# The parameters are those of maxsim_residual, in its order.
def explain_residual(
    Q: Tensor,
    codes: Tensor,
    residuals: Tensor,
    doc_lengths: Tensor | None,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    *,
    cu_seqlens_d: Tensor | None = None,
    documents: Tensor | None = None,
    normalize: bool = False,
) -> list[Alignment] | list[list[Alignment]]:
    """:func:`late_interaction.explain` of residual-compressed documents, the format of PLAID and ColBERTv2.

    Args:
        Q, codes, residuals, doc_lengths, centroids, bucket_weights, nbits, normalize: as in
            :func:`late_interaction.plaid.maxsim_residual`. For packed documents ``doc_lengths`` is None, and
            ``codes`` and ``residuals`` are those of :func:`late_interaction.plaid.maxsim_residual_varlen`.
        cu_seqlens_d: ``[Nd + 1]``: the offsets of packed documents.
        documents: ``[Nq, k]`` (``[k]`` for a 2-D ``Q``), int32 or int64: the documents of each query that
            are to be explained; all of them if None. Those alone are decompressed.

    Returns:
        Lists of :class:`late_interaction.Alignment`, as scores have dims: ``[Nq][Nd]`` or ``[Nq][k]``; a
        list of them for a 2-D ``Q``. Shares are of a document's own tokens, without padding.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.plaid.maxsim_residual`; both of ``doc_lengths`` and
            ``cu_seqlens_d``, or neither; documents that do not exist.

    Complexity: one :func:`late_interaction.maxsim_with_winners` for each query and document. Waits for the
    device.

    Example:
        >>> import torch
        >>> from late_interaction import explain_residual
        >>> centroids, weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 0.1, 0.2, 0.3])
        >>> residuals = torch.tensor([[[0b0001], [0b1100]]], dtype=torch.uint8)  # (0.1, 0) and (0, 0.3)
        >>> (alignment,) = explain_residual(
        ...     torch.tensor([[1.0, 1.0]]), torch.tensor([[0, 1]]), residuals, torch.tensor([2]),
        ...     centroids, weights, nbits=2)
        >>> alignment.matches, alignment.shares
        (tensor([1]), tensor([0.0000, 1.3000]))
    """
    check_flag("normalize", normalize)
    if (doc_lengths is None) == (cu_seqlens_d is None):
        got = "neither" if doc_lengths is None else "both"
        raise ValueError(f"doc_lengths (padded) or cu_seqlens_d (packed documents) must be given, got {got}")
    stored = ("codes", codes), ("residuals", residuals), ("doc_lengths", doc_lengths)
    if doc_lengths is None:
        stored = ("codes_flat", codes), ("residuals_flat", residuals), ("cu_seqlens_d", cu_seqlens_d)
    one_query = isinstance(Q, Tensor) and Q.dim() == 2
    args = check_compressed(Q, *stored, centroids, bucket_weights, nbits)
    Q, codes, residuals, extents, codebook = *args[:4], args[4:]
    bounds = _bounds(stored[2][0], codes, extents)
    codes, residuals = codes.flatten(), residuals.flatten(0, -2)
    picks = [range(len(bounds))] * Q.shape[0]
    if documents is not None:
        picks = check_documents(documents, Q, bounds, codes, one_query).tolist()
    found: dict[tuple[int, int], Alignment] = {}
    for j in sorted(set().union(*picks)):
        begin, end = bounds[j]
        tokens = decompressed(working_dtype(Q), codes[begin:end], residuals[begin:end], *codebook)
        document = tokens.to(Q.dtype)[None]
        for i, chosen in enumerate(picks):
            if j in chosen:
                (found[i, j],) = explain_one(Q[i].detach(), None, normalize, None, document, None)
    if not normalize:
        look("explain_residual", Q)
    result = [[found[i, j] for j in chosen] for i, chosen in enumerate(picks)]
    return result[0] if one_query else result


def _bounds(name: str, codes: Tensor, extents: Tensor) -> list[tuple[int, int]]:
    """The first token of each document and the one after its last, in the flattened codes."""
    values, total = extents.tolist(), codes.numel()
    if codes.dim() == 1:
        bounds = list(pairwise(values))
        if any(not 0 <= a <= b <= total for a, b in bounds):  # a GPU's offsets are read here first
            raise ValueError(f"{name} must not decrease and lie within [0, {total}], got {values[:8]}")
        return bounds
    Ld = codes.shape[1]
    if any(not 0 <= length <= Ld for length in values):
        raise ValueError(f"{name} must lie within [0, {Ld}], got {values[:8]}")
    return [(j * Ld, j * Ld + length) for j, length in enumerate(values)]
