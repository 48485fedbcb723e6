"""The autograd function of a loss by blocks: both passes over all shards of documents, for every loss."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._checks.messages import no_double_backward
from late_interaction._contrastive.backward import (
    Found,
    Given,
    Pair,
    Sums,
    Weights,
    add_gradients,
    add_shards,
    own_gradients,
)
from late_interaction._contrastive.blocks import Grid, KeptBlocks
from late_interaction._contrastive.call import Call, split
from late_interaction._contrastive.forward import score_own, score_shard
from late_interaction._contrastive.sequences import Block
from late_interaction._scoring.precision import without_autocast
from late_interaction._torch import _are_functorch_transforms_active
from late_interaction.tokens import Tokens


def applied(function: type[Function]) -> Callable[..., Any]:
    """Return ``function.apply``, with an error that says what to call under ``torch.func``."""
    plain: Any = function.apply

    def apply(*args: Any) -> Any:
        if _are_functorch_transforms_active():
            raise NotImplementedError(
                "torch.func (grad, vjp, jacrev, vmap, ...) does not transform this loss, which passes over "
                "the batch in parts by an autograd function of its own; take loss.backward() or "
                "torch.autograd.grad, or the loss of a matrix of late_interaction.maxsim's scores"
            )
        return plain(*args)

    return apply


Gradients = tuple[Tensor | None, ...]


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

    def weights(self, step: int, travelled: Tensor | None) -> Weights:
        """Return the gradients with respect to the scores of a step's shard."""

    def listed(self, step: int) -> Found | None:
        """Return the listed pairs of a step's shard, if pairs are listed."""

    def of_numbers(self, needs_T: bool, needs_bias: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the temperature and the bias."""


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


def once(name: str, gradients: Callable[[], Gradients], tensors: Sequence[Any]) -> Gradients:
    """Return the gradients of a backward, so that differentiating them again raises an error.

    ``tensors``: all that they depend on. ``name``: the function that the error names.
    """
    if not torch.is_grad_enabled():
        return gradients()
    return _once(name, gradients, *tensors)


class BlockwiseFunction(Function):
    @staticmethod
    def forward(ctx: Any, call: Call, start: Callable[[Call], Loss], *tensors: Any) -> Tensor:
        bare, call = call, call.of(tensors)
        with without_autocast(call.q.device.type):
            state = start(call)
            blocks = None if state.lists else call.kept_blocks()
            result, counts, last = _forward(call, state, blocks)
        if call.keeps:
            _save(ctx, bare, tensors, state, counts, blocks, last if call.keeps_last() else None)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        tensors, (counts,), saved, kept, last = split(ctx.saved_tensors, ctx.sizes)
        tensors = [x if number is None else number for x, number in zip(tensors, ctx.numbers, strict=True)]
        call, needs = ctx.call.of(tensors), ctx.needs_input_grad[2:]
        blocks = None if ctx.keys is None else KeptBlocks.from_saved(ctx.keys, list(kept))
        documents = Tokens._made(last[0], last[1], last[2], None, ctx.bounds) if last else None

        def gradients() -> Gradients:
            with without_autocast(call.q.device.type):
                state = ctx.rebuild(call, saved)
                travels = state.derive(grad, counts)
                return _backward(call, state, needs, blocks, documents, travels)

        return None, None, *once(call.name, gradients, (grad, *tensors))


_apply = applied(BlockwiseFunction)


def loss(call: Call, start: Callable[[Call], Loss]) -> Tensor:
    """Compute a loss by blocks. ``start`` makes its sums, over no logits yet."""
    return _apply(call.bare(), start, *call.tensors)


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


def _save(
    ctx: Any, call: Call, tensors: Sequence[Any], state: Loss, counts: Tensor, blocks: KeptBlocks | None,
    last: Tokens | None,
) -> None:  # fmt: skip
    of_sums, ctx.rebuild = state.save()
    inputs = [x if isinstance(x, Tensor) else None for x in tensors]
    kept = [] if blocks is None else blocks.tensors()
    of_last = [] if last is None else [last.values, last.mask, last.offsets]
    groups: list[list[Any]] = [inputs, [counts], of_sums, kept, of_last]
    ctx.save_for_backward(*(x for group in groups for x in group))
    ctx.sizes = [len(group) for group in groups]
    ctx.call, ctx.keys = call, None if blocks is None else blocks.keys()
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in tensors]
    ctx.bounds = None if last is None else last._bounds


def _backward(
    call: Call, state: Loss, needs: Sequence[bool], blocks: KeptBlocks | None, last: Tokens | None,
    travels: Tensor | None,
) -> Gradients:  # fmt: skip
    """Return the gradients of what :attr:`Call.tensors` lists."""
    # Queries are summed as a whole in a group, with hard negatives, or if they are the smaller or only side.
    smaller = call.q.values.numel() <= call.d.values.numel()
    whole = call.ring.world > 1 or call.h is not None or smaller or not needs[1]
    q_sums = Sums(call.q, needs[0], whole)
    grad_H = own_gradients(call, state.weights(-1, None), q_sums, needs[2])

    def add(step: int, documents: Tokens, travelled: Tensor | None, sums: Pair) -> None:
        given: Given = state.listed(step)
        if given is None and blocks is not None:
            given = blocks.of_shard(step)
        grid = Grid.of(call.kernels, call.q, documents, call.together)
        add_gradients(call, state.weights(step, travelled), grid, sums, given)

    grad_D = add_shards(call, q_sums, needs[1], add, travels, last)
    return q_sums.finished() if needs[0] else None, grad_D, grad_H, *state.of_numbers(needs[3], needs[4])
