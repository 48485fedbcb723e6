"""The autograd function of a loss by blocks: both passes over all shards of documents, for every loss."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._checks.messages import no_double_backward
from late_interaction._contrastive.backward import (
    Given,
    Loss,
    Pair,
    Sums,
    add_gradients,
    add_shards,
    own_gradients,
)
from late_interaction._contrastive.blocks import Grid, KeptBlocks
from late_interaction._contrastive.call import Call, split
from late_interaction._contrastive.forward import score_own, score_shard
from late_interaction._contrastive.sequences import Block
from late_interaction._scoring.precision import without_autocast
from late_interaction._torch import _are_functorch_transforms_active, _is_any_autocast_enabled
from late_interaction.tokens import Tokens

Gradients = tuple[Tensor | None, ...]


class _Once(Function):
    """Gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, name: str, gradients: Callable[[], Any], *tensors: Any) -> Any:
        ctx.name = name
        return gradients()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise no_double_backward(ctx.name, "a loss of late_interaction.maxsim's scores")


_once: Any = _Once.apply


def outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    return without_autocast(x.device.type) if _is_any_autocast_enabled() else nullcontext()


# A run returns the value of a loss, what the backward keeps beside the tensors that the run was given, and a
# function of ``(call, tensors, kept, grad, needs)``. It returns their gradients, and holds no tensor itself.
Run = tuple[Tensor, Sequence[Tensor | None], Callable[..., Gradients]]


class LossFunction(Function):
    """Compute a loss of tensors by ``run``, of the bare call, them, and which of them need a gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, run: Callable[..., Run], *tensors: Any) -> Tensor:
        with outside_autocast(tensors[0]):
            result, kept, gradients = run(call, tensors, ctx.needs_input_grad[2:])
        if call.keeps:
            ctx.call, ctx.count, ctx.gradients = call, len(tensors), gradients
            ctx.save_for_backward(*tensors, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.count], saved[ctx.count :]

        def gradients() -> Gradients:
            with outside_autocast(grad):
                found: Gradients = ctx.gradients(ctx.call, tensors, kept, grad, ctx.needs_input_grad[2:])
            return found

        if not torch.is_grad_enabled():
            return None, None, *gradients()
        return None, None, *_once(ctx.call.name, gradients, grad, *tensors)


_apply: Any = LossFunction.apply


def apply_loss(call: Call, run: Callable[..., Run], *tensors: Any) -> Tensor:
    """Compute a loss by :class:`LossFunction`."""
    if _are_functorch_transforms_active():
        raise NotImplementedError(
            "torch.func (grad, vjp, jacrev, vmap, ...) does not transform this loss, which passes over the"
            " batch in parts by an autograd function of its own; take loss.backward() or"
            " torch.autograd.grad, or the loss of a matrix of late_interaction.maxsim's scores"
        )
    loss: Tensor = _apply(call, run, *tensors)
    return loss


def loss(call: Call, start: Callable[[Call], Loss]) -> Tensor:
    """Compute a loss by blocks. ``start`` makes its sums, over no logits yet."""
    return apply_loss(call.bare(), partial(_run, start), *call.tensors)


def _run(start: Callable[[Call], Loss], call: Call, tensors: Sequence[Any], needs: Sequence[bool]) -> Run:
    call = call.of(tensors)
    state = start(call)
    blocks = None if state.lists else call.kept_blocks()
    result, counts, last = _forward(call, state, blocks)
    of_sums, rebuild = state.save()
    of_blocks = [] if blocks is None else blocks.tensors()
    of_last = [last.values, last.mask, last.offsets] if call.keeps_last() else []
    groups: list[Sequence[Any]] = [[counts], of_sums, of_blocks, of_last]
    sizes, keys, bounds = [len(x) for x in groups], None if blocks is None else blocks.keys(), last._bounds

    def gradients(call: Call, tensors: Any, kept: Any, grad: Tensor, needs: Sequence[bool]) -> Gradients:
        (counts,), of_sums, of_blocks, of_last = split(kept, sizes)
        blocks = None if keys is None else KeptBlocks.from_saved(keys, list(of_blocks))
        last = Tokens._made(of_last[0], of_last[1], of_last[2], None, bounds) if of_last else None
        call = call.of(tensors)
        state = rebuild(call, of_sums)
        return _backward(call, state, needs, blocks, last, state.derive(grad, counts))

    return result, [x for group in groups for x in group], gradients


def _forward(call: Call, state: Loss, blocks: KeptBlocks | None) -> tuple[Tensor, Tensor, Tokens]:
    """Return the loss, how many rows count, and the documents of the last step."""
    score_own(call, state.add_own)
    documents = call.d
    for step, (_, documents, _) in enumerate(call.ring.shards(call.d)):
        grid = Grid.of(call.kernels, call.q, documents, call.together)
        state.begin(grid, step)

        def take(logits: Tensor, rows: Block, run: list[Block], step: int = step) -> None:
            state.take(call.kept(logits, step, rows, (run[0][0], run[-1][1])), rows, run)

        score_shard(call, grid, take, None if blocks is None else blocks.of_shard(step))
        state.end(step)
    return *state.result(), documents


def _backward(
    call: Call, state: Loss, needs: Sequence[bool], blocks: KeptBlocks | None, last: Tokens | None,
    travels: Tensor | None,
) -> Gradients:  # fmt: skip
    """Return the gradients of what :attr:`Call.tensors` lists."""
    # Queries are summed as a whole in a group, with hard negatives, or if they are the smaller or only side.
    smaller = call.q.values.numel() <= call.d.values.numel()
    whole = call.ring.world > 1 or call.h is not None or smaller or not needs[1]
    q_sums = Sums(call.q, needs[0], whole)
    grad_H = own_gradients(call, state, q_sums, needs[2])

    def add(step: int, documents: Tokens, travelled: Tensor | None, sums: Pair) -> None:
        given: Given = state.listed(step)
        if given is None and blocks is not None:
            given = blocks.of_shard(step)
        grid = Grid.of(call.kernels, call.q, documents, call.together)
        state.begin_gradients(step, travelled)
        add_gradients(call, state, grid, sums, given)

    grad_D = add_shards(call, q_sums, needs[1], add, travels, last)
    return q_sums.finished() if needs[0] else None, grad_D, grad_H, *state.of_numbers(needs[3], needs[4])
