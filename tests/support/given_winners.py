"""The backward with winners as given: batches, the operator's call, its float64 reference and its plan."""

import torch

import late_interaction as li
from tests.support import ref

OPS = torch.ops.late_interaction


def batch(shape, dtype, device, kind="uniform"):
    """Return ``(grad_scores, Q, D, winners)``.

    "skewed": low tokens win most rows. "holes": some rows have none, nor have the first query and document.
    "one token": all rows of a document have one winner.
    """
    Nq, N, Lq, Ld, d = shape
    torch.manual_seed(0)
    Q, D = torch.randn(Nq, Lq, d, device=device), torch.randn(N, Ld, d, device=device)
    grad = torch.randn(Nq, N, device=device)
    winners = torch.randint(Ld, (Nq, N, Lq), device=device)
    if kind == "skewed":
        winners = (torch.rand(Nq, N, Lq, device=device) ** 4 * Ld).long().clamp_max(Ld - 1)
    elif kind == "holes":
        winners[torch.rand(Nq, N, Lq, device=device) < 0.3] = -1
        winners[:, 0], winners[0] = -1, -1
    elif kind == "one token":
        winners.copy_(torch.arange(N, device=device).view(-1, 1) * 7 % Ld)
    return grad, Q.to(dtype), D.to(dtype), winners


def gradients(grad, Q, D, winners, need_grad_Q=True, need_grad_D=True):
    narrow = winners if winners.dtype == torch.int16 else winners.to(torch.int16)
    return OPS.maxsim_backward(grad, Q, D, narrow, False, "lowmem", need_grad_Q, need_grad_D)


def reference(grad, Q, D, winners):
    """(grad_Q, grad_D) in float64, some queries at a time. What is no token of a document is no winner."""
    Nq, Lq, d = Q.shape
    N, Ld, _ = D.shape
    queries, tokens = Q.double().reshape(-1, d), D.double().reshape(-1, d)
    grad_Q, grad_D = torch.zeros_like(queries), torch.zeros_like(tokens)
    some = max(1, (1 << 19) // (N * Lq))
    for begin in range(0, Nq, some):
        part = winners[begin : begin + some].long()
        i, j, s = ((part >= 0) & (part < Ld)).nonzero(as_tuple=True)
        row, token = (begin + i) * Lq + s, j * Ld + part[i, j, s]
        scale = grad[begin + i, j].double().unsqueeze(1)
        grad_Q.index_add_(0, row, scale * tokens[token])
        grad_D.index_add_(0, token, scale * queries[row])
    return grad_Q.view(Q.shape), grad_D.view(D.shape)


def check(sides, grad, Q, D, winners):
    """Compute the gradients of these sides, compare them with float64, and return them."""
    needs = {"need_grad_Q": "Q" in sides, "need_grad_D": "D" in sides}
    got = gradients(grad, Q, D, winners, **needs)
    for out, wanted, side in zip(got, reference(grad, Q, D, winners), "QD", strict=True):
        if side in sides:
            assert out.dtype == Q.dtype
            ref.assert_close(out, wanted, ref.GRAD_TOLERANCE[Q.dtype], f"grad_{side}")
    return got


def plan(shape, **options):
    """What explain_plan says of the backward, on an H200 unless options say otherwise."""
    Nq, N, Lq, Ld, d = shape
    said = li.explain_plan((Nq, Lq, d), (N, Ld, d), **{"sm": 90, "sm_count": 132, **options})
    return said.partition("backward\n")[2]
