"""The cross entropy by blocks: running sums of the softmax, the list of pairs that a tail leaves, and the
derivatives that follow from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from late_interaction._contrastive import pair_list
from late_interaction._contrastive.backward import Found
from late_interaction._contrastive.blocks import Grid
from late_interaction._contrastive.call import Call, reduced, row_factor, split, times_number
from late_interaction._contrastive.forward import label_logits
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.pair_list import PairList
from late_interaction._contrastive.sequences import Block, sum_dtype
from late_interaction._contrastive.softmax import RunningSoftmax, SoftmaxWeights

_HELD_BYTES = 32 << 20  # of logits, until all pairs are scored


@dataclass
class _Shard:
    """What the forward of one shard finds beside the sums: the list of pairs, where one is wanted."""

    own: bool  # the documents are those that labels speak of
    found: PairList | None = None
    # Logits of the labels, where pairs are listed. They are found behind the first panel's scores: a device
    # has these to do meanwhile.
    find_starts: Callable[[], tuple[Tensor, Tensor | None]] | None = None
    starts: tuple[Tensor, Tensor | None] | None = None
    holds: bool = False  # the one panel, until the sums over all shards are known
    held: tuple[Tensor, Block, list[Block]] | None = None


@dataclass
class CrossEntropy:
    """The sums of the queries' rows and of the documents' columns, and the list of each shard."""

    call: Call
    rows: RunningSoftmax
    columns: RunningSoftmax | None
    found: list[PairList] = field(default_factory=list)
    shards: list[_Shard] = field(default_factory=list)

    @staticmethod
    def start(call: Call) -> "CrossEntropy":
        return CrossEntropy.of(call, call.q.values.new_empty(len(call.q), dtype=sum_dtype(call.q.values)))

    @staticmethod
    def of(call: Call, like: Tensor) -> "CrossEntropy":
        """``like``: numbers of the queries."""
        sums = (like, like.dtype, call.learns, call.smoothing > 0)
        columns = RunningSoftmax.empty(call.ring.documents[call.ring.rank], *sums) if call.symmetric else None
        return CrossEntropy(call, RunningSoftmax.empty(len(like), *sums), columns)

    # ---- forward ----

    @property
    def lists(self) -> bool:
        return self.call.tail > 0

    def add_own(self, logits: Tensor, rows: Block) -> None:
        self.rows.add(rows[0], logits)

    def begin(self, grid: Grid | None, step: int) -> None:
        call = self.call
        shard = _Shard(step == 0)
        if call.tail and call.keeps and grid is not None:
            shard.holds = self._holds(grid)
            shard.found = PairList(alone=shard.holds)
            shard.find_starts = lambda: self._starts(grid, shard.own)
        self.shards.append(shard)

    def take(self, logits: Tensor, rows: Block, run: list[Block]) -> None:
        call, shard, columns = self.call, self.shards[-1], (run[0][0], run[-1][1])
        self.rows.add(rows[0], logits)
        if shard.own:
            call.labels.read(self.rows.target, logits, rows, columns)
        if self.columns is not None:
            self.columns.add(columns[0], logits.t())
            if shard.own and call.column_labels is not None:
                call.column_labels.read(self.columns.target, logits.t(), columns, rows)
        if shard.holds:
            shard.held = logits, rows, run
        elif shard.find_starts is not None:
            shard.starts = shard.find_starts() if shard.starts is None else shard.starts
            self._list(shard, (logits, rows, run), shard.starts)

    def end(self, step: int) -> None:
        for (
            earlier
        ) in self.found:  # behind this shard's scores: the device has them to do while the host waits
            earlier.finish()
        shard = self.shards[-1]
        if shard.found is not None:
            self.found.append(shard.found)
        if self.columns is not None and self.call.ring.world > 1:
            self.columns = _pass_columns(self.call, step, self.columns)

    def result(self) -> tuple[Tensor, Tensor]:
        """The loss, and how many rows and columns it is the mean over."""
        of_labels = self.rows.target, None if self.columns is None else self.columns.target
        for shard in self.shards:
            if shard.held is not None:  # listed by the sums of all shards
                self._list(shard, shard.held, of_labels)
        self.shards.clear()
        found = loss_and_counts(self.call, self.rows, self.columns)
        for pairs in self.found:
            if not pairs.alone:
                pairs.finish()
        return found

    def _holds(self, grid: Grid) -> bool:
        """Whether the panel of a shard is listed once the sums of all shards are known. Then every pair of
        the list counts, and the host learns how many there are in the backward. Sums of columns that travel
        are known elsewhere."""
        if not grid.one_panel or (self.call.symmetric and self.call.ring.world > 1):
            return False
        held = sum(shard.held[0].numel() for shard in self.shards if shard.held is not None)
        return (len(grid.q) * len(grid.d) + held) * sum_dtype(grid.q.values).itemsize <= _HELD_BYTES

    def _starts(self, grid: Grid, own: bool) -> tuple[Tensor, Tensor | None]:
        """The logits of queries with their labels, and of documents with theirs. They are part of every sum
        in the end, and known before it begins. For another process's documents they have been read."""
        if not own:
            return self.rows.target, None if self.columns is None else self.columns.target
        logits = label_logits(self.call, grid, self.rows.target)
        labels = self.call.column_labels
        return logits, None if labels is None else labels.chosen(logits, torch.nan)

    def _list(
        self,
        shard: _Shard,
        panel: tuple[Tensor, Block, list[Block]],
        of_labels: tuple[Tensor, Tensor | None],
    ) -> None:
        if shard.found is not None:
            logits, rows, run = panel
            at, sums = (rows, (run[0][0], run[-1][1])), (self.rows, self.columns)
            shard.found.add_panel(
                pair_list.mark(self.call, logits, sums, of_labels, at, shard.own), logits, rows, run
            )

    # ---- what is kept ----

    def save(self) -> tuple[list[Tensor | None], Callable[[Call, Sequence[Any]], "CrossEntropy"]]:
        """All tensors, for autograd to keep, and what makes the same of them."""
        lists = [found.save(self.rows.weight) for found in self.found]
        groups: list[list[Any]] = [x.tensors() for x in (self.rows, self.columns) if x is not None]
        sides, again = len(groups), [of_list for _, of_list in lists]
        groups += [tensors for tensors, _ in lists]
        sizes = [len(tensors) for tensors in groups]

        def rebuild(call: Call, saved: Sequence[Any]) -> CrossEntropy:
            parts = split(saved, sizes)
            sums = [RunningSoftmax.of(x) for x in parts[:sides]]
            found = [of_list(x) for of_list, x in zip(again, parts[sides:], strict=True)]
            return CrossEntropy(call, sums[0], sums[1] if sides > 1 else None, found)

        return [x for tensors in groups for x in tensors], rebuild

    # ---- backward ----

    def derive(self, grad: Tensor, counts: Tensor) -> Tensor | None:
        self._amounts = factors(self.call, grad, self.rows, self.columns, counts)
        self._rows = self._of_sums(self.rows, self._amounts[0])
        if self.columns is None:
            return None
        x = self._of_sums(self.columns, self._amounts[1])
        return torch.stack([x.maximum, x.scale, x.factor] + ([] if x.smoothed is None else [x.smoothed]))

    def _of_sums(self, sums: RunningSoftmax, amount: Tensor) -> SoftmaxWeights:
        factor, ignored = amount / self.call.temperature, self.call.labels.index is not None
        smoothed = None if sums.seen is None else factor * self.call.smoothing / sums.seen
        return SoftmaxWeights(sums.maximum, factor / sums.weight, factor, ignored, smoothed)

    def weights(self, step: int, travelled: Tensor | None) -> "Weights":
        columns = None
        if travelled is not None:
            maximum, scale, factor, *smoothed = travelled.unbind(0)
            columns = SoftmaxWeights(maximum, scale, factor, True, *smoothed)
        return Weights(self.call, self._rows, columns, step == 0)

    def listed(self, step: int) -> Found | None:
        if not self.found:
            return None
        pairs = self.found[step]
        pairs.finish()
        return Found(pairs.tensors(self.rows.maximum), pairs.dense, pairs.alone)

    def of_numbers(self, needs_T: bool, needs_bias: bool) -> tuple[Tensor | None, None]:
        if not needs_T:
            return None, None
        return temperature_gradient(self.call, self.rows, self.columns, self._amounts), None


