"""The autograd functions of losses that follow from sums over each query's logits."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._contrastive import backward, forward, whole
from late_interaction._contrastive.arguments import Arguments
from late_interaction._contrastive.kept import KeptBlocks
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.problem import Grid, Problem, sum_dtype
from late_interaction._contrastive.row_losses.pairwise import Pairwise
from late_interaction._contrastive.row_losses.rows import Panel, RowLoss, RowPass, RowSums, RowWeights
from late_interaction._contrastive.row_losses.sigmoid import Sigmoid
from late_interaction._contrastive.shards import (
    Call,
    Gradients,
    add_shards,
    once,
    reduced,
    row_factor,
    sums_of_queries,
)
from late_interaction._scoring.precision import without_autocast
from late_interaction._scoring.untransformed import applied
from late_interaction._torch import _is_any_autocast_enabled


@dataclass(frozen=True)
class RowCall:
    """What a call has beside the tensors that have gradients."""

    call: Call
    row_loss: RowLoss  # its bias is replaced by the one that is given, if that is a tensor
    needs_positives: bool
    name: str  # of the public function, for messages

    def loss(self, bias: Tensor | None) -> RowLoss:
        if bias is None:
            return self.row_loss
        assert isinstance(self.row_loss, Sigmoid)
        return replace(self.row_loss, bias=bias)


def row_loss(name: str, given: Arguments, loss: RowLoss, needs_positives: bool = False) -> Tensor:
    """The loss of a batch, from the arguments of the function ``name``. ``needs_positives``: the forward must
    know the logits of labels before it begins."""
    sides, options = given.sides, given.options
    classes = sum(given.ring.documents) + sides.each
    problem = Problem(
        given.kernels, options.temperature, Labels(options.labels), None, 0.0, 0.0, classes,
        sum(given.ring.queries), sides.each, False,
    )  # fmt: skip
    call = Call.of(problem, given)
    row_call = RowCall(call, loss, needs_positives, name)
    q, d, h = sides.q, sides.d, sides.h
    number = None if options.own is None else options.own.bias
    bias = number if isinstance(number, Tensor) else None
    result: Tensor
    if not given.whole:
        H = None if h is None else h.values
        result = _blockwise(q.values, d.values, H, options.temperature, bias, row_call)
        return result
    with without_autocast(q.values.device.type) if _is_any_autocast_enabled() else nullcontext():
        scores = whole.all_scores(problem, q, d, h, given.keeps)
        own = None if h is None or not sides.each else given.kernels.own_scores(q, h, sides.each)[0]
        result = _of_scores(scores, own, options.temperature, bias, row_call)
    return result


# ---- by blocks ----


class BlockwiseFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        Q: Tensor,
        D: Tensor,
        H: Tensor | None,
        temperature: Tensor | float,
        bias: Tensor | None,
        row_call: RowCall,
    ) -> Tensor:
        with without_autocast(Q.device.type):
            # The backward of a list of pairs has no blocks.
            listed = isinstance(row_call.row_loss, Pairwise)
            blocks = None if listed else row_call.call.kept_blocks(row_call.call.q.with_values(Q))
            sums = _sums_of_blocks((Q, D, H), temperature, bias, row_call, blocks)
            ctx.keys = None if blocks is None else blocks.keys()
            tensors = (Q, D, H, *(() if blocks is None else blocks.tensors()))
            return _finish(ctx, sums, tensors, temperature, bias, row_call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        (Q, D, H, *kept), state = _saved(ctx)
        blocks = None if ctx.keys is None else KeptBlocks.from_saved(ctx.keys, kept)

        def gradients() -> Gradients:
            with without_autocast(Q.device.type):
                return _gradients_of_blocks(grad, (Q, D, H), state, ctx.needs_input_grad, blocks)

        tensors = (grad, Q, D, H, state.problem.temperature, state.bias)
        return *once(ctx.row_call.name, gradients, tensors), None


_blockwise = applied(BlockwiseFunction)


@dataclass(frozen=True)
class _State:
    """What a backward has beside its tensors of tokens or scores."""

    row_call: RowCall
    problem: Problem
    bias: Tensor | None
    sums: RowSums
    counts: Tensor

    @property
    def loss(self) -> RowLoss:
        return self.row_call.loss(self.bias)

    def factor(self, grad: Tensor) -> Tensor:
        """The derivative of the result in the loss of each row."""
        call = self.row_call.call
        like = next(iter(self.sums.values()))
        grad = grad.to(like.dtype) * call.scale
        each = grad / self.counts[0] if call.reduction == "mean" else grad
        return row_factor(each, self.problem.labels.index, like)

    def of_numbers(
        self, factor: Tensor, needs_T: bool, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the temperature and the bias."""
        grad_T = grad_bias = None
        temperature = self.problem.temperature
        if needs_T and isinstance(temperature, Tensor):
            total = torch.where(factor == 0, 0.0, self.sums["moment"] * factor).sum()
            grad_T = (-total / temperature).to(temperature.dtype)
        if needs_bias and self.bias is not None:
            total = torch.where(factor == 0, 0.0, self.sums["slope"] * factor).sum()
            grad_bias = total.to(self.bias.dtype)
        return grad_T, grad_bias


def _finish(
    ctx: Any,
    sums: RowSums,
    tensors: tuple[Tensor | None, ...],
    temperature: Tensor | float,
    bias: Tensor | None,
    row_call: RowCall,
) -> Tensor:
    """The result, and what the backward will need of the forward."""
    call = row_call.call
    losses = row_call.loss(bias).losses(sums)
    (each,), total, counts = reduced(call, [(losses, call.problem.labels.index)])
    if call.keeps:
        ctx.row_call, ctx.names = row_call, list(sums)
        ctx.temperature = None if isinstance(temperature, Tensor) else temperature
        given = None if ctx.temperature is not None else temperature
        ctx.save_for_backward(given, bias, counts, *sums.values(), *tensors)
    return (each if total is None else total) * call.scale


