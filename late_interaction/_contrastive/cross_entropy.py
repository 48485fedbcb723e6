"""The cross entropy by blocks, from running sums of the softmax and the pairs that a tail leaves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from late_interaction._contrastive import pair_list
from late_interaction._contrastive.backward import Found
from late_interaction._contrastive.blocks import Grid
from late_interaction._contrastive.call import Call, left_out_of, reduced, row_factor, split, times_number
from late_interaction._contrastive.forward import label_logits
from late_interaction._contrastive.labels import Targets
from late_interaction._contrastive.pair_list import PairList
from late_interaction._contrastive.sequences import Block, sum_dtype
from late_interaction._contrastive.softmax import RunningSoftmax, SoftmaxWeights

_HELD_BYTES = 32 << 20  # of logits, until all pairs are scored


@dataclass
class _Shard:
    """The state of the forward over one shard, beside the sums: its list of pairs, if one is wanted."""

    own: bool  # labels lie in the shard
    found: PairList | None = None
    # Finds bounds from the labels' logits, where pairs are listed, while the device scores the first panel.
    find_starts: Callable[[], tuple[Tensor | None, Tensor | None]] | None = None
    starts: tuple[Tensor | None, Tensor | None] | None = None
    holds: bool = False  # the one panel, until the sums over all shards are known
    held: tuple[Tensor, Block, list[Block]] | None = None


@dataclass
class CrossEntropy:
    """The sums of rows and columns, the logits of labels, and the list of each shard."""

    call: Call
    rows: RunningSoftmax
    columns: RunningSoftmax | None
    of_labels: Tensor  # [queries, P]
    found: list[PairList] = field(default_factory=list)
    shards: list[_Shard] = field(default_factory=list)

    @staticmethod
    def start(call: Call) -> "CrossEntropy":
        return CrossEntropy.of(call, call.no_logits())

    @staticmethod
    def of(call: Call, of_labels: Tensor) -> "CrossEntropy":
        """Make sums over no logits. ``of_labels``: the labels' logits, NaN for those still to be read."""
        sums = (of_labels, of_labels.dtype, call.learns, call.smoothing > 0)
        columns = RunningSoftmax.empty(call.own_documents, *sums) if call.symmetric else None
        return CrossEntropy(call, RunningSoftmax.empty(len(of_labels), *sums), columns, of_labels)

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
            call.labels.read(self.of_labels, logits, rows, columns)
        if self.columns is not None:
            self.columns.add(columns[0], logits.t())
        if shard.holds:
            shard.held = logits, rows, run
        elif shard.find_starts is not None:
            shard.starts = shard.find_starts() if shard.starts is None else shard.starts
            self._list(shard, (logits, rows, run), shard.starts)

    def end(self, step: int) -> None:
        for earlier in self.found:  # the host waits while the device scores this shard
            earlier.finish()
        shard = self.shards[-1]
        if shard.found is not None:
            self.found.append(shard.found)
        if self.columns is not None and self.call.ring.world > 1:
            self.columns = _pass_columns(self.call, step, self.columns)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the loss, and how many rows and columns it is the mean over."""
        for shard in self.shards:
            if shard.held is not None:  # listed by the sums of all shards
                self._list(shard, shard.held, (None, None))
        self.shards.clear()
        found = loss_and_counts(self.call, self._sides())
        for pairs in self.found:
            if not pairs.alone:
                pairs.finish()
        return found

    def _holds(self, grid: Grid) -> bool:
        """Tell whether a shard's one panel is held until the sums of all shards are known, and then listed.

        Then every listed pair counts, and the host learns their number in the backward. Sums of columns that
        travel are complete on other processes.
        """
        one_panel = len(grid.q_blocks) == 1 and len(grid.runs) == 1
        if not one_panel or (self.call.symmetric and self.call.ring.world > 1):
            return False
        held = sum(shard.held[0].numel() for shard in self.shards if shard.held is not None)
        return (len(grid.q) * len(grid.d) + held) * sum_dtype(grid.q.values).itemsize <= _HELD_BYTES

    def _sides(self) -> "list[Side]":
        labels, form = self.call.labels, self.call.multi_positive
        logits = self.of_labels - self.rows.maximum.unsqueeze(1)
        found = [(self.rows, Targets.of_rows(labels, logits, form))]
        if self.columns is not None:
            logits = self.of_labels - labels.of_columns(self.columns.maximum, len(logits))
            targets = Targets.of_columns(labels, logits, self.call.own_documents, form)
            found.append((self.columns, targets))
        return found

    def _starts(self, grid: Grid, own: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the greatest label logit of each row, and of each column: lower bounds of log-sum-exps.

        They are known before the sums have seen them. None for another process's documents: the sums have.
        """
        if not own:
            return None, None
        logits, labels = label_logits(self.call, grid, self.of_labels), self.call.labels
        of_columns = None if self.columns is None else labels.peaks(logits, self.call.own_documents)
        return torch.where(logits.isnan(), -torch.inf, logits).amax(1), of_columns

    def _list(
        self,
        shard: _Shard,
        panel: tuple[Tensor, Block, list[Block]],
        of_labels: tuple[Tensor | None, Tensor | None],
    ) -> None:
        if shard.found is not None:
            logits, rows, run = panel
            at, sums = (rows, (run[0][0], run[-1][1])), (self.rows, self.columns)
            shard.found.add_panel(
                pair_list.mark(self.call, logits, sums, of_labels, at, shard.own), logits, rows, run
            )

    # ---- what is kept ----

    def save(self) -> tuple[list[Tensor | None], Callable[[Call, Sequence[Any]], "CrossEntropy"]]:
        """Return all tensors for autograd to save, and a function that restores the state from them."""
        lists = [found.save(self.rows.weight) for found in self.found]
        groups: list[Sequence[Any]] = [x for x in (self.rows, self.columns) if x is not None]
        sides, again = len(groups), [of_list for _, of_list in lists]
        groups += [[self.of_labels], *(tensors for tensors, _ in lists)]
        sizes = [len(tensors) for tensors in groups]

        def rebuild(call: Call, saved: Sequence[Any]) -> CrossEntropy:
            parts = split(saved, sizes)
            sums = [RunningSoftmax(*x) for x in parts[:sides]]
            found = [of_list(x) for of_list, x in zip(again, parts[sides + 1 :], strict=True)]
            return CrossEntropy(call, sums[0], sums[1] if sides > 1 else None, parts[sides][0], found)

        return [x for tensors in groups for x in tensors], rebuild

    # ---- backward ----

    def derive(self, grad: Tensor, counts: Tensor) -> Tensor | None:
        call, labels, sides = self.call, self.call.labels, self._sides()
        self._amounts = factors(call, grad, sides, counts)
        self._rows = self._of_sums(self.rows, self._amounts[0])
        amount = self._rows.factor.unsqueeze(1) * sides[0][1].share  # at each label
        if self.columns is None:
            self._at_labels = amount * (1 - call.smoothing)
            return None
        x = self._of_sums(self.columns, self._amounts[1])
        amount = amount + labels.of_columns(x.factor, len(amount)) * sides[1][1].share
        self._at_labels = amount * (1 - call.smoothing)
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
        return Weights(self.call, self._rows, columns, self._at_labels if step == 0 else None, step)

    def listed(self, step: int) -> Found | None:
        if not self.found:
            return None
        pairs = self.found[step]
        pairs.finish()
        return Found(pairs.tensors(self.rows.maximum), pairs.dense, pairs.alone)

    def of_numbers(self, needs_T: bool, needs_bias: bool) -> tuple[Tensor | None, None]:
        if not needs_T:
            return None, None
        return temperature_gradient(self.call, self._sides(), self._amounts), None


