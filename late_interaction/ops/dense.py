"""The operators on dense tokens.

``Q`` is ``[Nq, Lq, d]``. ``D`` is ``[Nd, Ld, d]`` (in-batch: every query meets every document) or
``[Nq, K, Ld, d]`` (each query meets its own ``K``); ``N`` below is ``Nd`` or ``K``. Masks are bool, True =
keep, shaped as their tokens without ``d``. ``paired``: query ``i`` meets document ``i`` alone, ``D`` is
``[Nq, Ld, d]``, and scores and winners have no dim ``N``.

``maxsim(Q, D, q_mask, d_mask, normalize=False, precision="highest", backward="auto", paired=False)
-> scores``
    ``scores`` is ``[Nq, N]``, float32 (float64 for float64 inputs). Differentiable; the backward finds the
    winners again, so nothing but the inputs is kept for it.
``maxsim_winners(...the same...) -> (scores, winners)``
    ``winners`` is ``[Nq, N, Lq]``: the document token that each query token matched. int16 while
    ``Ld <= 65534``, holding the unsigned 16-bit index, with -1 for "none"; int32 above. Differentiable in
    ``scores``; keeps ``Q``, ``D`` and ``winners`` for the backward.
``maxsim_backward(grad_scores, Q, D, winners, normalize=False, backward="auto", need_grad_Q=True,
need_grad_D=True, paired=False) -> (grad_Q, grad_D)``
    A gradient that is not needed comes back with zero elements. Differentiable, any number of times.
``maxsim_backward_recompute(grad_scores, Q, D, q_mask, d_mask, normalize=False, precision="highest",
backward="auto", need_grad_Q=True, need_grad_D=True, paired=False) -> (grad_Q, grad_D)``
    The same without winners, which it finds again as a forward with these options does; on a GPU in parts
    that take at most 16 MiB (one document's, if those take more). ``"auto"`` is ``"lowmem"`` here. Its own
    gradients are those of ``maxsim_backward``.

``maxsim_no_autograd``, ``maxsim_winners_no_autograd`` and ``maxsim_backward_no_autograd`` are the first three
without gradients: no kernel of the Autograd key, which is Python, runs before theirs. Autograd functions call
them, and so a compiled graph has them.
"""

from typing import Any

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.autograd import Function

from late_interaction._checks.tensors import scores_dtype
from late_interaction._scoring.precision import without_autocast
from late_interaction._torch import forward_ad
from late_interaction.ops import _oom
from late_interaction.ops._arguments import check_form
from late_interaction.ops._functions import keeping_inputs, keeping_winners
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import (
    autocast_pair,
    call_in_backward,
    call_without_gradients,
    count_sequences,
    differentiable,
    fake_gradients,
    register_backward,
    register_forward,
    register_no_autograd,
)
from late_interaction.ops.winners import winner_dtype

_maxsim_op, _winners_op = operators.maxsim.default, operators.maxsim_winners.default
_backward_op = operators.maxsim_backward.default
_recompute_op = operators.maxsim_backward_recompute.default
_Grads = tuple[Tensor | None, ...]
_BOTH = (True, True, False, False)  # inputs of PlainStep that want gradients
# The operators that are called below autograd, without winners and with them. No Python runs before a kernel.
PLAIN = operators.maxsim_no_autograd.default, operators.maxsim_winners_no_autograd.default
_plain_backward = operators.maxsim_backward_no_autograd.default
# What an OpOverload's own __call__, a frame in Python, calls.
call_maxsim: Any = getattr(PLAIN[False], "_op", PLAIN[False])
_call_winners: Any = getattr(PLAIN[True], "_op", PLAIN[True])
_call_gradients: Any = getattr(_plain_backward, "_op", _plain_backward)


# ---- shapes ----


def _check_ranks(Q: Tensor, D: Tensor, paired: bool) -> None:
    check_form("Q", Q, "[Nq, Lq, d]")
    check_form("D", D, *(("[Nq, Ld, d]",) if paired else ("[Nd, Ld, d]", "[Nq, K, Ld, d]")))


def fake_scores(Q: Tensor, D: Tensor, paired: bool = False, **_: Any) -> Tensor:
    """Return empty scores of the shape and dtype that a forward has."""
    _check_ranks(Q, D, paired)
    return Q.new_empty(Q.shape[:1] if paired else (Q.shape[0], D.shape[-3]), dtype=scores_dtype(Q))


