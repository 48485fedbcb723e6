"""The loss of a batch that is small enough to keep all of its scores and winners."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from late_interaction._contrastive.blocks import Kernels
from late_interaction._contrastive.labels import ignored
from late_interaction._contrastive.problem import KEPT_BYTES, KEPT_BYTES_WITH_LIST, Problem
from late_interaction._contrastive.tokens import Tokens
from late_interaction._scoring.precision import without_autocast
from late_interaction._torch import _is_any_autocast_enabled


def fits(kernels: Kernels, q: Tokens, d: Tokens, keeps: bool, kept_bytes: int | None, listed: bool) -> bool:
    """Whether scores, and for a backward winners, stay within ``kept_bytes`` (None: the device's default).
    Single tokens have no winners, and their products go by blocks at every size."""
    if kernels.way == "matrix":
        return False
    each = (4 if d.packed else 2) * q.longest if keeps else 0
    budget = default_budget(q.values.device.type, listed) if kept_bytes is None else kept_bytes
    return len(q) * len(d) * (4 + each) <= budget


def default_budget(device_type: str, listed: bool) -> int:
    """Bytes that scores and winners may take where the caller names none."""
    budget = KEPT_BYTES[device_type]
    return min(budget, KEPT_BYTES_WITH_LIST) if listed and device_type == "cuda" else budget


def all_scores(p: Problem, q: Tokens, d: Tokens, h: Tokens | None, keeps: bool) -> Tensor:
    """Scores of all pairs of queries and documents, differentiable where ``keeps``. Hard negatives of which
    no query has any are part of the graph, and have a gradient of zeros."""
    scores = p.kernels.scores_and_winners(q, d)[0] if keeps else p.kernels.scores(q, d)
    return scores if h is None or p.each else scores + h.values[:0].sum(dtype=scores.dtype)


def loss(p: Problem, q: Tokens, d: Tokens, h: Tokens | None, reduction: str, keeps: bool) -> Tensor:
    """Differentiable by the operators' own formulas."""
    with without_autocast(q.values.device.type) if _is_any_autocast_enabled() else nullcontext():
        scores = all_scores(p, q, d, h, keeps)
        every = scores
        if h is not None and p.each:
            every = torch.cat((scores, p.kernels.own_scores(q, h, p.each)[0]), 1)
        left_out = ignored(p.labels.index)
        if left_out is not None:  # a gradient of 0 times NaN is NaN
            every = every.masked_fill(left_out.unsqueeze(1), 0.0)
        every = every / p.temperature
        index = p.labels.index
        labels = torch.arange(len(q), device=scores.device) if index is None else index
        rows = cross_entropy(every, labels, label_smoothing=p.smoothing, reduction=reduction)
        if p.column_labels is None:
            return rows
        index = p.column_labels.index
        back = labels if index is None else index
        logits = every if every.shape == scores.shape and left_out is None else scores / p.temperature
        columns = cross_entropy(logits.t(), back, label_smoothing=p.smoothing, reduction=reduction)
        if reduction == "none" and p.labels.index is not None:
            columns = columns[labels.clamp_min(0)].masked_fill(labels < 0, 0.0)
        return (rows + columns) / 2
