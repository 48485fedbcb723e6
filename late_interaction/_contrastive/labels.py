"""Which logit of a row is its label's, in blocks and in lists."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._contrastive.tokens import Block

IGNORED = -100  # as torch.nn.functional.cross_entropy's ignore_index


@dataclass(frozen=True)
class Labels:
    """``index`` int64 ``[rows]``, or None: row ``i`` has label ``i``."""

    index: Tensor | None

    def inverse(self, columns: int) -> "Labels":
        """The rows that columns are the label of, of labels that no two rows share."""
        if self.index is None:
            return self
        rows = torch.arange(len(self.index), device=self.index.device)
        found = self.index.new_full((columns + 1,), IGNORED)
        # Ignored rows write to a place behind the last column.
        found[torch.where(self.index == IGNORED, columns, self.index)] = rows
        return Labels(found[:columns])

    def read(self, targets: Tensor, logits: Tensor, rows: Block, columns: Block) -> None:
        """Takes over the labels' logits that lie in this block."""
        part = targets[slice(*rows)]
        if self.index is None:
            begin, end = max(rows[0], columns[0]), min(rows[1], columns[1])
            if begin < end:
                targets[begin:end] = _diagonal(logits, rows, columns)
            return
        place = self.index[slice(*rows)] - columns[0]
        inside = (place >= 0) & (place < logits.shape[1])
        found = logits.gather(1, place.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
        part.copy_(torch.where(inside, found, part))

    def subtract(self, weights: Tensor, amount: Tensor, rows: Block, columns: Block) -> None:
        """Subtracts ``amount[row]`` at the label of each row, in place."""
        if self.index is None:
            begin, end = max(rows[0], columns[0]), min(rows[1], columns[1])
            if begin < end:
                _diagonal(weights, rows, columns).sub_(amount[begin:end])
            return
        hits = self.hits(rows, columns)
        torch.where(hits, weights - amount[slice(*rows)].unsqueeze(1), weights, out=weights)

    def negate(self, x: Tensor, rows: Block, columns: Block) -> None:
        """Changes the sign at the label of each row, in place."""
        if self.index is None:
            begin, end = max(rows[0], columns[0]), min(rows[1], columns[1])
            if begin < end:
                _diagonal(x, rows, columns).neg_()
            return
        torch.where(self.hits(rows, columns), -x, x, out=x)

    def write(self, x: Tensor, values: Tensor, rows: Block, columns: Block) -> None:
        """Puts ``values[row]`` at the label of each row, in place."""
        if self.index is None:
            begin, end = max(rows[0], columns[0]), min(rows[1], columns[1])
            if begin < end:
                _diagonal(x, rows, columns).copy_(values[begin:end])
            return
        torch.where(self.hits(rows, columns), values[slice(*rows)].unsqueeze(1), x, out=x)

    def hits(self, rows: Block, columns: Block) -> Tensor:
        """bool ``[rows, columns]`` of labels in a block."""
        assert self.index is not None
        places = torch.arange(*columns, device=self.index.device)
        return self.index[slice(*rows)].unsqueeze(1) == places

    def mark(self, marks: Tensor, rows: Block, columns: Block) -> None:
        """Sets the labels' entries of bool ``[rows, columns]``."""
        if self.index is None:
            _diagonal(marks, rows, columns).fill_(True)
        else:
            marks.logical_or_(self.hits(rows, columns))

    def of_pairs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Which of the listed pairs are a row and its label."""
        return rows == columns if self.index is None else self.index[rows] == columns


def _diagonal(x: Tensor, rows: Block, columns: Block) -> Tensor:
    """The entries of a block whose row and column have the same number."""
    return x.diagonal(rows[0] - columns[0])


def ignored(index: Tensor | None) -> Tensor | None:
    return None if index is None else index == IGNORED
