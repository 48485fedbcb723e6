"""``late_interaction_kernels.backward.unified``: the one-pass gradient, and its definition."""

import torch
from torch import Tensor

from late_interaction._checks.tensors import scores_dtype
from late_interaction.lik.backward import _saved

__all__ = ["maxsim_backward_unified", "maxsim_backward_unified_reference"]


def maxsim_backward_unified(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None = None,
    *,
    kd_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    """Find the gradients of MaxSim from a saved argmax in one pass over the winners.

    ``grad_D`` is summed by float32 atomics.

    On a GPU the order of those sums, hence the last bits, varies from run to run; ``grad_D`` passes through a
    float32 buffer. :func:`late_interaction.lik.backward.lowmem.maxsim_backward_lowmem` has neither trait.

    Args:
        grad_scores, Q, D, argmax, q_mask, kd_layout: as in ``maxsim_backward_lowmem``.

    Returns:
        ``(grad_Q, grad_D)``, of the shapes and dtypes of ``Q`` and ``D``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Example:
        >>> import torch
        >>> from late_interaction.lik.backward.unified import maxsim_backward_unified
        >>> Q, D = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0], [5.0, 6.0]]])
        >>> maxsim_backward_unified(torch.ones(1, 1), Q, D, torch.tensor([[1]], dtype=torch.int32))
        (tensor([[[5., 6.]]]), tensor([[[0., 0.],
                 [1., 2.]]]))
    """
    return _saved.backward("unified", grad_scores, Q, D, argmax, q_mask, kd_layout)


def maxsim_backward_unified_reference(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the same gradients in plain PyTorch, by gathering and scattering the winners' rows.

    It is slow, and easy to check.

    Args:
        grad_scores: ``[Nq, Nd]``.
        Q: ``[Nq, Lq, d]``.
        D: ``[Nd, Ld, d]``.
        argmax: ``[Nq * Nd, Lq]`` int32, -1 for none.
        q_mask: ``[Nq, Lq]``.

    Returns:
        ``(grad_Q, grad_D)`` in the dtypes of ``Q`` and ``D``, computed in float32 (float64 for float64
        inputs).

    Example:
        >>> import torch
        >>> from late_interaction.lik.backward.unified import maxsim_backward_unified_reference
        >>> Q, D = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0], [5.0, 6.0]]])
        >>> maxsim_backward_unified_reference(torch.ones(1, 1), Q, D, torch.tensor([[1]], dtype=torch.int32))
        (tensor([[[5., 6.]]]), tensor([[[0., 0.],
                 [1., 2.]]]))
    """
    N, q_mask = _saved.check(grad_scores, Q, D, argmax, q_mask, False)
    (Nq, Lq, d), Ld = Q.shape, D.shape[1]
    dtype = scores_dtype(Q)
    winners = argmax.reshape(Nq, N, Lq).long()
    matched = (winners >= 0) & (winners < Ld)
    if q_mask is not None:
        matched = matched & q_mask.unsqueeze(1)
    i, j, s = matched.nonzero(as_tuple=True)
    t = winners[i, j, s]
    weight = grad_scores.to(dtype)[i, j].unsqueeze(-1)
    grad_Q = torch.zeros(Nq, Lq, d, dtype=dtype, device=Q.device)
    grad_D = torch.zeros(N, Ld, d, dtype=dtype, device=D.device)
    grad_Q.index_put_((i, s), weight * D[j, t].to(dtype), accumulate=True)
    grad_D.index_put_((j, t), weight * Q[i, s].to(dtype), accumulate=True)
    return grad_Q.to(Q.dtype), grad_D.to(D.dtype)
