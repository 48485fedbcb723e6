"""Lists of embeddings of different lengths, packed end to end a block at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from late_interaction.tokens import Tokens


@dataclass(frozen=True)
class Ragged:
    items: list[Tensor]  # each [L_i, d]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> list[int]:
        return [len(x) for x in self.items]

    def packed(self, start: int, end: int, device: torch.device) -> Tokens:
        items = self.items[start:end]
        lengths = [len(x) for x in items]
        offsets = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)
        return Tokens._made(torch.cat(items).to(device), None, offsets, offsets.new_empty((max(lengths), 0)))


def blocks(sizes: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Consecutive items whose sizes sum to at most ``most``, or one item: (start, end)."""
    start = total = 0
    for index, size in enumerate(sizes):
        if total + size > most and index > start:
            yield start, index
            start, total = index, 0
        total += size
    yield start, len(sizes)
