"""Shapes and dtypes of every operator's results, for torch.compile, torch.export and meta tensors."""

import torch
from torch import Tensor

from late_interaction.ops import from_hidden
from late_interaction.ops.winners import winner_dtype


def _check_ranks(Q: Tensor, D: Tensor, paired: bool = False) -> None:
    torch._check(Q.dim() == 3, lambda: f"late_interaction: Q must be [Nq, Lq, d], got rank {Q.dim()}")
    wanted = "[Nq, Ld, d]" if paired else "[Nd, Ld, d] or [Nq, K, Ld, d]"
    torch._check(
        D.dim() == 3 or (D.dim() == 4 and not paired),
        lambda: f"late_interaction: D must be {wanted}, got rank {D.dim()}",
    )


def _maxsim(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool = False,
    precision: str = "highest",
    backward: str = "auto",
    paired: bool = False,
) -> Tensor:
    _check_ranks(Q, D, paired)
    dtype = torch.float64 if Q.dtype == torch.float64 else torch.float32
    return Q.new_empty(Q.shape[:1] if paired else (Q.shape[0], D.shape[-3]), dtype=dtype)


def _maxsim_winners(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool = False,
    precision: str = "highest",
    backward: str = "auto",
    paired: bool = False,
) -> tuple[Tensor, Tensor]:
    scores = _maxsim(Q, D, q_mask, d_mask, paired=paired)
    winners = Q.new_empty((*scores.shape, Q.shape[1]), dtype=winner_dtype(D.shape[-2]))
    return scores, winners