Side = tuple[RunningSoftmax, Targets]  # of the rows, or of the columns


def loss_and_counts(call: Call, sides: list[Side]) -> tuple[Tensor, Tensor]:
    losses = [sums.losses(targets.logit, call.smoothing) for sums, targets in sides]
    losses, total, counts = reduced(call, losses)
    share = call.scale / len(losses)
    if total is None:
        total = losses[0]
        if len(losses) > 1:  # the mean over the documents of a query
            back = call.labels.of_columns(losses[1], len(total))
            total = total + (back * call.labels.even(back)).sum(1)
    return total * share, counts


def _pass_columns(call: Call, step: int, columns: RunningSoftmax) -> RunningSoftmax:
    """Send the sums of a shard's columns on with its documents, and take those of the next shard."""
    ring = call.ring
    leaving = torch.stack([x for x in columns if x is not None])
    coming = ring.owner(step + 1)
    arriving = leaving.new_empty(leaving.shape[0], ring.documents[coming])
    (arrived,) = ring.exchange([leaving], [arriving], "sums").wait()
    places: Iterator[Any] = iter(arrived.unbind(0))
    taken: list[Any] = [None if x is None else next(places) for x in columns]
    return RunningSoftmax(*taken)


# ---- derivatives ----


def factors(call: Call, grad: Tensor, sides: list[Side], counts: Tensor) -> list[Tensor]:
    """Return the gradients with respect to the cross entropies of rows, and of columns."""
    weights = [sums.weight for sums, _ in sides]
    grad, found = grad.to(weights[0].dtype) * (call.scale / len(sides)), []
    for i, (like, left_out) in enumerate(zip(weights, left_out_of(call, weights[0]), strict=True)):
        each = grad if call.reduction != "mean" else grad / counts[i]
        if call.reduction == "none" and i == 1:
            of_labels = grad.unsqueeze(1).expand(-1, call.labels.most)
            each = call.labels.by_column(of_labels * call.labels.even(of_labels), len(like))
        found.append(row_factor(each, left_out, like))
    return found


