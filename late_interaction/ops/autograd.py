"""Gradients of the operators.

``maxsim_winners`` keeps its winners; ``maxsim`` keeps only its inputs and finds the winners again. Both end
in ``maxsim_backward``, which has no gradient of its own.
"""

from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.late_interaction
_Grads = tuple[Tensor | None, ...]


def _strategy(backward: str) -> str:
    if backward == "auto" and torch.are_deterministic_algorithms_enabled():
        return "lowmem"
    return backward


def _gradients(
    ctx: Any, grad_scores: Tensor, Q: Tensor, D: Tensor, winners: Tensor, normalize: bool, backward: str
) -> _Grads:
    needs = ctx.needs_input_grad
    need_Q, need_D = needs[0], needs[1]
    grad_Q, grad_D = _ops.maxsim_backward.default(
        grad_scores, Q, D, winners, normalize, _strategy(backward), need_Q, need_D
    )
    return grad_Q if need_Q else None, grad_D if need_D else None, None, None, None, None, None


def _save_winners(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    Q, D, _, _, normalize, _, backward = inputs
    winners = output[1]
    ctx.mark_non_differentiable(winners)
    ctx.set_materialize_grads(False)  # or a zero tensor as large as the winners would come in for them
    ctx.save_for_backward(Q, D, winners)
    ctx.options = (normalize, backward)


def _from_winners(ctx: Any, grad_scores: Tensor | None, _: None) -> _Grads:
    if grad_scores is None:
        return (None,) * 7
    return _gradients(ctx, grad_scores, *ctx.saved_tensors, *ctx.options)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    Q, D, q_mask, d_mask, *options = inputs
    ctx.save_for_backward(Q, D, q_mask, d_mask)
    ctx.options = options


def _recompute(ctx: Any, grad_scores: Tensor) -> _Grads:
    Q, D, q_mask, d_mask = ctx.saved_tensors
    normalize, precision, backward = ctx.options
    # The forward's precision already says what autocast wanted; autocast must not change it here.
    with torch.no_grad(), torch.autocast(Q.device.type, enabled=False):
        _, winners = _ops.maxsim_winners.default(Q, D, q_mask, d_mask, normalize, precision)
    return _gradients(ctx, grad_scores, Q, D, winners, normalize, backward)


def _ignore(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    pass


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "double backward of maxsim is not supported: its gradients cannot be differentiated again"
        " (call backward or torch.autograd.grad without create_graph=True)"
    )


def register() -> None:
    torch.library.register_autograd("late_interaction::maxsim", _recompute, setup_context=_save_inputs)
    torch.library.register_autograd(
        "late_interaction::maxsim_winners", _from_winners, setup_context=_save_winners
    )
    torch.library.register_autograd(
        "late_interaction::maxsim_backward", _no_double_backward, setup_context=_ignore
    )
