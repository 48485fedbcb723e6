"""``late_interaction_kernels.varlen``: MaxSim of packed sequences."""

from torch import Tensor

from late_interaction import varlen

__all__ = ["maxsim_varlen"]


def maxsim_varlen(
    Q_packed: Tensor,
    D_packed: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_d: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_d: int | None = None,
) -> Tensor:
    """Call :func:`late_interaction.maxsim_varlen`."""
    offsets = (cu_seqlens_q, cu_seqlens_d)
    return varlen.maxsim_varlen(Q_packed, D_packed, *offsets, max_seqlen_q, max_seqlen_d)
