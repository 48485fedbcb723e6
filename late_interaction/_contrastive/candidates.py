"""Which documents each query is compared with. The logit of any other is minus infinity."""

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
    bound: Tensor | None = None  # the greatest logit of a negative that follows from it

    @property
    def are_all(self) -> bool:
        """Whether no document is left out; hard negatives may be."""
        return self.excluded is None and self.margin is None

    def of_own(self, logits: Tensor, rows: Block) -> Tensor:
        """Keep the candidates among the hard negatives of a block of queries, in place."""
        if self.own is not None:
            logits.masked_fill_(~self.own[slice(*rows)], -torch.inf)
        if self.bound is not None:
            logits.masked_fill_(logits > self.bound[slice(*rows)].unsqueeze(1), -torch.inf)
        return logits

    def of_documents(
        self, logits: Tensor, rows: Block, columns: Block, first: int, labels: Labels | None
    ) -> Tensor:
        """Keep the candidates in a block of a shard, and the labels there, in place. ``first``: the number of
        the shard's first document."""
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
