"""Gradients of the operators.

``maxsim_winners`` keeps its winners and ends in ``maxsim_backward``; ``maxsim`` keeps only its inputs and
ends in ``maxsim_backward_recompute``, which finds the winners again. Neither has a gradient of its own.

These are kernels of the Autograd dispatch key, as ``torch.library.register_autograd`` would make them, but
without its generality: the host's time bounds a small training step.

Under the transforms of ``torch.func`` the dispatcher calls such a kernel once a level, and the kernel records
its function at that level (:func:`applied`). ``grad``, ``vjp`` and ``jacrev`` work; forward-mode derivatives
(``jvp``, ``jacfwd``, dual tensors) are refused by every kernel.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _is_any_autocast_enabled,
)
from torch._C._functorch import set_single_level_autograd_function_allowed
from torch.autograd import Function, forward_ad

from late_interaction import _checks
from late_interaction._precision import without_autocast
from late_interaction.ops import memory

_library = torch.library.Library("late_interaction", "IMPL")
_ops = torch.ops.late_interaction
_maxsim_op, _winners_op = _ops.maxsim.default, _ops.maxsim_winners.default
_backward_op = _ops.maxsim_backward.default
_recompute_op = _ops.maxsim_backward_recompute.default
_Grads = tuple[Tensor | None, ...]
_OPTIONS = 6  # masks, normalize, precision, backward, paired: no gradients
_NOTHING: _Grads = (None,) * (2 + _OPTIONS)


def beneath(
    op: Any, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None,
    normalize: bool, precision: str, paired: bool,
) -> Any:  # fmt: skip
    """``op``, which is ``maxsim`` or ``maxsim_winners``, where autograd has no say."""
    with _AutoDispatchBelowAutograd():
        if paired or precision != "highest":
            return op(Q, D, q_mask, d_mask, normalize, precision, "auto", paired)
        return op(Q, D, q_mask, d_mask, normalize)  # defaults that are said take the dispatcher 0.3 us


def call_below_autograd(op: Any, *args: Any) -> Any:
    """``op`` in the forward of a function of autograd. A level of ``torch.func`` under the one that the
    function is recorded at records the call as well, which the forward of a function disables."""
    if _are_functorch_transforms_active():
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), _AutoDispatchBelowAutograd():
            return op(*args)
    with _AutoDispatchBelowAutograd():
        return op(*args)


def applied(function: type[Function]) -> Any:
    """``function.apply`` for a kernel of the Autograd key. ``Function.apply`` itself would hand the call to
    every active level of ``torch.func``; but the dispatcher has chosen the level already."""
    plain: Any = super(Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        if not _are_functorch_transforms_active():
            return plain(*args)
        before = torch._C._functorch.get_single_level_autograd_function_allowed()
        set_single_level_autograd_function_allowed(True)
        try:
            return plain(*args)
        finally:
            set_single_level_autograd_function_allowed(before)

    return apply


def _gradients(ctx: Any, grad_scores: Tensor) -> _Grads:
    Q, D, winners = ctx.saved_tensors
    normalize, backward, paired = ctx.options
    needs = ctx.needs_input_grad[:2]
    if backward == "auto" and torch.are_deterministic_algorithms_enabled():
        backward = "lowmem"
    args: tuple[Any, ...] = (grad_scores, Q, D, winners, normalize)
    if backward != "auto" or not all(needs) or paired:
        args += (backward, *needs, paired)
    return _called(_backward_op, args, Q, D, needs, backward != "lowmem")


def _is_recorded() -> bool:
    """Whether a backward is differentiated itself: create_graph=True, torch.func, dual tensors."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def _called(
    op: Any, args: tuple[Any, ...], Q: Tensor, D: Tensor, needs: tuple[bool, bool], unified: bool
) -> _Grads:
    try:
        if _is_recorded():
            grad_Q, grad_D = op(*args)
        else:
            with _AutoDispatchBelowAutograd():
                grad_Q, grad_D = op(*args)
    except RuntimeError as error:
        memory.backward_failed(error, Q, D, unified)
        raise
    return grad_Q if needs[0] else None, grad_D if needs[1] else None, *_NOTHING[2:]


