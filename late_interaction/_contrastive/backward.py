"""The backward pass over one shard of documents: winners are found again, block by block, unless the forward
kept them.

The larger side's gradients are finished a block at a time; of the smaller side's, one copy in the sums' dtype
exists. Where documents travel (:mod:`late_interaction._contrastive.ring`) the queries have such a copy, and
the own documents where more than two processes find gradients for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from late_interaction._contrastive.forward import own_blocks, own_part
from late_interaction._contrastive.kept import KeptBlocks
from late_interaction._contrastive.problem import Grid, Problem, sum_dtype
from late_interaction._contrastive.softmax import SoftmaxWeights
from late_interaction._contrastive.sums import Sums
from late_interaction._contrastive.tokens import Block, Tokens
from late_interaction.ops._library import operators as _ops

_WINNER_BYTES = 32 << 20  # of one call on listed pairs
_LISTED_SUM_BYTES = 64 << 20  # of a block's sums, where every pair is listed


Listed = tuple[Tensor, Tensor, Tensor]  # rows, columns and logits (or what a loss keeps instead) of pairs


class BlockWeights(Protocol):
    """The derivatives of a loss in scores."""

    @property
    def p(self) -> Problem: ...

    def of_block(self, scores: Tensor, rows: Block, columns: Block) -> Tensor:
        """In the scores of a block of queries and documents of the shard."""

    def of_own(self, scores: Tensor, rows: Block) -> Tensor:
        """In scores ``[rows, each]`` of hard negatives, which are overwritten."""

    def of_pairs(
        self, rows: Tensor, columns: Tensor, logits: Tensor, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """In the scores of listed pairs, and which of them count. ``final``: all of them do."""


@dataclass(frozen=True)
class Weights:
    """Those of the cross entropy. ``columns`` where the loss is symmetric."""

    p: Problem
    rows: SoftmaxWeights
    columns: SoftmaxWeights | None
    own: bool

    def of_block(self, scores: Tensor, rows: Block, columns: Block) -> Tensor:
        logits = scores / self.p.temperature
        weights = self.rows.of_block(rows[0], logits)
        self._subtract(weights, self.rows.factor, self.p.classes, rows, columns, False)
        if self.columns is not None:
            back = self.columns.of_block(columns[0], logits.t())
            self._subtract(back, self.columns.factor, self.p.column_classes, columns, rows, True)
            weights.add_(back.t())
        return weights

    def of_own(self, scores: Tensor, rows: Block) -> Tensor:
        weights = self.rows.of_block(rows[0], scores.div_(self.p.temperature))
        if self.p.smoothing:
            weights.sub_(self.rows.factor[slice(*rows)].unsqueeze(1) * (self.p.smoothing / self.p.classes))
        return weights

    def _subtract(
        self, weights: Tensor, factor: Tensor, classes: int, rows: Block, columns: Block, back: bool
    ) -> None:
        smoothing = self.p.smoothing
        if smoothing:
            weights.sub_(factor[slice(*rows)].unsqueeze(1) * (smoothing / classes))
        labels = self.p.column_labels if back else self.p.labels
        if self.own and labels is not None:
            labels.subtract(weights, factor * (1 - smoothing), rows, columns)

    def of_pairs(
        self, rows: Tensor, columns: Tensor, logits: Tensor, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What counts are labels, and pairs above the threshold."""
        rows, columns = rows.long(), columns.long()  # each index would be converted again
        amount, factor = self.rows.of_pairs(rows, logits)
        labels = self.p.labels.of_pairs(rows, columns) if self.own else None
        counts = None if final else self._above(amount, factor, self.p.classes)
        if labels is not None:
            counts = None if counts is None else counts.logical_or_(labels)
            amount -= torch.where(labels, factor, 0.0)
        if self.columns is not None:
            back, factor = self.columns.of_pairs(columns, logits)
            if counts is not None:
                counts.logical_or_(self._above(back, factor, self.p.column_classes))
            if labels is not None:
                back -= torch.where(labels, factor, 0.0)
            amount += back
        return amount, counts

    def _above(self, amount: Tensor, factor: Tensor, classes: int) -> Tensor:
        return ~(amount.abs() < factor.abs() * (self.p.tail / classes))  # so that NaN counts


