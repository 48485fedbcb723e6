"""The short way of eager calls of maxsim and maxsim_pairs, which checks little before the operator does."""

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.dense import as_given
from late_interaction._checks.options import BACKWARDS, PRECISIONS, is_one_of
from late_interaction._checks.tensors import check_mask, scores_dtype
from late_interaction._scoring.precision import float32_precision
from late_interaction._torch import (
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _is_any_autocast_enabled,
    forward_ad,
)
from late_interaction.ops.dense import (
    DEFAULTS,
    apply_plain_step,
    apply_step,
    call_below_autograd,
    call_maxsim,
)
from late_interaction.ops.weighted import apply_weighted_step


def fast_path(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool,
    backward: str | None,
    precision: str | None,
    paired: bool,
    weights: Tensor | None = None,
) -> Tensor | None:
    """Scores of a call that nothing intercepts on its way to the operator, or None.

    The operator checks its inputs itself. If it refuses them, the checks in Python follow, and say why in the
    caller's words.
    """
    if (
        intercepted(Q, D)
        or not (normalize is False or normalize is True)
        or not (backward is None or is_one_of(backward, BACKWARDS))
        or not (precision is None or is_one_of(precision, PRECISIONS))
        or forward_ad._current_level >= 0
        or not (weights is None or _fits(weights, Q))
    ):
        return None
    Q3, DN = Q, D
    try:
        if not paired:
            if Q.dim() == 2:
                if D.dim() == 4:
                    return None
                Q3 = Q.unsqueeze(0)
            DN = D.unsqueeze(0) if D.dim() == 2 else D
        if q_mask is not None:
            q_mask = check_mask("q_mask", q_mask, "Q", Q3)
        if d_mask is not None:
            d_mask = check_mask("d_mask", d_mask, "D", DN)
        if precision is None:
            precision = float32_precision(Q.device.type) if Q.dtype is torch.float32 else "highest"
        options = (normalize, precision, backward or "auto", paired)
        if weights is not None:
            if torch.is_grad_enabled() and any(x.requires_grad for x in (Q, D, weights)):
                scores = apply_weighted_step(Q3, DN, weights, q_mask, d_mask, *options)
            else:
                with _AutoDispatchBelowAutograd():
                    scores = ops.maxsim_weighted(Q3, DN, weights, q_mask, d_mask, *options)
        elif (Q.requires_grad or D.requires_grad) and torch.is_grad_enabled():
            if options == DEFAULTS:
                scores = apply_plain_step(Q3, DN, q_mask, d_mask)
            else:
                scores = apply_step(Q3, DN, q_mask, d_mask, *options)
        else:
            scores = call_below_autograd(call_maxsim, Q3, DN, q_mask, d_mask, normalize, precision, paired)
    except (RuntimeError, TypeError, ValueError):
        return None
    return scores if Q3 is Q and DN is D else as_given(scores, Q, D)


def _fits(weights: Tensor, Q: Tensor) -> bool:
    return type(weights) in PLAIN_TYPES and weights.dtype is scores_dtype(Q) and weights.device == Q.device


PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def intercepted(Q: Tensor, D: Tensor) -> bool:
    """Tell whether something acts between a call and its operator.

    That is a subclass of Tensor, another device, autocast, or a transform of torch.func.
    """
    if type(Q) not in PLAIN_TYPES or type(D) not in PLAIN_TYPES:
        return True
    if not ((Q.is_cuda and D.is_cuda) or (Q.is_cpu and D.is_cpu)):
        return True
    return _is_any_autocast_enabled() or _are_functorch_transforms_active()
