"""The labels of rows: their places in blocks and lists, their term of the cross entropy; and candidates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._checks.losses import IGNORED
from late_interaction._checks.options import MultiPositive
from late_interaction._contrastive.sequences import Block


@dataclass(frozen=True)
class Labels:
    """The labels of each row. Values of labels are ``[rows, P]``.

    ``index``: int64 ``[rows, P]``, up to ``P`` labels of each row, each once, padded with IGNORED. None: row
    ``i`` has label ``i``.
    """

    index: Tensor | None

    @property
    def most(self) -> int:
        """Return ``P``, how many labels a row may have."""
        return 1 if self.index is None else self.index.shape[1]

    @property
    def left_out(self) -> Tensor | None:
        """Mark the rows without a label: bool ``[rows]``; None: all have one."""
        return None if self.index is None else (self.index == IGNORED).all(1)

    def left_out_columns(self, like: Tensor, columns: int) -> Tensor | None:
        """Mark the columns that are no label: bool ``[columns]``; None: all are one. ``like``: ``[rows]``."""
        if self.index is None and len(like) == columns:
            return None
        ones = torch.ones_like(like).unsqueeze(1) if self.index is None else torch.ones_like(self.index)
        return self.by_column(ones, columns) == 0

    def at(self, place: int) -> "Labels":
        return self if self.index is None else Labels(self.index[:, place : place + 1])

    # ---- sums over labels ----

    def kept(self, values: Tensor, otherwise: float = 0.0) -> Tensor:
        """Replace ``values`` where there is no label."""
        return values if self.index is None else values.masked_fill(self.index == IGNORED, otherwise)

    def even(self, like: Tensor) -> Tensor:
        """Return the weights of the mean over the labels of each row."""
        found = self.kept(torch.ones_like(like))
        return found / found.sum(1, keepdim=True).clamp_min(1.0)

    def by_column(self, values: Tensor, columns: int) -> Tensor:
        """Sum the values of the rows that have each column as a label, with the same bits on every run."""
        sums = torch.zeros(columns + 1, dtype=torch.float64, device=values.device)
        if self.index is None:
            sums[: len(values)] = values[:, 0]
        else:  # IGNORED adds to a place behind the last column
            sums.index_put_((self._or_behind(columns),), values.double(), accumulate=True)
        return sums[:columns].to(values.dtype)

    def peaks(self, values: Tensor, columns: int) -> Tensor:
        """Find the greatest value of the rows that have each column as a label, or minus infinity."""
        found = values.new_full((columns + 1,), -torch.inf)
        if self.index is None:
            found[: len(values)] = values[:, 0]
        else:
            found.scatter_reduce_(0, self._or_behind(columns).flatten(), values.flatten(), "amax")
        return found[:columns]

    def of_columns(self, values: Tensor, rows: int) -> Tensor:
        """Return ``values[label]``, or 0 where there is no label."""
        if self.index is None:
            return values[:rows].unsqueeze(1)
        return self.kept(values[self.index.clamp_min(0)])

    def _or_behind(self, columns: int) -> Tensor:
        assert self.index is not None
        return self.index.masked_fill(self.index == IGNORED, columns)

    # ---- in a block ----

    def read(self, targets: Tensor, logits: Tensor, rows: Block, columns: Block) -> None:
        """Copy the labels' logits that lie in this block to ``targets``."""
        if self.index is None:
            targets[_common(rows, columns), 0] = _diagonal(logits, rows, columns)
            return
        part, place = targets[slice(*rows)], self.index[slice(*rows)] - columns[0]
        inside = (place >= 0) & (place < logits.shape[1])
        part.copy_(torch.where(inside, logits.gather(1, place.clamp(0, logits.shape[1] - 1)), part))

    def subtract(self, x: Tensor, amount: Tensor, rows: Block, columns: Block) -> None:
        if self.index is None:
            _diagonal(x, rows, columns).sub_(amount[_common(rows, columns), 0])
        else:
            x.sub_(self._placed(amount, rows, columns))

    def negate(self, x: Tensor, rows: Block, columns: Block) -> None:
        if self.index is None:
            _diagonal(x, rows, columns).neg_()
        else:
            torch.where(self.hits(rows, columns), -x, x, out=x)

    def write(self, x: Tensor, values: Tensor, rows: Block, columns: Block) -> None:
        if self.index is None:
            _diagonal(x, rows, columns).copy_(values[_common(rows, columns), 0])
        else:
            torch.where(self.hits(rows, columns), self._placed(values, rows, columns), x, out=x)

    def clear(self, marks: Tensor, rows: Block, columns: Block) -> None:
        """Set the labels' entries of bool ``[rows, columns]`` to False, in place."""
        if self.index is None:
            _diagonal(marks, rows, columns).fill_(False)
        else:
            marks.logical_and_(~self.hits(rows, columns))

    def hits(self, rows: Block, columns: Block) -> Tensor:
        """Mark the labels in a block: bool ``[rows, columns]``."""
        assert self.index is not None
        if self.most == 1:
            return self.index[slice(*rows)] == torch.arange(*columns, device=self.index.device)
        places = self._places(rows, columns)
        found = torch.zeros(len(places), columns[1] - columns[0] + 1, dtype=torch.bool, device=places.device)
        return found.scatter_(1, places, True)[:, :-1]

    def _placed(self, values: Tensor, rows: Block, columns: Block) -> Tensor:
        if self.most == 1:
            return torch.where(self.hits(rows, columns), values[slice(*rows)], 0.0)
        places = self._places(rows, columns)
        found = values.new_zeros(len(places), columns[1] - columns[0] + 1)
        return found.scatter_(1, places, values[slice(*rows)])[:, :-1]

    def _places(self, rows: Block, columns: Block) -> Tensor:
        """Return the labels' columns in a block; for those outside, the one behind the last."""
        assert self.index is not None
        place, count = self.index[slice(*rows)] - columns[0], columns[1] - columns[0]
        return place.masked_fill_((place < 0) | (place > count), count)

    def of_pairs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Mark the listed pairs that are a row and its label: bool ``[pairs, P]``."""
        return (rows.unsqueeze(1) if self.index is None else self.index[rows]) == columns.unsqueeze(1)


@dataclass(frozen=True)
class Targets:
    """The labels' term of the cross entropy of rows (or columns).

    ``logit``: the mean of their logits, or the log-sum-exp. ``share``: its gradient with respect to these
    logits, ``[rows, P]``. ``product``: the sum of logits times shares. Logits are relative to a number of
    each row (or column).
    """

    logit: Tensor
    share: Tensor
    product: Tensor

    @staticmethod
    def of_rows(labels: Labels, logits: Tensor, form: MultiPositive) -> "Targets":
        if labels.most == 1:
            return Targets(logits[:, 0], torch.ones_like(logits), logits[:, 0])
        share = labels.even(logits)
        product = logit = labels.kept(logits * share).sum(1)
        if form == "softmax":
            logit = labels.kept(logits, -torch.inf).logsumexp(1)
            share = labels.kept((logits - logit.unsqueeze(1)).exp())
            product = labels.kept(logits * share).sum(1)
        return Targets(logit, share, product)

    @staticmethod
    def of_columns(labels: Labels, logits: Tensor, columns: int, form: MultiPositive) -> "Targets":
        """Take as a column's labels the rows that have it as a label."""
        n = len(logits)
        if form == "softmax" and labels.index is not None:
            peaks = labels.peaks(logits, columns)
            logit = labels.by_column((logits - labels.of_columns(peaks, n)).exp(), columns).log() + peaks
            share = labels.kept((logits - labels.of_columns(logit, n)).exp())
        else:
            counts = labels.by_column(torch.ones_like(logits), columns)
            share = labels.kept(1 / labels.of_columns(counts, n))
            logit = labels.by_column(logits * share, columns)
        return Targets(logit, share, labels.by_column(logits * share, columns))


def _common(rows: Block, columns: Block) -> slice:
    """Return the range of numbers that are both a row's and a column's."""
    begin = max(rows[0], columns[0])
    return slice(begin, max(begin, min(rows[1], columns[1])))


def _diagonal(x: Tensor, rows: Block, columns: Block) -> Tensor:
    """View the entries of a block whose row and column have the same number; maybe none."""
    return x.diagonal(rows[0] - columns[0])


@dataclass(frozen=True)
class Candidates:
    """The documents that each query is compared with. The logits of others are minus infinity."""

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
