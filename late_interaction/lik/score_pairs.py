"""``late_interaction_kernels.score_pairs``: scores of listed pairs of packed batches."""

from torch import Tensor

from late_interaction import score_pairs

__all__ = ["score_pairs_packed"]


def score_pairs_packed(
    Q_packed: Tensor,
    D_packed: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_d: Tensor,
    pair_q_idx: Tensor,
    pair_d_idx: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_d: int | None = None,
) -> Tensor:
    """Call :func:`late_interaction.score_pairs.score_pairs_packed`."""
    packed = (Q_packed, D_packed, cu_seqlens_q, cu_seqlens_d, pair_q_idx, pair_d_idx)
    return score_pairs.score_pairs_packed(*packed, max_seqlen_q=max_seqlen_q, max_seqlen_d=max_seqlen_d)
