"""Which logit of a row is its label's, in blocks and in lists."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._checks.losses import IGNORED
from late_interaction._contrastive.sequences import Block


@dataclass(frozen=True)
class Labels:
    """``index`` int64 ``[rows]``, or None: row ``i`` has label ``i``."""

    index: Tensor | None

    @property
    def left_out(self) -> Tensor | None:
        """bool ``[rows]`` of those without a label; None where all have one."""
        return None if self.index is None else self.index == IGNORED

    def inverse(self, columns: int) -> "Labels":
        """The rows that columns are the label of, of labels that no two rows share."""
        if self.index is None:
            return self
        rows = torch.arange(len(self.index), device=self.index.device)
        found = self.index.new_full((columns + 1,), IGNORED)
        # Rows that are left out write to a place behind the last column.
        found[torch.where(self.index == IGNORED, columns, self.index)] = rows
        return Labels(found[:columns])

    def chosen(self, values: Tensor, otherwise: float = 0.0) -> Tensor:
        """``values[label]`` of each row, and something else where there is no label."""
        if self.index is None:
            return values
        return values[self.index.clamp_min(0)].masked_fill(self.index < 0, otherwise)

    def read(self, targets: Tensor, logits: Tensor, rows: Block, columns: Block) -> None:
        """Take over the labels' logits that lie in this block."""
        if self.index is None:
            targets[_common(rows, columns)] = _diagonal(logits, rows, columns)
            return
        part, place = targets[slice(*rows)], self.index[slice(*rows)] - columns[0]
        inside = (place >= 0) & (place < logits.shape[1])
        found = logits.gather(1, place.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
        part.copy_(torch.where(inside, found, part))

    def subtract(self, x: Tensor, amount: Tensor, rows: Block, columns: Block) -> None:
        """Subtract ``amount[row]`` at the label of each row, in place."""
        if self.index is None:
            _diagonal(x, rows, columns).sub_(amount[_common(rows, columns)])
        else:
            torch.where(self.hits(rows, columns), x - amount[slice(*rows)].unsqueeze(1), x, out=x)

    def negate(self, x: Tensor, rows: Block, columns: Block) -> None:
        """Change the sign at the label of each row, in place."""
        if self.index is None:
            _diagonal(x, rows, columns).neg_()
        else:
            torch.where(self.hits(rows, columns), -x, x, out=x)

    def write(self, x: Tensor, values: Tensor, rows: Block, columns: Block) -> None:
        """Put ``values[row]`` at the label of each row, in place."""
        if self.index is None:
            _diagonal(x, rows, columns).copy_(values[_common(rows, columns)])
        else:
            torch.where(self.hits(rows, columns), values[slice(*rows)].unsqueeze(1), x, out=x)

    def mark(self, marks: Tensor, rows: Block, columns: Block) -> None:
        """Set the labels' entries of bool ``[rows, columns]``."""
        if self.index is None:
            _diagonal(marks, rows, columns).fill_(True)
        else:
            marks.logical_or_(self.hits(rows, columns))

    def hits(self, rows: Block, columns: Block) -> Tensor:
        """bool ``[rows, columns]`` of labels in a block."""
        assert self.index is not None
        places = torch.arange(*columns, device=self.index.device)
        return self.index[slice(*rows)].unsqueeze(1) == places

    def of_pairs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Which of the listed pairs are a row and its label."""
        return rows == columns if self.index is None else self.index[rows] == columns


def _common(rows: Block, columns: Block) -> slice:
    """Numbers that are both a row's and a column's."""
    begin = max(rows[0], columns[0])
    return slice(begin, max(begin, min(rows[1], columns[1])))


def _diagonal(x: Tensor, rows: Block, columns: Block) -> Tensor:
    """The entries of a block whose row and column have the same number; maybe none."""
    return x.diagonal(rows[0] - columns[0])
