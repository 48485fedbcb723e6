"""The backward pass over the shards of documents, which finds winners again unless the forward kept them.

Gradients of the larger side are finished a block at a time; those of the smaller side add up in one copy in
the sums' dtype. Where documents travel (:mod:`late_interaction._contrastive.ring`) the queries have such a
copy, and so have this process's documents if more than two processes find gradients for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from late_interaction._checks.tensors import scores_dtype
from late_interaction._contrastive.blocks import Grid, KeptBlocks
from late_interaction._contrastive.call import Call
from late_interaction._contrastive.forward import own_blocks
from late_interaction._contrastive.ring import Exchange
from late_interaction._contrastive.sequences import Block, blocks_of, longest, mean_bytes, part, rows
from late_interaction.ops._library import operators as _ops
from late_interaction.tokens import Tokens


class Sums:
    """The sums of one side's gradient, if it is ``needed``.

    They are one ``whole`` in the sums' dtype, or made a block at a time, each written to the result when it
    is finished; or the gradient comes at once (``take``). Memory is allocated when something is added.
    """

    def __init__(self, tokens: Tokens, needed: bool, whole: bool) -> None:
        self.tokens, self.needed, self.in_blocks = tokens, needed, needed and not whole
        self._whole: Tensor | None = None
        self._out: Tensor | None = None  # the gradient in the dtype of the tokens, all of it or blocks
        self._block: Tensor | None = None
        self.result: Tensor | None = None  # of the open block, in the dtype of the tokens

    @property
    def begun(self) -> bool:
        return not (self._whole is None and self._out is None)

    @property
    def whole(self) -> Tensor | None:
        if self._whole is None and self.needed and not self.in_blocks:
            values = self.tokens.values
            if self._out is not None:
                self._whole, self._out = self._out.to(scores_dtype(values)), None
            else:
                self._whole = torch.zeros(values.shape, dtype=scores_dtype(values), device=values.device)
        return self._whole

    def take(self, gradient: Tensor) -> None:
        """Take the whole gradient, in the dtype of the tokens, if nothing has been added."""
        self._out = gradient.view(self.tokens.values.shape)

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of all tokens, in their dtype, if one is needed. It may be overwritten."""
        so_far = self._out if self.whole is None else self.whole
        if so_far is not None:
            so_far.add_(gradient)
        elif self.needed:
            self._out = gradient

    def open(self, block: Block, at_once: bool = False) -> None:
        """Begin the sums of a block. ``at_once``: its gradient is written to ``result`` instead."""
        if self.in_blocks:
            if self._out is None:
                self._out = torch.empty_like(self.tokens.values, memory_format=torch.contiguous_format)
            part = self._out[rows(self.tokens, block)]
            if at_once:
                self.result = part
            else:
                self._block = torch.zeros_like(part, dtype=scores_dtype(part))

    def close(self, block: Block) -> None:
        if self._out is not None and self._block is not None:
            self._out[rows(self.tokens, block)] = self._block
        self._block = self.result = None

    def of(self, block: Block) -> Tensor | None:
        """Return the sums of a block, which is the open one unless the sums are whole."""
        return self._block if self.whole is None else self.whole[rows(self.tokens, block)]

    def finished(self) -> Tensor | None:
        values = self.tokens.values
        if self._whole is not None:
            return self._whole.to(values.dtype)
        if self._out is None and self.needed:
            return torch.zeros_like(values, memory_format=torch.contiguous_format)
        return self._out


_LISTED_SUM_BYTES = 64 << 20  # of a block's sums, where every pair that counts is listed

Listed = tuple[Tensor, Tensor, Tensor]  # rows, columns and logits (or what a loss keeps instead) of pairs
Pair = tuple[Sums, Sums]  # of queries and documents


@dataclass(frozen=True)
class Found:
    """The listed pairs of a shard, and its blocks whose pairs are not listed."""

    pairs: Listed
    dense: set[tuple[Block, int]]  # blocks that are not listed: of queries, and the first document of a block
    final: bool = False  # every listed pair counts