def loss_and_counts(
    call: Call, rows: RunningSoftmax, columns: RunningSoftmax | None
) -> tuple[Tensor, Tensor]:
    losses = [sums.losses(call.smoothing) for sums in (rows, columns) if sums is not None]
    losses, total, counts = reduced(call, losses)
    share = call.scale / len(losses)
    if total is None:
        total = losses[0] if columns is None else losses[0] + call.labels.chosen(losses[1])
    return total * share, counts


def _pass_columns(call: Call, step: int, columns: RunningSoftmax) -> RunningSoftmax:
    """Send the sums of a shard's columns on with its documents, and take those of the next shard."""
    ring, parts = call.ring, columns.tensors()
    leaving = torch.stack([x for x in parts if x is not None])
    coming = ring.owner(step + 1)
    arriving = leaving.new_empty(leaving.shape[0], ring.documents[coming])
    (arrived,) = ring.exchange([leaving], [arriving], "sums").wait()
    places = iter(arrived.unbind(0))
    return RunningSoftmax.of([None if x is None else next(places) for x in parts])


# ---- derivatives ----


def factors(
    call: Call, grad: Tensor, rows: RunningSoftmax, columns: RunningSoftmax | None, counts: Tensor
) -> list[Tensor]:
    """The derivatives of the loss in the cross entropies of rows, and of columns."""
    sides: list[tuple[RunningSoftmax, Labels]] = [(rows, call.labels)]
    if columns is not None and call.column_labels is not None:
        sides.append((columns, call.column_labels))
    grad, found = grad.to(rows.weight.dtype) * (call.scale / len(sides)), []
    for i, (sums, labels) in enumerate(sides):
        each = grad if call.reduction != "mean" else grad / counts[i]
        if call.reduction == "none" and i == 1:
            each = labels.chosen(grad)
        found.append(row_factor(each, labels, sums.weight))
    return found


