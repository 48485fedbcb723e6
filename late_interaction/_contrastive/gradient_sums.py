"""The sums of the gradient of one side of a batch."""

import torch
from torch import Tensor

from late_interaction._contrastive.sequences import Block, rows, sum_dtype
from late_interaction.tokens import Tokens


class Sums:
    """The sums of one side's gradient, if it is ``needed``.

    They are one ``whole`` in the sums' dtype, or made a block at a time, each written to the result when it
    is finished; or the gradient comes at once (``take``). Memory is allocated when something is added.
    """

    def __init__(self, tokens: Tokens, needed: bool, whole: bool) -> None:
        self.tokens, self.needed, self.in_blocks = tokens, needed, needed and not whole
        self._whole: Tensor | None = None
        self._out: Tensor | None = None
        self._block: Tensor | None = None
        self._taken: Tensor | None = None
        self.result: Tensor | None = None  # of the open block, in the dtype of the tokens

    @property
    def begun(self) -> bool:
        return not (self._whole is None and self._out is None and self._taken is None)

    @property
    def whole(self) -> Tensor | None:
        if self._whole is None and self.needed and not self.in_blocks:
            values = self.tokens.values
            if self._taken is not None:
                self._whole, self._taken = self._taken.to(sum_dtype(values)), None
            else:
                self._whole = torch.zeros(values.shape, dtype=sum_dtype(values), device=values.device)
        return self._whole

    def take(self, gradient: Tensor) -> None:
        """Take the whole gradient, in the dtype of the tokens, if nothing has been added."""
        self._taken = gradient.view(self.tokens.values.shape)

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of all tokens, in their dtype, if one is needed. It may be overwritten."""
        so_far = self.whole  # or None, where they are not whole
        so_far = self._taken if so_far is None else so_far
        so_far = self._out if so_far is None else so_far
        if so_far is not None:
            so_far.add_(gradient)
        elif self.needed:
            self._taken = gradient

    def open(self, block: Block, at_once: bool = False) -> None:
        """Begin the sums of a block. ``at_once``: its gradient is written to ``result`` instead."""
        if self.in_blocks:
            if self._out is None:
                self._out = torch.empty_like(self.tokens.values, memory_format=torch.contiguous_format)
            part = self._out[rows(self.tokens, block)]
            if at_once:
                self.result = part
            else:
                self._block = torch.zeros_like(part, dtype=sum_dtype(part))

    def close(self, block: Block) -> None:
        if self._out is not None and self._block is not None:
            self._out[rows(self.tokens, block)] = self._block
        self._block = self.result = None

    def of(self, block: Block) -> Tensor | None:
        """Return the sums of a block, which is the open one unless the sums are whole."""
        return self._block if self.whole is None else self.whole[rows(self.tokens, block)]

    def finished(self) -> Tensor | None:
        values = self.tokens.values
        if self._taken is not None:
            return self._taken
        if self._whole is not None:
            return self._whole.to(values.dtype)
        if self._out is None and self.needed:
            return torch.zeros_like(values, memory_format=torch.contiguous_format)
        return self._out