def fake_packed_scores(Q: Tensor, D: Tensor, cu_seqlens_d: Tensor, **_: Any) -> Tensor:
    """Fake scores of padded queries and packed documents."""
    check_form("Q", Q, "[Nq, Lq, d]")
    check_form("D", D, "[tokens, d]")
    return Q.new_empty((Q.shape[0], count_sequences("cu_seqlens_d", cu_seqlens_d)), dtype=torch.float32)


def fake_winners(Q: Tensor, D: Tensor, paired: bool, **_: Any) -> tuple[Tensor, Tensor]:
    scores = fake_scores(Q, D, paired)
    return scores, Q.new_empty((*scores.shape, Q.shape[1]), dtype=winner_dtype(D.shape[-2]))


def fake_backward(Q: Tensor, D: Tensor, paired: bool, **given: Any) -> tuple[Tensor, ...]:
    _check_ranks(Q, D, paired)
    return fake_gradients(Q, D, **given)


# ---- gradients ----
#
# maxsim_winners keeps its winners and ends in maxsim_backward; maxsim keeps only its inputs and ends in
# maxsim_backward_recompute, which finds the winners again.


def call_below_autograd(
    op: Any, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None,
    normalize: bool, precision: str, paired: bool,
) -> Any:  # fmt: skip
    """Call ``op``, which is one of ``PLAIN`` or what such an overload calls itself."""
    if paired or precision != "highest":
        return op(Q, D, q_mask, d_mask, normalize, precision, "auto", paired)
    return op(Q, D, q_mask, d_mask, normalize)  # the dispatcher takes 0.3 us for defaults that are passed


def _gradients(ctx: Any, grad_scores: Tensor, Q: Tensor, D: Tensor, winners: Tensor) -> _Grads:
    normalize, _, backward, paired = ctx.options
    needs = ctx.needs_input_grad[:2]
    if backward == "auto" and torch.are_deterministic_algorithms_enabled():
        backward = "lowmem"
    args: tuple[Any, ...] = (grad_scores, Q, D, winners, normalize)
    if backward != "auto" or not all(needs) or paired:
        args += (backward, *needs, paired)
    return _call_backward(_backward_op, args, Q, D, needs, backward != "lowmem")


def _call_backward(
    op: Any, args: tuple[Any, ...], Q: Tensor, D: Tensor, needs: tuple[bool, bool], unified: bool
) -> _Grads:
    try:
        grad_Q, grad_D = call_in_backward(op, *args)
    except RuntimeError as error:
        _oom.backward_failed(error, Q, D, unified)
        raise
    return grad_Q if needs[0] else None, grad_D if needs[1] else None, *[None] * 6


class MaxSimStep(Function):
    """Differentiate ``maxsim_winners`` and return the scores alone.

    Autograd would wrap and mark a second output in every training step, and nobody would read it. Not for
    transforms of ``torch.func``.
    """

    @staticmethod
    def forward(
        ctx: Any, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, normalize: bool,
        precision: str, backward: str, paired: bool,
    ) -> Tensor:  # fmt: skip
        scores: Tensor
        options = (normalize, precision, paired)
        scores, winners = call_below_autograd(PLAIN[True], Q, D, q_mask, d_mask, *options)
        ctx.save_for_backward(Q, D, winners)
        ctx.options = normalize, precision, backward, paired
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
        return _gradients(ctx, grad_scores, *ctx.saved_tensors)


