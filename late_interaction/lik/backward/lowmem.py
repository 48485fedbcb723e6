"""``late_interaction_kernels.backward.lowmem``: the deterministic gradient."""

from torch import Tensor

from late_interaction.lik.backward import _saved

__all__ = ["maxsim_backward_lowmem"]


def maxsim_backward_lowmem(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None = None,
    *,
    kd_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of MaxSim from a saved argmax, each element summed by one owner in a fixed order.

    Deterministic bit for bit, and written once in the input dtype: no float32 copy of a gradient exists.
    Every product and sum is float32 (float64 for float64 inputs).

    Args:
        grad_scores: ``[Nq, N]``, the gradient of the scores.
        Q: ``[Nq, Lq, d]``.
        D: ``[Nd, Ld, d]``, every document met by every query (``N = Nd``); with ``kd_layout``,
            ``[Nq * K, Ld, d]``, document ``i * K + k`` belonging to query ``i`` (``N = K``).
        argmax: ``[Nq * N, Lq]`` int32, as from :func:`late_interaction.lik.forward.maxsim_forward`. -1, like
            any number outside ``[0, Ld)``, means that nothing matched.
        q_mask: ``[Nq, Lq]``; masked query tokens send no gradient.
        kd_layout: documents of each query's own, see ``D``.

    Returns:
        ``(grad_Q, grad_D)``, of the shapes and dtypes of ``Q`` and ``D``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Example:
        >>> import torch
        >>> from late_interaction.lik.backward.lowmem import maxsim_backward_lowmem
        >>> Q, D = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0], [5.0, 6.0]]])
        >>> maxsim_backward_lowmem(torch.ones(1, 1), Q, D, torch.tensor([[1]], dtype=torch.int32))
        (tensor([[[5., 6.]]]), tensor([[[0., 0.],
                 [1., 2.]]]))
    """
    return _saved.backward("lowmem", grad_scores, Q, D, argmax, q_mask, kd_layout)
