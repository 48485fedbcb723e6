"""The candidates: documents that each query is compared with. The logits of others are minus infinity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.sequences import Block


@dataclass(frozen=True)
class Candidates:
    own: Tensor | None = None  # bool [queries, each], of hard negatives; None: all of them
    excluded: Labels | Tensor | None = None  # documents of all processes; or bool [queries, documents]
    margin: float | None = None  # by which a negative scores less than the query's labels
    bound: Tensor | None = None  # the greatest logit of a negative by this margin

    @property
    def are_all(self) -> bool:
        """Tell whether every document is a candidate; some hard negatives may be none."""
        return self.excluded is None and self.margin is None

    def of_own(self, logits: Tensor, rows: Block) -> Tensor:
        """Set the logits of hard negatives that are no candidates to minus infinity, in place."""
        if self.own is not None:
            logits.masked_fill_(~self.own[slice(*rows)], -torch.inf)
        if self.bound is not None:
            logits.masked_fill_(logits > self.bound[slice(*rows)].unsqueeze(1), -torch.inf)
        return logits

    def of_documents(
        self, logits: Tensor, rows: Block, columns: Block, first: int, labels: Labels | None
    ) -> Tensor:
        """Set the logits of documents that are neither candidates nor labels to minus infinity, in place.

        ``first``: the number of the shard's first document. ``labels``: None if they lie in another shard.
        """
        out, there = None, (first + columns[0], first + columns[1])
        if isinstance(self.excluded, Labels):
            out = self.excluded.hits(rows, there)
        elif self.excluded is not None:
            out = self.excluded[slice(*rows), slice(*there)].clone()
        if self.bound is not None:
            above = logits > self.bound[slice(*rows)].unsqueeze(1)
            out = above if out is None else out.logical_or_(above)
        if out is None:
            return logits
        if labels is not None:
            labels.clear(out, rows, columns)
        return logits.masked_fill_(out, -torch.inf)
