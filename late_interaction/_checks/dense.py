"""Checks of maxsim and maxsim_pairs."""

from torch import Tensor

from late_interaction._checks.messages import shape_of
from late_interaction._checks.tensors import check_embeddings, check_mask, check_same_kind

Batch = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def check_maxsim(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Batch:
    """The arguments of maxsim. 2-D Q or D come back with a leading dim of 1, masks as bool."""
    check_embeddings("Q", Q)
    check_embeddings("D", D)
    return check_batch(Q, D, q_mask, d_mask)


def check_batch(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Batch:
    """The arguments of maxsim but for the kinds and dtypes of tokens."""
    q_rank, d_rank = Q.dim(), D.dim()
    if q_rank != 3 and q_rank != 2:
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {shape_of(Q)}")
    if d_rank != 3 and d_rank != 2 and d_rank != 4:
        raise ValueError(f"D must be [Nd, Ld, d], [Ld, d] or [Nq, K, Ld, d], got {shape_of(D)}")
    check_same_kind(Q, D)
    if d_rank == 4 and (q_rank != 3 or Q.shape[0] != D.shape[0]):
        raise ValueError(
            f"D [Nq, K, Ld, d] (documents of each query's own) needs Q to be [Nq, Lq, d] with"
            f" D.shape[0] == Q.shape[0], got Q {shape_of(Q)} and D {shape_of(D)}"
        )
    if q_rank == 2:
        Q = Q.unsqueeze(0)
    if d_rank == 2:
        D = D.unsqueeze(0)
    return Q, D, check_mask("q_mask", q_mask, "Q", Q), check_mask("d_mask", d_mask, "D", D)


def check_maxsim_pairs(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Batch:
    """The arguments of maxsim_pairs. Masks come back as bool."""
    check_embeddings("Q", Q)
    check_embeddings("D", D)
    if Q.dim() != 3 or D.dim() != 3:
        raise ValueError(f"maxsim_pairs needs Q and D as [B, L, d], got {shape_of(Q)} and {shape_of(D)}")
    check_same_kind(Q, D)
    if Q.shape[0] != D.shape[0]:
        raise ValueError(
            f"maxsim_pairs needs as many documents as queries (Q.shape[0] == D.shape[0]),"
            f" got {shape_of(Q)} and {shape_of(D)}"
        )
    return Q, D, check_mask("q_mask", q_mask, "Q", Q), check_mask("d_mask", d_mask, "D", D)


def as_given(result: Tensor, Q: Tensor, D: Tensor) -> Tensor:
    """Drops the dims that a 2-D Q (first) or a 2-D D (second) does not have."""
    if D.dim() == 2:
        result = result.squeeze(1)
    return result.squeeze(0) if Q.dim() == 2 else result