def _saved(ctx: Any) -> tuple[Any, _State]:
    temperature, bias, counts, *others = ctx.saved_tensors
    n = len(ctx.names)
    sums = dict(zip(ctx.names, others[:n], strict=True))
    temperature = ctx.temperature if temperature is None else temperature
    problem = replace(ctx.row_call.call.problem, temperature=temperature)
    return others[n:], _State(ctx.row_call, problem, bias, sums, counts)


def _sums_of_blocks(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    temperature: Tensor | float,
    bias: Tensor | None,
    row_call: RowCall,
    blocks: KeptBlocks | None,
) -> RowSums:
    (Q, D, H), call = inputs, row_call.call
    p, ring = replace(call.problem, temperature=temperature), call.ring
    q, d = call.q.with_values(Q), call.d.with_values(D)
    loss = row_call.loss(bias)
    positives = torch.full((len(q),), torch.nan, dtype=sum_dtype(Q), device=Q.device)
    if row_call.needs_positives:
        positives = forward.own_logits(p, Grid.of(p.kernels, q, d), positives)
    sums = loss.empty(positives)
    if H is not None and call.h is not None and p.each:

        def take(begin: int, logits: Tensor) -> None:
            loss.add(sums, Panel(logits, (begin, begin + len(logits)), p.classes - p.each))

        forward.score_own(p, q, call.h.with_values(H), take)
    for step, (owner, documents, _) in enumerate(ring.shards(d)):
        to = RowPass(loss, sums, sum(ring.documents[:owner]), step == 0)
        forward.score_shard(
            p, Grid.of(p.kernels, q, documents), to, None if blocks is None else blocks.of_shard(step)
        )
    return sums


def _gradients_of_blocks(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor | None],
    state: _State,
    needs: tuple[bool, ...],
    blocks: KeptBlocks | None,
) -> Gradients:
    """The gradients of Q, D, hard negatives, temperature and bias."""
    Q, D, H = inputs
    p, call, loss, sums = state.problem, state.row_call.call, state.loss, state.sums
    ring, q = call.ring, call.q.with_values(Q)
    factor = state.factor(grad)
    scaled = factor / p.temperature
    q_sums = sums_of_queries(call, q, D, needs[0], needs[1])
    grad_H = None
    if H is not None and call.h is not None and p.each and (needs[0] or needs[2]):
        weights = RowWeights(p, loss, sums, scaled, 0, False)
        h = call.h.with_values(H)
        grad_H = backward.add_own_gradients(weights, q, h, q_sums.whole, needs[2])
    elif H is not None and needs[2]:
        grad_H = torch.zeros_like(H)

    def of_shard(step: int, _: Tensor | None) -> tuple[RowWeights, backward.Given]:
        owner, own = ring.owner(step), step == 0
        first = sum(ring.documents[:owner])
        weights = RowWeights(p, loss, sums, scaled, first, own)
        if isinstance(loss, Pairwise):
            shard = (first, first + ring.documents[owner])
            return weights, backward.Found(loss.pairs(sums, p.labels if own else None, shard), set())
        return weights, None if blocks is None else blocks.of_shard(step)

    grad_D = add_shards(call, p, q_sums, call.d.with_values(D), needs[1], of_shard)
    grad_Q = q_sums.finished() if needs[0] else None
    return grad_Q, grad_D, grad_H, *state.of_numbers(factor, needs[3], needs[4])


# ---- of all scores ----


class ScoresFunction(Function):
    """The same from the scores of all pairs, and of the queries with their hard negatives."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        own: Tensor | None,
        temperature: Tensor | float,
        bias: Tensor | None,
        row_call: RowCall,
    ) -> Tensor:
        p, loss = replace(row_call.call.problem, temperature=temperature), row_call.loss(bias)
        positives = torch.full_like(scores[:, :0].sum(1), torch.nan)
        panels = _panels(p, scores, own)
        p.labels.read(positives, panels[0].logits, panels[0].rows, panels[0].columns)
        sums = loss.empty(positives)
        for panel in panels:
            if panel.logits.numel():
                loss.add(sums, panel)
        return _finish(ctx, sums, (scores, own), temperature, bias, row_call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        (scores, own), state = _saved(ctx)

        def gradients() -> Gradients:
            p, factor = state.problem, state.factor(grad)
            weights = RowWeights(p, state.loss, state.sums, factor / p.temperature, 0, True)
            rows, columns = (0, scores.shape[0]), (0, scores.shape[1])
            of_scores = weights.of_block(scores, rows, columns)
            of_own = None if own is None else weights.of_own(own.clone(), rows)
            return of_scores, of_own, *state.of_numbers(factor, *ctx.needs_input_grad[2:4])

        tensors = (grad, scores, own, state.problem.temperature, state.bias)
        return *once(ctx.row_call.name, gradients, tensors), None


_of_scores = applied(ScoresFunction)


def _panels(p: Problem, scores: Tensor, own: Tensor | None) -> list[Panel]:
    rows, columns = (0, scores.shape[0]), (0, scores.shape[1])
    found = [Panel(scores / p.temperature, rows, 0, columns, p.labels)]
    if own is not None:
        found.append(Panel(own / p.temperature, rows, scores.shape[1]))
    return found
