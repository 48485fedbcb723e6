"""The operators on packed tokens.

``maxsim_varlen(Q, D, cu_seqlens_q, cu_seqlens_d, precision="highest") -> scores``
    ``Q`` and ``D`` are ``[tokens, d]``, sequences end to end; offsets are int32 and read on the device.
    ``scores`` is ``[Nq, Nd]``. Differentiable; the backward finds the winners again.
``maxsim_varlen_winners(...the same...) -> (scores, winners)``
    ``winners`` is ``[Nd, tokens of Q]``, counted from the beginning of each document.
``maxsim_varlen_backward(grad_scores, Q, D, cu_seqlens_q, cu_seqlens_d, winners, need_grad_Q=True,
need_grad_D=True) -> (grad_Q, grad_D)``
    Deterministic. Not differentiable again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._precision import without_autocast
from late_interaction.ops._library import operators
from late_interaction.ops._registration import (
    applied,
    autocast_pair,
    call_in_function,
    differentiable,
    fake_gradient,
    register_backward,
    register_forward,
    scores_dtype,
)
from late_interaction.ops.winners import packed_winner_dtype

# ---- shapes ----


def _fake(Q: Tensor, D: Tensor, cu_seqlens_q: Tensor, cu_seqlens_d: Tensor, precision: str = "") -> Tensor:
    torch._check(
        Q.dim() == 2 and D.dim() == 2,
        lambda: f"late_interaction: Q and D must be [tokens, d], got ranks {Q.dim()} and {D.dim()}",
    )
    return Q.new_empty((cu_seqlens_q.shape[0] - 1, cu_seqlens_d.shape[0] - 1), dtype=scores_dtype(Q))


def _fake_winners(
    Q: Tensor, D: Tensor, cu_seqlens_q: Tensor, cu_seqlens_d: Tensor, precision: str = ""
) -> tuple[Tensor, Tensor]:
    scores = _fake(Q, D, cu_seqlens_q, cu_seqlens_d)
    return scores, Q.new_empty((scores.shape[1], Q.shape[0]), dtype=packed_winner_dtype(D.shape[0]))


def _fake_backward(
    grad_scores: Tensor, Q: Tensor, D: Tensor, cu_seqlens_q: Tensor, cu_seqlens_d: Tensor, winners: Tensor,
    need_grad_Q: bool = True, need_grad_D: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return fake_gradient(Q, need_grad_Q), fake_gradient(D, need_grad_D)


# ---- gradients ----

_Grads = tuple[Tensor | None, Tensor | None, None, None, None]


def _gradients(ctx: Any, grad_scores: Tensor, *saved: Tensor) -> _Grads:
    need_Q, need_D = ctx.needs_input_grad[:2]
    grad_Q, grad_D = operators.maxsim_varlen_backward.default(grad_scores, *saved, need_Q, need_D)
    return grad_Q if need_Q else None, grad_D if need_D else None, None, None, None


class _VarlenWinners(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        scores, winners = call_in_function(operators.maxsim_varlen_winners.default, *args)
        ctx.mark_non_differentiable(winners)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[:4], winners)
        return scores, winners

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, _: None) -> _Grads:
        if grad_scores is None:
            return None, None, None, None, None
        return _gradients(ctx, grad_scores, *ctx.saved_tensors)


class _Varlen(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        scores: Tensor = call_in_function(operators.maxsim_varlen.default, *args)
        ctx.save_for_backward(*args[:4])
        ctx.precision = args[4]
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
        inputs = ctx.saved_tensors
        with torch.no_grad(), without_autocast(inputs[0].device.type):
            _, winners = operators.maxsim_varlen_winners.default(*inputs, ctx.precision)
        return _gradients(ctx, grad_scores, *inputs, winners)


def register() -> None:
    for op, fake, function in (
        (operators.maxsim_varlen.default, _fake, _Varlen),
        (operators.maxsim_varlen_winners.default, _fake_winners, _VarlenWinners),
    ):
        register_forward(op, fake, differentiable(op, applied(function)), autocast_pair, packed=True)
    register_backward(operators.maxsim_varlen_backward.default, _fake_backward)