def _maxsim_backward(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    winners: Tensor,
    normalize: bool = False,
    backward: str = "auto",
    need_grad_Q: bool = True,
    need_grad_D: bool = True,
    paired: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_ranks(Q, D, paired)
    grad_Q = Q.new_empty(Q.shape if need_grad_Q else (0,))
    grad_D = D.new_empty(D.shape if need_grad_D else (0,))
    return grad_Q, grad_D


def _maxsim_backward_recompute(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool = False,
    precision: str = "highest",
    backward: str = "auto",
    need_grad_Q: bool = True,
    need_grad_D: bool = True,
    paired: bool = False,
) -> tuple[Tensor, Tensor]:
    args = (grad_scores, Q, D, grad_scores, normalize, backward, need_grad_Q, need_grad_D, paired)
    return _maxsim_backward(*args)


def _maxsim_quantized(
    Q: Tensor,
    D: Tensor,
    scale_Q: Tensor,
    scale_D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
) -> Tensor:
    return _maxsim(Q, D, q_mask, d_mask)


def _residual_scores(Q: Tensor, codes: Tensor, extents: Tensor) -> Tensor:
    torch._check(Q.dim() == 3, lambda: f"late_interaction: Q must be [Nq, Lq, d], got rank {Q.dim()}")
    torch._check(
        codes.dim() in (1, 2),
        lambda: f"late_interaction: codes must be [tokens] or [Nd, Ld], got rank {codes.dim()}",
    )
    N = codes.shape[0] if codes.dim() == 2 else extents.shape[0] - 1
    return Q.new_empty((Q.shape[0], N), dtype=torch.float64 if Q.dtype == torch.float64 else torch.float32)


def _maxsim_residual(
    Q: Tensor,
    codes: Tensor,
    residuals: Tensor,
    extents: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    normalize: bool = True,
    precision: str = "highest",
) -> Tensor:
    return _residual_scores(Q, codes, extents)


def _maxsim_residual_winners(
    Q: Tensor,
    codes: Tensor,
    residuals: Tensor,
    extents: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    normalize: bool = True,
    precision: str = "highest",
) -> tuple[Tensor, Tensor]:
    scores = _residual_scores(Q, codes, extents)
    dtype = torch.int32 if codes.dim() == 1 else winner_dtype(codes.shape[1])
    return scores, Q.new_empty((*scores.shape, Q.shape[1]), dtype=dtype)


def _maxsim_residual_backward(
    grad_scores: Tensor,
    Q: Tensor,
    codes: Tensor,
    residuals: Tensor,
    extents: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    winners: Tensor,
    nbits: int,
    normalize: bool = True,
) -> Tensor:
    return Q.new_empty(Q.shape)


def _plaid_approx_score(query_centroid_scores: Tensor, codes: Tensor, doc_lengths: Tensor) -> Tensor:
    return query_centroid_scores.new_empty((codes.shape[0],))


def _maxsim_from_hidden(
    Q: Tensor,
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool = True,
    precision: str = "highest",
) -> Tensor:
    return _maxsim_from_hidden_winners(Q, H, W, b, q_mask, d_mask, normalize, precision)[0]


def _maxsim_from_hidden_winners(
    Q: Tensor,
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool = True,
    precision: str = "highest",
) -> tuple[Tensor, Tensor]:
    from_hidden.check(Q, H, W, b)
    dtype = from_hidden.sum_dtype(from_hidden.working_dtype(precision, Q, H, W, b))
    scores = Q.new_empty((Q.shape[0], H.shape[0]), dtype=dtype)
    winners = Q.new_empty((Q.shape[0], H.shape[0], Q.shape[1]), dtype=winner_dtype(H.shape[1]))
    return scores, winners


def _maxsim_from_hidden_backward(
    grad_scores: Tensor,
    Q: Tensor,
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    winners: Tensor,
    normalize: bool = True,
    precision: str = "highest",
    need_grad_Q: bool = True,
    need_grad_H: bool = True,
    need_grad_W: bool = True,
    need_grad_b: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from_hidden.check(Q, H, W, b)
    return (
        Q.new_empty(Q.shape if need_grad_Q else (0,)),
        H.new_empty(H.shape if need_grad_H else (0,)),
        W.new_empty(W.shape if need_grad_W else (0,)),
        (W if b is None else b).new_empty(W.shape[:1] if need_grad_b else (0,)),
    )


def _project_rows(
    rows: Tensor, hidden: Tensor, W: Tensor, b: Tensor | None, active_rows: Tensor | None, normalize: bool
) -> Tensor:
    return rows.new_empty((rows.shape[0] if normalize else 0,), dtype=from_hidden.sum_dtype(rows.dtype))


def _project_scores(
    Q: Tensor,
    hidden: Tensor,
    W: Tensor,
    b: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    Ld: int,
    normalize: bool,
) -> Tensor:
    return Q.new_empty((Q.shape[0], hidden.shape[0] // Ld), dtype=torch.float32)


def _argmax_mask(winners: Tensor, Ld: int) -> Tensor:
    return winners.new_empty((winners.shape[1] * Ld,), dtype=torch.bool)


def _l2_normalize_rows(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:1], dtype=from_hidden.sum_dtype(x.dtype))


def _maxsim_backward_into(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    inverse: Tensor | None,
    winners: Tensor,
    grad_Q: Tensor,
    grad_D: Tensor,
    sums: Tensor | None,
    first: bool,
    last: bool,
) -> None:
    pass


def _wgrad_splitk(
    partials: Tensor, grad: Tensor, hidden: Tensor, active_rows: Tensor, overwrite: bool
) -> None:
    pass


def _send_bytes(to: Tensor, source: Tensor, staging: Tensor, events: Tensor, first: int) -> None:
    pass


def register() -> None:
    torch.library.register_fake("late_interaction::maxsim", _maxsim)
    torch.library.register_fake("late_interaction::maxsim_winners", _maxsim_winners)
    torch.library.register_fake("late_interaction::maxsim_backward", _maxsim_backward)
    torch.library.register_fake("late_interaction::maxsim_backward_recompute", _maxsim_backward_recompute)
    torch.library.register_fake("late_interaction::maxsim_quantized", _maxsim_quantized)
    torch.library.register_fake("late_interaction::maxsim_dequantized", _maxsim_quantized)
    torch.library.register_fake("late_interaction::maxsim_residual", _maxsim_residual)
    torch.library.register_fake("late_interaction::maxsim_residual_winners", _maxsim_residual_winners)
    torch.library.register_fake("late_interaction::maxsim_residual_backward", _maxsim_residual_backward)
    torch.library.register_fake("late_interaction::plaid_approx_score", _plaid_approx_score)
    for name, fake in (
        ("maxsim_from_hidden", _maxsim_from_hidden),
        ("maxsim_from_hidden_winners", _maxsim_from_hidden_winners),
        ("maxsim_from_hidden_backward", _maxsim_from_hidden_backward),
        ("send_bytes_", _send_bytes),
        ("project_rows_", _project_rows),
        ("project_scores", _project_scores),
        ("argmax_mask", _argmax_mask),
        ("l2_normalize_rows_", _l2_normalize_rows),
        ("maxsim_backward_into_", _maxsim_backward_into),
        ("wgrad_splitk_", _wgrad_splitk),
    ):
        torch.library.register_fake(f"late_interaction::{name}", fake)
