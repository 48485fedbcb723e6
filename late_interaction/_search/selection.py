"""The choice of the best scores, ties included the same on every device.

A document that does not count (its score is NaN, or it is empty and left out) takes no rank. Where fewer than
k documents remain, the worst score and the index -1 stand in the places behind them.
"""

import torch
from torch import Tensor

from late_interaction._torch import _AutoDispatchBelowAutograd
from late_interaction.ops import topk
from late_interaction.ops._library import cuda_missing, operators
from late_interaction.ops.topk import MOST_BEST, MOST_DOCUMENTS

# As many scores are made before the best are chosen: 16 MiB in float32; on a CPU choosing takes a few times
# that.
MOST_SCORES = 1 << 22

Found = tuple[Tensor, Tensor]  # scores and indices, [Nq, n]

NO_DOCUMENT = -1  # in the place of an index

_select_best = operators.select_best.default


def has_kernels(x: Tensor, k: int) -> bool:
    """Tell whether the operators of :mod:`late_interaction.ops.topk` choose so many there."""
    return x.is_cpu or (x.is_cuda and k <= MOST_BEST and cuda_missing is None)


def without_rank(
    D: Tensor, d_mask: Tensor | None, keep_empty: bool, left_out: Tensor | None
) -> Tensor | None:
    """Tell which documents are left out or have no kept token, bool ``[Nd]``. None: all take a rank."""
    if keep_empty or (d_mask is None and D.shape[1]):
        return left_out
    if d_mask is None:
        return torch.ones(D.shape[0], dtype=torch.bool, device=D.device)
    empty = ~d_mask.any(dim=1)
    return empty if left_out is None else empty | left_out


def select(scores: Tensor, indices: Tensor, k: int, largest: bool) -> Found:
    """Select the k best columns, best first, equal scores by ascending index. Below 0 is no document.

    A float32 score and its index make one integer that sorts as the pair does. (A float64 score fills the
    integer by itself; two sorts serve, the second one stable.)
    """
    if scores.dtype != torch.float64:
        return _best(scores, indices.expand(scores.shape), 0, None, k, largest)
    missing = scores.isnan() | (indices < 0)
    scores = scores.masked_fill(missing, -torch.inf if largest else torch.inf)
    indices = indices.masked_fill(missing, MOST_DOCUMENTS)  # behind all others
    k, rising = min(k, scores.shape[-1]), indices.argsort(dim=-1)
    scores, indices = scores.gather(-1, rising), indices.gather(-1, rising)
    indices = indices.masked_fill(indices == MOST_DOCUMENTS, NO_DOCUMENT)
    order = scores.sort(dim=-1, descending=largest, stable=True).indices[..., :k]
    return scores.gather(-1, order), indices.gather(-1, order)


def select_next(
    scores: Tensor, first: int, found: Found, k: int, largest: bool, empty: Tensor | None = None
) -> Found:
    """Select the k best of the documents from ``first`` on, with these scores, and of those found before.

    empty: ``[documents]``, those of them to leave out.
    """
    if empty is not None:
        scores = scores.masked_fill(empty, torch.nan)
    if scores.dtype != torch.float64:
        return _best(scores, None, first, found, k, largest)
    places = torch.arange(first, first + scores.shape[1], device=scores.device).expand(scores.shape)
    every = torch.cat((found[0], scores), dim=1), torch.cat((found[1], places), dim=1)
    return select(*every, k, largest)


def _best(
    scores: Tensor, indices: Tensor | None, first: int, found: Found | None, k: int, largest: bool
) -> Found:
    found_scores, found_indices, count = None, None, scores.shape[1]
    if found is not None and found[0].shape[1]:
        found_scores, found_indices = found[0].contiguous(), found[1].contiguous()
        count += found[0].shape[1]
    k = min(k, max(count, 1))  # an operator takes no number beyond int64
    if not has_kernels(scores, k):
        return topk.select_best(scores, indices, first, found_scores, found_indices, k, largest)
    if scores.is_cuda:
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        indices = indices if indices is None or indices.stride(1) == 1 else indices.contiguous()
    with _AutoDispatchBelowAutograd():  # there is nothing to differentiate
        best: Found = _select_best(scores, indices, first, found_scores, found_indices, k, largest)
    return best
