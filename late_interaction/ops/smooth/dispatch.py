"""Shapes, gradients and autocast of the operators of the smooth maximum."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import (
    applied,
    autocast_pair,
    call_in_backward,
    call_in_function,
    differentiable,
    fake_gradient,
    register_backward,
    register_forward,
)
from late_interaction.ops.dense import fake_scores
from late_interaction.ops.smooth import driver

_scores_op, _backward_op = operators.smooth_maxsim.default, operators.smooth_maxsim_backward.default


def _fake_scores(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None,
    tau: float = 0.1, normalize: bool = False, precision: str = "highest", paired: bool = False,
) -> Tensor:  # fmt: skip
    return fake_scores(Q, D, paired)


def _fake_backward(
    grad_scores: Tensor, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None,
    tau: float = 0.1, normalize: bool = False, precision: str = "highest", need_grad_Q: bool = True,
    need_grad_D: bool = True, paired: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    fake_scores(Q, D, paired)
    return fake_gradient(Q, need_grad_Q), fake_gradient(D, need_grad_D)


class SmoothMaxSim(Function):
    @staticmethod
    def forward(
        ctx: Any, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, tau: float,
        normalize: bool, precision: str, paired: bool,
    ) -> Tensor:  # fmt: skip
        args = (Q, D, q_mask, d_mask, tau, normalize, precision, paired)
        scores: Tensor = call_in_function(_scores_op, *args)
        ctx.save_for_backward(Q, D, q_mask, d_mask)
        ctx.options = tau, normalize, precision, paired
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        *options, paired = ctx.options
        needs = ctx.needs_input_grad[:2]
        args = (grad_scores, *ctx.saved_tensors, *options, *needs, paired)
        grads = call_in_backward(_backward_op, *args)
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 6


def register() -> None:
    function = differentiable(_scores_op, applied(SmoothMaxSim))
    register_forward(_scores_op, _fake_scores, function, autocast_pair)
    register_backward(_backward_op, _fake_backward)
    library.impl(_scores_op, driver.smooth_maxsim, "CompositeExplicitAutograd")
    library.impl(_backward_op, driver.smooth_maxsim_backward, "CompositeExplicitAutograd")
