"""The pairs whose softmax weight is not negligible, found while the scores of all pairs pass.

A pair's weight is ``exp(logit - log_sum)`` with the log-sum-exp of its row, which grows while panels pass and
is at least the label's logit from the start. So a pair whose weight will be above the threshold is above it
when it passes: the list misses none. Pairs that fall below it are dropped once the sums are known.

If a panel has too many such pairs to be listed, or the list is full, the panel is dense: the backward goes
through its blocks as it does without a list.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from late_interaction._contrastive.sequences import Block

LIST_BYTES = 32 << 20  # that the list of pairs may take from the forward to the backward
_DENSE_SHARE = 0.04  # of a panel's pairs; above it whole blocks take less time than a list
_PAIR_BYTES = 12  # int32 row and column, and a logit

Panel = tuple[Tensor, Block, list[Block]]  # logits of a block of queries with a run of blocks of documents


@dataclass
class _Marked:
    """A panel whose marked pairs are counted on the device, while the host goes on."""

    marks: Tensor
    logits: Tensor
    rows: Block
    blocks: list[Block]
    count: Tensor  # on the host, valid once the device has reached the event
    counted: torch.cuda.Event | None

    @staticmethod
    def of(marks: Tensor, logits: Tensor, rows: Block, blocks: list[Block]) -> "_Marked":
        count, counted = marks.count_nonzero(), None
        if marks.is_cuda:
            pinned = torch.empty((), dtype=count.dtype, device="cpu", pin_memory=True)
            count = pinned.copy_(count, non_blocking=True)
            counted = torch.cuda.Event()
            counted.record(torch.cuda.current_stream(marks.device))
        return _Marked(marks, logits, rows, blocks, count, counted)

    def wait(self) -> int:
        """Return how many pairs are marked, once the device has counted them."""
        if self.counted is not None:
            self.counted.synchronize()
        return int(self.count)


@dataclass
class PairList:
    """The listed pairs of one shard, by row and column, with their logits; and its dense panels.

    A panel is listed when the next one comes, so that the device scores that one while the host waits for a
    count. ``finish`` lists the last one: in the backward if it is the only one, so that the forward never
    waits.
    """

    capacity: int = field(default_factory=lambda: LIST_BYTES // _PAIR_BYTES)
    total: int = 0
    rows: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    dense: set[tuple[Block, int]] = field(default_factory=set)  # blocks of queries, first documents of blocks
    # The shard has one panel alone. It is marked by the sums of all shards, so every listed pair counts.
    alone: bool = False
    own: bool = False  # labels lie in the shard
    held: Panel | None = None  # the one panel, until the sums over all shards are known
    last: _Marked | None = None  # not listed yet

    def add_panel(self, marks: Tensor, logits: Tensor, rows: Block, blocks: list[Block]) -> None:
        """Take the marked pairs of a panel, and list those of the panel before."""
        marked = _Marked.of(marks, logits, rows, blocks)
        self.finish()
        self.last = marked

    def finish(self) -> None:
        """List the panel that was taken last. Waits until the device has counted its marked pairs."""
        if self.last is None:
            return
        at, self.last = self.last, None
        count, pairs = at.wait(), at.marks.numel()
        if count > max(_DENSE_SHARE * pairs, at.marks.shape[0]) or self.total + count > self.capacity:
            self.dense.update((at.rows, block[0]) for block in at.blocks)
            return
        row, column = torch.nonzero_static(at.marks, size=count).unbind(1)
        self.logits.append(at.logits[row, column])
        # PyTorch indexes by int64, and the backward that finishes such a list uses it at once.
        dtype = torch.int64 if self.alone else torch.int32
        self.rows.append(_shifted(row, at.rows[0], dtype))
        self.columns.append(_shifted(column, at.blocks[0][0], dtype))
        self.total += count

    def tensors(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        none = torch.empty(0, dtype=torch.int32, device=like.device)
        if not self.rows:
            return none, none, like.new_empty(0)
        rows, columns, logits = (
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in (self.rows, self.columns, self.logits)
        )
        return rows, columns, logits

    # ---- for autograd ----

    def save(self, like: Tensor) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], "PairList"]]:
        """Return tensors for autograd to save, and a function, free of them, that restores the list."""
        dense, alone, last = self.dense, self.alone, self.last
        if last is None:
            return [*self.tensors(like)], lambda x: PairList(
                rows=[x[0]], columns=[x[1]], logits=[x[2]], dense=dense, alone=alone
            )
        rest = last.rows, last.blocks, last.count, last.counted
        return [last.marks, last.logits], lambda x: PairList(
            dense=set(dense), alone=alone, last=_Marked(x[0], x[1], *rest)
        )


def _shifted(places: Tensor, by: int, dtype: torch.dtype) -> Tensor:
    return (places + by if by else places).to(dtype)
