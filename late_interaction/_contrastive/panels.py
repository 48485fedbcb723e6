"""Panels of the scores and weights of a batch with one token a side: how large, and what they add up to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from late_interaction._checks.tensors import scores_dtype
from late_interaction._contrastive.blockwise import Gradients, Run, apply_loss
from late_interaction._contrastive.call import Call
from late_interaction._contrastive.cross_entropy import Side, factors, loss_and_counts, temperature_gradient
from late_interaction._contrastive.kernels import add_product, product
from late_interaction._contrastive.labels import Targets
from late_interaction._contrastive.sequences import Block
from late_interaction._contrastive.softmax import RunningSoftmax
from late_interaction.ops._library import operators as _ops

# Bytes of a panel, and its least rows. Each panel of scores reads all documents; each panel of weights adds
# its share to the gradients of all documents: small ones would spend their time on that.
_SCORES = {"cuda": (256 << 20, 1024), "cpu": (16 << 20, 64)}
_WEIGHTS = {"cuda": (128 << 20, 1024), "cpu": (16 << 20, 64)}
_LINE = 64  # rows of a panel begin at multiples of this many elements
_TILE = 128  # panels have a multiple of this many rows: products are computed by tiles
_MOST_ROWS = 1 << 18  # of a panel: the operators take no more than twice as many


@dataclass(frozen=True)
class Batch:
    """The matrices of a call."""

    call: Call
    Q: Tensor  # [queries, d], in the dtype of the product
    D: Tensor
    inverse: Tensor  # of the temperature

    @staticmethod
    def of(call: Call) -> "Batch":
        Q, D = call.kernels.rows(call.q), call.kernels.rows(call.d)
        dtype, T = scores_dtype(call.q.values), call.temperature
        if isinstance(T, Tensor):
            inverse = T.to(dtype).reciprocal()
        else:
            inverse = torch.full((), 1 / T, dtype=dtype, device=Q.device)
        return Batch(call, Q, D, inverse)

    def blocks(self) -> list[Block]:
        """Split the queries into the rows of each panel of scores."""
        return self._blocks((0, len(self.Q)), _SCORES, self.inverse.itemsize)

    def weight_blocks(self) -> list[tuple[Block, list[Block]]]:
        """Split the queries into the rows of each panel of weights, and these into panels of scores."""
        found = self._blocks((0, len(self.Q)), _WEIGHTS, self.Q.itemsize)
        return [(block, self._blocks(block, _SCORES, self.inverse.itemsize)) for block in found]

    def _blocks(self, rows: Block, limits: dict[str, tuple[int, int]], itemsize: int) -> list[Block]:
        most, least = limits[self.Q.device.type]
        size = min(max(least, most // (itemsize * self.pitch())), _MOST_ROWS)
        size -= size % _TILE if size > _TILE else 0
        return [(begin, min(begin + size, rows[1])) for begin in range(*rows, size)]

    def pitch(self) -> int:
        """Return the stride of a panel's rows, in elements."""
        return -(-len(self.D) // _LINE) * _LINE

    def buffer(self, blocks: list[Block], dtype: torch.dtype | None = None) -> Tensor:
        """Allocate memory for any of these panels: of scores, or of weights of a dtype."""
        rows = max(end - begin for begin, end in blocks)
        return self.inverse.new_empty((rows, self.pitch()), dtype=dtype)

    def score(self, block: Block, buffer: Tensor) -> Tensor:
        """Write the scores of a panel to the first rows of a buffer."""
        out = buffer[: block[1] - block[0], : len(self.D)]
        return product(self.Q[slice(*block)], self.D.t(), out)

    def labels(self, block: Block) -> tuple[Tensor | None, int]:
        """Return the labels of a panel's rows, as the operators take them."""
        index = self.call.labels.index
        return (None, block[0]) if index is None else (index[slice(*block), 0].contiguous(), 0)

    def running(self, sums: Tensor, count: int) -> RunningSoftmax:
        """Convert sums over ``count`` scores each to those of logits relative to their maximum."""
        maximum, weight, moment, total = sums.unbind(0)
        return RunningSoftmax(
            maximum=torch.zeros_like(maximum),
            weight=weight,
            moment=moment * self.inverse if self.call.learns else None,
            total=(total - count * maximum) * self.inverse if self.call.smoothing else None,
            seen=torch.full_like(weight, count) if self.call.smoothing else None,
        )

    def rows(self, sums: Tensor, target: Tensor) -> Side:
        """Return the sums and targets of the queries. ``target``: the score of each with its label."""
        logits = ((target - sums[0]) * self.inverse).unsqueeze(1)
        return self.running(sums, len(self.D)), Targets.of_rows(self.call.labels, logits, "mean")

    def columns(self, sums: Tensor, target: Tensor) -> Side:
        """Return the sums and targets of the documents. ``target``: as for :meth:`rows`."""
        labels, count = self.call.labels, len(self.D)
        logits = (target.unsqueeze(1) - labels.of_columns(sums[0], len(self.Q))) * self.inverse
        return self.running(sums, len(self.Q)), Targets.of_columns(labels, logits, count, "mean")

    def no_target(self) -> Tensor:
        return self.inverse.new_full((len(self.Q),), torch.nan)


@dataclass
class Sums:
    """The gradients that panels add to; None: not needed.

    A panel finishes the gradient of its queries, in the inputs' dtype. The gradient of the documents adds up
    over all panels, in the sums' dtype.
    """

    q: Tensor | None
    d: Tensor | None
    begun: bool = False

    @staticmethod
    def of(batch: Batch, needs: tuple[bool, ...], dtype: torch.dtype) -> "Sums":
        q = batch.Q.new_empty(batch.Q.shape, dtype=dtype) if needs[0] else None
        return Sums(q, batch.inverse.new_empty(batch.D.shape) if needs[1] else None)

    def add(
        self, batch: Batch, block: Block, weights: Tensor, scaled: tuple[Tensor, Tensor | None] | None = None
    ) -> None:
        """Add a panel of weights. ``scaled``: a factor that its rows lack, and the queries times it."""
        rows = batch.Q[slice(*block)]
        if self.q is not None and scaled is None:
            self.q[slice(*block)] = product(weights, batch.D)
        elif self.q is not None and scaled is not None:
            _ops.scale_rows_.default(product(weights, batch.D), scaled[0], self.q[slice(*block)])
        if self.d is not None:
            rows = rows if scaled is None or scaled[1] is None else scaled[1]
            if self.begun:
                add_product(self.d, weights.t(), rows)
            else:
                product(weights.t(), rows, self.d)
        self.begun = True


def add_panels(
    batch: Batch,
    needs: tuple[bool, ...],
    dtype: torch.dtype,
    weigh: Callable[[Block, Tensor, Tensor], None],
    kept: Tensor | None,
) -> Sums:
    """Return the gradients of Q and D. ``weigh`` turns scores, ``kept`` or computed here, into weights."""
    panels, n = batch.weight_blocks(), len(batch.D)
    sums = Sums.of(batch, needs, dtype)
    weights = batch.buffer([block for block, _ in panels], batch.Q.dtype)
    buffer = batch.buffer([part for _, parts in panels for part in parts]) if kept is None else kept
    for block, parts in panels:
        for part in parts:
            scores = batch.score(part, buffer) if kept is None else kept[slice(*part), :n]
            weigh(part, scores, weights[part[0] - block[0] : part[1] - block[0], :n])
        sums.add(batch, block, weights[: block[1] - block[0], :n])
    return sums


def scaled(x: Tensor | None, scale: Tensor, like: Tensor) -> Tensor | None:
    """Multiply ``x`` by a number before it is rounded to the dtype of ``like``."""
    if x is None:
        return None
    out = torch.empty(x.shape, dtype=like.dtype, device=x.device)
    if x.is_cuda and scale.dtype is torch.float32:
        _ops.scale_rows_.default(x, scale.contiguous(), out)
        return out.view_as(like)
    return torch.mul(x, scale.reshape(1, 1), out=out).view_as(like)


def terms(sums: Tensor, factor: Tensor) -> Tensor:
    """Return maximum, scale and factor of rows or columns as the operator takes them; scale 0 if left out."""
    scale = torch.where(factor == 0, 0.0, factor / sums[1])
    return torch.stack((sums[0], scale, factor))


# ---- sums in the forward, gradients in the backward ----


class AllSums(NamedTuple):
    """The sums of all scores, which the forward keeps for the backward."""

    rows: Tensor  # [4, queries], of the operators
    target: Tensor  # the score of each query with its label
    columns: Tensor | None = None  # [4, documents]
    kept: Tensor | None = None  # all scores; over a process group the documents of the last step

    def sides(self, batch: Batch) -> list[Side]:
        found = [batch.rows(self.rows, self.target)]
        return found if self.columns is None else [*found, batch.columns(self.columns, self.target)]


def two_passes(call: Call, all_sums: Callable[[Batch], AllSums], gradients: Callable[..., Any]) -> Tensor:
    """Compute ``all_sums`` of a batch; ``gradients`` of Q and D take these and the amounts of each side."""
    return apply_loss(call.bare(), partial(_two_passes, all_sums, gradients), *call.tensors)


def _two_passes(
    all_sums: Callable[[Batch], AllSums], of_tokens: Any, call: Call, tensors: Any, needs: Any
) -> Run:
    batch = Batch.of(call.of(tensors))
    found = all_sums(batch)
    result, counts = loss_and_counts(batch.call, found.sides(batch))

    def gradients(call: Call, tensors: Any, kept: Any, grad: Tensor, needs: Sequence[bool]) -> Gradients:
        counts, *sums = kept
        batch, found = Batch.of(call.of(tensors)), AllSums(*sums)
        sides = found.sides(batch)
        amounts = factors(batch.call, grad, sides, counts)
        of_temperature = temperature_gradient(batch.call, sides, amounts) if needs[3] else None
        return *of_tokens(batch, found, amounts, needs), None, of_temperature, None

    return result, [counts, *found], gradients


# ---- panels of weights that come straight from the product, without scores in memory ----


_WEIGHT_BYTES, _LEAST_ROWS = 256 << 20, 1024  # of a panel of weights
_PRODUCT_TILE = 256  # panels have a multiple of this many rows
_LEAST_PAIRS = 3 << 22  # below, panels of scores are as fast


def takes_product(batch: Batch) -> bool:
    """Tell whether the batch goes this way: bf16 on compute capability 9.0, without smoothing, and large."""
    if batch.call.smoothing or not batch.Q.is_cuda or len(batch.Q) * len(batch.D) < _LEAST_PAIRS:
        return False
    return _ops.can_softmax_product_rows.default(batch.Q, batch.D)


def add_product_panels(
    batch: Batch, needs: tuple[bool, ...], factor: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Sums]:
    """Return the sums of rows, as the operator returns them, and the gradients of Q and D.

    Weights lack the scale of their rows, ``factor / sum`` of the softmax, which is known when a panel is
    done. The gradient of the queries is multiplied by it, and so are the queries before they multiply the
    weights.
    """
    panels = _product_blocks(batch)
    sums, of_rows = Sums.of(batch, needs, dtype), []
    weights = batch.buffer(panels, batch.Q.dtype)
    rows = batch.Q.new_empty((panels[0][1], batch.Q.shape[1])) if needs[1] else None
    for begin, end in panels:
        panel, n = slice(begin, end), end - begin
        q, given = batch.Q[panel], (*batch.labels((begin, end)), factor[panel])
        to = weights[:n, : len(batch.D)]
        scaled = None if rows is None else rows[:n]
        found = _ops.softmax_product_rows_.default(q, batch.D, batch.inverse, *given, to, scaled)
        of_rows.append(found)
        sums.add(batch, (begin, end), to, (found[5], scaled))
    return of_rows[0] if len(of_rows) == 1 else torch.cat(of_rows, 1), sums


def _product_blocks(batch: Batch) -> list[Block]:
    """Split the queries into panels of equal height, in whole tiles."""
    queries = len(batch.Q)
    most = max(_LEAST_ROWS, _WEIGHT_BYTES // (batch.Q.itemsize * batch.pitch()))
    size = -(-queries // -(-queries // most))
    size = -(-size // _PRODUCT_TILE) * _PRODUCT_TILE
    return [(begin, min(begin + size, queries)) for begin in range(0, queries, size)]
