"""Which documents each query is compared with. The logit of any other is minus infinity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._contrastive.sequences import Block


@dataclass(frozen=True)
class Candidates:
    own: Tensor | None = None  # bool [queries, each], of hard negatives; None: all of them

    def of_own(self, logits: Tensor, rows: Block) -> Tensor:
        """Keep the candidates among the hard negatives of a block of queries, in place."""
        return logits if self.own is None else logits.masked_fill_(~self.own[slice(*rows)], -torch.inf)
