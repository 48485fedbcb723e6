"""XTR scores by definition: the grid of all similarities, a sort, maxima, their sum."""

import torch
from torch import Tensor

from late_interaction._checks.dense import as_given, check_xtr
from late_interaction._checks.options import Rule
from late_interaction._checks.tensors import scores_dtype
from late_interaction._scoring.precision import without_autocast
from late_interaction.reference.dense import similarities

__all__ = ["xtr_scores_reference"]


def xtr_scores_reference(
    Q: Tensor,
    D: Tensor,
    k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    rule: Rule = "paper",
    q_weights: Tensor | None = None,
) -> Tensor:
    """Compute what :func:`late_interaction.xtr_scores` does, by definition.

    Args:
        Q, D, k, q_mask, d_mask, rule, q_weights: as in :func:`late_interaction.xtr_scores`. Half precision is
            widened to float32 first; float64 stays.

    Returns:
        Scores of the shapes that :func:`late_interaction.xtr_scores` returns.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.xtr_scores`.

    Example:
        >>> import torch
        >>> from late_interaction.reference import xtr_scores_reference
        >>> Q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> D = torch.tensor([[[4.0, 1.0], [3.0, 0.0]], [[2.0, 1.0], [0.0, 5.0]]])
        >>> xtr_scores_reference(Q, D, k=1)
        tensor([4., 5.])
    """
    Q3, DN, q_mask, d_mask = check_xtr(Q, D, k, q_mask, d_mask, q_weights, rule)
    groups = DN.shape[:2] if DN.dim() == 4 else None
    if groups is not None:
        DN, d_mask = DN.flatten(0, 1), None if d_mask is None else d_mask.flatten(0, 1)
    dtype = scores_dtype(Q)
    with without_autocast(Q.device.type):
        weights = torch.ones(Q3.shape[:2], dtype=dtype, device=Q.device)
        if q_weights is not None:
            weights = q_weights.to(dtype).view(weights.shape)
        kept = torch.ones_like(weights, dtype=torch.bool) if q_mask is None else q_mask
        weights = weights.masked_fill(~kept, 0.0)
        grid = similarities(Q3, DN, q_mask, d_mask).transpose(1, 2)
        scores = _score(grid, k, weights.unsqueeze(-1), kept.unsqueeze(-1), d_mask, rule)
    if groups is not None:
        own: Tensor = scores.unflatten(1, groups).diagonal(dim1=0, dim2=1)
        return own.t()
    return as_given(scores, Q, D)


def _score(grid: Tensor, k: int, weights: Tensor, kept: Tensor, d_mask: Tensor | None, rule: Rule) -> Tensor:
    """Scores ``[Nq, Nd]`` of similarities ``[Nq, Lq, Nd, Ld]``; weights and kept are ``[Nq, Lq, 1]``."""
    least = 1.0 if rule == "paper" else 1e-3
    if grid.numel() == 0:
        return grid.sum((1, 3))
    lowest = torch.finfo(grid.dtype).min
    if d_mask is not None:
        grid = grid.masked_fill(~d_mask, lowest)
    order = grid.detach().flatten(2).argsort(dim=-1, descending=True, stable=True)
    selected = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., :k], True)
    selected = selected.view(grid.shape)
    if d_mask is not None and k < selected[0, 0].numel():  # else masked tokens are selected, too
        selected = selected & d_mask
    if rule == "paper":
        real = selected if d_mask is None else selected & d_mask
        retrieved = real.any(-1)
        maxima = _first_maximum(grid.masked_fill(~real, -torch.inf)).masked_fill(~retrieved, 0.0)
    else:
        zero = torch.zeros((), dtype=grid.dtype, device=grid.device)
        maxima = _first_maximum(torch.where(selected | grid.isnan(), grid, zero))
    maxima = maxima.masked_fill(~kept, 0.0) * weights
    counted = retrieved & kept & (weights != 0) if rule == "paper" else maxima > 0
    return maxima.sum(1) / counted.sum(1, dtype=grid.dtype).clamp_min(least)


def _first_maximum(x: Tensor) -> Tensor:
    """Take maxima over the last dim; the gradient goes to the first of equals."""
    return x.gather(-1, x.detach().argmax(-1, keepdim=True)).squeeze(-1)
