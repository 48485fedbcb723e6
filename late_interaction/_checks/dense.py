"""Checks of maxsim and maxsim_pairs."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import shape_of
from late_interaction._checks.options import RULES, check_one_of, check_positive
from late_interaction._checks.tensors import (
    check_device,
    check_embeddings,
    check_mask,
    check_same_dtype_and_d,
    check_same_kind,
    scores_dtype,
)

Batch = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def check_maxsim(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Batch:
    """Check the arguments of maxsim. 2-D Q or D come back with a leading dim of 1, masks as bool."""
    check_embeddings("Q", Q)
    check_embeddings("D", D)
    return check_batch(Q, D, q_mask, d_mask)


def check_batch(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Batch:
    """Check the arguments of maxsim but for the kinds and dtypes of tokens."""
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
    return as_batch(Q, D, q_mask, d_mask)


def as_batch(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Batch:
    """Check masks, and return them as bool; 2-D Q or D get a leading dim of 1."""
    Q = Q.unsqueeze(0) if Q.dim() == 2 else Q
    D = D.unsqueeze(0) if D.dim() == 2 else D
    return Q, D, check_mask("q_mask", q_mask, "Q", Q), check_mask("d_mask", d_mask, "D", D)


def check_maxsim_pairs(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Batch:
    """Check the arguments of maxsim_pairs. Masks come back as bool."""
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
    return as_batch(Q, D, q_mask, d_mask)


def check_xtr(
    Q: Tensor,
    D: Tensor,
    k: Any,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    rule: Any,
) -> Batch:
    """Check the arguments of xtr_scores. 2-D Q or D come back with a leading dim of 1, masks as bool."""
    Q, D, q_mask, d_mask = check_maxsim(Q, D, q_mask, d_mask)
    check_positive("k", k)
    check_one_of("rule", rule, RULES)
    check_weights(q_weights, "Q", Q)
    return Q, D, q_mask, d_mask


def as_given(result: Tensor, Q: Tensor, D: Tensor) -> Tensor:
    """Drop the dims that a 2-D Q (first) or a 2-D D (second) does not have."""
    if D.dim() == 2:
        result = result.squeeze(1)
    return result.squeeze(0) if Q.dim() == 2 else result


def check_weights(weights: Tensor | None, tokens_name: str, tokens: Tensor) -> Tensor | None:
    """Weights of the tokens' shape without d, in the dtype of the scores; 1-D ones as a batch of one."""
    if weights is None:
        return None
    check_embeddings("q_weights", weights)
    check_device("q_weights", weights, tokens_name, tokens.device)
    fitted = weights.unsqueeze(0) if weights.dim() == 1 and tokens.dim() == 3 else weights
    if fitted.shape != tokens.shape[:-1]:
        raise ValueError(
            f"q_weights must be {list(tokens.shape[:-1])}, the shape of {tokens_name} without d,"
            f" got {shape_of(weights)}"
        )
    return fitted.to(scores_dtype(tokens))


def check_queries(Q: Any) -> None:
    check_embeddings("Q", Q)
    if Q.dim() not in (2, 3):
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {shape_of(Q)}")


def check_places(Q: torch.device, D: torch.device) -> None:
    """D may be on the CPU while Q is on a GPU."""
    if Q != D and not (Q.type == "cuda" and D.type == "cpu"):
        raise ValueError(
            f"Q and D must be on the same device (or Q on a GPU and D on the CPU), got {Q} and {D}"
        )


def check_corpus(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> Batch:
    """Check a search of D by Q, with their masks; 2-D Q or D get a leading dim of 1."""
    check_queries(Q)
    check_embeddings("D", D)
    if D.dim() not in (2, 3):
        raise ValueError(f"D must be [Nd, Ld, d] or [Ld, d], got {shape_of(D)}")
    check_places(Q.device, D.device)
    check_same_dtype_and_d(Q, D)
    return as_batch(Q, D, q_mask, d_mask)


def check_from_hidden(
    Q: Tensor,
    H_d: Tensor,
    W: Tensor,
    b: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    project_Q: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Check all but the mix of dtypes. Q comes back as [Nq, Lq, ...], masks as bool."""
    for name, x in (("Q", Q), ("H_d", H_d), ("W", W), *([] if b is None else [("b", b)])):
        check_embeddings(name, x)
        check_device(name, x, "Q", Q.device)
    check_queries(Q)
    if H_d.dim() != 3:
        raise ValueError(f"H_d must be [Nd, Ld, d_model], got {shape_of(H_d)}")
    if W.dim() != 2 or 0 in W.shape or W.shape[1] != H_d.shape[2]:
        raise ValueError(f"W must be [d, d_model] with d_model = {H_d.shape[2]}, got {shape_of(W)}")
    width, what = (W.shape[1], "d_model") if project_Q else (W.shape[0], "d")
    if Q.shape[-1] != width:
        raise ValueError(f"Q and W must be of the same {what}, got Q {shape_of(Q)} and W {shape_of(W)}")
    if b is not None and b.shape != W.shape[:1]:
        raise ValueError(f"b must be [d] with d = {W.shape[0]}, as W has it, got {shape_of(b)}")
    Q = Q.unsqueeze(0) if Q.dim() == 2 else Q
    return Q, check_mask("q_mask", q_mask, "Q", Q), check_mask("d_mask", d_mask, "H_d", H_d)
