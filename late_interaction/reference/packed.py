"""MaxSim of batches of unequal lengths, by definition: packed end to end, or padded with lengths."""

import itertools

import torch
from torch import Tensor

from late_interaction._checks.packed import check_indices_below
from late_interaction._checks.tensors import check_embeddings, check_rising, scores_dtype
from late_interaction.reference.dense import maxsim_reference

__all__ = ["maxsim_padded_reference", "maxsim_reference_scatter", "maxsim_reference_varlen"]


def maxsim_reference_varlen(
    Q: Tensor, D: Tensor, cu_seqlens_q: Tensor, cu_seqlens_d: Tensor, *, normalize: bool = False
) -> Tensor:
    """Score every packed query with every packed document, by definition.

    Args:
        Q: query tokens end to end, ``[tokens, d]``; sequence ``i`` is
            ``Q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]``.
        D: document tokens, likewise.
        cu_seqlens_q, cu_seqlens_d: integers, ``[Nq + 1]`` and ``[Nd + 1]``, that do not decrease. An empty
            query or document scores 0.
        normalize: divide every token by ``max(norm, 1e-12)`` first.

    Returns:
        ``[Nq, Nd]``, float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`; offsets that are not integers, fall, or
            lie outside their tokens.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_reference_varlen
        >>> tokens, offsets = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 3])
        >>> maxsim_reference_varlen(tokens, tokens, offsets, offsets)
        tensor([[ 1.,  3.],
                [ 5., 15.]])
    """
    queries, documents = _sequences("Q", Q, "q", cu_seqlens_q), _sequences("D", D, "d", cu_seqlens_d)
    pairs = [maxsim_reference(q, d, normalize=normalize) for q in queries for d in documents]
    return _stacked(pairs, Q).view(len(queries), len(documents))


def maxsim_reference_scatter(
    Q_packed: Tensor,
    D_packed: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_d: Tensor,
    pair_q_idx: Tensor,
    pair_d_idx: Tensor,
    *,
    normalize: bool = False,
) -> Tensor:
    """Scores of the listed (query, document) pairs of packed batches, by definition.

    Args:
        Q_packed, D_packed, cu_seqlens_q, cu_seqlens_d, normalize: as in :func:`maxsim_reference_varlen`.
        pair_q_idx, pair_d_idx: integers, ``[pairs]``: which query meets which document. Repeats are allowed.

    Returns:
        ``[pairs]``, float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: as :func:`maxsim_reference_varlen`; an index of no sequence.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_reference_scatter
        >>> tokens, offsets = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 3])
        >>> queries, documents = torch.tensor([1, 0]), torch.tensor([1, 1])
        >>> maxsim_reference_scatter(tokens, tokens, offsets, offsets, queries, documents)
        tensor([15.,  3.])
    """
    queries = _sequences("Q_packed", Q_packed, "q", cu_seqlens_q)
    documents = _sequences("D_packed", D_packed, "d", cu_seqlens_d)
    if pair_q_idx.dim() != 1 or pair_q_idx.shape != pair_d_idx.shape:
        raise ValueError(
            "pair_q_idx and pair_d_idx must be 1-D and equally long,"
            f" got {list(pair_q_idx.shape)} and {list(pair_d_idx.shape)}"
        )
    for name, index, sequences in (
        ("pair_q_idx", pair_q_idx, queries),
        ("pair_d_idx", pair_d_idx, documents),
    ):
        check_indices_below(name, index, len(sequences))
    pairs = [
        maxsim_reference(queries[i], documents[j], normalize=normalize)
        for i, j in zip(pair_q_idx.tolist(), pair_d_idx.tolist(), strict=True)
    ]
    return _stacked(pairs, Q_packed)


def maxsim_padded_reference(
    queries: Tensor,
    documents: Tensor,
    query_lengths: Tensor,
    doc_lengths: Tensor,
    *,
    normalize: bool = False,
) -> Tensor:
    """Scores of every query with the candidates of its own, padded at the end, by definition.

    Args:
        queries: ``[B, Lq, d]``.
        documents: ``[B, C, Ld, d]``.
        query_lengths: ``[B]``: the first so many tokens of a query count.
        doc_lengths: ``[B, C]``, likewise.
        normalize: divide every token by ``max(norm, 1e-12)`` first.

    Returns:
        ``[B, C]``, float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`; lengths of another shape.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_padded_reference
        >>> queries = torch.tensor([[[1.0], [9.0]]])
        >>> documents = torch.tensor([[[[2.0], [3.0]], [[4.0], [5.0]]]])
        >>> maxsim_padded_reference(queries, documents, torch.tensor([1]), torch.tensor([[2, 1]]))
        tensor([[3., 4.]])
    """
    check_embeddings("queries", queries)
    check_embeddings("documents", documents)
    if queries.dim() != 3 or documents.dim() != 4:
        raise ValueError(
            "queries must be [B, Lq, d] and documents [B, C, Ld, d],"
            f" got {list(queries.shape)} and {list(documents.shape)}"
        )
    q_mask = _first("query_lengths", query_lengths, queries)
    d_mask = _first("doc_lengths", doc_lengths, documents)
    return maxsim_reference(queries, documents, q_mask, d_mask, normalize=normalize)


def _first(name: str, lengths: Tensor, tokens: Tensor) -> Tensor:
    if lengths.shape != tokens.shape[:-2]:
        raise ValueError(f"{name} must be {list(tokens.shape[:-2])}, got {list(lengths.shape)}")
    return torch.arange(tokens.shape[-2], device=tokens.device) < lengths.to(tokens.device).unsqueeze(-1)


def _sequences(name: str, packed: Tensor, side: str, offsets: Tensor) -> list[Tensor]:
    cu = f"cu_seqlens_{side}"
    check_embeddings(name, packed)
    if packed.dim() != 2:
        raise ValueError(f"{name} must be [tokens, d], got {list(packed.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{cu} must be int32 or int64, got {offsets.dtype}")
    if offsets.dim() != 1 or len(offsets) == 0:
        raise ValueError(f"{cu} must be [sequences + 1], got {list(offsets.shape)}")
    check_rising(cu, offsets, len(packed))
    return [packed[start:stop] for start, stop in itertools.pairwise(offsets.tolist())]


def _stacked(scores: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(scores) if scores else like.new_empty(0, dtype=scores_dtype(like))
