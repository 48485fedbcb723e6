"""The operators on dense tokens with weights of query tokens.

``maxsim_weighted(Q, D, q_weights, q_mask, d_mask, normalize=False, precision="highest", backward="auto",
paired=False) -> scores``
    ``maxsim``, where the maximum of query token ``s`` of query ``i`` counts ``q_weights[i, s]``.
    ``q_weights`` is ``[Nq, Lq]``, float32 (float64 for float64 inputs). Differentiable in ``Q``, ``D`` and
    the weights; the backward finds the winners again, all at once.
``maxsim_weighted_winners(...the same...) -> (scores, winners)``
    ``maxsim_winners`` likewise, differentiable in ``scores``.
``maxsim_weighted_backward(grad_scores, Q, D, q_weights, winners, normalize=False, backward="auto",
need_grad_Q=True, need_grad_D=True, paired=False, need_grad_weights=True) -> (grad_Q, grad_D, grad_weights)``
    Gradients that are not needed have zero elements; ``grad_weights`` comes with ``grad_Q`` alone. Not
    differentiable again.

The winners do not depend on the weights. With ``g`` the gradient of ``Q`` for weights of 1, that of a weight
is ``<g, Q>`` of its token, and that of ``Q`` is the weight times ``g``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._torch import _AutoDispatchBelowAutograd
from late_interaction.ops._functions import finding_winners, keeping_winners
from late_interaction.ops._library import operators
from late_interaction.ops._registration import (
    autocast_pair,
    call_in_backward,
    differentiable,
    fake_gradients,
    register_backward,
    register_forward,
)
from late_interaction.ops.dense import fake_scores, fake_winners

_scores_op, _winners_op = operators.maxsim_weighted.default, operators.maxsim_weighted_winners.default
_backward_op = operators.maxsim_weighted_backward.default
_Grads = tuple[Tensor | None, ...]
_OPTIONS = 6  # masks, normalize, precision, backward, paired: no gradients


def _gradients(
    ctx: Any, grad_scores: Tensor, Q: Tensor, D: Tensor, q_weights: Tensor, winners: Tensor
) -> _Grads:
    normalize, _, backward, paired = ctx.options
    need_Q, need_D, need_weights = needs = ctx.needs_input_grad[:3]
    if backward == "auto" and torch.are_deterministic_algorithms_enabled():
        backward = "lowmem"
    options = (normalize, backward, need_Q or need_weights, need_D, paired, need_weights)
    grads = call_in_backward(_backward_op, grad_scores, Q, D, q_weights, winners, *options)
    return *(x if need else None for x, need in zip(grads, needs, strict=True)), *[None] * _OPTIONS


class WeightedStep(Function):
    """``maxsim_weighted_winners`` that returns the scores alone, as ``dense.MaxSimStep``."""

    @staticmethod
    def forward(ctx: Any, Q: Tensor, D: Tensor, q_weights: Tensor, *args: Any) -> Tensor:
        scores: Tensor
        with _AutoDispatchBelowAutograd():
            scores, winners = _winners_op(Q, D, q_weights, *args)
        ctx.save_for_backward(Q, D, q_weights, winners)
        ctx.options = args[2:]
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
        return _gradients(ctx, grad_scores, *ctx.saved_tensors)


# Function.apply without its questions about torch.func: only for calls without such a transform.
apply_weighted_step: Any = super(Function, WeightedStep).apply


_scores = finding_winners(_scores_op, _winners_op, 3, 5, _gradients)
for _op, _shape, _function in (
    (_scores_op, fake_scores, _scores),
    (_winners_op, fake_winners, keeping_winners(_winners_op, 3, 5, _gradients)),
):
    register_forward(_op, _shape, differentiable(_op, _function), autocast_pair)
register_backward(_backward_op, fake_gradients)