def temperature_gradient(
    call: Call, rows: RunningSoftmax, columns: RunningSoftmax | None, amounts: list[Tensor]
) -> Tensor:
    """``amounts``: what :func:`factors` returned."""
    T = call.temperature
    assert isinstance(T, Tensor)
    total = times_number(rows.logit_products(call.smoothing), amounts[0], rows.weight)
    if columns is not None:
        total = total + times_number(columns.logit_products(call.smoothing), amounts[1], rows.weight)
    return (-total / T).to(T.dtype)


@dataclass(frozen=True)
class Weights:
    """The derivatives in the scores of one shard. ``columns`` where the loss is symmetric."""

    call: Call
    rows: SoftmaxWeights
    columns: SoftmaxWeights | None
    own: bool

    def of_block(self, scores: Tensor, rows: Block, columns: Block) -> Tensor:
        logits, call = scores / self.call.temperature, self.call
        weights = self.rows.of_block(rows[0], logits)
        self._subtract(weights, self.rows.factor, call.labels, (rows, columns))
        if self.columns is not None:
            back = self.columns.of_block(columns[0], logits.t())
            self._subtract(back, self.columns.factor, call.column_labels, (columns, rows))
            weights.add_(back.t())
        return weights

    def of_own(self, scores: Tensor, rows: Block) -> Tensor:
        logits = self.call.candidates.of_own(scores.div_(self.call.temperature), rows)
        return self.rows.of_block(rows[0], logits)

    def _subtract(
        self, weights: Tensor, factor: Tensor, labels: Labels | None, at: tuple[Block, Block]
    ) -> None:
        if self.own and labels is not None:
            labels.subtract(weights, factor * (1 - self.call.smoothing), *at)

    def of_pairs(
        self, rows: Tensor, columns: Tensor, logits: Tensor, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What counts are labels, and pairs above the threshold."""
        rows, columns = rows.long(), columns.long()  # each index would be converted again
        amount, factor = self.rows.of_pairs(rows, logits)
        labels = self.call.labels.of_pairs(rows, columns) if self.own else None
        counts = None if final else self._above(amount, factor, self.call.classes)
        if labels is not None:
            counts = None if counts is None else counts.logical_or_(labels)
            amount -= torch.where(labels, factor, 0.0)
        if self.columns is not None:
            back, factor = self.columns.of_pairs(columns, logits)
            if counts is not None:
                counts.logical_or_(self._above(back, factor, self.call.column_classes))
            if labels is not None:
                back -= torch.where(labels, factor, 0.0)
            amount += back
        return amount, counts

    def _above(self, amount: Tensor, factor: Tensor, classes: int) -> Tensor:
        return ~(amount.abs() < factor.abs() * (self.call.tail / classes))  # so that NaN counts
