"""The backward pass over all shards of documents, and the reduction over all processes: what the autograd
functions of all losses share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._contrastive import backward, whole
from late_interaction._contrastive.arguments import Arguments
from late_interaction._contrastive.kept import KeptBlocks
from late_interaction._contrastive.labels import ignored
from late_interaction._contrastive.problem import Grid, Problem
from late_interaction._contrastive.ring import Exchange, Ring
from late_interaction._contrastive.sums import Sums
from late_interaction._contrastive.tokens import Tokens

_LAST_BYTES = 128 << 20  # of the other one of two processes' documents, that stay for the backward

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

    def kept_blocks(self, q: Tokens) -> KeptBlocks | None:
        """Where the forward keeps blocks; None: it keeps none."""
        if not self.keeps:
            return None
        device = q.values.device.type
        if self.ring.world == 1:
            return KeptBlocks.of(self.problem.kernels, self.kept_bytes, device)
        # In a group all blocks stay or none, as in a batch that is kept as a whole.
        budget = whole.default_budget(device, False)
        pair = (4 if q.packed else 2) * q.longest + 4
        fit = len(q) * sum(self.ring.documents) * pair <= budget
        return KeptBlocks.of(self.problem.kernels, budget, device) if fit else None

    def keeps_last(self, like: Tensor) -> bool:
        """Whether the documents of the last step stay for the backward, which then begins with them. The
        same on every process."""
        if not self.keeps or self.ring.world != 2 or self.problem.symmetric:
            return False
        return self.ring.largest_shard * like.itemsize <= _LAST_BYTES


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


def sums_of_queries(call: Call, q: Tokens, D: Tensor, needs_q: bool, needs_d: bool) -> Sums:
    """Queries with hard negatives add up as a whole, and so do those that documents travel to."""
    q_whole = call.ring.world > 1 or call.h is not None or q.values.numel() <= D.numel() or not needs_d
    return _sums(q, needs_q, q_whole)


def add_shards(
    call: Call,
    p: Problem,
    q_sums: Sums,
    d: Tokens,
    needs_d: bool,
    of_shard: Callable[[int, Tensor | None], tuple[backward.BlockWeights, backward.Given]],
    extra: Tensor | None = None,
    last: Tokens | None = None,
) -> Tensor | None:
    """Adds the gradients of the queries to their sums, and returns that of the documents. ``of_shard``: the
    weights of a step's shard, and what the forward over it hands on; from ``extra``, which goes with the
    documents. ``last``: the documents of the other one of two processes, where they are still there."""
    ring, alone = call.ring, call.ring.world == 1
    # More than two gradients are added up in the sums' dtype.
    own = _sums(d, needs_d, q_sums.in_blocks if alone else ring.world > 2)
    if alone and not (q_sums.needed or needs_d):
        return None
    under_way: Exchange | None = None
    shards = enumerate(ring.shards(d, extra)) if last is None else [(1, (0, last, None)), (0, (0, d, None))]
    for step, (_, documents, travelled) in shards:
        owner = ring.owner(step)
        sums = own if step == 0 else _sums(documents, ring.wants[owner], False)
        weights, given = of_shard(step, travelled)
        if q_sums.needed or sums.needed:
            grid = Grid.of(p.kernels, q_sums.tokens, documents)
            backward.add_gradients(weights, grid, (q_sums, sums), given)
        if step and any(ring.wants):
            if under_way is not None:
                own.add(under_way.wait()[0])
            under_way = _send_home(ring, step, sums)
    if under_way is not None:
        own.add(under_way.wait()[0])
    return own.finished() if needs_d else None


def _sums(tokens: Tokens, needed: bool, whole: bool) -> Sums:
    if not needed:
        return Sums(tokens)
    return Sums.zeros(tokens) if whole else Sums.by_blocks(tokens)


def _send_home(ring: Ring, step: int, sums: Sums) -> Exchange:
    """Sends the gradient of a step's documents to their process, and receives one of the own documents from
    the process that has had them in this step."""
    values, found = sums.tokens.values, sums.finished()
    leaving = values.new_empty(0) if found is None else found
    arriving = values.new_empty(ring.shapes[ring.rank] if ring.wants[ring.rank] else 0)
    return ring.exchange([leaving], [arriving], "gradients", -step)
