"""``late_interaction_kernels.padded``: padded tokens with lengths, scored or packed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import shape_of
from late_interaction._checks.options import check_flag
from late_interaction._checks.packed import read_longest
from late_interaction._checks.tensors import (
    check_embeddings,
    check_integers,
    check_lengths,
    check_same_kind,
    has_values,
    has_values_on_cpu,
)
from late_interaction._maxsim import maxsim

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
        yield from vars(self).values()


def _masks(
    queries: Tensor, documents: Tensor, query_lengths: Tensor, doc_lengths: Tensor, validate: bool
) -> tuple[Tensor, Tensor]:
    """Check queries, and candidates of each. Return masks of the tokens that count."""
    check_flag("validate", validate)
    check_embeddings("queries", queries)
    check_embeddings("documents", documents)
    if queries.dim() != 3 or documents.dim() != 4 or queries.shape[0] != documents.shape[0]:
        raise ValueError(
            "queries and documents must be [B, Lq, d] and [B, C, Ld, d],"
            f" got {shape_of(queries)} and {shape_of(documents)}"
        )
    check_same_kind(queries, documents, "queries", "documents")
    return (
        _mask_of_lengths("query_lengths", query_lengths, "queries", queries, validate),
        _mask_of_lengths("doc_lengths", doc_lengths, "documents", documents, validate),
    )


def _mask_of_lengths(name: str, lengths: Tensor, tokens_name: str, tokens: Tensor, validate: bool) -> Tensor:
    dims = tokens.dim() - 2
    check_integers(name, lengths, dims, "[B, C]" if dims == 2 else "[B]", tokens_name, tokens.device)
    if lengths.shape != tokens.shape[:-2]:
        raise ValueError(f"{name} must be {list(tokens.shape[:-2])}, got {shape_of(lengths)}")
    longest = tokens.shape[-2]
    readable = (
        has_values(lengths) or torch.compiler.is_compiling() if validate else has_values_on_cpu(lengths)
    )
    if readable:
        check_lengths(name, lengths, int(validate), longest)
    return torch.arange(longest, device=tokens.device) < lengths.unsqueeze(-1)


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
    """Drop the padding of queries and of the candidates of each, and pack what is left end to end.

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
        >>> from late_interaction.lik import maxsim_varlen
        >>> from late_interaction.lik.padded import pack_padded
        >>> queries, documents = torch.ones(1, 2, 4), torch.ones(1, 3, 5, 4)
        >>> batch = pack_padded(queries, documents, torch.tensor([1]), torch.tensor([[5, 2, 3]]))
        >>> maxsim_varlen(batch.Q_packed, batch.D_packed, batch.cu_seqlens_q, batch.cu_seqlens_d)
        tensor([[4., 4., 4.]])
    """
    q_mask, d_mask = _masks(queries, documents, query_lengths, doc_lengths, validate)
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
    """Call :func:`late_interaction.maxsim` with masks of the lengths. Returns ``[B, C]``.

    ``validate`` waits for the lengths on a GPU too, and refuses those of 0.
    """
    return maxsim(queries, documents, *_masks(queries, documents, query_lengths, doc_lengths, validate))
