"""Scores of listed pairs of a packed batch, by :mod:`late_interaction.ops.pairs`: :func:`score_pairs_packed`.

A server's forward pass leaves the tokens of many queries and documents end to end in one buffer.
:func:`score_pairs_packed` scores some pairs of them; :func:`rerank_direct` scores one query with documents
that are scattered over the buffer. Neither copies a token.
"""

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.dense import check_weights
from late_interaction._checks.options import Precision, check_flag
from late_interaction._checks.packed import check_max_length, check_packed, check_pair_indices, check_spans
from late_interaction._checks.tensors import check_no_forward_ad, has_values
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.normalized import packed_counts
from late_interaction._scoring.precision import call_packed
from late_interaction.ops import _oom

__all__ = ["rerank_direct", "score_pairs_packed"]


def score_pairs_packed(
    Q_packed: Tensor,
    D_packed: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_d: Tensor,
    pair_q_idx: Tensor,
    pair_d_idx: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_d: int | None = None,
    precision: Precision | None = None,
    q_weights: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """Scores of the listed (query, document) pairs of packed batches, differentiable, deterministic.

    Args:
        Q_packed, D_packed: the tokens of all queries, and of all documents, ``[tokens, d]``; bfloat16,
            float16, float32 or float64.
        cu_seqlens_q, cu_seqlens_d: ``[Nq + 1]`` and ``[Nd + 1]``, int32 (or int64): query ``i`` has the
            tokens from ``cu_seqlens_q[i]`` up to ``cu_seqlens_q[i + 1]``. Offsets do not decrease and stay
            within the tokens. On a CPU that is checked; a GPU's are not waited for, and offsets that lead
            elsewhere give scores without meaning, though never another tensor's memory.
        pair_q_idx, pair_d_idx: ``[pairs]``, int32 (or int64), on the device of the tokens: pair ``p`` is
            query ``pair_q_idx[p]`` with document ``pair_d_idx[p]``. In any order; pairs may repeat. An index
            of no sequence is a ValueError on a CPU; a GPU's are not waited for, and that pair scores NaN.
        max_seqlen_q: the longest query, where known. Only with gradients on a GPU does it matter: without it
            the host waits for the GPU once to learn it, and under ``torch.compile`` makes room for winners as
            if each query had all tokens. Queries longer than it score NaN (on a CPU: a ValueError).
        max_seqlen_d: accepted and not needed: every token counts whatever it says.
        precision: how float32 inputs multiply, as in :func:`late_interaction.maxsim`.
        q_weights, mean: as in :func:`late_interaction.maxsim`.

    Returns:
        ``[pairs]`` scores, float32 (float64 for float64 inputs). An empty query or document scores 0.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value.

    Complexity: ``2 * Lq * Ld * d`` operations a pair, and one read of its document; neighbours in the list
    that share a query load it once. Where the pairs are a large part of all there could be, every query is
    scored with every document, each of which is then read once, and the list picked from that. With
    gradients the winners are kept, ``pairs * max_seqlen_q`` of 2 bytes (4 if ``D_packed`` has more than
    65,534 tokens).

    Example:
        >>> import torch
        >>> from late_interaction.score_pairs import score_pairs_packed
        >>> Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> D = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
        >>> cu_seqlens = torch.tensor([0, 2, 3])
        >>> pair_q_idx, pair_d_idx = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 0])
        >>> score_pairs_packed(Q, D, cu_seqlens, cu_seqlens, pair_q_idx, pair_d_idx)
        tensor([3., 2., 3.])
    """
    cu_q, cu_d = check_packed(Q_packed, D_packed, cu_seqlens_q, cu_seqlens_d, max_seqlen_q, max_seqlen_d)
    pair_q, pair_d = check_pair_indices(
        pair_q_idx, pair_d_idx, Q_packed, cu_q.shape[0] - 1, cu_d.shape[0] - 1
    )
    if max_seqlen_q is not None and not torch.compiler.is_compiling():
        max_seqlen_q = min(max_seqlen_q, Q_packed.shape[0])  # no query is longer
    check_flag("mean", mean)
    q_weights = check_weights(q_weights, "Q_packed", Q_packed)
    check_no_forward_ad("score_pairs_packed", Q_packed, D_packed, q_weights)
    tokens: tuple[Tensor, ...] = (Q_packed, D_packed)
    if q_weights is not None:
        tokens += (q_weights,)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tokens)
    if learns and max_seqlen_q is None:
        max_seqlen_q = _longest_query(Q_packed, cu_q)
    op = getattr(ops, f"maxsim_pairs_packed{'_weighted' * (len(tokens) == 3)}{'_winners' * learns}")
    try:
        found = call_packed(op, (*tokens, cu_q, cu_d, pair_q, pair_d, max_seqlen_q), precision, learns)
    except RuntimeError as error:
        if learns and max_seqlen_q is not None:
            _oom.pairs_failed(error, Q_packed, D_packed, len(pair_q), max_seqlen_q)
        raise
    scores: Tensor = found[0] if learns else found
    look("score_pairs_packed", Q_packed, option=False)
    if not mean or len(pair_q) == 0:
        return scores
    counts = packed_counts(cu_q, q_weights).to(scores.dtype)
    return scores / counts[pair_q.clamp(0, len(counts) - 1).long()]


