"""What tokens and scores are divided by: norms, tokens of a query that count, the range of a row."""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def unit(x: Tensor) -> Tensor:
    """Rows divided by ``max(norm, 1e-12)``, half precision in float32, in their dtype."""
    if x.dtype.itemsize < 4:
        return normalize(x.float(), dim=-1, eps=1e-12).to(x.dtype)
    return normalize(x, dim=-1, eps=1e-12)


def unit_packed(x: Tensor, offsets: Tensor) -> Tensor:
    """Normalize packed tokens likewise. Tokens of no sequence become 0, whatever they hold."""
    row = torch.arange(x.shape[0], device=x.device)
    return unit(x.masked_fill(((row < offsets[0]) | (row >= offsets[-1])).unsqueeze(1), 0.0))


def min_max(scores: Tensor, kept: Tensor | None = None) -> Tensor:
    """Map the scores of each row that are kept to [0, 1]; the others become anything finite.

    Where rounding alone tells the scores of a row apart they all become 0, since the gradient would be
    multiplied by up to 1e8.
    """
    low = high = scores
    if kept is not None:
        low, high = (scores.masked_fill(~kept, float(fill)) for fill in ("inf", "-inf"))
    least, greatest = low.min(1, keepdim=True).values, high.max(1, keepdim=True).values
    spread = greatest - least
    rounding = 8 * torch.finfo(scores.dtype).eps * torch.maximum(greatest.abs(), least.abs())
    mapped: Tensor = (scores - least) / (spread + 1e-8)
    return mapped.masked_fill(spread <= rounding, 0.0)


def per_token(scores: Tensor, Q: Tensor, q_mask: Tensor | None, weights: Tensor | None) -> Tensor:
    """Divide ``scores`` ``[Nq, ...]`` by the tokens of each query that count, for ``mean=True``.

    A token counts that the mask keeps and whose weight is not 0, as Sentence Transformers counts them.
    Queries without such a token divide by 1. Q is ``[Nq, Lq, d]``.
    """
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
