"""Checks of a search of tensors."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import shape_of
from late_interaction._checks.tensors import check_embeddings, check_mask, check_same_dtype_and_d


def check_queries(Q: Any) -> None:
    """Embeddings of one query or of some."""
    check_embeddings("Q", Q)
    if Q.dim() not in (2, 3):
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {shape_of(Q)}")


def check_places(Q: torch.device, D: torch.device) -> None:
    """D may be on the CPU while Q is on a GPU."""
    if Q != D and not (Q.type == "cuda" and D.type == "cpu"):
        raise ValueError(
            f"Q and D must be on the same device (or Q on a GPU and D on the CPU), got {Q} and {D}"
        )


def check_corpus(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A search of D by Q, with their masks; 2-D Q or D get a leading dim of 1."""
    check_queries(Q)
    check_embeddings("D", D)
    if D.dim() not in (2, 3):
        raise ValueError(f"D must be [Nd, Ld, d] or [Ld, d], got {shape_of(D)}")
    check_places(Q.device, D.device)
    check_same_dtype_and_d(Q, D)
    Q = Q.unsqueeze(0) if Q.dim() == 2 else Q
    D = D.unsqueeze(0) if D.dim() == 2 else D
    return Q, D, check_mask("q_mask", q_mask, "Q", Q), check_mask("d_mask", d_mask, "D", D)
