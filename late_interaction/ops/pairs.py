"""The operators on listed pairs of packed tokens, and on spans of a buffer.

``maxsim_pairs_packed(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, max_seqlen_q=None,
precision="highest") -> scores``
    Tokens and offsets as those of ``maxsim_varlen``; pair ``p`` is query ``pair_q[p]`` with document
    ``pair_d[p]``, int32. ``scores`` is ``[pairs]``. Differentiable; the backward finds the winners again, and
    needs ``max_seqlen_q`` for it.
``maxsim_pairs_packed_winners(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, max_seqlen_q,
precision="highest") -> (scores, winners)``
    ``winners`` is ``[pairs, max_seqlen_q]``, counted from the beginning of each document.
``maxsim_pairs_packed_backward(grad_scores, Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, winners,
need_grad_Q=True, need_grad_D=True) -> (grad_Q, grad_D)``
    Deterministic. Not differentiable again.
``maxsim_spans(Q, D, starts, lengths, precision="highest") -> scores``
    One query, ``Q``, with documents that lie anywhere in ``D``: document ``j`` is the ``lengths[j]`` tokens
    from ``starts[j]`` on. Not differentiable.
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
    without_gradients,
)
from late_interaction.ops.winners import packed_winner_dtype

_INPUTS = 6  # Q, D, offsets of both, pairs of both


# ---- shapes ----


def _scores(Q: Tensor, D: Tensor, pairs: int) -> Tensor:
    torch._check(
        Q.dim() == 2 and D.dim() == 2,
        lambda: f"late_interaction: Q and D must be [tokens, d], got ranks {Q.dim()} and {D.dim()}",
    )
    return Q.new_empty((pairs,), dtype=scores_dtype(Q))


def _fake(
    Q: Tensor, D: Tensor, cu_q: Tensor, cu_d: Tensor, pair_q: Tensor, pair_d: Tensor,
    max_seqlen_q: int | None = None, precision: str = "",
) -> Tensor:  # fmt: skip
    return _scores(Q, D, pair_q.shape[0])


def _fake_winners(
    Q: Tensor, D: Tensor, cu_q: Tensor, cu_d: Tensor, pair_q: Tensor, pair_d: Tensor,
    max_seqlen_q: int, precision: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    winners = Q.new_empty((pair_q.shape[0], max_seqlen_q), dtype=packed_winner_dtype(D.shape[0]))
    return _scores(Q, D, pair_q.shape[0]), winners


def _fake_backward(
    grad_scores: Tensor, Q: Tensor, D: Tensor, cu_q: Tensor, cu_d: Tensor, pair_q: Tensor, pair_d: Tensor,
    winners: Tensor, need_grad_Q: bool = True, need_grad_D: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return fake_gradient(Q, need_grad_Q), fake_gradient(D, need_grad_D)


def _fake_spans(Q: Tensor, D: Tensor, starts: Tensor, lengths: Tensor, precision: str = "") -> Tensor:
    return _scores(Q, D, starts.shape[0])


# ---- gradients ----

_Grads = tuple[Tensor | None, ...]


def _gradients(ctx: Any, grad_scores: Tensor, *saved: Tensor) -> _Grads:
    need_Q, need_D = ctx.needs_input_grad[:2]
    grad_Q, grad_D = operators.maxsim_pairs_packed_backward.default(grad_scores, *saved, need_Q, need_D)
    return grad_Q if need_Q else None, grad_D if need_D else None, *[None] * _INPUTS


class _PairsWinners(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        scores, winners = call_in_function(operators.maxsim_pairs_packed_winners.default, *args)
        ctx.mark_non_differentiable(winners)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[:_INPUTS], winners)
        return scores, winners

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, _: None) -> _Grads:
        if grad_scores is None:
            return (None,) * (_INPUTS + 2)
        return _gradients(ctx, grad_scores, *ctx.saved_tensors)


class _Pairs(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, max_seqlen_q, ctx.precision = args
        scores: Tensor = call_in_function(operators.maxsim_pairs_packed.default, *args)
        ctx.longest = inputs[0].shape[0] if max_seqlen_q is None else max_seqlen_q
        ctx.save_for_backward(*inputs)
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> _Grads:
        inputs = ctx.saved_tensors
        with torch.no_grad(), without_autocast(inputs[0].device.type):
            _, winners = operators.maxsim_pairs_packed_winners.default(*inputs, ctx.longest, ctx.precision)
        return _gradients(ctx, grad_scores, *inputs, winners)


def register() -> None:
    for op, fake, function in (
        (operators.maxsim_pairs_packed.default, _fake, _Pairs),
        (operators.maxsim_pairs_packed_winners.default, _fake_winners, _PairsWinners),
    ):
        register_forward(op, fake, differentiable(op, applied(function)), autocast_pair, packed=True)
    register_backward(operators.maxsim_pairs_packed_backward.default, _fake_backward)
    spans = operators.maxsim_spans.default
    register_forward(spans, _fake_spans, without_gradients(spans), autocast_pair, packed=True)
