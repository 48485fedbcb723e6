"""``late_interaction_kernels.fused_head``: MaxSim of the documents' hidden states."""

from torch import Tensor

from late_interaction import fused_head

__all__ = ["maxsim_from_hidden"]


def maxsim_from_hidden(
    Q: Tensor,
    H_d: Tensor,
    W: Tensor,
    b: Tensor | None = None,
    d_mask: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Call :func:`late_interaction.fused_head.maxsim_from_hidden`."""
    return fused_head.maxsim_from_hidden(Q, H_d, W, b, d_mask, normalize=normalize)
