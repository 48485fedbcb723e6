"""Checks of xtr_scores."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from late_interaction._checks.dense import check_maxsim
from late_interaction._checks.messages import abbreviate, no_tensor, shape_of
from late_interaction._checks.options import check_positive, is_one_of
from late_interaction._checks.tensors import FLOATS, check_device

Rule = Literal["paper", "pylate"]
RULES: tuple[Rule, ...] = get_args(Rule)
Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def check_xtr(
    Q: Tensor,
    D: Tensor,
    k: Any,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    rule: Any,
) -> Arguments:
    """Q and D, 2-D ones with a leading dim of 1, and masks as bool. Weights are checked, too."""
    Q, D, q_mask, d_mask = check_maxsim(Q, D, q_mask, d_mask)
    check_positive("k", k)
    if not is_one_of(rule, RULES):
        raise ValueError(f"rule must be one of {RULES}, got {abbreviate(rule)}")
    if q_weights is not None:
        check_weights(q_weights, Q)
    return Q, D, q_mask, d_mask


def check_weights(q_weights: Any, Q: Tensor) -> None:
    """Floating-point numbers, one for each query token; of one query, 1-D."""
    if not isinstance(q_weights, Tensor):
        raise TypeError(f"q_weights must be a torch.Tensor or None, got {no_tensor('q_weights', q_weights)}")
    if q_weights.dtype not in FLOATS or q_weights.layout != torch.strided:
        raise TypeError(
            f"q_weights must be dense and floating point (a mask goes to q_mask), got {q_weights.dtype},"
            f" {q_weights.layout}"
        )
    check_device("q_weights", q_weights, "Q", Q.device)
    if (q_weights.unsqueeze(0) if q_weights.dim() == 1 else q_weights).shape != Q.shape[:2]:
        raise ValueError(
            f"q_weights must be {list(Q.shape[:2])}, the shape of Q without d, got {shape_of(q_weights)}"
        )
