"""The cross entropy by blocks, from running sums of the softmax and the pairs that a tail leaves."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import scores_dtype
from late_interaction._contrastive.backward import Found
from late_interaction._contrastive.blocks import Grid
from late_interaction._contrastive.call import Call, left_out_of, reduced, row_factor, split, times_number
from late_interaction._contrastive.forward import label_logits
from late_interaction._contrastive.labels import Targets
from late_interaction._contrastive.pair_list import PairList, Panel
from late_interaction._contrastive.sequences import Block
from late_interaction._contrastive.softmax import RunningSoftmax, SoftmaxWeights

_HELD_BYTES = 32 << 20  # of logits, until all pairs are scored
_ROUNDING = 1e-3  # logits of the same pair differ by less from one kernel to another


_Bounds = tuple[Tensor | None, Tensor | None]  # of rows, and of columns


@dataclass
class CrossEntropy:
    """The sums of rows and columns, the logits of labels, and the list of each shard."""

    call: Call
    rows: RunningSoftmax
    columns: RunningSoftmax | None
    of_labels: Tensor  # [queries, P]
    found: list[PairList] = field(default_factory=list)
    # The shard that the forward is in has these blocks, this list, and these bounds from its labels' logits.
    grid: Grid | None = None
    listing: PairList | None = None
    starts: _Bounds | None = None
    own: bool = False  # labels lie in it

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
        self.grid, self.own, self.listing, self.starts = grid, step == 0, None, None
        if self.call.tail and self.call.keeps and grid is not None:
            self.listing = PairList(alone=self._holds(grid), own=self.own)

    def take(self, logits: Tensor, rows: Block, run: list[Block]) -> None:
        columns = run[0][0], run[-1][1]
        self.rows.add(rows[0], logits)
        if self.own:
            self.call.labels.read(self.of_labels, logits, rows, columns)
        if self.columns is not None:
            self.columns.add(columns[0], logits.t())
        if self.listing is None:
            return
        if self.listing.alone:
            self.listing.held = logits, rows, run
            return
        if self.starts is None:  # the host asks for them while the device scores the first panel
            self.starts = self._starts()
        self._list(self.listing, (logits, rows, run), self.starts)

    def end(self, step: int) -> None:
        for earlier in self.found:  # the host waits while the device scores this shard
            earlier.finish()
        if self.listing is not None:
            self.found.append(self.listing)
        if self.columns is not None and self.call.ring.world > 1:
            self.columns = _pass_columns(self.call, step, self.columns)

    def result(self) -> tuple[Tensor, Tensor]:
        for pairs in self.found:
            if pairs.held is not None:  # listed by the sums of all shards
                self._list(pairs, pairs.held, (None, None))
                pairs.held = None
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
        held = sum(pairs.held[0].numel() for pairs in self.found if pairs.held is not None)
        return (len(grid.q) * len(grid.d) + held) * scores_dtype(grid.q.values).itemsize <= _HELD_BYTES

    def _sides(self) -> "list[Side]":
        labels, form = self.call.labels, self.call.multi_positive
        logits = self.of_labels - self.rows.maximum.unsqueeze(1)
        found = [(self.rows, Targets.of_rows(labels, logits, form))]
        if self.columns is not None:
            logits = self.of_labels - labels.of_columns(self.columns.maximum, len(logits))
            targets = Targets.of_columns(labels, logits, self.call.own_documents, form)
            found.append((self.columns, targets))
        return found

    def _starts(self) -> _Bounds:
        """Return the greatest label logit of each row, and of each column: lower bounds of log-sum-exps.

        They are known before the sums have seen them. None for another process's documents: the sums have.
        """
        if not self.own or self.grid is None:
            return None, None
        logits, labels = label_logits(self.call, self.grid, self.of_labels), self.call.labels
        of_columns = None if self.columns is None else labels.peaks(logits, self.call.own_documents)
        return torch.where(logits.isnan(), -torch.inf, logits).amax(1), of_columns

    def _list(self, pairs: PairList, panel: Panel, of_labels: _Bounds) -> None:
        """Mark a panel's labels, and its pairs whose weight may be above the threshold.

        The sums have seen the panel. ``of_labels``: the labels' logits, if the sums may not have seen these.
        """
        logits, rows, run = panel
        call, columns = self.call, (run[0][0], run[-1][1])
        lowest = _lowest(call.tail / call.classes, self.rows, of_labels[0], rows)
        below = logits.lt(lowest.unsqueeze(1))  # so that NaN is not below
        if self.columns is not None:
            share = call.tail / sum(call.ring.queries)
            below.logical_and_(logits.lt(_lowest(share, self.columns, of_labels[1], columns)))
        if pairs.own:
            call.labels.clear(below, rows, columns)
        pairs.add_panel(below.logical_not_(), logits, rows, run)

    # ---- what is kept ----

    def save(self) -> tuple[list[Tensor | None], Callable[[Call, Sequence[Any]], "CrossEntropy"]]:
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

    def begin_gradients(self, step: int, travelled: Tensor | None) -> None:
        self._step, self._columns = step, None
        if travelled is not None:
            maximum, scale, factor, *smoothed = travelled.unbind(0)
            self._columns = SoftmaxWeights(maximum, scale, factor, True, *smoothed)

    def of_block(self, scores: Tensor, rows: Block, columns: Block) -> Tensor:
        call = self.call
        logits = call.kept(scores / call.temperature, self._step, rows, columns)
        weights = self._rows.of_block(rows[0], logits)
        if self._columns is not None:
            weights.add_(self._columns.of_block(columns[0], logits.t()).t())
        if self._step == 0:
            call.labels.subtract(weights, self._at_labels, rows, columns)
        return weights

    def of_own(self, scores: Tensor, rows: Block) -> Tensor:
        logits = self.call.candidates.of_own(scores.div_(self.call.temperature), rows)
        return self._rows.of_block(rows[0], logits)

    def of_pairs(
        self, rows: Tensor, columns: Tensor, logits: Tensor, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of listed pairs, and mark those that count: labels, or above the threshold."""
        rows, columns = rows.long(), columns.long()  # each index would be converted again
        amount, factor = self._rows.of_pairs(rows, logits)
        counts = None if final else self._above(amount, factor, self.call.classes)
        if self._columns is not None:
            back, factor = self._columns.of_pairs(columns, logits)
            if counts is not None:
                counts.logical_or_(self._above(back, factor, sum(self.call.ring.queries)))
            amount += back
        if self._step == 0:
            hits = self.call.labels.of_pairs(rows, columns)
            counts = None if counts is None else counts.logical_or_(hits.any(1))
            at_labels = self._at_labels[rows]
            amount -= torch.where(hits, at_labels, 0.0).sum(1)
        return amount, counts

    def _above(self, amount: Tensor, factor: Tensor, classes: int) -> Tensor:
        return ~(amount.abs() < factor.abs() * (self.call.tail / classes))  # so that NaN counts

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


def _lowest(share: float, sums: RunningSoftmax, label_logits: Tensor | None, block: Block) -> Tensor:
    part = slice(*block)
    bound = sums.log_sum(part)
    if label_logits is not None:  # NaN of a row without a label, or with NaN in it: fmax leaves it out
        bound = torch.fmax(bound, label_logits[part])
    return bound + (math.log(share) - _ROUNDING)


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
