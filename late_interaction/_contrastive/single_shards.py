"""The cross entropy of batches with one token a side over a process group.

Documents travel round the ring (:mod:`late_interaction._contrastive.ring`) in both passes. Over the shard
that a process has, the forward adds up the sums of its queries' softmax. The backward, which knows the sums
over all shards, makes softmax weights of a block, in the dtype of the embeddings, and multiplies them with
both sides: with the forward's, four products of the size of the batch. The weights of a block come

- from its scores in float32, some rows at a time; or
- in bf16 on compute capability 9.0, where a shard is large and the block has no label, straight from the
  product (:mod:`late_interaction._contrastive.panels`). They lack a scale of each row, which follows
  from the block's own sums beside those of all blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from late_interaction._contrastive.backward import Pair, Sums, add_shards
from late_interaction._contrastive.call import Call
from late_interaction._contrastive.kernels import add_product, product
from late_interaction._contrastive.panels import AllSums, Batch, takes_product, terms, two_passes
from late_interaction._contrastive.sequences import Block, even_blocks
from late_interaction.ops._library import cuda_missing
from late_interaction.ops._library import operators as _ops
from late_interaction.tokens import Tokens

_SIDE = {"cuda": 16384, "cpu": 1024}  # queries, and documents, of a block of weights
_SCORES = {"cuda": 256 << 20, "cpu": 4 << 20}  # bytes of scores, some rows of a block
_LARGE = 2.0**24  # weight of a row, above which its sums become relative to a greater score


def takes(call: Call) -> bool:
    """Tell whether this way computes the loss exactly as it was asked for."""
    ring, values = call.ring, call.q.values
    plain = ring.single and ring.plain and not ring.any_mask and call.h is None
    plain = plain and not (call.symmetric or call.tail or call.smoothing)
    kernels = not values.is_cuda or (cuda_missing is None and values.dtype is not torch.float64)
    return ring.group is not None and call.kernels.way == "matrix" and plain and kernels


def loss(call: Call) -> Tensor:
    """Return the cross entropy of this process's ``Q [Nq, 1, d]`` with the ``D [Nd, 1, d]`` of all."""
    return two_passes(call, _all_sums, _gradients)


# ---- forward ----


def _all_sums(batch: Batch) -> AllSums:
    call, target, documents = batch.call, batch.no_target(), batch.call.d
    sums = batch.inverse.new_zeros((4, len(batch.Q)))
    sums[0] = torch.finfo(sums.dtype).min
    for step, (_, documents, _) in enumerate(call.ring.shards(call.d)):
        shard = _Shard.of(batch, documents, step == 0)
        for rows in shard.row_blocks:
            parts = [sums[:, slice(*rows)]]
            for columns in shard.column_blocks:
                way = shard.product_sums if shard.by_product else shard.score_sums
                parts.append(way(rows, columns, target))
            parts[0].copy_(_merged(parts, batch.inverse))
    return AllSums(sums, target, kept=documents.values if call.keeps_last() else None)


def _merged(parts: Sequence[Tensor], inverse: Tensor) -> Tensor:
    """Merge the sums of some columns each into those of all.

    A row of a product's sums may be relative to a score far below its maximum. Where its weight is large for
    that, the result is relative to a greater score.
    """
    reference, weight, moment, total = torch.stack(list(parts), 1).unbind(0)
    nothing = weight == 0  # a sum over no scores moves nowhere: infinity times zero is NaN
    greater = reference + torch.where(weight > _LARGE, weight.log() / inverse, 0.0)
    both = greater.masked_fill(nothing, torch.finfo(greater.dtype).min).amax(0)
    moved = (reference - both).masked_fill_(nothing, 0.0)
    keep = (moved * inverse).exp_()
    moment = torch.addcmul(moment, moved, weight).mul_(keep)
    return torch.stack((both, (weight * keep).sum(0), moment.sum(0), total.sum(0)))


# ---- blocks of one shard ----


