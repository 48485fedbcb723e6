"""Shapes, gradients and autocast of the operators of the smooth maximum."""

from typing import Any

import torch
from torch import Tensor

from late_interaction.ops._functions import keeping_inputs
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import (
    autocast_pair,
    call_in_backward,
    differentiable,
    register_backward,
    register_forward,
    register_helper,
)
from late_interaction.ops.dense import fake_backward, fake_scores
from late_interaction.ops.smooth import driver

_scores_op, _backward_op = operators.smooth_maxsim.default, operators.smooth_maxsim_backward.default


def _fake_logs(Q: Tensor, D: Tensor, **_: Any) -> Tensor:
    return Q.new_empty((Q.shape[0], D.shape[1], Q.shape[1]), dtype=torch.float32)


def _fake_gradient(Q: Tensor, D: Tensor, of_documents: bool, **_: Any) -> Tensor:
    rows = D.shape[1] * D.shape[2] if of_documents else Q.shape[1]
    return Q.new_empty((Q.shape[0], rows, Q.shape[2]), dtype=torch.float32)


def _gradients(ctx: Any, grad_scores: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    *options, paired = ctx.options
    needs = ctx.needs_input_grad[:2]
    grads = call_in_backward(_backward_op, grad_scores, *inputs, *options, *needs, paired)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 6


_kernel = differentiable(_scores_op, keeping_inputs(_scores_op, 4, _gradients))
register_forward(_scores_op, fake_scores, _kernel, autocast_pair)
register_backward(_backward_op, fake_backward)
register_helper(operators.smooth_logs.default, _fake_logs)
register_helper(operators.smooth_gradient.default, _fake_gradient)
library.impl(_scores_op, driver.smooth_maxsim, "CompositeExplicitAutograd")
library.impl(_backward_op, driver.smooth_maxsim_backward, "CompositeExplicitAutograd")
