"""Checks a saved argmax, converts it to winners, and calls the operator ``maxsim_backward``."""

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.options import check_flag
from late_interaction._checks.tensors import check_embeddings, check_mask, check_same_kind, scores_dtype
from late_interaction.ops.winners import narrow


def check(
    grad_scores: Tensor, Q: Tensor, D: Tensor, argmax: Tensor, q_mask: Tensor | None, kd_layout: bool
) -> tuple[int, Tensor | None]:
    """Return the number of documents each query meets, and q_mask as bool."""
    check_embeddings("Q", Q)
    check_embeddings("D", D)
    check_embeddings("grad_scores", grad_scores)
    check_flag("kd_layout", kd_layout)
    if Q.dim() != 3 or D.dim() != 3:
        raise ValueError(
            f"Q and D must be [Nq, Lq, d] and [Nd, Ld, d], got {list(Q.shape)} and {list(D.shape)}"
        )
    check_same_kind(Q, D)
    Nq, Lq = Q.shape[:2]
    if kd_layout and (D.shape[0] % Nq if Nq else D.shape[0]):
        raise ValueError(f"kd_layout needs D [Nq * K, Ld, d] with Nq = {Nq}, got {list(D.shape)}")
    N = D.shape[0] // max(Nq, 1) if kd_layout else D.shape[0]
    if grad_scores.shape != (Nq, N):
        raise ValueError(f"grad_scores must be {[Nq, N]}, got {list(grad_scores.shape)}")
    if not isinstance(argmax, Tensor) or argmax.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"argmax must be an int32 tensor, got {getattr(argmax, 'dtype', type(argmax).__name__)}"
        )
    if argmax.shape != (Nq * N, Lq):
        raise ValueError(f"argmax must be [Nq * N, Lq] = {[Nq * N, Lq]}, got {list(argmax.shape)}")
    if not grad_scores.device == argmax.device == Q.device:
        raise ValueError(
            f"grad_scores and argmax must be on the device of Q, {Q.device},"
            f" got {grad_scores.device} and {argmax.device}"
        )
    return N, check_mask("q_mask", q_mask, "Q", Q)


def backward(
    method: str,
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None,
    kd_layout: bool,
) -> tuple[Tensor, Tensor]:
    N, q_mask = check(grad_scores, Q, D, argmax, q_mask, kd_layout)
    Nq, Lq = Q.shape[:2]
    winners = narrow(argmax.reshape(Nq, N, Lq), D.shape[1])
    if q_mask is not None:
        winners.masked_fill_(~q_mask.unsqueeze(1), -1)
    documents = D.unflatten(0, (Nq, N)) if kd_layout else D
    with torch.no_grad():
        grad_Q, grad_D = ops.maxsim_backward(
            grad_scores.to(scores_dtype(Q)), Q, documents, winners, False, method
        )
    return grad_Q, grad_D.reshape(D.shape)
