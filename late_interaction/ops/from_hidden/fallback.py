"""The dtypes that multiply, and the helper operators in plain PyTorch, where there are no kernels."""

import torch
from torch import Tensor

from late_interaction._checks.tensors import FLOATS
from late_interaction._scoring.precision import HALF
from late_interaction.ops._arguments import MAX_TOKENS, check_sums, check_tensor
from late_interaction.ops._library import operators
from late_interaction.ops.winners import widen, winner_dtype


def working_dtype(precision: str, *tensors: Tensor | None) -> torch.dtype:
    """Return the dtype that everything multiplies in.

    It is the tensors' own if they agree; else, or if precision says so of float32, the half precision among
    them.
    """
    found = {x.dtype for x in tensors if x is not None}
    if len(found) > 1 and torch.float64 in found:
        pass
    elif torch.float32 in found and precision in HALF:
        return HALF[precision]
    elif len(halves := found - {torch.float32}) == 1:
        return halves.pop()
    elif not halves:
        return torch.float32
    names = ", ".join(sorted(str(dtype) for dtype in found))
    raise TypeError(
        f"Q, H_d, W and b must share a dtype, or mix float32 with one half precision, got {names}"
    )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


_BOOL = (torch.bool,)


def can_project_rows(hidden: Tensor, W: Tensor, b: Tensor | None) -> bool:
    return False


def project_rows(
    rows: Tensor, hidden: Tensor, W: Tensor, b: Tensor | None, active_rows: Tensor | None, normalize: bool
) -> Tensor:
    floats = (rows.dtype,) if rows.dtype in FLOATS else FLOATS
    check_tensor("rows", rows, (None, None), floats)
    check_tensor("hidden", hidden, (rows.shape[0], None), floats, rows)
    check_tensor("W", W, (rows.shape[1], hidden.shape[1]), floats, rows)
    check_tensor("b", b, (rows.shape[1],), floats, rows)
    check_tensor("active_rows", active_rows, (rows.shape[0],), _BOOL, rows)
    if b is None:
        torch.mm(hidden, W.t(), out=rows)
    else:
        torch.addmm(b, hidden, W.t(), out=rows)
    return (
        operators.l2_normalize_rows_.default(rows)
        if normalize
        else rows.new_empty(0, dtype=sum_dtype(rows.dtype))
    )


def argmax_mask(winners: Tensor, Ld: int) -> Tensor:
    if not 0 <= Ld <= MAX_TOKENS:
        raise RuntimeError(f"late_interaction: Ld must lie in [0, {MAX_TOKENS}], got {Ld}")
    check_tensor("winners", winners, (None, None, None), (winner_dtype(Ld),))
    Nd = winners.shape[1]
    places = widen(winners, Ld).long()
    places = torch.where(places < 0, Ld, places)  # an extra column takes the tokens that matched nothing
    won = places.new_zeros(Nd, Ld + 1, dtype=torch.bool)
    return won.scatter_(1, places.transpose(0, 1).flatten(1), True)[:, :Ld].flatten()


def l2_normalize_rows(x: Tensor) -> Tensor:
    check_tensor("x", x, (None, None), FLOATS)
    inverse: Tensor = (
        torch.linalg.vector_norm(x, dim=-1, dtype=sum_dtype(x.dtype)).clamp_min_(1e-12).reciprocal_()
    )
    x.mul_(inverse.unsqueeze(-1))
    return inverse


def maxsim_backward_into(
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
    d_sums: Tensor | None = None,
) -> None:
    # What the CUDA kernel asks for too.
    for name, x, of in (("grad_Q", grad_Q, Q), ("grad_D", grad_D, D)):
        check_tensor(name, x, None, (of.dtype,), of)
        if x.numel() > 0 and not (x.is_contiguous() and x.numel() == of.numel()):
            raise RuntimeError(
                f"late_interaction: {name} must be contiguous with {of.numel()} elements, or have none,"
                f" got {tuple(x.shape)} with strides {x.stride()}"
            )
    check_tensor("D", D, (None, None, None), (Q.dtype,), Q)
    check_tensor("inverse", inverse, (D.shape[0] * D.shape[1],), (sum_dtype(D.dtype),), D)
    check_sums("sums", sums, Q)
    check_sums("d_sums", d_sums, D)
    if d_sums is not None and (grad_D.numel() > 0 or inverse is not None):
        raise RuntimeError(
            "late_interaction: with d_sums, grad_D must have no elements and inverse must be None"
        )
    needs = grad_Q.numel() > 0, grad_D.numel() > 0 or d_sums is not None
    part_Q, grad = operators.maxsim_backward.default(grad_scores, Q, D, winners, False, "lowmem", *needs)
    if needs[0]:
        if sums is not None:
            part_Q = sums.copy_(part_Q) if first else sums.add_(part_Q)
        if last:
            grad_Q.copy_(part_Q)
    if d_sums is not None:
        d_sums.add_(grad.view_as(d_sums))
    if grad_D.numel() == 0:
        return
    if inverse is not None:
        won = (grad != 0).any(-1)
        inverse = inverse.view_as(won)
        g, u = grad.to(inverse.dtype), D.to(inverse.dtype)
        along = (g * u).sum(-1)
        along.masked_fill_(inverse >= 1e12, 0.0)  # below eps, the norm is a constant
        grad = (g - along.unsqueeze(-1) * u) * inverse.unsqueeze(-1)
        grad = grad.masked_fill_(~won.unsqueeze(-1), 0.0)  # even for a token that holds NaN
    grad_D.copy_(grad)


def wgrad_splitk(
    partials: Tensor, grad: Tensor, hidden: Tensor, active_rows: Tensor, overwrite: bool
) -> None:
    check_tensor("grad", grad, (None, None), FLOATS)
    check_tensor("hidden", hidden, (grad.shape[0], None), (grad.dtype,), grad)
    check_tensor("active_rows", active_rows, grad.shape[:1], _BOOL, grad)
    sizes = None, grad.shape[1], hidden.shape[1]
    check_tensor("partials", partials, sizes, (sum_dtype(grad.dtype),), grad, contiguous=True)
    if partials.numel() == 0:
        return
    rows = hidden.masked_fill(~active_rows.unsqueeze(-1), 0.0).to(partials.dtype)
    first = partials[0]
    torch.addmm(first, grad.t().to(partials.dtype), rows, beta=0 if overwrite else 1, out=first)
    if overwrite:
        partials[1:].zero_()


# By the names of the operators.
KERNELS = {
    "can_project_rows": can_project_rows,
    "argmax_mask": argmax_mask,
    "project_rows_": project_rows,
    "l2_normalize_rows_": l2_normalize_rows,
    "maxsim_backward_into_": maxsim_backward_into,
    "wgrad_splitk_": wgrad_splitk,
}
