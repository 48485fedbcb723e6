"""``late_interaction_kernels.autograd``: MaxSim with gradients."""

from torch import Tensor

from late_interaction import _maxsim
from late_interaction._checks.options import Backward

__all__ = ["maxsim", "maxsim_pairs"]


def maxsim(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    backward: Backward | None = None,
) -> Tensor:
    """Call :func:`late_interaction.maxsim`."""
    return _maxsim.maxsim(Q, D, q_mask, d_mask, normalize=normalize, backward=backward)


def maxsim_pairs(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    backward: Backward | None = None,
) -> Tensor:
    """Call :func:`late_interaction.maxsim_pairs`."""
    return _maxsim.maxsim_pairs(Q, D, q_mask, d_mask, normalize=normalize, backward=backward)
