"""The backward pass over all shards of documents, and the reduction over all processes: what the autograd
functions of all losses share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._contrastive import backward
from late_interaction._contrastive.arguments import Arguments
from late_interaction._contrastive.kept import KeptBlocks
from late_interaction._contrastive.labels import ignored
from late_interaction._contrastive.problem import Grid, Problem
from late_interaction._contrastive.ring import Exchange, Ring
from late_interaction._contrastive.tokens import Tokens

Gradients = tuple[Tensor | None, ...]


class _Once(Function):
    """Gradients, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, name: str, gradients: Callable[[], Any], *tensors: Any) -> Any:
        ctx.name = name
        return gradients()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            f"double backward of {ctx.name} is not supported: its gradients cannot be differentiated again"
            " (call backward or torch.autograd.grad without create_graph=True)"
        )


_once: Any = _Once.apply


def once(name: str, gradients: Callable[[], Gradients], tensors: Sequence[Any]) -> Gradients:
    """The gradients of a backward. ``tensors``: all that they depend on, so that with ``create_graph=True``
    differentiating them again raises an error that names the function."""
    if not torch.is_grad_enabled():
        return gradients()
    found: Gradients = _once(name, gradients, *tensors)
    return found


@dataclass(frozen=True)
class Form:
    """Tokens without their values."""

    mask: Tensor | None
    offsets: Tensor | None
    bounds: Sequence[int]

    @staticmethod
    def of(tokens: Tokens) -> "Form":
        return Form(tokens.mask, tokens.offsets, tokens.bounds)

    def with_values(self, values: Tensor) -> Tokens:
        return Tokens(values, self.mask, self.offsets, self.bounds)


@dataclass(frozen=True)
class Call:
    """What a call has beside the tensors that have gradients."""

    problem: Problem  # its temperature is replaced by the one that is given
    q: Form
    d: Form
    h: Form | None
    reduction: str
    ring: Ring
    scale: float  # of the loss: the number of processes, or 1
    keeps: bool  # a backward will follow
    kept_bytes: int | None  # of blocks from the forward to the backward; None: the device's default

    @staticmethod
    def of(problem: Problem, given: Arguments) -> "Call":
        sides, options = given.sides, given.options
        h = None if sides.h is None else Form.of(sides.h)
        forms = Form.of(sides.q), Form.of(sides.d), h
        kept = options.kept_bytes
        return Call(problem, *forms, options.reduction, given.ring, given.scale, given.keeps, kept)

    def kept_blocks(self, like: Tensor) -> KeptBlocks | None:
        """Where the forward keeps blocks; None: it keeps none."""
        if not self.keeps or self.ring.world > 1:
            return None
        return KeptBlocks.of(self.problem.kernels, self.kept_bytes, like.device.type)


def reduced(
    call: Call, found: Sequence[tuple[Tensor, Tensor | None]]
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """From losses of rows, and of columns, with their labels: the same with 0 where there is no label; the
    sum of their means (or sums) over all processes, or None where they are not reduced; and how many rows and
    columns have a label, in all processes where they are reduced."""
    losses, totals, counts = [], [], []
    for loss, index in found:
        left_out = ignored(index)
        count = torch.full_like(loss[:0].sum(), loss.numel())
        if left_out is not None:
            loss, count = loss.masked_fill(left_out, 0.0), count - left_out.sum()
        losses.append(loss)
        totals.append(loss.sum())
        counts.append(count)
    if call.reduction == "none":
        return losses, None, torch.stack(counts)
    world = call.ring.sums(torch.stack([*totals, *counts]))
    total, count = world[: len(losses)], world[len(losses) :]
    return losses, (total / count if call.reduction == "mean" else total).sum(), count


def row_factor(each: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    """The derivative of the loss in each row's loss: ``each``, but 0 where there is no label."""
    each, left_out = each.expand_as(like), ignored(index)
    return each if left_out is None else each.masked_fill(left_out, 0.0)


def sums_of_queries(call: Call, q: Tokens, D: Tensor, needs_q: bool, needs_d: bool) -> backward.Sums:
    """Queries with hard negatives add up as a whole; so do both sides where documents travel."""
    q_whole = call.ring.world > 1 or call.h is not None or q.values.numel() <= D.numel() or not needs_d
    return _sums(q, needs_q, q_whole)


def add_shards(
    call: Call,
    p: Problem,
    q_sums: backward.Sums,
    d: Tokens,
    needs_d: bool,
    of_shard: Callable[[int, Tensor | None], tuple[backward.BlockWeights, backward.Given]],
    extra: Tensor | None = None,
) -> Tensor | None:
    """Adds the gradients of the queries to their sums, and returns that of the documents. ``of_shard``: the
    weights of a step's shard, and what the forward over it hands on; from ``extra``, which goes with the
    documents."""
    ring, own = call.ring, backward.Sums(d)
    under_way: Exchange | None = None
    alone = ring.world == 1
    # Each of two processes keeps the gradient that it finds for its own documents, so that half as many bytes
    # travel. More processes send it on, since keeping it would take one more copy in memory.
    stays = ring.world <= 2
    if alone and not (q_sums.needed or needs_d):
        return None
    for step, (_, documents, travelled) in enumerate(ring.shards(d, extra)):
        of_own = stays and step == 0
        wants = needs_d if of_own else ring.needs_gradient
        sums = _sums(documents, wants, not alone or q_sums.in_blocks)
        weights, given = of_shard(step, travelled)
        backward.add_gradients(weights, Grid.of(p.kernels, q_sums.tokens, documents), (q_sums, sums), given)
        if of_own:
            own = sums
        elif wants:
            under_way = _pass_on(ring, step, sums, under_way)
    if under_way is not None:
        (arrived,) = under_way.wait()
        if needs_d:
            own.add(arrived)
    return own.finished() if needs_d else None


def _sums(tokens: Tokens, needed: bool, whole: bool) -> backward.Sums:
    if not needed:
        return backward.Sums(tokens)
    return backward.Sums.zeros(tokens) if whole else backward.Sums.by_blocks(tokens)


def _pass_on(ring: Ring, step: int, sums: backward.Sums, under_way: Exchange | None) -> Exchange:
    """Adds what other processes found for this shard, and sends the sum on with the documents."""
    if under_way is not None:
        sums.add(under_way.wait()[0])
    leaving = sums.whole
    assert leaving is not None
    arriving = leaving.new_empty(ring.shapes[ring.owner(step + 1)])
    return ring.exchange([leaving], [arriving], "gradients")
