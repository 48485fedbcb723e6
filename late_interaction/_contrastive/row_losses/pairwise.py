"""The pairwise cross entropy of a query's document and its hardest negative."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.row_losses.rows import Panel, RowSums
from late_interaction._contrastive.tokens import Block


@dataclass(frozen=True)
class Pairwise:
    """``softplus(hardest - label)``, where ``hardest`` is the greatest logit of all others, among equals
    that of the lowest number. 0 for a query without a negative."""

    learns: bool  # the temperature has a gradient

    def empty(self, positives: Tensor) -> RowSums:
        return {
            "label": torch.full_like(positives, torch.nan),
            "hardest": torch.full_like(positives, -torch.inf),
            "place": torch.full_like(positives, -1, dtype=torch.int64),
        }

    def add(self, sums: RowSums, panel: Panel) -> None:
        if panel.labels is not None:
            panel.labels.read(sums["label"], panel.logits, panel.rows, panel.columns)
        others = panel.set_labels(panel.logits, torch.full_like(sums["label"], -torch.inf))
        found, place = others.max(1)  # the first of equals
        place += panel.first
        hardest, at = sums["hardest"][panel.part], sums["place"][panel.part]
        # NaN is harder than any number, as torch.max has it.
        harder = (found > hardest) | found.isnan() | ((found == hardest) & (place < at))
        at.copy_(torch.where(harder, place, at))
        hardest.copy_(torch.maximum(hardest, found))

    def losses(self, sums: RowSums) -> Tensor:
        gap = sums["hardest"] - sums["label"]
        sums["pull"] = gap.sigmoid()
        if self.learns:
            sums["moment"] = torch.where(sums["pull"] == 0, 0.0, sums["pull"] * gap)
        return -logsigmoid(-gap)

    def weights(self, sums: RowSums, panel: Panel) -> Tensor:
        pull, weights = sums["pull"][panel.part], torch.zeros_like(panel.logits)
        if weights.numel():
            place = sums["place"][panel.part] - panel.first
            inside = (place >= 0) & (place < weights.shape[1])
            place = place.clamp(0, weights.shape[1] - 1)
            weights.scatter_(1, place.unsqueeze(1), torch.where(inside, pull, 0.0).unsqueeze(1))
        return panel.set_labels(weights, -sums["pull"])

    def pairs(self, sums: RowSums, labels: Labels | None, shard: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, columns and derivatives of the pairs with documents of a shard, whose numbers among those of
        all processes are given; the derivative is 0 where a query's hardest negative lies elsewhere. With
        ``labels`` each query's pair with its label as well."""
        pull, place = sums["pull"], sums["place"]
        rows = torch.arange(len(pull), device=pull.device)
        inside = (place >= shard[0]) & (place < shard[1])
        columns, amount = torch.where(inside, place - shard[0], 0), torch.where(inside, pull, 0.0)
        if labels is None:
            return rows, columns, amount
        own = rows if labels.index is None else labels.index.clamp_min(0)
        return torch.cat((rows, rows)), torch.cat((columns, own)), torch.cat((amount, -pull))
