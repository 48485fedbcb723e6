"""``late_interaction_kernels.forward``: scores without gradients, and winners."""

import torch
from torch import Tensor

from late_interaction._checks.options import check_flag
from late_interaction._maxsim import maxsim, maxsim_with_winners

__all__ = ["maxsim_forward"]


def maxsim_forward(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    save_argmax: bool = False,
    normalize: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run the forward pass alone, outside autograd.

    Args:
        Q, D, q_mask, d_mask, normalize: as in :func:`late_interaction.maxsim`.
        save_argmax: also return which document token each query token matched.

    Returns:
        ``(scores, argmax)``: ``scores`` as from :func:`late_interaction.maxsim`; ``argmax`` is None, or int32
        ``[Nq * Nd, Lq]`` (one row a pair, queries outermost) with -1 where nothing matched.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.lik.forward import maxsim_forward
        >>> Q = torch.tensor([[[1.0, 0.0]]])
        >>> D = torch.tensor([[[2.0, 5.0], [4.0, 0.0]], [[7.0, 3.0], [0.0, 1.0]]])
        >>> maxsim_forward(Q, D, save_argmax=True)
        (tensor([[4., 7.]]), tensor([[1],
                [0]], dtype=torch.int32))
    """
    check_flag("save_argmax", save_argmax)
    with torch.no_grad():
        if not save_argmax:
            return maxsim(Q, D, q_mask, d_mask, normalize=normalize), None
        scores, winners = maxsim_with_winners(Q, D, q_mask, d_mask, normalize=normalize)
        return scores, winners.flatten(end_dim=-2) if winners.dim() > 1 else winners.unsqueeze(0)


def _run_forward(
    Q: Tensor,
    D: Tensor,
    *,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    save_argmax: bool,
    kd_layout: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run :func:`maxsim_forward` as that library's own tests do: masks of 0 and 1, documents in one list."""
    if kd_layout:
        D = D.unflatten(0, (len(Q), -1))
        d_mask = None if d_mask is None else d_mask.unflatten(0, (len(Q), -1))
    q_mask, d_mask = (None if mask is None else mask.bool() for mask in (q_mask, d_mask))
    return maxsim_forward(Q, D, q_mask, d_mask, save_argmax=save_argmax)