@dataclass(frozen=True)
class Found:
    """What a forward with a list hands on."""

    pairs: Listed
    dense: set[tuple[Block, int]]
    final: bool = False  # all that are listed count


Given = Found | KeptBlocks | None  # what the forward over a shard hands on to the backward


def add_gradients(weights: BlockWeights, grid: Grid, sums: tuple[Sums, Sums], given: Given) -> None:
    """Adds the gradients of all pairs of the shard. A side that adds up by blocks is walked outermost."""
    documents_outermost = not sums[0].in_blocks
    found, kept = (given, None) if isinstance(given, Found) else (None, given)
    if found is not None and not found.dense:
        return _add_listed(weights, grid, sums, _counting(weights, found), documents_outermost)
    outer_blocks = grid.d_blocks if documents_outermost else grid.q_blocks
    inner_blocks = grid.q_blocks if documents_outermost else grid.d_blocks
    outer = sums[1] if documents_outermost else sums[0]
    listed = None
    if found is not None:
        listed = _Chunks.of(_counting(weights, found), outer_blocks, documents_outermost)
    at_once = documents_outermost and found is None and len(inner_blocks) == 1
    for i, block in enumerate(outer_blocks):
        outer.open(block, at_once)
        for j in range(len(inner_blocks)):
            at = (j, i) if documents_outermost else (i, j)
            if found is None or (grid.q_blocks[at[0]], grid.d_blocks[at[1]][0]) in found.dense:
                _add_block(weights, grid, sums, at, kept)
        if listed is not None:
            listed.add(weights.p, grid, sums, block, i)
        outer.close(block)


def _add_listed(
    weights: BlockWeights, grid: Grid, sums: tuple[Sums, Sums], pairs: Listed, by_documents: bool
) -> None:
    """The same where every pair that counts is listed: at once where one call takes all of them. Else blocks
    may be larger than what is scored as a whole, since little of them is read."""
    every = (grid.packed_q, grid.packed_d)
    fits = len(pairs[0]) <= _pairs_of_call(grid) and all(x.is_all for x in every)
    if fits and not any(x.begun and x.in_blocks for x in sums):
        return _take_listed(weights.p, every, sums, pairs)
    outer = sums[1] if by_documents else sums[0]
    sequence = (
        outer.tokens.mean_bytes * sum_dtype(outer.tokens.values).itemsize / outer.tokens.values.itemsize
    )
    blocks = outer.tokens.blocks(max(1, int(_LISTED_SUM_BYTES / max(sequence, 1))))
    listed = _Chunks.of(pairs, blocks, by_documents)
    for i, block in enumerate(blocks):
        outer.open(block)
        listed.add(weights.p, grid, sums, block, i)
        outer.close(block)