@dataclass(frozen=True)
class _Shard:
    """The blocks of this process's queries with one shard of documents."""

    batch: Batch  # with the shard's documents
    own: bool  # labels lie in the shard
    by_product: bool  # sums and weights come straight from the product
    row_blocks: list[Block]
    column_blocks: list[Block]
    room: Tensor  # for the weights of a block

    @staticmethod
    def of(batch: Batch, documents: Tokens, own: bool) -> "_Shard":
        batch = batch if own else Batch.of(replace(batch.call, d=documents))
        side = _SIDE[batch.Q.device.type]
        of_rows, of_columns = (even_blocks(len(x), side) for x in (batch.Q, batch.D))
        rows, columns = (max((end - begin for begin, end in x), default=0) for x in (of_rows, of_columns))
        pitch = -(-columns // 64) * 64  # rows of a block begin at multiples of 16 bytes
        room = batch.Q.new_empty((rows, pitch))
        return _Shard(batch, own, takes_product(batch), of_rows, of_columns, room)

    def labels(self, rows: Block, columns: Block) -> tuple[Tensor | None, int]:
        """Return the labels of rows among the columns of a block, as the operators take them."""
        index = self.batch.call.labels.index
        if not self.own:
            return None, columns[1] - columns[0]
        if index is None:
            return None, rows[0] - columns[0]
        return index[slice(*rows), 0] - columns[0], 0

    def has_labels(self, rows: Block, columns: Block) -> bool:
        """Tell whether labels may lie in a block."""
        apart = rows[1] <= columns[0] or columns[1] <= rows[0]
        return self.own and not (self.batch.call.labels.index is None and apart)

    def scores(self, rows: Block, columns: Block) -> Iterator[tuple[Block, Tensor]]:
        """Yield some rows of a block at a time, and their scores."""
        batch, width = self.batch, columns[1] - columns[0]
        most = _SCORES[batch.Q.device.type] // (width * batch.inverse.itemsize)
        pieces = even_blocks(rows[1] - rows[0], most)
        buffer = batch.inverse.new_empty((max(end - begin for begin, end in pieces), width))
        for begin, end in pieces:
            piece = rows[0] + begin, rows[0] + end
            documents = batch.D[slice(*columns)].t()
            yield piece, product(batch.Q[slice(*piece)], documents, buffer[: end - begin])

    # ---- sums ----

    def score_sums(self, rows: Block, columns: Block, target: Tensor) -> Tensor:
        """Return the sums of a block's rows. Write the scores of labels to ``target``."""
        found = []
        for piece, scores in self.scores(rows, columns):
            if self.own:
                self.batch.call.labels.read(target.unsqueeze(1), scores, piece, columns)
            found.append(_ops.softmax_row_sums.default(scores, self.batch.inverse))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def product_sums(self, rows: Block, columns: Block, target: Tensor) -> Tensor:
        """Do what :meth:`score_sums` does, without scores in memory. The weights are not needed."""
        labels = self.labels(rows, columns)
        found = self._product(rows, columns, labels, torch.ones_like(target[slice(*rows)]))
        if self.own:
            part = target[slice(*rows)]
            part.copy_(torch.where(found[4].isnan(), part, found[4]))
        return found[:4]

    def _product(
        self, rows: Block, columns: Block, labels: tuple[Tensor | None, int], factor: Tensor
    ) -> Tensor:
        batch, weights = self.batch, self.weights_of(rows, columns)
        q, d = batch.Q[slice(*rows)], batch.D[slice(*columns)]
        found: Tensor = _ops.softmax_product_rows_.default(
            q, d, batch.inverse, *labels, factor, weights, None
        )
        return found

    # ---- weights ----

    def weights_of(self, rows: Block, columns: Block) -> Tensor:
        return self.room[: rows[1] - rows[0], : columns[1] - columns[0]]

    def weigh(self, rows: Block, columns: Block, of_rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the weights of a block, and the scale of each row that they lack.

        ``of_rows``: the :func:`terms` of all rows.
        """
        inverse, weights = self.batch.inverse, self.weights_of(rows, columns)
        if self.by_product and not self.has_labels(rows, columns):
            reference, scale, _ = of_rows[:, slice(*rows)].unbind(0)
            no_labels = None, columns[1] - columns[0]
            found = self._product(rows, columns, no_labels, scale.contiguous())
            share = (found[0] - reference).mul_(inverse).exp_().mul_(found[1])
            return weights, share.mul_(found[5])
        for piece, scores in self.scores(rows, columns):
            labels, first = self.labels(piece, columns)
            given = of_rows[:, slice(*piece)].contiguous(), None, labels, first, 0.0
            to = weights[piece[0] - rows[0] : piece[1] - rows[0]]
            _ops.softmax_weights_.default(scores, inverse, *given, to)
        return weights, None


# ---- backward ----


def _gradients(
    batch: Batch, found: AllSums, amounts: list[Tensor], needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    call = batch.call
    amount, after = amounts[0] * batch.inverse, None
    if batch.Q.dtype is torch.float16 and len(amount):  # holds no small numbers: the largest factor becomes 1
        after = amount.abs().amax().clamp_min(1e-30)
        amount = amount / after
    of_rows, q_sums = terms(found.rows, amount), Sums(call.q, needs[0], True)

    def add(step: int, documents: Tokens, _: Tensor | None, to: Pair) -> None:
        _add_shard(_Shard.of(batch, documents, step == 0), of_rows, to, after)

    last = None if found.kept is None else Tokens._made(found.kept)
    of_d = add_shards(call, q_sums, needs[1], add, None, last)
    return q_sums.finished(), of_d


def _add_shard(shard: _Shard, of_rows: Tensor, sums: Pair, after: Tensor | None) -> None:
    """Add the gradients of all pairs of a shard. ``after``: a factor that the weights lack."""
    Q, D = shard.batch.Q, shard.batch.D
    for columns in shard.column_blocks:
        sums[1].open(columns)
        d_sums = sums[1].of(columns)
        for rows in shard.row_blocks:
            weights, scale = shard.weigh(rows, columns, of_rows)
            q, q_sums = Q[slice(*rows)], sums[0].of(rows)
            if q_sums is not None:
                each = after if scale is None else scale.unsqueeze(1)
                _add(q_sums.squeeze(1), weights, D[slice(*columns)], each)
            if d_sums is not None:
                if scale is not None:
                    scaled = torch.empty_like(q)
                    _ops.scale_rows_.default(q, scale, scaled)
                    q = scaled
                _add(d_sums.squeeze(1), weights.t(), q, after)
        sums[1].close(columns)


def _add(sums: Tensor, a: Tensor, b: Tensor, scale: Tensor | None) -> None:
    if scale is None:
        add_product(sums, a, b)
    else:
        sums.addcmul_(product(a, b), scale)
