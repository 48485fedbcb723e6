"""Sixty calls in a row give the same bits, of more documents than a GPU works on at once.

A kernel that reads memory too late, or gives it back too early, is right in most calls, and in all of a
sanitizer's. Here its blocks are full, and what they read comes from L2.
"""

import pytest
import torch

import late_interaction as li
from late_interaction import ops
from tests.support.packed import pack_sequences

ON_A_GPU = {
    "one query": (1, 2300, 32, 170, 128),
    "one query of 64 tokens": (1, 2300, 64, 300, 64),
    "one long query": (1, 900, 128, 260, 128),
    "queries": (64, 500, 32, 170, 128),
    "long queries": (8, 300, 300, 300, 128),
    "long embeddings": (32, 300, 32, 170, 400),
    "short documents": (128, 2000, 32, 24, 128),
    "many short documents": (1, 30000, 16, 24, 128),
    "few long documents": (2, 3, 130, 9000, 128),
}
ON_A_CPU = (3, 20, 16, 40, 64)


def forward(Q, D, masks):
    return (li.maxsim(Q, D), *li.maxsim_with_winners(Q, D))


def masked(Q, D, masks):
    return (li.maxsim(Q, D, *masks), *li.maxsim_with_winners(Q, D, *masks))


def normalized(Q, D, masks):
    return (li.maxsim(Q, D, None, masks[1], normalize=True),)


def weighted(Q, D, masks):
    return (li.maxsim(Q, D, q_weights=masks[0].to(torch.float32) + 0.5),)


def gradients(Q, D, masks, winners=None):
    Q, D = Q.detach().requires_grad_(), D.detach().requires_grad_()
    scores = li.maxsim(Q, D, backward="lowmem", winners=winners)
    return torch.autograd.grad(scores, (Q, D), torch.cos(scores.detach()))


def recomputed(Q, D, masks):
    return gradients(Q, D, masks, "recompute")


def own_documents(Q, D, masks):
    own = D[: len(D) // len(Q) * len(Q)].unflatten(0, (len(Q), -1))
    return (li.maxsim(Q, own), *li.maxsim_with_winners(Q, own))


WAYS = [forward, masked, normalized, weighted, gradients, recomputed, own_documents]


def assert_same_bits(call, times):
    first = call()
    differs = torch.zeros((), dtype=torch.bool, device=first[0].device)
    for _ in range(times):
        for found, wanted in zip(call(), first, strict=True):
            differs |= (found != wanted).any()
    assert not any(bool(x.isnan().any()) for x in first)
    assert not differs


def batch(name, dtype, device):
    Nq, N, Lq, Ld, d = ON_A_GPU[name] if device == "cuda" else ON_A_CPU
    Q, D = torch.randn(Nq, Lq, d, device=device), torch.randn(N, Ld, d, device=device)
    masks = torch.rand(Nq, Lq, device=device) < 0.8, torch.rand(N, Ld, device=device) < 0.8
    return Q.to(dtype), D.to(dtype), masks


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ON_A_GPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_padded(dtype, name, way, device):
    if device == "cpu" and name != "queries":
        pytest.skip("a CPU has a size of its own")
    Q, D, masks = batch(name, dtype, device)
    assert_same_bits(lambda: way(Q, D, masks), 60 if device == "cuda" else 3)


@pytest.mark.parametrize("name", ["one query", "queries", "short documents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed(dtype, name, device):
    if device == "cpu" and name != "queries":
        pytest.skip("a CPU has a size of its own")
    Q, D, masks = batch(name, dtype, device)
    (q, cu_q), (d, cu_d) = (
        pack_sequences([x[m] for x, m in zip(X, mask, strict=True)])
        for X, mask in zip((Q, D), masks, strict=True)
    )

    def call():
        scores, winners = ops.maxsim_varlen_winners(q, d, cu_q, cu_d, "highest")
        return scores, *ops.maxsim_varlen_backward(scores, q, d, cu_q, cu_d, winners)

    assert_same_bits(call, 60 if device == "cuda" else 3)