def _pairs_of_call(grid: Grid) -> int:
    """How many listed pairs one call takes, by what their winners take."""
    return max(1, _WINNER_BYTES // max(1, 4 * grid.q.longest))


def _take_listed(p: Problem, both: tuple[Tokens, Tokens], sums: tuple[Sums, Sums], pairs: Listed) -> None:
    """Hands over the gradients of listed pairs, which are all that there are of these sequences, or adds them
    where sums have begun."""
    inputs, winners = _listed_winners(p, both, pairs)
    needs = [x.needed for x in sums]
    begun = [x.whole if x.begun else None for x in sums]
    for to, part in zip(
        sums, p.kernels.listed_gradients(pairs[2], inputs, winners, needs, begun), strict=True
    ):
        if to.needed and not to.begun:
            to.take(part)


def _counting(weights: BlockWeights, found: Found) -> Listed:
    """Rows, columns and amounts of the listed pairs that count. The host waits for the device, unless all of
    them do."""
    pairs = found.pairs
    amount, counts = weights.of_pairs(*pairs, found.final)
    if counts is None:
        return pairs[0], pairs[1], amount
    kept = counts.nonzero().squeeze(1)
    return pairs[0][kept], pairs[1][kept], amount[kept]


def _add_block(
    weights: BlockWeights, grid: Grid, sums: tuple[Sums, Sums], at: tuple[int, int], kept: KeptBlocks | None
) -> None:
    rows, columns = grid.q_blocks[at[0]], grid.d_blocks[at[1]]
    q, d = grid.q_parts[at[0]], grid.d_parts[at[1]]
    stays = None if kept is None else kept.get(rows, columns)
    scores, winners = stays or weights.p.kernels.scores_and_winners(q, d)
    grad = weights.of_block(scores, rows, columns)
    to = sums[0].of(rows), sums[1].of(columns), sums[1].result
    weights.p.kernels.add_gradients(grad, q, d, winners, *to)


@dataclass(frozen=True)
class _Chunks:
    """Pairs in the order of the outermost blocks, and where those of each block begin."""

    pairs: Listed
    begins: list[int]
    by_documents: bool

    @staticmethod
    def of(pairs: Listed, blocks: list[Block], by_documents: bool) -> "_Chunks":
        rows, columns, amount = pairs
        key = columns if by_documents else rows
        key, order = key.sort(stable=True)
        ends = torch.tensor([end for _, end in blocks], dtype=key.dtype, device="cpu").to(key.device)
        begins = [0, *torch.searchsorted(key, ends).tolist()]
        return _Chunks((rows[order], columns[order], amount[order]), begins, by_documents)

    def add(self, p: Problem, grid: Grid, sums: tuple[Sums, Sums], block: Block, i: int) -> None:
        """Adds the gradients of the pairs of outermost block ``i``."""
        whole_q, whole_d = (0, len(grid.q)), (0, len(grid.d))
        q_block, d_block = (whole_q, block) if self.by_documents else (block, whole_d)
        step = _pairs_of_call(grid)
        for begin in range(self.begins[i], self.begins[i + 1], step):
            part = slice(begin, min(begin + step, self.begins[i + 1]))
            rows, columns, amount = (x[part] for x in self.pairs)
            _add_pairs(p, grid, sums, (q_block, d_block), (rows - q_block[0], columns - d_block[0], amount))


def _add_pairs(
    p: Problem, grid: Grid, sums: tuple[Sums, Sums], blocks: tuple[Block, Block], pairs: Listed
) -> None:
    q, d = (x.part(block) for x, block in zip((grid.packed_q, grid.packed_d), blocks, strict=True))
    to = [x.of(block) for x, block in zip(sums, blocks, strict=True)]
    inputs, winners = _listed_winners(p, (q, d), pairs)
    p.kernels.add_listed_gradients(pairs[2], inputs, winners, to)


def _listed_winners(p: Problem, both: tuple[Tokens, Tokens], pairs: Listed) -> tuple[Sequence[Any], Tensor]:
    """What the operators on packed pairs take, and the winners of listed pairs."""
    (q, d), indices = both, (x.to(torch.int32) for x in pairs[:2])
    inputs = (q.values, d.values, q.offsets, d.offsets, *indices)
    _, winners = _ops.maxsim_pairs_packed_winners.default(*inputs, q.longest, p.kernels.precision)
    return inputs, winners


def add_own_gradients(
    weights: BlockWeights, q: Tokens, h: Tokens, q_sums: Tensor | None, need_h: bool
) -> Tensor | None:
    """The gradient of the hard negatives; that of the queries is added to their sums, which are whole."""
    p = weights.p
    grad_h = torch.zeros_like(h.values, memory_format=torch.contiguous_format) if need_h else None
    for block in own_blocks(q, h, p.each):
        own = own_part(block, p.each)
        queries, negatives = q.part(block), h.part(own)
        scores, winners = p.kernels.own_scores(queries, negatives, p.each)
        grad = weights.of_own(scores, block)
        to = None if q_sums is None else q_sums[q.rows(block)]
        part = p.kernels.own_gradients(grad, queries, negatives, winners, to, need_h)
        if grad_h is not None:
            grad_h[h.rows(own)] = part
    return grad_h
