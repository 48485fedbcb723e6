"""Gradients of the operators.

``maxsim_winners`` keeps its winners; ``maxsim`` keeps only its inputs and finds the winners again. Both end
in ``maxsim_backward``, which has no gradient of its own.

These are kernels of the Autograd dispatch key, as ``torch.library.register_autograd`` would make them, but
without its generality: the host's time bounds a small training step.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd
from torch.autograd import Function

from late_interaction.ops import memory

_library = torch.library.Library("late_interaction", "IMPL")
_ops = torch.ops.late_interaction
_maxsim_op, _winners_op = _ops.maxsim.default, _ops.maxsim_winners.default
_backward_op = _ops.maxsim_backward.default
_Grads = tuple[Tensor | None, Tensor | None, None, None, None, None, None]
_NOTHING: _Grads = (None, None, None, None, None, None, None)


def _gradients(
    ctx: Any, grad_scores: Tensor, Q: Tensor, D: Tensor, winners: Tensor, normalize: bool, backward: str
) -> _Grads:
    needs = ctx.needs_input_grad
    need_Q, need_D = needs[0], needs[1]
    if backward == "auto" and torch.are_deterministic_algorithms_enabled():
        backward = "lowmem"
    args = (grad_scores, Q, D, winners, normalize, backward, need_Q, need_D)
    try:
        if torch.is_grad_enabled():  # create_graph=True
            grad_Q, grad_D = _backward_op(*args)
        else:
            with _AutoDispatchBelowAutograd():
                grad_Q, grad_D = _backward_op(*args)
    except RuntimeError as error:
        memory.backward_failed(error, Q, D, backward != "lowmem")
        raise
    return grad_Q if need_Q else None, grad_D if need_D else None, None, None, None, None, None


class MaxSimWinners(Function):
    @staticmethod
    def forward(
        ctx: Any,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        normalize: bool,
        precision: str,
        backward: str,
    ) -> tuple[Tensor, Tensor]:
        with _AutoDispatchBelowAutograd():
            scores, winners = _winners_op(Q, D, q_mask, d_mask, normalize, precision)
        ctx.mark_non_differentiable(winners)
        ctx.set_materialize_grads(False)  # or a zero tensor as large as the winners would come in for them
        ctx.save_for_backward(Q, D, winners)
        ctx.options = normalize, backward
        return scores, winners

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, _: None) -> _Grads:
        if grad_scores is None:
            return _NOTHING
        return _gradients(ctx, grad_scores, *ctx.saved_tensors, *ctx.options)


class MaxSim(Function):
    @staticmethod
    def forward(
        ctx: Any,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        normalize: bool,
        precision: str,
        backward: str,
    ) -> Tensor:
        with _AutoDispatchBelowAutograd():
            scores: Tensor = _maxsim_op(Q, D, q_mask, d_mask, normalize, precision)
        ctx.save_for_backward(Q, D, q_mask, d_mask)
        ctx.options = normalize, precision, backward
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
        Q, D, q_mask, d_mask = ctx.saved_tensors
        normalize, precision, backward = ctx.options
        # The forward's precision already says what autocast wanted; autocast must not change it here.
        with torch.no_grad(), torch.autocast(Q.device.type, enabled=False):
            _, winners = _winners_op(Q, D, q_mask, d_mask, normalize, precision)
        return _gradients(ctx, grad_scores, Q, D, winners, normalize, backward)


class MaxSimBackward(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with _AutoDispatchBelowAutograd():
            grads: tuple[Tensor, Tensor] = _backward_op(*args)
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "double backward of maxsim is not supported: its gradients cannot be differentiated again"
            " (call backward or torch.autograd.grad without create_graph=True)"
        )


_with_inputs: Any = MaxSim.apply
_with_winners: Any = MaxSimWinners.apply
_once: Any = MaxSimBackward.apply
_DEFAULTS = (False, "highest", "auto")  # of normalize, precision, backward: the dispatcher leaves these out


def with_gradients(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, *options: Any) -> Any:
    """What ``maxsim_winners`` does for inputs that require gradients, without the dispatcher's way there."""
    return _with_winners(Q, D, q_mask, d_mask, *options, *_DEFAULTS[len(options) :])


def _maxsim(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, *options: Any) -> Any:
    if (Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
        return _with_inputs(Q, D, q_mask, d_mask, *options, *_DEFAULTS[len(options) :])
    with _AutoDispatchBelowAutograd():
        return _maxsim_op(Q, D, q_mask, d_mask, *options)


def _maxsim_winners(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, *options: Any) -> Any:
    if (Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
        return with_gradients(Q, D, q_mask, d_mask, *options)
    with _AutoDispatchBelowAutograd():
        return _winners_op(Q, D, q_mask, d_mask, *options)


def _maxsim_backward(grad_scores: Tensor, Q: Tensor, D: Tensor, *args: Any) -> Any:
    if (grad_scores.requires_grad or Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
        return _once(grad_scores, Q, D, *args)
    with _AutoDispatchBelowAutograd():
        return _backward_op(grad_scores, Q, D, *args)


def _without_gradients(op: Any) -> Any:
    def kernel(*args: Any) -> Any:
        wanting = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if wanting and torch.is_grad_enabled():
            raise RuntimeError(f"{op} has no gradients: detach its arguments, or use torch.no_grad()")
        with _AutoDispatchBelowAutograd():
            return op(*args)

    return kernel


def register() -> None:
    _library.impl("maxsim", _maxsim, "Autograd")
    _library.impl("maxsim_winners", _maxsim_winners, "Autograd")
    _library.impl("maxsim_backward", _maxsim_backward, "Autograd")
    for op in (_ops.maxsim_quantized.default, _ops.maxsim_dequantized.default):
        _library.impl(op, _without_gradients(op), "Autograd")