class Loss(Protocol):
    """A loss: the sums that its forward keeps of the logits, and the gradients that follow from them."""

    @property
    def lists(self) -> bool:
        """Tell whether the backward takes listed pairs instead of blocks."""

    def add_own(self, logits: Tensor, rows: Block) -> None:
        """Take the logits of a block of queries with their hard negatives."""

    def begin(self, grid: Grid | None, step: int) -> None:
        """Begin a step's shard. Without a grid it comes as one panel, and nothing is listed."""

    def take(self, logits: Tensor, rows: Block, run: list[Block]) -> None:
        """Take a panel: the logits of a block of queries with a run of blocks of documents."""

    def end(self, step: int) -> None:
        """End the step's shard."""

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the loss, and how many rows (and columns) it is the mean over."""

    def save(self) -> tuple[list[Tensor | None], Callable[[Call, Sequence[Any]], Any]]:
        """Return tensors for autograd to save, and a function that restores the loss from them."""

    def derive(self, grad: Tensor, counts: Tensor) -> Tensor | None:
        """Take the gradient of the loss. Return what travels with documents, ``[k, documents]``, or None."""

    def begin_gradients(self, step: int, travelled: Tensor | None) -> None:
        """Begin a step's shard in the backward, with what has travelled with its documents."""

    def of_block(self, scores: Tensor, rows: Block, columns: Block) -> Tensor:
        """Return the gradient with respect to the scores of a block."""

    def of_own(self, scores: Tensor, rows: Block) -> Tensor:
        """Return the gradient with respect to hard negatives' scores ``[rows, each]``; overwrite these."""

    def of_pairs(
        self, rows: Tensor, columns: Tensor, logits: Tensor, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient with respect to listed scores, and which pairs count; None: all (``final``)."""

    def listed(self, step: int) -> Found | None:
        """Return the listed pairs of a step's shard, if pairs are listed."""

    def of_numbers(self, needs_T: bool, needs_bias: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the temperature and the bias."""


Given = Found | KeptBlocks | None  # what the forward over a shard hands on to the backward


# ---- all shards ----


def add_shards(
    call: Call,
    q_sums: Sums,
    needs_d: bool,
    add: Callable[[int, Tokens, Tensor | None, Pair], None],
    extra: Tensor | None = None,
    last: Tokens | None = None,
) -> Tensor | None:
    """Add the queries' gradient over all shards to their sums, and return the documents' gradient.

    ``add`` adds the gradients of a step's shard: it takes the step, its documents, what travelled with them
    (``extra``), and the sums of queries and documents. ``last``: the other of two processes' documents, if
    kept.
    """
    ring, alone, d = call.ring, call.ring.world == 1, call.d
    # More than two gradients are added up in the sums' dtype.
    own = Sums(d, needs_d, q_sums.in_blocks if alone else ring.world > 2)
    if alone and not (q_sums.needed or needs_d):
        return None
    under_way: Exchange | None = None
    shards = enumerate(ring.shards(d, extra)) if last is None else [(1, (0, last, None)), (0, (0, d, None))]
    for step, (_, documents, travelled) in shards:
        sums = own if step == 0 else Sums(documents, ring.wants[ring.owner(step)], False)
        if q_sums.needed or sums.needed:
            add(step, documents, travelled, (q_sums, sums))
        if step and any(ring.wants):
            if under_way is not None:
                own.add(under_way.wait()[0])
            # Their gradient goes home, and one for this process's documents comes.
            values, found = documents.values, sums.finished()
            leaving = values.new_empty(0) if found is None else found
            arriving = values.new_empty(ring.shapes[ring.rank] if ring.wants[ring.rank] else 0)
            under_way = ring.exchange([leaving], [arriving], "gradients", -step)
    if under_way is not None:
        own.add(under_way.wait()[0])
    return own.finished() if needs_d else None


def own_gradients(call: Call, loss: Loss, q_sums: Sums, need_h: bool) -> Tensor | None:
    """Return the gradient of the hard negatives, and add that of the queries to their whole sums."""
    if call.h is None or not (call.each and (q_sums.needed or need_h)):
        return torch.zeros_like(call.h.values) if call.h is not None and need_h else None
    values = call.h.values
    grad_h = torch.zeros_like(values, memory_format=torch.contiguous_format) if need_h else None
    for block, queries, negatives, own in own_blocks(call):
        scores, winners = call.kernels.own_scores(queries, negatives, call.each)
        grad = loss.of_own(scores, block)
        found = call.kernels.own_gradients(grad, queries, negatives, winners, q_sums.of(block), need_h)
        if grad_h is not None:
            grad_h[rows(call.h, own)] = found
    return grad_h


# ---- one shard ----


def add_gradients(call: Call, loss: Loss, grid: Grid, sums: Pair, given: Given) -> None:
    """Add the gradients of all pairs of the shard. The outer loop is over the side that adds up in blocks."""
    by_documents = not sums[0].in_blocks
    found, kept = (given, None) if isinstance(given, Found) else (None, given)
    pairs = None if found is None else _counting(loss, found)
    if found is not None and pairs is not None and not found.dense:
        return _add_listed(call, grid, sums, pairs, by_documents)
    outer_blocks, inner_blocks = grid.q_blocks, grid.d_blocks
    if by_documents:
        outer_blocks, inner_blocks = inner_blocks, outer_blocks
    listed = None if pairs is None else _Chunks.of(pairs, outer_blocks, by_documents)
    at_once = by_documents and found is None and len(inner_blocks) == 1
    for i, block in enumerate(outer_blocks):
        sums[by_documents].open(block, at_once)
        for j in range(len(inner_blocks)):
            at = (j, i) if by_documents else (i, j)
            if found is None or (grid.q_blocks[at[0]], grid.d_blocks[at[1]][0]) in found.dense:
                _add_block(call, loss, grid, sums, at, kept)
        if listed is not None:
            listed.add(call, grid, sums, block, i)
        sums[by_documents].close(block)
    return None


def _add_block(
    call: Call, loss: Loss, grid: Grid, sums: Pair, at: tuple[int, int], kept: KeptBlocks | None
) -> None:
    rows, columns = grid.q_blocks[at[0]], grid.d_blocks[at[1]]
    q, d = grid.q_parts[at[0]], grid.d_parts[at[1]]
    stays = None if kept is None else kept.get(rows, columns)
    scores, winners = stays or call.kernels.scores_and_winners(q, d)
    grad = loss.of_block(scores, rows, columns)
    to = sums[0].of(rows), sums[1].of(columns), sums[1].result
    call.kernels.add_gradients(grad, q, d, winners, *to)


# ---- lists of pairs ----


def _counting(loss: Loss, found: Found) -> Listed:
    """Return rows, columns and gradients of the listed pairs that count.

    The host waits for the device, unless all of them do.
    """
    pairs = found.pairs
    amount, counts = loss.of_pairs(*pairs, found.final)
    if counts is None:
        return pairs[0], pairs[1], amount
    kept = counts.nonzero().squeeze(1)
    return pairs[0][kept], pairs[1][kept], amount[kept]


def _add_listed(call: Call, grid: Grid, sums: Pair, pairs: Listed, by_documents: bool) -> None:
    """Add the gradients of a shard whose pairs that count are all listed.

    If one call takes all of them, its gradients become the sums, or are added to those that have begun. Else
    blocks may be larger than those that are scored as a whole, since little of them is read.
    """
    if len(pairs[0]) <= grid.pairs_of_call and not any(x.begun and x.in_blocks for x in sums):
        inputs, winners = _listed_winners(call, grid.packed, pairs)
        begun = [x.whole if x.begun else None for x in sums]
        needs = [x.needed for x in sums]
        found = call.kernels.listed_gradients(pairs[2], inputs, winners, needs, begun)
        for to, gradient in zip(sums, found, strict=True):
            if to.needed and not to.begun:
                to.take(gradient)
        return
    outer = sums[by_documents]
    values = outer.tokens.values
    sequence = mean_bytes(outer.tokens) * scores_dtype(values).itemsize / values.itemsize
    blocks = blocks_of(outer.tokens, max(1, int(_LISTED_SUM_BYTES / max(sequence, 1))))
    listed = _Chunks.of(pairs, blocks, by_documents)
    for i, block in enumerate(blocks):
        outer.open(block)
        listed.add(call, grid, sums, block, i)
        outer.close(block)


def _listed_winners(call: Call, both: tuple[Tokens, Tokens], pairs: Listed) -> tuple[Sequence[Any], Tensor]:
    """Return the inputs of the operators on packed pairs, and the winners of the listed pairs."""
    (q, d), indices = both, (x.to(torch.int32) for x in pairs[:2])
    inputs = (q.values, d.values, q.offsets, d.offsets, *indices)
    _, winners = _ops.maxsim_pairs_packed_winners.default(*inputs, longest(q), call.kernels.precision)
    return inputs, winners


@dataclass(frozen=True)
class _Chunks:
    """Listed pairs in the order of the outer blocks, and where those of each block begin."""

    pairs: Listed
    begins: list[int]
    by_documents: bool

    @staticmethod
    def of(pairs: Listed, blocks: list[Block], by_documents: bool) -> "_Chunks":
        key, order = pairs[by_documents].sort(stable=True)
        ends = torch.tensor([end for _, end in blocks], dtype=key.dtype, device="cpu").to(key.device)
        begins = [0, *torch.searchsorted(key, ends).tolist()]
        rows, columns, amount = (x[order] for x in pairs)
        return _Chunks((rows, columns, amount), begins, by_documents)

    def add(self, call: Call, grid: Grid, sums: Pair, block: Block, i: int) -> None:
        blocks = [(0, len(grid.q)), (0, len(grid.d))]
        blocks[self.by_documents] = block
        both = part(grid.packed[0], blocks[0]), part(grid.packed[1], blocks[1])
        for begin in range(self.begins[i], self.begins[i + 1], grid.pairs_of_call):
            chunk = slice(begin, min(begin + grid.pairs_of_call, self.begins[i + 1]))
            rows, columns, amount = (x[chunk] for x in self.pairs)
            pairs = rows - blocks[0][0], columns - blocks[1][0], amount
            to = [x.of(own) for x, own in zip(sums, blocks, strict=True)]
            inputs, winners = _listed_winners(call, both, pairs)
            call.kernels.listed_gradients(amount, inputs, winners, [x is not None for x in to], to)
