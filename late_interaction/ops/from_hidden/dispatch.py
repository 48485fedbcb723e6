"""Shapes, gradients and autocast of the operators on hidden states."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from late_interaction._scoring.precision import AUTOCAST_PRECISION, without_autocast
from late_interaction._torch import (
    DispatchKey,
    DispatchKeySet,
    _ExcludeDispatchKeyGuard,
    _is_any_autocast_enabled,
    register_fake,
)
from late_interaction.ops._functions import keeping_winners
from late_interaction.ops._library import library, operators, qualified
from late_interaction.ops._registration import (
    Kernel,
    call_in_backward,
    differentiable,
    fake_gradient,
    fake_nothing,
    register_backward,
    register_forward,
    register_helper,
)
from late_interaction.ops.from_hidden import driver, fallback
from late_interaction.ops.from_hidden.fallback import sum_dtype, working_dtype
from late_interaction.ops.winners import winner_dtype

_scores_op = operators.maxsim_from_hidden.default
_winners_op = operators.maxsim_from_hidden_winners.default
_backward_op = operators.maxsim_from_hidden_backward.default


# ---- shapes ----


def _fake_scores(**given: Any) -> Tensor:
    return _fake_winners(**given)[0]


def _fake_winners(
    Q: Tensor, H: Tensor, W: Tensor, b: Tensor | None, precision: str, **_: Any
) -> tuple[Tensor, Tensor]:
    driver.check(Q, H, W, b)
    dtype = sum_dtype(working_dtype(precision, Q, H, W, b))
    scores = Q.new_empty((Q.shape[0], H.shape[0]), dtype=dtype)
    return scores, Q.new_empty((Q.shape[0], H.shape[0], Q.shape[1]), dtype=winner_dtype(H.shape[1]))


def _fake_backward(
    Q: Tensor, H: Tensor, W: Tensor, b: Tensor | None, need_grad_Q: bool, need_grad_H: bool,
    need_grad_W: bool, need_grad_b: bool, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    driver.check(Q, H, W, b)
    grad_b = (W if b is None else b).new_empty(W.shape[:1] if need_grad_b else (0,))
    grad_Q, grad_H = fake_gradient(Q, need_grad_Q), fake_gradient(H, need_grad_H)
    return grad_Q, grad_H, fake_gradient(W, need_grad_W), grad_b


def _fake_project_rows(rows: Tensor, normalize: bool, **_: Any) -> Tensor:
    return rows.new_empty((rows.shape[0] if normalize else 0,), dtype=sum_dtype(rows.dtype))


def _fake_project_scores(Q: Tensor, hidden: Tensor, Ld: int, **_: Any) -> Tensor:
    return Q.new_empty((Q.shape[0], hidden.shape[0] // Ld), dtype=torch.float32)


def _fake_argmax_mask(winners: Tensor, Ld: int) -> Tensor:
    return winners.new_empty((winners.shape[1] * Ld,), dtype=torch.bool)


def _fake_l2_normalize_rows(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:1], dtype=sum_dtype(x.dtype))


# ---- gradients ----


def _gradients(ctx: Any, grad_scores: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:4]
    # The forward's precision already says what autocast wanted.
    with without_autocast(grad_scores.device.type) if _is_any_autocast_enabled() else nullcontext():
        grads = call_in_backward(_backward_op, grad_scores, *saved, *ctx.options, *needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None


_apply = keeping_winners(_winners_op, 4, 6, _gradients)
_DEFAULTS = (True, "highest")  # normalize and precision: the dispatcher leaves defaults out


def _scores(*args: Any) -> Any:
    return _apply(*args)[0]


# ---- autocast ----


def _autocast(op: Any, device_type: str, key: DispatchKey) -> Kernel:
    """Keep the dtypes of inputs: the operator converts a chunk of documents at a time."""
    exclude = DispatchKeySet(key)

    def autocast(*args: Any) -> Any:
        normalize, precision = (*args, *_DEFAULTS[len(args) - 6 :])[6:]
        precision = AUTOCAST_PRECISION.get(torch.get_autocast_dtype(device_type), precision)
        with _ExcludeDispatchKeyGuard(exclude):
            return op(*args[:6], normalize, precision)

    return autocast


register_forward(_scores_op, _fake_scores, differentiable(_scores_op, _scores), _autocast)
register_forward(_winners_op, _fake_winners, differentiable(_winners_op, _apply), _autocast)
register_backward(_backward_op, _fake_backward)
register_helper(operators.project_rows_.default, _fake_project_rows)
register_helper(operators.project_scores.default, _fake_project_scores)
register_helper(operators.l2_normalize_rows_.default, _fake_l2_normalize_rows)
register_helper(operators.maxsim_backward_into_.default, fake_nothing)
register_helper(operators.wgrad_splitk_.default, fake_nothing)
register_fake(library, qualified("argmax_mask"), _fake_argmax_mask)
for _kernel in driver.KERNELS:
    library.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")
for _name, _step in fallback.KERNELS.items():
    library.impl(_name, _step, "CPU")
