"""One side of a batch: queries, documents or hard negatives, padded or packed, and parts of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

Block = tuple[int, int]  # sequences from the first up to the second


@dataclass(frozen=True)
class Tokens:
    """Padded: ``values [n, L, d]`` and perhaps a ``mask [n, L]``. Packed: ``values [tokens, d]`` with int32
    ``offsets [n + 1]`` on their device and ``bounds``, the same numbers on the host (a ``range`` where all
    sequences have one length)."""

    values: Tensor
    mask: Tensor | None = None
    offsets: Tensor | None = None
    bounds: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.bounds) - 1 if self.packed else self.values.shape[0]

    @property
    def packed(self) -> bool:
        return self.offsets is not None

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        if isinstance(self.bounds, range):
            return self.bounds.step if len(self) else 0
        if self.packed:
            return max((b - a for a, b in pairwise(self.bounds)), default=0)
        return self.values.shape[1]

    @property
    def is_all(self) -> bool:
        """Whether every token belongs to a sequence."""
        return self.rows((0, len(self))) == slice(0, self.values.shape[0])

    @property
    def mean_bytes(self) -> float:
        """Bytes of a sequence of mean length."""
        return self.values.numel() * self.values.itemsize / max(len(self), 1)

    def part(self, block: Block) -> "Tokens":
        """The sequences of a block. A view; the offsets of packed ones begin at 0 again."""
        begin, end = block
        if block == (0, len(self)) and self.is_all:
            return self
        if self.offsets is not None:
            first, last = self.bounds[begin], self.bounds[end]
            bounds = _moved(self.bounds[begin : end + 1], first)
            return Tokens(self.values[first:last], None, self.offsets[begin : end + 1] - first, bounds)
        return Tokens(self.values[begin:end], None if self.mask is None else self.mask[begin:end])

    def rows(self, block: Block) -> slice:
        """Where the block lies in the first dim of ``values``."""
        return slice(self.bounds[block[0]], self.bounds[block[1]]) if self.packed else slice(*block)

    def as_packed(self) -> "Tokens":
        """Padded tokens without a mask as packed ones, without a copy where they are contiguous."""
        if self.packed:
            return self
        n, L, d = self.values.shape
        offsets = torch.arange(n + 1, dtype=torch.int32, device=self.values.device) * L
        bounds = range(0, (n + 1) * L, L) if L else (0,) * (n + 1)
        return Tokens(self.values.reshape(n * L, d), None, offsets, bounds)

    def blocks(self, most: int) -> list[Block]:
        """Blocks of up to ``most`` sequences of mean length, of about equal size."""
        n = len(self)
        if not self.packed:
            return even_blocks(n, most)
        tokens = self.bounds[-1] - self.bounds[0]
        limit, found, begin = max(1.0, most * tokens / max(n, 1)), [], 0
        for end in range(1, n + 1):
            full = end < n and (self.bounds[end + 1] - self.bounds[begin] > limit or end - begin >= 4 * most)
            if full or end == n:
                found.append((begin, end))
                begin = end
        return found


def _moved(bounds: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(bounds, range):
        return range(bounds.start - by, bounds.stop - by, bounds.step)
    return tuple(x - by for x in bounds)


def even_blocks(n: int, most: int) -> list[Block]:
    """``n`` sequences in blocks of about equal size and at most ``most`` (at least 1)."""
    most = max(1, most)
    size = -(-n // -(-n // most)) if n else 1
    if size >= 64:
        size = min(most, -(-size // 32) * 32)  # whole tiles of query rows
    return [(begin, min(begin + size, n)) for begin in range(0, n, size)]


def pack_kept(tokens: Tokens) -> Tokens:
    """Padded tokens with a mask -> packed ones, those that the mask keeps, in their order. Differentiable;
    a copy, and the host waits for the device."""
    if tokens.packed or tokens.mask is None:
        return tokens
    kept = tokens.mask.flatten().nonzero().squeeze(1)
    lengths = tokens.mask.sum(1, dtype=torch.int32)
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
    values = tokens.values.flatten(0, 1).index_select(0, kept)
    return Tokens(values, None, offsets, tuple(offsets.tolist()))