class MaxSimWinners(Function):
    @staticmethod
    def forward(
        ctx: Any, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, normalize: bool,
        precision: str, backward: str, paired: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        args = (Q, D, q_mask, d_mask, normalize, precision, backward, paired)
        scores, winners = call_below_autograd(_winners_op, *args)
        ctx.save_for_backward(Q, D, winners)
        ctx.options = normalize, backward, paired
        ctx.mark_non_differentiable(winners)
        ctx.set_materialize_grads(False)  # or a zero tensor as large as the winners would come in for them
        return scores, winners

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, _: None) -> _Grads:
        return _NOTHING if grad_scores is None else _gradients(ctx, grad_scores)


class MaxSimStep(Function):
    """``maxsim_winners`` of which the scores alone come out: a second output would be wrapped and marked in
    every step, for nobody. Not for transforms of ``torch.func``."""

    @staticmethod
    def forward(
        ctx: Any, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, normalize: bool,
        precision: str, backward: str, paired: bool,
    ) -> Tensor:  # fmt: skip
        scores: Tensor
        scores, winners = beneath(_winners_op, Q, D, q_mask, d_mask, normalize, precision, paired)
        ctx.save_for_backward(Q, D, winners)
        ctx.options = normalize, backward, paired
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
        return _gradients(ctx, grad_scores)


