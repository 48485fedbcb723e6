"""Scores per query token: what ``mean=True`` divides scores by.

A token counts that the mask keeps and whose weight is not 0, as Sentence Transformers counts them. Queries
without such a token divide by 1.
"""

import torch
from torch import Tensor


def per_token(scores: Tensor, Q: Tensor, q_mask: Tensor | None, weights: Tensor | None) -> Tensor:
    """Divide ``scores`` ``[Nq, ...]`` by the tokens of each query that count. Q is ``[Nq, Lq, d]``."""
    counted = q_mask
    if weights is not None:
        counted = weights != 0 if q_mask is None else q_mask & (weights != 0)
    if counted is None:
        return scores / max(Q.shape[1], 1)
    counts = counted.sum(-1).clamp_min(1).to(scores.dtype)
    return scores / (counts if scores.dim() == 1 else counts.unsqueeze(1))


def packed_counts(cu_seqlens_q: Tensor, weights: Tensor | None) -> Tensor:
    """Count the tokens of each packed query that weigh something, ``[Nq]``."""
    if weights is not None:
        counted = torch.cat((cu_seqlens_q.new_zeros(1), (weights != 0).cumsum(0)))
        ends = counted[cu_seqlens_q.clamp(0, weights.shape[0]).long()]
    else:
        ends = cu_seqlens_q
    return ends.diff().clamp_min(1)
