"""Losses of each query that follow from sums over its logits.

Such a loss has two methods over a panel of logits: ``add``, what the forward keeps of it in the sums, and
``weights``, the derivatives in its logits once the sums are known. The cross entropy, whose columns count
too and whose pairs may be listed, has a pass of its own (:mod:`late_interaction._contrastive.function`).
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.problem import Problem
from late_interaction._contrastive.tokens import Block

RowSums = dict[str, Tensor]  # of all queries, by name


@dataclass(frozen=True)
class Panel:
    """Logits of a block of queries with documents that follow one another, or with their hard negatives."""

    logits: Tensor  # [rows, columns], which a loss may overwrite
    rows: Block
    first: int  # the number of the first column among the documents of all processes and hard negatives
    columns: Block = (0, 0)  # the documents' numbers among those that labels speak of
    labels: Labels | None = None  # None: no label lies here

    @property
    def part(self) -> slice:
        return slice(*self.rows)

    def negate_labels(self, x: Tensor) -> Tensor:
        """In place, of ``[rows, columns]``: the sign of labels."""
        if self.labels is not None:
            self.labels.negate(x, self.rows, self.columns)
        return x

    def set_labels(self, x: Tensor, values: Tensor) -> Tensor:
        """In place: ``values[row]`` (of all rows) at the label of each row."""
        if self.labels is not None:
            self.labels.write(x, values, self.rows, self.columns)
        return x


class RowLoss(Protocol):
    """A loss of each query."""

    def empty(self, positives: Tensor) -> RowSums:
        """Sums over no logits. ``positives``: the logit of each query with its label, or NaN."""

    def add(self, sums: RowSums, panel: Panel) -> None:
        """What the forward keeps of a panel."""

    def losses(self, sums: RowSums) -> Tensor:
        """The loss of each query once all logits have been added. What ``weights`` needs of it joins the
        sums. So does, where the temperature has a gradient, ``moment``: the sum over a query's logits of
        logit times derivative; and with a bias ``slope``, the sum of the derivatives."""

    def weights(self, sums: RowSums, panel: Panel) -> Tensor:
        """The derivatives of each query's loss in the logits of a panel."""


@dataclass(frozen=True)
class RowWeights:
    """The derivatives of a loss in the scores of one shard of documents."""

    p: Problem
    loss: RowLoss
    sums: RowSums
    factor: Tensor  # the derivative in each row's loss, divided by the temperature
    first: int  # the number of the shard's first document among those of all processes
    own: bool  # the documents are those that labels speak of

    def of_block(self, scores: Tensor, rows: Block, columns: Block) -> Tensor:
        labels = self.p.labels if self.own else None
        panel = Panel(scores / self.p.temperature, rows, self.first + columns[0], columns, labels)
        return self._scaled(panel)

    def of_own(self, scores: Tensor, rows: Block) -> Tensor:
        return self._scaled(Panel(scores.div_(self.p.temperature), rows, self.p.classes - self.p.each))

    def _scaled(self, panel: Panel) -> Tensor:
        factor = self.factor[panel.part].unsqueeze(1)
        weights = self.loss.weights(self.sums, panel).mul_(factor)
        if self.p.labels.index is not None:
            weights.masked_fill_(factor == 0, 0.0)  # rows that are left out, NaN included
        return weights

    def of_pairs(
        self, rows: Tensor, columns: Tensor, logits: Tensor, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        factor = self.factor[rows]
        amount = (logits * factor).masked_fill_(factor == 0, 0.0)  # logits: derivatives, of Pairwise.pairs
        return amount, None if final else amount != 0


@dataclass
class RowPass:
    """The forward of a loss over one shard."""

    loss: RowLoss
    sums: RowSums
    first: int
    own: bool

    def take(self, p: Problem, logits: Tensor, rows: Block, run: list[Block]) -> None:
        columns = (run[0][0], run[-1][1])
        labels = p.labels if self.own else None
        if logits.numel():
            self.loss.add(self.sums, Panel(logits, rows, self.first + columns[0], columns, labels))