class MaxSim(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        scores: Tensor = call_below_autograd(_maxsim_op, *args)
        ctx.save_for_backward(*args[:4])
        ctx.options = args[4:]
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
        Q, D, q_mask, d_mask = ctx.saved_tensors
        normalize, precision, backward, paired = ctx.options
        needs = ctx.needs_input_grad[:2]
        args = (grad_scores, Q, D, q_mask, d_mask, normalize, precision, backward, *needs, paired)
        return _called(_recompute_op, args, Q, D, needs, backward == "unified")


class MaxSimFromHidden(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        Q, H, W, b, _, _, normalize, precision = args
        scores, winners = call_below_autograd(_ops.maxsim_from_hidden_winners.default, *args)
        ctx.mark_non_differentiable(winners)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(Q, H, W, b, winners)
        ctx.options = normalize, precision
        return scores, winners

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_scores is None:
            return (None,) * 8
        needs = ctx.needs_input_grad[:4]
        args = (grad_scores, *ctx.saved_tensors, *ctx.options, *needs)
        if _is_any_autocast_enabled():  # the forward's precision already says what it wanted
            with without_autocast(grad_scores.device.type):
                grads = _from_hidden_backward(args)
        else:
            grads = _from_hidden_backward(args)
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None


def _from_hidden_backward(args: tuple[Any, ...]) -> Any:
    op = _ops.maxsim_from_hidden_backward.default
    if _is_recorded():
        return op(*args)
    with _AutoDispatchBelowAutograd():
        return op(*args)


class Once(Function):
    """A backward operator, which has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, op: Any, *args: Any) -> Any:
        return call_below_autograd(op, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "double backward of maxsim is not supported: its gradients cannot be differentiated again"
            " (call backward or torch.autograd.grad without create_graph=True)"
        )


class MaxSimResidual(Function):
    """Q alone is differentiable: centroids and bucket weights are an index, which is frozen."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        scores, winners = call_below_autograd(_ops.maxsim_residual_winners.default, *args)
        *tensors, nbits, normalize, _ = args
        ctx.mark_non_differentiable(winners)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, winners)
        ctx.options = nbits, normalize
        return scores, winners

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_scores is None:
            return (None,) * 9
        grad_Q: Tensor = _ops.maxsim_residual_backward.default(grad_scores, *ctx.saved_tensors, *ctx.options)
        return grad_Q, *[None] * 8


_with_inputs = applied(MaxSim)
_with_winners = applied(MaxSimWinners)
# Where no transform of torch.func is active: Function.apply without the questions that it asks about them.
step: Any = super(Function, MaxSimStep).apply
_residual = applied(MaxSimResidual)
_from_hidden = applied(MaxSimFromHidden)
once = applied(Once)
# Of normalize, precision, backward, paired: the dispatcher leaves these out.
_DEFAULTS = (False, "highest", "auto", False)


def _maxsim(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, *options: Any) -> Any:
    if (Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
        return _with_inputs(Q, D, q_mask, d_mask, *options, *_DEFAULTS[len(options) :])
    with _AutoDispatchBelowAutograd():
        return _maxsim_op(Q, D, q_mask, d_mask, *options)


def _maxsim_winners(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, *options: Any) -> Any:
    if (Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
        return _with_winners(Q, D, q_mask, d_mask, *options, *_DEFAULTS[len(options) :])
    with _AutoDispatchBelowAutograd():
        return _winners_op(Q, D, q_mask, d_mask, *options)


def _maxsim_backward(grad_scores: Tensor, Q: Tensor, D: Tensor, *args: Any) -> Any:
    if (grad_scores.requires_grad or Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
        return once(_backward_op, grad_scores, Q, D, *args)
    with _AutoDispatchBelowAutograd():
        return _backward_op(grad_scores, Q, D, *args)


def _maxsim_residual_winners(Q: Tensor, *args: Any) -> Any:
    if Q.requires_grad and torch.is_grad_enabled():
        return _residual(Q, *args, *(True, "highest")[len(args) - 6 :])  # the dispatcher leaves defaults out
    with _AutoDispatchBelowAutograd():
        return _ops.maxsim_residual_winners.default(Q, *args)


def _maxsim_residual(Q: Tensor, *args: Any) -> Any:
    if Q.requires_grad and torch.is_grad_enabled():
        return _maxsim_residual_winners(Q, *args)[0]
    with _AutoDispatchBelowAutograd():
        return _ops.maxsim_residual.default(Q, *args)


def _maxsim_from_hidden_winners(*args: Any) -> Any:
    if _wanted(args):
        options = args[6:]
        return _from_hidden(*args[:6], *options, *(True, "highest")[len(options) :])
    with _AutoDispatchBelowAutograd():
        return _ops.maxsim_from_hidden_winners.default(*args)


def _maxsim_from_hidden(*args: Any) -> Any:
    if _wanted(args):
        return _maxsim_from_hidden_winners(*args)[0]
    with _AutoDispatchBelowAutograd():
        return _ops.maxsim_from_hidden.default(*args)


def _wanted(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def register_kernel(op: Any, kernel: Any) -> None:
    """``kernel`` for the Autograd key, where no argument is a dual tensor."""
    name = op._schema.name.removeprefix("late_interaction::")

    def without_tangents(*args: Any) -> Any:
        _checks.no_forward_ad(name, *args)
        return kernel(*args)

    _library.impl(op, without_tangents, "Autograd")


def kernel(op: Any, function: Any) -> Any:
    """The Autograd kernel of ``op``: ``function``, with every argument, where one requires gradients."""
    defaults = [argument.default_value for argument in op._schema.arguments]  # the dispatcher leaves them out

    def choose(*args: Any) -> Any:
        if _wanted(args):
            return function(*args, *defaults[len(args) :])
        with _AutoDispatchBelowAutograd():
            return op(*args)

    return choose


def last(op: Any) -> Any:
    """The same of a backward operator."""
    return kernel(op, partial(once, op))


def without_gradients(op: Any) -> Any:
    def kernel(*args: Any) -> Any:
        if _wanted(args):
            raise RuntimeError(f"{op} has no gradients: detach its arguments, or use torch.no_grad()")
        with _AutoDispatchBelowAutograd():
            return op(*args)

    return kernel


def register() -> None:
    for op, kernel in (
        (_maxsim_op, _maxsim),
        (_winners_op, _maxsim_winners),
        (_backward_op, _maxsim_backward),
        (_recompute_op, last(_recompute_op)),
        (_ops.maxsim_residual.default, _maxsim_residual),
        (_ops.maxsim_residual_winners.default, _maxsim_residual_winners),
        (_ops.maxsim_residual_backward.default, last(_ops.maxsim_residual_backward.default)),
        (_ops.maxsim_from_hidden.default, _maxsim_from_hidden),
        (_ops.maxsim_from_hidden_winners.default, _maxsim_from_hidden_winners),
        (_ops.maxsim_from_hidden_backward.default, last(_ops.maxsim_from_hidden_backward.default)),
    ):
        register_kernel(op, kernel)
    for op in (
        _ops.maxsim_quantized.default,
        _ops.maxsim_dequantized.default,
        _ops.plaid_approx_score.default,
        _ops.project_rows_.default,
        _ops.project_scores.default,
        _ops.l2_normalize_rows_.default,
        _ops.maxsim_backward_into_.default,
        _ops.wgrad_splitk_.default,
    ):
        register_kernel(op, without_gradients(op))
