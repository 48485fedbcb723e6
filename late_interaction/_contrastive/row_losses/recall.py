"""The surrogate of recall@k: https://arxiv.org/abs/2108.11179."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._contrastive.row_losses.rows import Panel, RowSums


@dataclass(frozen=True)
class Recall:
    """``1 - mean over k of sigmoid((k - 1 - ahead) / temperature)``, where ``ahead`` is the sum of
    ``sigmoid(logit - positive's logit)`` over all other documents: a smooth count of those ahead of it."""

    k: tuple[int, ...]
    rank_temperature: float
    keeps: bool  # a backward will follow

    def empty(self, positives: Tensor) -> RowSums:
        sums = {"positive": positives, "ahead": torch.zeros_like(positives)}
        return sums | ({"slope_of_ahead": torch.zeros_like(positives)} if self.keeps else {})

    def add(self, sums: RowSums, panel: Panel) -> None:
        steps = self._steps(sums, panel)
        sums["ahead"][panel.part].add_(steps.sum(1))
        if self.keeps:
            sums["slope_of_ahead"][panel.part].add_(_slope(steps).sum(1))

    def losses(self, sums: RowSums) -> Tensor:
        each = [((k - 1 - sums["ahead"]) / self.rank_temperature).sigmoid() for k in self.k]
        recalls = torch.stack(each, 1)
        if self.keeps:
            by_ahead = _slope(recalls).mean(1) / self.rank_temperature
            sums["by_ahead"] = by_ahead
            sums["by_positive"] = -by_ahead * sums["slope_of_ahead"]
        return 1 - recalls.mean(1)

    def weights(self, sums: RowSums, panel: Panel) -> Tensor:
        weights = _slope(self._steps(sums, panel)).mul_(sums["by_ahead"][panel.part].unsqueeze(1))
        return panel.set_labels(weights, sums["by_positive"])

    def _steps(self, sums: RowSums, panel: Panel) -> Tensor:
        x = panel.logits - sums["positive"][panel.part].unsqueeze(1)
        return panel.set_labels(x, torch.full_like(sums["positive"], -torch.inf)).sigmoid_()


def _slope(sigmoid: Tensor) -> Tensor:
    """The derivative of a sigmoid, from its value."""
    return sigmoid * (1 - sigmoid)
