"""Autograd functions of operators that have winners, and what those on packed tokens register.

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
    fake_gradients,
    register_backward,
    register_forward,
)

_Grads = tuple[Tensor | None, ...]
# Takes the context, whose ``options`` are the arguments behind the inputs, the gradient of the scores, what
# was kept and the winners, and returns a gradient of each argument.
Gradients = Callable[..., _Grads]


def keeping_winners(op: Any, kept: int, inputs: int, gradients: Gradients) -> Any:
    """Differentiate an operator in the scores that it returns before winners: keep inputs up to ``kept``."""

    class Winners(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            scores, *others = call_in_function(op, *args)
            ctx.mark_non_differentiable(*others)
            ctx.set_materialize_grads(False)  # or autograd would make a zero tensor as large as the winners
            ctx.save_for_backward(*args[:kept], *others)
            ctx.options = args[inputs:]
            return scores, *others

        @staticmethod
        def backward(ctx: Any, grad_scores: Tensor | None, *_: None) -> _Grads:
            if grad_scores is None:
                return (None,) * len(ctx.needs_input_grad)
            return gradients(ctx, grad_scores, *ctx.saved_tensors)

    return applied(Winners)


def keeping_inputs(op: Any, inputs: int, gradients: Gradients) -> Any:
    """Differentiate an operator that returns scores alone: keep its inputs."""

    class Scores(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            scores: Tensor = call_in_function(op, *args)
            ctx.save_for_backward(*args[:inputs])
            ctx.options = args[inputs:]
            return scores

        @staticmethod
        def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
            return gradients(ctx, grad_scores, *ctx.saved_tensors)

    return applied(Scores)


def _as_given(Q: Tensor, *options: Any) -> tuple[Any, ...]:
    return options


def finding_winners(
    op: Any, winners_op: Any, kept: int, inputs: int, gradients: Gradients,
    winners_options: Callable[..., tuple[Any, ...]] = _as_given,
) -> Any:  # fmt: skip
    """Differentiate an operator without winners, which its backward finds again from all inputs.

    winners_options: Q and the operator's options -> the options of ``winners_op``.
    """

    def find(ctx: Any, grad_scores: Tensor, *saved: Tensor) -> _Grads:
        # The precision already says what autocast wanted; autocast must not change it here.
        with torch.no_grad(), without_autocast(saved[0].device.type):
            _, winners = winners_op(*saved, *winners_options(saved[0], *ctx.options))
        return gradients(ctx, grad_scores, *saved[:kept], winners)

    return keeping_inputs(op, inputs, find)


def register_packed(
    name: str,
    fake: Kernel,
    fake_winners: Kernel,
    inputs: int,
    winners_options: Callable[..., tuple[Any, ...]] = _as_given,
    weighted: bool = False,
) -> None:
    """Register ``name``, ``name_winners`` and ``name_backward``.

    Args:
        name: of the operator of scores.
        fake, fake_winners: the fake kernels of the first two.
        inputs: how many tensors they take.
        winners_options: Q and the options of ``name`` -> the options of ``name_winners``.
        weighted: the third input is the weights of Q, which have a gradient as well; the backward operator
            finds it together with that of Q.
    """
    scores_op = getattr(operators, name).default
    winners_op = getattr(operators, f"{name}_winners").default
    backward_op = getattr(operators, f"{name}_backward").default

    learned = 3 if weighted else 2

    def gradients(ctx: Any, grad_scores: Tensor, *saved: Tensor) -> _Grads:
        needs, others = ctx.needs_input_grad[:learned], ctx.needs_input_grad[learned:]
        need_Q = needs[0] or any(needs[2:])
        grads = backward_op(grad_scores, *saved, need_Q, needs[1])
        return *(x if need else None for x, need in zip(grads, needs, strict=True)), *[None] * len(others)

    scores = finding_winners(scores_op, winners_op, inputs, inputs, gradients, winners_options)
    winners = keeping_winners(winners_op, inputs, inputs, gradients)
    for op, shape, function in ((scores_op, fake, scores), (winners_op, fake_winners, winners)):
        register_forward(op, shape, differentiable(op, function), autocast_pair, packed=True)
    register_backward(backward_op, fake_gradients)
