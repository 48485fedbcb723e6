"""``late_interaction_kernels.varlen``: MaxSim of packed sequences."""

from torch import Tensor

from late_interaction._checks.packed import check_packed
from late_interaction._maxsim import maxsim
from late_interaction.tokens import Tokens

__all__ = ["maxsim_varlen"]


def maxsim_varlen(
    Q_packed: Tensor,
    D_packed: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_d: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_d: int | None = None,
) -> Tensor:
    """Call :func:`late_interaction.maxsim` of packed tokens.

    Offsets may leave tokens out at both ends, which those of :class:`late_interaction.Tokens` may not.
    """
    cu_q, cu_d = check_packed(Q_packed, D_packed, cu_seqlens_q, cu_seqlens_d, max_seqlen_q, max_seqlen_d)
    return maxsim(Tokens._made(Q_packed, None, cu_q), Tokens._made(D_packed, None, cu_d))
