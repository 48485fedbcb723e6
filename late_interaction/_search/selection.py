"""The choice of the best scores, ties included the same on every device."""

import torch
from torch import Tensor

# As many scores are made before the best are chosen: 16 MiB in float32; choosing takes a few times that.
MOST_SCORES = 1 << 22
# An index is part of a key of 64 bits.
MOST_DOCUMENTS = 1 << 32

_LOW = MOST_DOCUMENTS - 1


def select(scores: Tensor, indices: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k best columns, best first, equal scores by ascending index. In float64 the columns of equal scores
    must come by ascending index.

    A float32 score and its index make one integer that sorts as the pair does, which torch.topk then has no
    choice about. (A float64 score fills the integer by itself; a stable sort serves.)
    """
    k = min(k, scores.shape[-1])
    if scores.dtype == torch.float64:
        order = scores.sort(dim=-1, descending=largest, stable=True).indices[..., :k]
        return scores.gather(-1, order), indices.gather(-1, order)
    bits = torch.where(scores.isnan(), torch.nan, scores + 0.0).view(torch.int32)  # one NaN, one zero
    tie = _LOW - indices if largest else indices
    keys = (_by_magnitude(bits).to(torch.int64) << 32) | tie
    best = keys.topk(k, dim=-1, largest=largest).values
    scores = _by_magnitude((best >> 32).to(torch.int32)).view(torch.float32)
    tie = best & _LOW
    return scores, _LOW - tie if largest else tie


def _by_magnitude(bits: Tensor) -> Tensor:
    """The bits of a float32 as an integer that compares as the float does; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