def rerank_direct(
    Q: Tensor,
    batch_tensor: Tensor,
    doc_offsets: Tensor,
    doc_lengths: Tensor,
    max_seqlen_d: int | None = None,
    *,
    precision: Precision | None = None,
) -> Tensor:
    """Scores of one query with documents that lie anywhere in one buffer of tokens. Copies nothing.

    Args:
        Q: the query, ``[Lq, d]``; bfloat16, float16, float32 or float64.
        batch_tensor: ``[tokens, d]``, of the same dtype and device: what a model put out, say, documents
            among whatever else there is.
        doc_offsets: ``[documents]``, int32 (or int64): the token that each document begins with.
        doc_lengths: ``[documents]``, likewise: its tokens. Documents may come in any order, overlap and be
            empty. One that does not lie within ``batch_tensor`` is a ValueError on a CPU; a GPU's are not
            waited for, and that document scores NaN.
        max_seqlen_d: accepted and not needed.
        precision: how float32 inputs multiply, as in :func:`late_interaction.maxsim`.

    Returns:
        ``[documents]`` scores, float32 (float64 for float64 inputs). An empty document scores 0. Without
        gradients: for those there is :func:`score_pairs_packed`.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value, or one that
            requires a gradient while gradients are enabled.

    Complexity: ``2 * Lq * sum(doc_lengths) * d`` operations and one read of each document. No memory beside
    the scores but some 20 bytes a document. The host waits for nothing but
    the look at norms of the process's first call (:func:`late_interaction.maxsim` says when).

    Example:
        >>> import torch
        >>> from late_interaction.score_pairs import rerank_direct
        >>> batch = torch.tensor([[1.0, 0.0], [0.0, 3.0], [9.0, 9.0], [2.0, 2.0]])
        >>> rerank_direct(torch.tensor([[1.0, 1.0]]), batch, torch.tensor([3, 0]), torch.tensor([1, 2]))
        tensor([4., 3.])
    """
    starts, lengths = check_spans(Q, batch_tensor, doc_offsets, doc_lengths)
    if max_seqlen_d is not None:
        check_max_length("max_seqlen_d", max_seqlen_d, lengths)
    check_no_forward_ad("rerank_direct", Q, batch_tensor)
    if (Q.requires_grad or batch_tensor.requires_grad) and torch.is_grad_enabled():
        raise ValueError(
            "rerank_direct has no gradients, got Q or batch_tensor that requires one:"
            " use score_pairs_packed, or torch.no_grad()"
        )
    scores: Tensor = call_packed(ops.maxsim_spans, (Q, batch_tensor, starts, lengths), precision, False)
    look("rerank_direct", Q, option=False)
    return scores


def _longest_query(Q: Tensor, cu_q: Tensor) -> int:
    if not has_values(cu_q) or cu_q.shape[0] <= 2:
        return Q.shape[0]
    return max(0, int(cu_q.diff().amax()))