class PlainStep(Function):
    """``MaxSimStep`` with default options: it keeps none of them, and calls the operators in fewer frames."""

    @staticmethod
    def forward(ctx: Any, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Tensor:
        scores: Tensor
        scores, winners = _call_winners(Q, D, q_mask, d_mask)
        ctx.save_for_backward(Q, D, winners)
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
        Q, D, winners = ctx.saved_tensors  # once: a checkpoint gives them out no second time
        # Some gradients, a backward that is differentiated itself, or one that must be deterministic.
        special = torch.is_grad_enabled() or forward_ad._current_level >= 0
        if special or ctx.needs_input_grad != _BOTH or are_deterministic_algorithms_enabled():
            ctx.options = DEFAULTS
            return _gradients(ctx, grad_scores, Q, D, winners)[:4]
        try:
            grad_Q, grad_D = _call_gradients(grad_scores, Q, D, winners)
        except RuntimeError as error:
            _oom.backward_failed(error, Q, D, True)
            raise
        return grad_Q, grad_D, None, None


def _recomputed_gradients(ctx: Any, grad_scores: Tensor, Q: Tensor, D: Tensor, *masks: Tensor) -> _Grads:
    normalize, precision, backward, paired = ctx.options
    needs = ctx.needs_input_grad[:2]
    args = (grad_scores, Q, D, *masks, normalize, precision, backward, *needs, paired)
    return _call_backward(_recompute_op, args, Q, D, needs, backward == "unified")


# Function.apply without its questions about torch.func: only for calls without such a transform.
apply_step: Any = super(Function, MaxSimStep).apply
apply_plain_step: Any = super(Function, PlainStep).apply
_apply_maxsim = keeping_inputs(_maxsim_op, 4, _recomputed_gradients)
_apply_winners = keeping_winners(_winners_op, 2, 4, _gradients)
# The defaults of normalize, precision, backward and paired: the dispatcher leaves these out.
DEFAULTS = (False, "highest", "auto", False)
# The same of what maxsim_backward takes behind the winners.
_BACKWARD_DEFAULTS = (False, "auto", True, True, False)


# Faster than `differentiable`: of the arguments, these look at Q and D alone.


def _maxsim(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, *options: Any) -> Any:
    if (Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
        return _apply_maxsim(Q, D, q_mask, d_mask, *options, *DEFAULTS[len(options) :])
    return call_without_gradients(_maxsim_op, Q, D, q_mask, d_mask, *options)


def _maxsim_winners(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, *options: Any) -> Any:
    if (Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
        return _apply_winners(Q, D, q_mask, d_mask, *options, *DEFAULTS[len(options) :])
    return call_without_gradients(_winners_op, Q, D, q_mask, d_mask, *options)


def _maxsim_backward(grad_scores: Tensor, Q: Tensor, D: Tensor, winners: Tensor, *options: Any) -> Any:
    if (grad_scores.requires_grad or Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
        from late_interaction.ops._twice import differentiable_gradients  # few calls need it

        options = *options, *_BACKWARD_DEFAULTS[len(options) :]
        return differentiable_gradients(grad_scores, Q, D, winners, *options)
    return call_without_gradients(_backward_op, grad_scores, Q, D, winners, *options)


def _recompute_differentiably(
    grad_scores: Tensor, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None,
    normalize: bool, precision: str, *options: Any,
) -> Any:  # fmt: skip
    with torch.no_grad(), without_autocast(Q.device.type):
        _, winners = _winners_op(Q, D, q_mask, d_mask, normalize, precision, "auto", options[-1])
    return _backward_op(grad_scores, Q, D, winners, normalize, *options)


# ---- gradients without kept winners, on the CPU: all winners are found again at once ----


def _maxsim_backward_recompute(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool = False,
    precision: str = "highest",
    backward: str = "auto",
    need_grad_Q: bool = True,
    need_grad_D: bool = True,
    paired: bool = False,
) -> tuple[Tensor, Tensor]:
    # The precision already says what autocast wanted; autocast must not change it here.
    with torch.autocast(Q.device.type, enabled=False):
        _, winners = _winners_op(Q, D, q_mask, d_mask, normalize, precision, paired=paired)
    backward = "lowmem" if backward == "auto" else backward
    args = (grad_scores, Q, D, winners, normalize, backward, need_grad_Q, need_grad_D, paired)
    return _backward_op(*args)


register_forward(_maxsim_op, fake_scores, _maxsim, autocast_pair)
register_forward(_winners_op, fake_winners, _maxsim_winners, autocast_pair)
register_backward(_backward_op, fake_backward, _maxsim_backward)
_recompute = differentiable(_recompute_op, _recompute_differentiably)
register_backward(_recompute_op, fake_backward, _recompute)
register_no_autograd(_maxsim_op, "maxsim_no_autograd", fake_scores)
register_no_autograd(_winners_op, "maxsim_winners_no_autograd", fake_winners)
register_no_autograd(_backward_op, "maxsim_backward_no_autograd", fake_backward)
library.impl(_recompute_op, _maxsim_backward_recompute, "CPU")
