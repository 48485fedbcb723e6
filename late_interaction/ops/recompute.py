"""Gradients without kept winners, on the CPU: all of them are found again at once."""

import torch
from torch import Tensor

_library = torch.library.Library("late_interaction", "IMPL")
_ops = torch.ops.late_interaction


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
        _, winners = _ops.maxsim_winners.default(Q, D, q_mask, d_mask, normalize, precision, paired=paired)
    backward = "lowmem" if backward == "auto" else backward
    grads: tuple[Tensor, Tensor] = _ops.maxsim_backward.default(
        grad_scores, Q, D, winners, normalize, backward, need_grad_Q, need_grad_D, paired
    )
    return grads


def register() -> None:
    _library.impl("maxsim_backward_recompute", _maxsim_backward_recompute, "CPU")
