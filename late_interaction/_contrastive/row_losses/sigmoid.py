"""The sigmoid loss over all pairs, of SigLIP: https://arxiv.org/abs/2303.15343."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from late_interaction._contrastive.row_losses.rows import Panel, RowSums


@dataclass(frozen=True)
class Sigmoid:
    """``softplus(-(logit + bias))`` of a query's label plus ``softplus(logit + bias)`` of all others."""

    bias: Tensor | float
    learns: bool  # the temperature or the bias has a gradient

    def empty(self, positives: Tensor) -> RowSums:
        names = ("loss", "slope", "moment") if self.learns else ("loss",)
        return {name: torch.zeros_like(positives) for name in names}

    def add(self, sums: RowSums, panel: Panel) -> None:
        x = panel.negate_labels(panel.logits + self.bias)
        sums["loss"][panel.part].sub_(logsigmoid(-x).sum(1))
        if self.learns:
            weights = panel.negate_labels(x.sigmoid_())
            sums["slope"][panel.part].add_(weights.sum(1))
            sums["moment"][panel.part].add_(weights.mul_(panel.logits).sum(1))

    def losses(self, sums: RowSums) -> Tensor:
        return sums["loss"]

    def weights(self, sums: RowSums, panel: Panel) -> Tensor:
        return panel.negate_labels(panel.negate_labels(panel.logits + self.bias).sigmoid_())
