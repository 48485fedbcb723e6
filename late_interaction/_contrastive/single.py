"""The cross entropy of batches with one token a side, which is CLIP's loss.

Scores are a matrix product, and pass in panels: some queries with all documents. The operators of
:mod:`late_interaction.ops.softmax` make sums of a panel, and weights in the dtype of the embeddings. Panels
of scores are small, so that a GPU reads them back from its L2 cache; the weights of several are multiplied
with the embeddings together. There are two ways:

- Queries among the documents, reduced to one number: a panel has whole rows, so its weights follow from its
  own sums. The forward computes the gradients as well, and the backward multiplies them by the gradient that
  comes in. Scores are computed once.
- Both directions, or a loss for each query: weights need sums of all panels, or a gradient for each row. The
  backward computes the scores again, or reads them where all of them stay within the budget.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._contrastive.arguments import Arguments
from late_interaction._contrastive.labels import ignored
from late_interaction._contrastive.problem import KEPT_BYTES, Problem, sum_dtype
from late_interaction._contrastive.products import add_product, product
from late_interaction._contrastive.reduction import (
    Kept,
    by_columns,
    factors,
    loss_and_counts,
    temperature_gradient,
)
from late_interaction._contrastive.shards import Call, Gradients, once, row_factor
from late_interaction._contrastive.softmax import RunningSoftmax
from late_interaction._contrastive.tokens import Block, even_blocks
from late_interaction._precision import without_autocast

_ops = torch.ops.late_interaction
# Bytes of a panel, and its least rows. Each panel of scores reads all documents; each panel of weights adds
# its share to the gradients of all documents: small ones would spend their time on that.
_SCORES = {"cuda": (32 << 20, 512), "cpu": (16 << 20, 64)}
_WEIGHTS = {"cuda": (96 << 20, 1024), "cpu": (16 << 20, 64)}
_LINE = 64  # rows of a panel begin at multiples of so many elements
_BELOW_ALL = -1e30  # the maximum of no scores, as the operators have it


def takes(given: Arguments) -> bool:
    """Whether this way computes the loss exactly as it was asked for."""
    sides = given.sides
    plain = sides.h is None and sides.q.mask is None and sides.d.mask is None and not given.options.tail
    alone = given.ring.group is None and given.kernels.way == "matrix"
    values = sides.q.values
    kernels = not (values.is_cuda and values.dtype is torch.float64)
    return plain and alone and kernels and len(sides.q) > 0 and len(sides.d) > 0


def loss(Q: Tensor, D: Tensor, temperature: Tensor | float, call: Call, kept_bytes: int | None) -> Tensor:
    """``Q [Nq, 1, d]`` with ``D [Nd, 1, d]``."""
    budget = KEPT_BYTES[Q.device.type] if kept_bytes is None else kept_bytes
    rows_alone = not call.problem.symmetric and call.reduction != "none"
    one_pass = call.keeps and rows_alone and (Q.requires_grad or D.requires_grad)
    function: Any = _OnePass if one_pass else _TwoPasses
    found: Tensor = function.apply(Q, D, temperature, call, budget)
    return found


@dataclass(frozen=True)
class _Batch:
    """A call's matrices."""

    call: Call
    p: Problem
    Q: Tensor  # [queries, d], as they multiply
    D: Tensor
    inverse: Tensor  # of the temperature

    @staticmethod
    def of(Q: Tensor, D: Tensor, temperature: Tensor | float, call: Call) -> "_Batch":
        p = replace(call.problem, temperature=temperature)
        rows = [p.kernels.rows(form.with_values(x)) for form, x in ((call.q, Q), (call.d, D))]
        dtype = sum_dtype(Q)
        if isinstance(temperature, Tensor):
            inverse = temperature.to(dtype).reciprocal()
        else:
            inverse = torch.full((), 1 / temperature, dtype=dtype, device=Q.device)
        return _Batch(call, p, rows[0], rows[1], inverse)

    def blocks(self) -> list[Block]:
        """The rows of each panel of scores."""
        return self._blocks((0, len(self.Q)), _SCORES, self.inverse.itemsize)

    def weight_blocks(self) -> list[tuple[Block, list[Block]]]:
        """The rows of each panel of weights, and of its panels of scores."""
        found = self._blocks((0, len(self.Q)), _WEIGHTS, self.Q.itemsize)
        return [(block, self._blocks(block, _SCORES, self.inverse.itemsize)) for block in found]

    def _blocks(self, rows: Block, limits: dict[str, tuple[int, int]], itemsize: int) -> list[Block]:
        most, least = limits[self.Q.device.type]
        begin, end = rows
        found = even_blocks(end - begin, max(least, most // (itemsize * self._pitch())))
        return [(begin + first, begin + last) for first, last in found]

    def _pitch(self) -> int:
        """From one row of a panel to the next."""
        return -(-len(self.D) // _LINE) * _LINE

    def buffer(self, blocks: list[Block], dtype: torch.dtype | None = None) -> Tensor:
        """Memory for any of these panels: of scores, or of weights of a dtype."""
        rows = max(end - begin for begin, end in blocks)
        return self.inverse.new_empty((rows, self._pitch()), dtype=dtype)

    def score(self, block: Block, buffer: Tensor) -> Tensor:
        """The scores of a panel, in the first rows of a buffer."""
        out = buffer[: block[1] - block[0], : len(self.D)]
        return product(self.Q[slice(*block)], self.D.t(), out)

    def labels(self, block: Block) -> tuple[Tensor | None, int]:
        """Of a panel's rows, as the operators take them."""
        index = self.p.labels.index
        return (None, block[0]) if index is None else (index[slice(*block)], 0)

    def running(self, sums: Tensor, target: Tensor, count: int) -> RunningSoftmax:
        """Sums over ``count`` scores each, as those of logits relative to their maximum."""
        maximum, weight, moment, total = sums.unbind(0)
        return RunningSoftmax(
            maximum=torch.zeros_like(maximum),
            weight=weight,
            target=(target - maximum) * self.inverse,
            moment=moment * self.inverse if self.p.needs_moment else None,
            total=(total - count * maximum) * self.inverse if self.p.smoothing else None,
        )

    def no_target(self) -> Tensor:
        return self.inverse.new_full((len(self.Q),), torch.nan)


@dataclass
class _Sums:
    """Gradients that panels add to: of the queries finished with each panel, in the dtype of the inputs; of
    the documents in the sums' dtype. None: not needed."""

    q: Tensor | None
    d: Tensor | None
    begun: bool = False

    @staticmethod
    def of(batch: _Batch, needs: tuple[bool, ...], dtype: torch.dtype) -> "_Sums":
        q = batch.Q.new_empty(batch.Q.shape, dtype=dtype) if needs[0] else None
        return _Sums(q, batch.inverse.new_empty(batch.D.shape) if needs[1] else None)

    def add(self, batch: _Batch, block: Block, weights: Tensor) -> None:
        if self.q is not None:
            self.q[slice(*block)] = product(weights, batch.D)
        if self.d is not None:
            to = add_product if self.begun else _begin
            to(self.d, weights.t(), batch.Q[slice(*block)])
        self.begun = True


def _begin(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return product(a, b, sums)


def _add_panels(
    batch: _Batch,
    needs: tuple[bool, ...],
    dtype: torch.dtype,
    weigh: Callable[[Block, Tensor, Tensor], None],
    kept: Tensor | None,
) -> _Sums:
    """The gradients of Q and D. ``weigh`` writes the weights of a panel of scores, which are those of
    ``kept`` or computed."""
    panels, n = batch.weight_blocks(), len(batch.D)
    sums = _Sums.of(batch, needs, dtype)
    weights = batch.buffer([block for block, _ in panels], batch.Q.dtype)
    buffer = batch.buffer([part for _, parts in panels for part in parts]) if kept is None else kept
    for block, parts in panels:
        for part in parts:
            scores = batch.score(part, buffer) if kept is None else kept[slice(*part), :n]
            weigh(part, scores, weights[part[0] - block[0] : part[1] - block[0], :n])
        sums.add(batch, block, weights[: block[1] - block[0], :n])
    return sums


def _scaled(x: Tensor | None, scale: Tensor, like: Tensor) -> Tensor | None:
    """``x`` times a number, multiplied before it is rounded to the dtype of ``like``."""
    if x is None:
        return None
    out = torch.empty(x.shape, dtype=like.dtype, device=x.device)
    return torch.mul(x, scale.reshape(1, 1), out=out).view_as(like)


# ---- gradients in the forward ----


class _OnePass(Function):
    @staticmethod
    def forward(
        ctx: Any, Q: Tensor, D: Tensor, temperature: Tensor | float, call: Call, budget: int
    ) -> Tensor:
        with without_autocast(Q.device.type):
            result, found, after = _with_gradients(Q, D, temperature, call, ctx.needs_input_grad[:3])
        given = temperature if isinstance(temperature, Tensor) else None
        ctx.save_for_backward(Q, D, given, after, *found)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        Q, D, temperature, after, *found = ctx.saved_tensors

        def gradients() -> Gradients:
            scale = grad if after is None else grad * after
            of_temperature = None if found[2] is None else found[2] * grad.to(found[2].dtype)
            return _scaled(found[0], scale, Q), _scaled(found[1], scale, D), of_temperature

        return *once("contrastive_loss", gradients, (grad, Q, D, temperature)), None, None


def _with_gradients(
    Q: Tensor, D: Tensor, temperature: Tensor | float, call: Call, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
    """The loss; the gradients of Q, D and the temperature; and what the first two are to be multiplied by."""
    batch = _Batch.of(Q, D, temperature, call)
    p, index = batch.p, batch.p.labels.index
    target = batch.no_target()
    share = _share(call, index, target)
    # Half-precision weights of fp16 hold no small numbers: theirs are of a factor of 1.
    after = share * batch.inverse if batch.Q.dtype is torch.float16 else None
    each = torch.ones_like(share) if after is not None else share * batch.inverse
    factor = row_factor(each, index, target).contiguous()
    of_rows = []

    def weigh(block: Block, scores: Tensor, weights: Tensor) -> None:
        p.labels.read(target, scores, block, (0, len(batch.D)))
        given = (*batch.labels(block), factor[slice(*block)], p.smoothing, weights)
        of_rows.append(_ops.softmax_rows_.default(scores, batch.inverse, *given))

    sums = _add_panels(batch, needs, Q.dtype, weigh, None)
    running = batch.running(_joined(of_rows), target, len(batch.D))
    result, counts = loss_and_counts(p, call, running, None)
    of_temperature = None
    if needs[2]:
        kept = Kept(running, None, [], counts)
        of_temperature = temperature_gradient(
            p, temperature, kept, factors(torch.ones_like(share), p, call, kept)
        )
    return result, [sums.q, sums.d, of_temperature], after


def _share(call: Call, index: Tensor | None, like: Tensor) -> Tensor:
    """The derivative of the loss in the cross entropy of a row that counts."""
    share = torch.full_like(like[:0].sum(), call.scale)
    if call.reduction == "mean":
        left_out = ignored(index)
        share = share / (len(like) if left_out is None else len(like) - left_out.sum())
    return share


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


# ---- sums in the forward, gradients in the backward ----


class _TwoPasses(Function):
    @staticmethod
    def forward(
        ctx: Any, Q: Tensor, D: Tensor, temperature: Tensor | float, call: Call, budget: int
    ) -> Tensor:
        with without_autocast(Q.device.type):
            batch = _Batch.of(Q, D, temperature, call)
            found = _all_sums(batch, budget)
            rows, columns = found.running(batch)
            result, counts = loss_and_counts(batch.p, call, rows, columns)
        if call.keeps:
            given = temperature if isinstance(temperature, Tensor) else None
            ctx.temperature, ctx.call = None if given is not None else temperature, call
            ctx.save_for_backward(Q, D, given, counts, found.rows, found.target, found.columns, found.scores)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        Q, D, temperature, counts, *sums = ctx.saved_tensors
        temperature = ctx.temperature if temperature is None else temperature
        needs = ctx.needs_input_grad[:3]

        def gradients() -> Gradients:
            with without_autocast(Q.device.type):
                batch = _Batch.of(Q, D, temperature, ctx.call)
                return _gradients(grad, batch, _AllSums(*sums), counts, (Q, D), needs)

        return *once("contrastive_loss", gradients, (grad, Q, D, temperature)), None, None


@dataclass(frozen=True)
class _AllSums:
    """What the forward knows of all scores."""

    rows: Tensor  # [4, queries], of the operators
    target: Tensor  # the score of each query with its label
    columns: Tensor | None  # [4, documents]
    scores: Tensor | None  # all of them, where they are kept

    def running(self, batch: _Batch) -> tuple[RunningSoftmax, RunningSoftmax | None]:
        rows = batch.running(self.rows, self.target, len(batch.D))
        if self.columns is None:
            return rows, None
        target = by_columns(batch.p, self.target, torch.nan)
        return rows, batch.running(self.columns, target, len(batch.Q))


def _all_sums(batch: _Batch, budget: int) -> _AllSums:
    p, blocks, target = batch.p, batch.blocks(), batch.no_target()
    columns = None
    if p.symmetric:
        columns = batch.inverse.new_zeros((4, len(batch.D)))
        columns[0] = _BELOW_ALL
    keeps = batch.call.keeps and len(batch.Q) * len(batch.D) * batch.inverse.itemsize <= budget
    buffer = batch.buffer([(0, len(batch.Q))] if keeps else blocks)
    of_rows = []
    for block in blocks:
        scores = batch.score(block, buffer[slice(*block)] if keeps else buffer)
        p.labels.read(target, scores, block, (0, len(batch.D)))
        if columns is None:
            of_rows.append(_ops.softmax_row_sums.default(scores, batch.inverse))
        else:
            of_rows.append(_ops.softmax_sums_.default(scores, batch.inverse, columns))
    return _AllSums(_joined(of_rows), target, columns, buffer if keeps else None)


def _gradients(
    grad: Tensor,
    batch: _Batch,
    found: _AllSums,
    counts: Tensor,
    inputs: tuple[Tensor, Tensor],
    needs: tuple[bool, ...],
) -> Gradients:
    """The gradients of Q, D and the temperature."""
    p = batch.p
    kept = Kept(*found.running(batch), [], counts)
    amounts = factors(grad, p, batch.call, kept)
    of_temperature = temperature_gradient(p, p.temperature, kept, amounts) if needs[2] else None
    if not (needs[0] or needs[1]):
        return None, None, of_temperature
    scale = batch.inverse
    if batch.Q.dtype is torch.float16:  # which holds no small numbers: the largest factor becomes 1
        peak = torch.stack([x.abs().amax() for x in amounts]).amax().clamp_min(1e-30)
        amounts, scale = [x / peak for x in amounts], scale * peak
    else:
        amounts, scale = [x * scale for x in amounts], torch.ones_like(scale)
    rows = _terms(found.rows, amounts[0])
    columns = None if found.columns is None else _terms(found.columns, amounts[1])

    def weigh(block: Block, scores: Tensor, weights: Tensor) -> None:
        of_rows = rows[:, slice(*block)].contiguous()
        given = (of_rows, columns, *batch.labels(block), p.smoothing, weights)
        _ops.softmax_weights_.default(scores, batch.inverse, *given)

    sums = _add_panels(batch, needs, inputs[0].dtype, weigh, found.scores)
    return _scaled(sums.q, scale, inputs[0]), _scaled(sums.d, scale, inputs[1]), of_temperature


def _terms(sums: Tensor, factor: Tensor) -> Tensor:
    """What the operator takes of sums: those of rows or columns that are left out are 0."""
    scale = torch.where(factor == 0, 0.0, factor / sums[1])
    return torch.stack((sums[0], scale, factor))
