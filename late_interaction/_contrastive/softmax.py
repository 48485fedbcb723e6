"""Softmax over rows of logits that are never in memory all at once, and cross entropy from its sums.

For each row three sums run over the logits ``l`` seen so far, relative to their maximum ``m``:

    weight = sum exp(l - m)        moment = sum exp(l - m) (l - m)        total = sum (l - m)

A new block moves the maximum and rescales the sums (the online softmax of https://arxiv.org/abs/1805.02867).
``log weight - (l_target - m)`` is the cross entropy of a row. It keeps its precision where the logits are
large and the loss is small, which a log-sum-exp in one number would lose. A logit of minus infinity, of a
document that is no candidate, has no part in any sum.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class RunningSoftmax(NamedTuple):
    """The running sums of rows: ``moment`` if the temperature has a gradient, ``total`` with smoothing."""

    maximum: Tensor
    weight: Tensor
    moment: Tensor | None
    total: Tensor | None
    seen: Tensor | None  # logits of each row so far, beside ``total``

    @staticmethod
    def empty(n: int, like: Tensor, dtype: torch.dtype, moment: bool, total: bool) -> "RunningSoftmax":
        def full(value: float) -> Tensor:
            return torch.full((n,), value, dtype=dtype, device=like.device)

        return RunningSoftmax(
            maximum=full(torch.finfo(dtype).min),  # finite, if all logits are -inf too
            weight=full(0.0),
            moment=full(0.0) if moment else None,
            total=full(0.0) if total else None,
            seen=full(0.0) if total else None,
        )

    def add(self, begin: int, logits: Tensor) -> None:
        """Add logits ``[rows, columns]`` to the rows from ``begin`` on."""
        rows = slice(begin, begin + logits.shape[0])
        if logits.numel() == 0:
            return
        maximum = torch.maximum(self.maximum[rows], logits.amax(1))
        # Sums over no logits are not rescaled: infinity times zero is NaN.
        moved = (self.maximum[rows] - maximum).masked_fill_(self.weight[rows] == 0, 0.0)
        scale = moved.exp()
        relative = logits - maximum.unsqueeze(1)
        if self.total is not None and self.seen is not None:
            none = relative == -torch.inf
            self.total[rows].addcmul_(moved, self.seen[rows]).add_(relative.masked_fill(none, 0.0).sum(1))
            self.seen[rows].add_((~none).sum(1))
        if self.moment is not None:
            self.moment[rows].addcmul_(moved, self.weight[rows]).mul_(scale)
            weights = relative.exp()
            finite = relative.clamp_min_(torch.finfo(relative.dtype).min)  # 0 times minus infinity is NaN
            self.moment[rows].add_(finite.mul_(weights).sum(1))
        else:
            weights = relative.exp_()
        self.weight[rows].mul_(scale).add_(weights.sum(1))
        self.maximum[rows] = maximum

    def losses(self, target: Tensor, smoothing: float) -> Tensor:
        """Return the cross entropy of each row. ``target``: the labels' logit, relative to the maximum."""
        log = self.weight.log()
        loss = log - target
        if self.total is not None and self.seen is not None:
            loss = loss.lerp(log - self.total / self.seen, smoothing)
        return loss

    def logit_products(self, of_labels: Tensor, smoothing: float) -> Tensor:
        """Sum logit times the gradient with respect to it, over each row's logits.

        ``of_labels``: the same sum of the labels' term, with logits relative to the maximum.
        """
        assert self.moment is not None
        mean = self.moment / self.weight
        product = mean - of_labels
        if self.total is not None and self.seen is not None:
            product = product.lerp(mean - self.total / self.seen, smoothing)
        return product

    def log_sum(self, rows: slice = slice(None)) -> Tensor:
        """Return the log-sum-exp of the logits seen so far; very low if there are none."""
        return self.maximum[rows] + self.weight[rows].clamp_min(torch.finfo(self.weight.dtype).tiny).log()


@dataclass(frozen=True)
class SoftmaxWeights:
    """The numbers of each row from which the backward computes gradients.

    ``scale * exp(logit - maximum) - smoothed`` is the gradient with respect to a score, without the label's
    term.
    """

    maximum: Tensor
    scale: Tensor  # factor / weight
    factor: Tensor  # gradient with respect to a row's cross entropy, divided by the temperature
    some_ignored: bool  # rows may have a factor of 0: they get no gradient, even if their logits are NaN
    smoothed: Tensor | None = None  # smoothing's term

    def of_block(self, begin: int, logits: Tensor) -> Tensor:
        """Return the gradients for logits ``[rows, columns]`` of the rows from ``begin`` on."""
        rows = slice(begin, begin + logits.shape[0])
        weights = (logits - self.maximum[rows].unsqueeze(1)).exp_().mul_(self.scale[rows].unsqueeze(1))
        if self.smoothed is not None:
            weights.sub_(torch.where(logits == -torch.inf, 0.0, self.smoothed[rows].unsqueeze(1)))
        if self.some_ignored:
            weights.masked_fill_((self.factor[rows] == 0).unsqueeze(1), 0.0)
        return weights

    def of_pairs(self, rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients for listed logits, and the factors of their ``rows``, which are int64."""
        factor = self.factor[rows]
        weights = (logits - self.maximum[rows]).exp_().mul_(self.scale[rows])
        if self.some_ignored:
            weights.masked_fill_(factor == 0, 0.0)
        return weights, factor
