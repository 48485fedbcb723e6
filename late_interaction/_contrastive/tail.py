"""The pairs whose softmax weight is not negligible, found while the scores of all pairs pass.

A pair's weight is ``exp(logit - log_sum)`` with the log-sum-exp of its row, which grows while blocks pass and
is at least the label's logit from the start. So a pair that will be above the threshold is above it when it
passes: the list misses none. What it holds too much is dropped once the sums are known.

Where a panel has too many such pairs to be listed, or the list is full, the panel is marked as dense: the
backward goes through its blocks as it does without a list.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from late_interaction._contrastive.problem import LIST_BYTES, Problem
from late_interaction._contrastive.softmax import RunningSoftmax
from late_interaction._contrastive.tokens import Block

_DENSE_SHARE = 0.04  # of a panel's pairs; above it whole blocks take less time than a list
_PAIR_BYTES = 12  # int32 row and column, and a logit
_ROUNDING = 1e-3  # logits of the same pair differ by less from one kernel to another


@dataclass
class PairList:
    """Pairs by row and column of one shard, with their logits; and the panels that were not listed."""

    capacity: int = field(default_factory=lambda: LIST_BYTES // _PAIR_BYTES)
    total: int = 0
    rows: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    dense: set[tuple[Block, int]] = field(default_factory=set)  # blocks of queries, first documents of blocks

    def add_panel(self, marks: Tensor, logits: Tensor, rows: Block, blocks: list[Block]) -> None:
        """Lists the marked pairs of a panel, blocks of documents of a block of queries. Waits for the
        device, to learn how many there are."""
        count = int(marks.count_nonzero())
        if count > max(_DENSE_SHARE * marks.numel(), marks.shape[0]) or self.total + count > self.capacity:
            self.dense.update((rows, block[0]) for block in blocks)
            return
        row, column = marks.nonzero(as_tuple=True)
        self.logits.append(logits[row, column])
        self.rows.append(row.add_(rows[0]).to(torch.int32))
        self.columns.append(column.add_(blocks[0][0]).to(torch.int32))
        self.total += count

    def tensors(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, columns and logits of all listed pairs."""
        none = torch.empty(0, dtype=torch.int32, device=like.device)
        if not self.rows:
            return none, none, like.new_empty(0)
        return torch.cat(self.rows), torch.cat(self.columns), torch.cat(self.logits)


def mark(
    p: Problem,
    logits: Tensor,
    sums: tuple[RunningSoftmax, RunningSoftmax | None],
    labels_logits: tuple[Tensor, Tensor | None],
    at: tuple[Block, Block],
    own: bool,
) -> Tensor:
    """bool, which of a panel's pairs may have a weight above the threshold. ``sums`` have seen the panel."""
    rows, columns = at
    lowest = _lowest(p.tail, p.classes, sums[0], labels_logits[0], rows)
    marks = logits.lt(lowest.unsqueeze(1))  # so that NaN is not below
    if sums[1] is not None:
        assert labels_logits[1] is not None
        lowest = _lowest(p.tail, p.column_classes, sums[1], labels_logits[1], columns)
        marks.logical_and_(logits.lt(lowest))
    marks.logical_not_()
    if own:
        p.labels.mark(marks, rows, columns)
    return marks


def _lowest(tail: float, classes: int, sums: RunningSoftmax, label_logits: Tensor, block: Block) -> Tensor:
    part = slice(*block)
    # A row without a label, or with NaN in it, has a NaN here, which fmax leaves out.
    bound = torch.fmax(sums.log_sum(part), label_logits[part])
    return bound + (math.log(tail / classes) - _ROUNDING)
