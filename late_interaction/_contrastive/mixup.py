"""Similarity mixup (SiMix, https://arxiv.org/abs/2108.11179): scores of virtual queries and documents.

They are mixed from the scores of two examples of a class. Every ``size`` consecutive examples are a group,
whose pairs are numbered by their second member: (0, 1), (0, 2), (1, 2), (0, 3), ... So mix ``t`` of all
groups is a strided slice of the mixes, and so are its two members among the examples, even where the last
group is not full.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._checks.losses import IGNORED
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.sequences import Block


@dataclass(frozen=True)
class Mixes:
    """The mixes of the queries, or of the documents."""

    size: int  # examples of a group
    count: int  # examples
    share: Tensor  # [mixes], in (0, 1): of the first member
    real: Tensor  # bool [mixes], of those whose members are of one class

    def block(self, examples: Block) -> Block:
        begin, end = (_mixes_of(n, self.size) for n in examples)
        return begin, end

    def numbers(self, examples: Block) -> Block:
        """Return the numbers that the mixes of a block have behind all examples."""
        begin, end = self.block(examples)
        return self.count + begin, self.count + end

    def mix(self, x: Tensor, examples: Block) -> Tensor:
        """Mix ``x [rows, examples]`` to ``[rows, mixes]``; minus infinity for those that are not real."""
        block = slice(*self.block(examples))
        mixed = x.new_empty(x.shape[0], block.stop - block.start)
        for to, first, second, share in self._members(mixed, x, block):
            torch.add(first * share, second * (1 - share), out=to)
        return mixed.masked_fill_(~self.real[block], -torch.inf)

    def add_back(self, x: Tensor, mixed: Tensor, examples: Block) -> None:
        """Add the gradient of the mixes to that of the examples ``x``, in place."""
        for grad, first, second, share in self._members(mixed, x, slice(*self.block(examples))):
            first.add_(grad * share)
            second.add_(grad * (1 - share))

    def _members(self, mixed: Tensor, x: Tensor, block: slice) -> Iterator[tuple[Tensor, ...]]:
        pairs = [(i, j) for j in range(self.size) for i in range(j)]
        for t, (i, j) in enumerate(pairs):
            to, share = mixed[:, t :: len(pairs)], self.share[block][t :: len(pairs)]
            yield to, x[:, i :: self.size][:, : len(share)], x[:, j :: self.size], share


@dataclass(frozen=True)
class Mixup:
    queries: Mixes
    documents: Mixes
    labels: Labels  # of queries and their mixes, among documents and their mixes
    order: Tensor  # [queries, P], which sorts the labels of each query

    @staticmethod
    def of(
        size: int, index: Tensor, documents: int, dtype: torch.dtype, generator: torch.Generator | None
    ) -> "Mixup":
        """Draw the mixes of queries and of documents from their labels, ``index [queries, P]``.

        Queries with the same documents are of one class, and so are documents with the same queries.
        """
        queries, device = len(index), index.device
        index, order = index.sort(1)
        first, second = _members(queries, size, device)
        same = (index[first] == index[second]).all(1, keepdim=True)
        every = torch.cat((index, index[first].masked_fill(~same, IGNORED)))
        of_mixes = _mixes_among(every, size)
        counts, of_both = (
            Labels(x).by_column(torch.ones_like(x, dtype=dtype), n)
            for x, n in ((index, documents), (of_mixes[:queries], _mixes_of(documents, size)))
        )
        first, second = _members(documents, size, device)
        real = (of_both > 0) & (of_both == counts[first]) & (of_both == counts[second])
        if len(real):
            of_mixes = of_mixes.masked_fill(~real[of_mixes.clamp_min(0)], IGNORED)
        of_mixes = torch.where(of_mixes == IGNORED, IGNORED, of_mixes + documents)
        labels = Labels(torch.cat((every, of_mixes), 1))
        shares = [_shares(len(x), dtype, device, generator) for x in (every[queries:], real)]
        sides = Mixes(size, queries, shares[0], (every[queries:] != IGNORED).any(1))
        return Mixup(sides, Mixes(size, documents, shares[1], real), labels, order)

    def positives(self, positives: Tensor) -> Tensor:
        """Return the label logits of all rows, mixes included, from those of the queries."""
        positives = positives.gather(1, self.order)
        mixed = self.queries.mix(positives.t(), (0, self.queries.count)).t()
        every = torch.cat((positives, mixed))
        P = every.shape[1]
        first, second = torch.triu_indices(P, P, 1, device=every.device)
        place = self.labels.index[:, P:] - self.documents.count  # type: ignore[index]
        share = self.documents.share
        share = share[place.clamp_min(0)] if len(share) else torch.zeros_like(place, dtype=every.dtype)
        return torch.cat((every, every[:, first] * share + every[:, second] * (1 - share)), 1)


def _mixes_of(examples: int, size: int) -> int:
    """Count the pairs of members of groups of ``size`` examples."""
    groups, rest = divmod(examples, size)
    return groups * (size * (size - 1) // 2) + rest * (rest - 1) // 2


def _members(examples: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    second, first = torch.tril_indices(size, size, -1, device=device)
    mix = torch.arange(_mixes_of(examples, size), device=device)
    group, t = mix // len(first) * size, mix % len(first)
    return group + first[t], group + second[t]


def _mixes_among(index: Tensor, size: int) -> Tensor:
    """Return the mix of every two labels of a row, by number: ``[rows, P * (P - 1) / 2]``, or IGNORED."""
    P = index.shape[1]
    i, j = torch.triu_indices(P, P, 1, device=index.device)
    first, second = index[:, i], index[:, j]
    there = (first != IGNORED) & (first // size == second // size)
    a, b = first % size, second % size
    number = first // size * (size * (size - 1) // 2) + b * (b - 1) // 2 + a
    return torch.where(there, number, IGNORED)


def _shares(n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Tensor:
    drawn = torch.rand(n, dtype=dtype, device=generator.device if generator else device, generator=generator)
    # 0 times the minus infinity of a pair that is left out would be NaN.
    return drawn.clamp_min_(torch.finfo(dtype).tiny).to(device, non_blocking=True)