def temperature_gradient(call: Call, sides: list[Side], amounts: list[Tensor]) -> Tensor:
    T = call.temperature
    assert isinstance(T, Tensor)
    found = [
        times_number(sums.logit_products(targets.product, call.smoothing), amount, sums.weight)
        for (sums, targets), amount in zip(sides, amounts, strict=True)
    ]
    return (-torch.stack(found).sum() / T).to(T.dtype)


@dataclass(frozen=True)
class Weights:
    """The gradients with respect to the scores of one shard. ``columns``: of a symmetric loss."""

    call: Call
    rows: SoftmaxWeights
    columns: SoftmaxWeights | None
    at_labels: Tensor | None  # what is subtracted at each label, where labels lie in the shard
    step: int

    def of_block(self, scores: Tensor, rows: Block, columns: Block) -> Tensor:
        call = self.call
        logits = call.kept(scores / call.temperature, self.step, rows, columns)
        weights = self.rows.of_block(rows[0], logits)
        if self.columns is not None:
            weights.add_(self.columns.of_block(columns[0], logits.t()).t())
        if self.at_labels is not None:
            call.labels.subtract(weights, self.at_labels, rows, columns)
        return weights

    def of_own(self, scores: Tensor, rows: Block) -> Tensor:
        logits = self.call.candidates.of_own(scores.div_(self.call.temperature), rows)
        return self.rows.of_block(rows[0], logits)

    def of_pairs(
        self, rows: Tensor, columns: Tensor, logits: Tensor, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of listed pairs, and mark those that count: labels, or above the threshold."""
        rows, columns = rows.long(), columns.long()  # each index would be converted again
        amount, factor = self.rows.of_pairs(rows, logits)
        counts = None if final else self._above(amount, factor, self.call.classes)
        if self.columns is not None:
            back, factor = self.columns.of_pairs(columns, logits)
            if counts is not None:
                counts.logical_or_(self._above(back, factor, sum(self.call.ring.queries)))
            amount += back
        if self.at_labels is not None:
            hits = self.call.labels.of_pairs(rows, columns)
            counts = None if counts is None else counts.logical_or_(hits.any(1))
            amount -= torch.where(hits, self.at_labels[rows], 0.0).sum(1)
        return amount, counts

    def _above(self, amount: Tensor, factor: Tensor, classes: int) -> Tensor:
        return ~(amount.abs() < factor.abs() * (self.call.tail / classes))  # so that NaN counts
