"""``late_interaction_kernels.padded``: padded tokens with lengths, scored or packed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction import padded
from late_interaction._checks.padded import check_padded, read_longest

__all__ = ["PackedBatch", "maxsim_padded", "pack_padded"]


@dataclass(frozen=True)
class PackedBatch:
    """Packed queries and documents from :func:`pack_padded`, on the device of the padded ones.

    Unpacks like a tuple.

    Args:
        Q_packed, cu_seqlens_q, D_packed, cu_seqlens_d, pair_q_idx, pair_d_idx, max_seqlen_q, max_seqlen_d:
            see each.

    Example:
        >>> import torch
        >>> from late_interaction.lik.padded import pack_padded
        >>> batch = pack_padded(torch.ones(1, 2, 4), torch.ones(1, 3, 5, 4), torch.tensor([1]),
        ...                     torch.tensor([[5, 2, 3]]))
        >>> Q_packed, cu_seqlens_q, D_packed, cu_seqlens_d, *_ = batch
        >>> D_packed.shape, cu_seqlens_d
        (torch.Size([10, 4]), tensor([ 0,  5,  7, 10], dtype=torch.int32))
    """

    Q_packed: Tensor
    """``[sum of query lengths, d]``: the tokens of all queries, end to end."""
    cu_seqlens_q: Tensor
    """int32 ``[B + 1]``: where each query begins, and the last one ends."""
    D_packed: Tensor
    """``[sum of document lengths, d]``: the documents of query 0, then those of query 1, and so on."""
    cu_seqlens_d: Tensor
    """int32 ``[B * C + 1]``."""
    pair_q_idx: Tensor
    """int32 ``[B * C]``: ``b`` for pair ``b * C + c``."""
    pair_d_idx: Tensor
    """int32 ``[B * C]``: each pair's own number, which is its document's."""
    max_seqlen_q: int
    """The length of the longest query."""
    max_seqlen_d: int
    """The length of the longest document."""

    def __iter__(self) -> Iterator[Any]:
        yield self.Q_packed
        yield self.cu_seqlens_q
        yield self.D_packed
        yield self.cu_seqlens_d
        yield self.pair_q_idx
        yield self.pair_d_idx
        yield self.max_seqlen_q
        yield self.max_seqlen_d


def _offsets(lengths: Tensor) -> Tensor:
    zero = lengths.new_zeros(1, dtype=torch.int32)
    return torch.cat((zero, lengths.flatten().cumsum(0).to(torch.int32)))


def pack_padded(
    queries: Tensor,
    documents: Tensor,
    query_lengths: Tensor,
    doc_lengths: Tensor,
    *,
    validate: bool = False,
) -> PackedBatch:
    """Drops the padding of queries and of the candidates of each, and packs what is left end to end.

    Args:
        queries: ``[B, Lq, d]``. Differentiable, as ``documents``.
        documents: ``[B, C, Ld, d]``, of the same dtype and device.
        query_lengths: ``[B]``, int32 or int64: the first so many tokens of a query count.
        doc_lengths: ``[B, C]``, likewise.
        validate: lengths of 0 are refused, too. (Those below 0, or above the padded length, always are.)

    Returns:
        A :class:`PackedBatch`. The host waits for the device: the shapes depend on the lengths.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value.

    Example:
        >>> import torch
        >>> from late_interaction import maxsim_varlen
        >>> from late_interaction.lik.padded import pack_padded
        >>> queries, documents = torch.ones(1, 2, 4), torch.ones(1, 3, 5, 4)
        >>> batch = pack_padded(queries, documents, torch.tensor([1]), torch.tensor([[5, 2, 3]]))
        >>> maxsim_varlen(batch.Q_packed, batch.D_packed, batch.cu_seqlens_q, batch.cu_seqlens_d)
        tensor([[4., 4., 4.]])
    """
    q_mask, d_mask = check_padded(queries, documents, query_lengths, doc_lengths, validate)
    longest_query = read_longest("query_lengths", query_lengths, queries.shape[-2])
    longest_document = read_longest("doc_lengths", doc_lengths, documents.shape[-2])
    pairs = d_mask.shape[0] * d_mask.shape[1]
    numbers = torch.arange(pairs, dtype=torch.int32, device=queries.device)
    return PackedBatch(
        Q_packed=queries[q_mask],
        cu_seqlens_q=_offsets(query_lengths),
        D_packed=documents[d_mask],
        cu_seqlens_d=_offsets(doc_lengths),
        pair_q_idx=numbers // max(documents.shape[1], 1),
        pair_d_idx=numbers,
        max_seqlen_q=longest_query,
        max_seqlen_d=longest_document,
    )


def maxsim_padded(
    queries: Tensor,
    documents: Tensor,
    query_lengths: Tensor,
    doc_lengths: Tensor,
    *,
    validate: bool = False,
) -> Tensor:
    """Call :func:`late_interaction.maxsim_padded`."""
    return padded.maxsim_padded(queries, documents, query_lengths, doc_lengths, validate=validate)
