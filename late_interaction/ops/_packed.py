"""Gradients of the operators on packed tokens, which ``varlen`` and ``pairs`` share.

Such an operator takes inputs, ``Q`` and ``D`` first, and options. ``..._winners`` keeps its winners for the
backward; the operator without winners keeps its inputs alone, and its backward finds the winners again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._scoring.precision import without_autocast
from late_interaction.ops._library import operators
from late_interaction.ops._registration import (
    Kernel,
    applied,
    autocast_pair,
    call_in_function,
    differentiable,
    fake_gradient,
    register_backward,
    register_forward,
)

_Grads = tuple[Tensor | None, ...]


def _without_weights(fake: Kernel) -> Kernel:
    return lambda Q, D, q_weights, *args: fake(Q, D, *args)


def register_packed(
    name: str,
    fake: Kernel,
    fake_winners: Kernel,
    inputs: int,
    winners_options: Callable[..., tuple[Any, ...]],
    weighted: bool = False,
) -> None:
    """Register ``name``, ``name_winners`` and ``name_backward``.

    Args:
        name: of the operator of scores.
        fake, fake_winners: the fake kernels of the first two.
        inputs: how many tensors they take.
        winners_options: the options of ``name`` -> those of ``name_winners``.
        weighted: the third input is the weights of Q, which have a gradient as well; the backward operator
            finds it together with that of Q.
    """
    scores_op = getattr(operators, name).default
    winners_op = getattr(operators, f"{name}_winners").default
    backward_op = getattr(operators, f"{name}_backward").default

    learned = 3 if weighted else 2
    if weighted:
        fake, fake_winners = _without_weights(fake), _without_weights(fake_winners)

    def fake_backward(grad_scores: Tensor, Q: Tensor, D: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        need_Q, need_D = (*rest[inputs - 1 :], True, True)[:2]  # behind the other inputs and the winners
        grads = fake_gradient(Q, need_Q), fake_gradient(D, need_D)
        return (*grads, fake_gradient(rest[0], need_Q)) if weighted else grads

    def gradients(ctx: Any, grad_scores: Tensor, *saved: Tensor) -> _Grads:
        needs, others = ctx.needs_input_grad[:learned], ctx.needs_input_grad[learned:]
        need_Q = needs[0] or any(needs[2:])
        grads = backward_op(grad_scores, *saved, need_Q, needs[1])
        return *(x if need else None for x, need in zip(grads, needs, strict=True)), *[None] * len(others)

    class Winners(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
            scores, winners = call_in_function(winners_op, *args)
            ctx.mark_non_differentiable(winners)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*args[:inputs], winners)
            return scores, winners

        @staticmethod
        def backward(ctx: Any, grad_scores: Tensor | None, _: None) -> _Grads:
            if grad_scores is None:
                return (None,) * len(ctx.needs_input_grad)
            return gradients(ctx, grad_scores, *ctx.saved_tensors)

    class Scores(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            scores: Tensor = call_in_function(scores_op, *args)
            ctx.save_for_backward(*args[:inputs])
            ctx.options = winners_options(*args)
            return scores

        @staticmethod
        def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
            saved = ctx.saved_tensors
            with torch.no_grad(), without_autocast(saved[0].device.type):
                _, winners = winners_op(*saved, *ctx.options)
            return gradients(ctx, grad_scores, *saved, winners)

    for op, shape, function in ((scores_op, fake, Scores), (winners_op, fake_winners, Winners)):
        register_forward(op, shape, differentiable(op, applied(function)), autocast_pair, packed=True)
    register_backward(backward_op, fake_backward)
