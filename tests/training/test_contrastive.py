"""losses.contrastive against its definition in float64, with blocks forced small so that many are crossed."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import late_interaction as li
from late_interaction._contrastive import arguments, whole
from tests.support.contrastive import (
    assert_close,
    assert_same,
    batch,
    gradients,
    logits,
    reference,
    small_blocks,
)

T = 0.3


def test_float16_keeps_small_weights(device):
    """Weights far below the least float16 number are scaled before they are rounded."""
    Q, D = batch(16, 16, 4, 6, 16, torch.float16, device, planted=0.0)
    with small_blocks(4):
        ours = gradients(1e-6 * li.losses.contrastive(Q, D, temperature=1.0), (Q, D))
    scaled = [g.double() * 1e6 for g in ours[1]]
    wanted = gradients(reference(Q, D, 1.0), (Q, D))
    # What float16 cannot hold in the result itself is lost: its least step is 6e-8.
    for got, want in zip(scaled, wanted[1], strict=True):
        torch.testing.assert_close(got, want.double(), rtol=0.01, atol=0.07)


@pytest.mark.parametrize("L", [1, 5])
@pytest.mark.parametrize("N", [1, 4])
def test_float16_holds_gradients_of_a_scaled_loss(device, N, L):
    """A GradScaler's first factor takes gradients of scores beyond float16, but not those of tokens."""
    Q, D = ((x.detach() / 100).requires_grad_() for x in batch(N, N, L, L, 8, torch.float16, device))
    S = logits(Q, D, T)
    wanted = F.softplus(S.where(~torch.eye(N, dtype=torch.bool, device=device), -S)).sum(1).mean()
    ours = li.losses.sigmoid(Q, D, temperature=T)
    assert_close(gradients(65536 * ours, (Q, D)), gradients(65536 * wanted, (Q, D)), 4e-3)


def test_precision_where_losses_are_small(device):
    """Logits of hundreds, losses of thousandths: one log-sum-exp in float32 would lose them."""
    Q, D = batch(20, 20, 32, 40, 16, torch.float32, device, planted=3.0)
    with small_blocks(4):
        loss = li.losses.contrastive(Q, D, temperature=0.02, reduction="none")
    wanted = reference(Q, D, 0.02, reduction="none")
    assert wanted.max() < 0.5
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-3, atol=1e-6)


def test_one_masked_token_a_side(device):
    """A masked token scores 0 and reaches nothing, whatever it holds."""
    Q, D = batch(9, 9, 1, 1, device=device)
    q_mask, d_mask = (torch.rand(9, 1, device=device) < 0.6 for _ in range(2))
    with torch.no_grad():
        Q.masked_fill_(~q_mask.unsqueeze(-1), float("nan"))
        D.masked_fill_(~d_mask.unsqueeze(-1), float("inf"))
    with small_blocks():
        loss = li.losses.contrastive(li.Tokens(Q, q_mask), li.Tokens(D, d_mask), temperature=T)
        ours = gradients(loss, (Q, D))
    assert_close(ours, gradients(reference(Q, D, T, masks=(q_mask, d_mask, None)), (Q, D)))


# ---- NaN, ties, determinism ----


HUGE = {  # what the loss takes beside what its definition takes
    "none": ({"reduction": "none"}, {}),
    "symmetric": ({"symmetric": True}, {}),
    "tail": ({}, {"tail": 1e-6}),
    "smoothed": ({"smoothing": 0.1}, {"label_smoothing": 0.1}),
}


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize("lengths", [(2, 3), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1e16), (torch.float64, 1e16), (torch.float64, 1e100)], ids=str
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_huge_scores_are_those_of_pytorch(device, sign, dtype, size, lengths, name):
    """Whatever is kept."""
    Q, D = (x.detach().abs() * size for x in batch(4, 4, *lengths, dtype=dtype, device=device))
    Q, D = (sign * Q).requires_grad_(), D.requires_grad_()
    temperature = torch.ones((), dtype=dtype, device=device, requires_grad=True)
    options, own = HUGE[name]
    wanted = gradients(reference(Q, D, temperature, **options), (Q, D, temperature))
    options = {k: v for k, v in options.items() if k != "smoothing"} | own
    for kept in (0, 1 << 20):
        with small_blocks(kept=kept):
            loss = li.losses.contrastive(Q, D, temperature=temperature, **options)
            ours = gradients(loss, (Q, D, temperature))
        assert_close(ours, wanted, 1e-5 if dtype is torch.float32 else 1e-9)


def test_ties_go_to_the_lowest_token(device):
    Q, D = batch(6, 8, device=device)
    with torch.no_grad():
        D[:, 4:] = D[:, :3]  # each of the last three tokens has an equal before it
    with small_blocks():
        ours = gradients(li.losses.contrastive(Q, D, temperature=T), (Q, D))
    assert_close(ours, gradients(reference(Q, D, T), (Q, D)))
    assert not ours[1][1][:, 4:].any()


# ---- autograd ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    """float32 inputs multiply in the autocast dtype, and their gradients come in float32."""
    Q, D = batch(17, 17, 8, 20, 32, torch.float32, device)
    with torch.autocast(device, dtype=dtype), small_blocks(8):
        scores = li.maxsim(Q, D)
        wanted = gradients(F.cross_entropy(scores / 0.05, torch.arange(17, device=device)), (Q, D))
        ours = gradients(li.losses.contrastive(Q, D, temperature=0.05), (Q, D))
        one = li.losses.contrastive(Q[:, :1], D[:, :1], temperature=0.05)
    assert ours[1][0].dtype is torch.float32
    assert_close(ours, wanted, 1e-4)
    assert one.isfinite()


def test_autocast_of_two_dtypes(device):
    Q, D = batch(6, 6, dtype=torch.float32, device=device)
    half = D.detach().to(torch.bfloat16).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16), small_blocks():
        loss = li.losses.contrastive(Q, half, temperature=T)
    grads = torch.autograd.grad(loss, (Q, half))
    assert grads[0].dtype is torch.float32 and grads[1].dtype is torch.bfloat16


# ---- memory, blocks ----


@pytest.mark.parametrize("Lq, more", [(5, 0), (5, 10**12), (1, 10**12)])
def test_a_budget_keeps_winners_of_larger_batches(device, Lq, more):
    all_bytes = 6 * 7 * (2 * Lq + 4)
    Q, D = batch(6, 7, Lq=Lq, dtype=torch.float64, device=device)
    with small_blocks():
        want = torch.autograd.grad(li.losses.contrastive(Q, D, temperature=0.3, kept_bytes=0), (Q, D))
        with mock.patch.object(whole, "cross_entropy", wraps=whole.cross_entropy) as kept:
            loss = li.losses.contrastive(Q, D, temperature=0.3, kept_bytes=all_bytes + more)
            assert kept.call_count == 1
            li.losses.contrastive(Q, D, temperature=0.3, kept_bytes=all_bytes - 1)
            assert kept.call_count == 1
    torch.testing.assert_close(torch.autograd.grad(loss, (Q, D)), want)


def test_float64_does_not_mix_under_autocast():
    Q, D = batch(4, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            H = torch.randn(4, 2, 3, 8).to(dtype)
            assert li.losses.contrastive(Q, D, temperature=T, hard_negatives=H).isfinite()
        with pytest.raises(TypeError, match="Q and hard_negatives must share a dtype"):
            li.losses.contrastive(Q, D, temperature=T, hard_negatives=torch.randn(4, 2, 3, 8).double())


@pytest.mark.parametrize("packed", [False, True])
def test_no_queries_with_no_hard_negatives(packed):
    Q, H, D = torch.randn(0, 3, 8), torch.randn(0, 2, 3, 8), torch.randn(4, 5, 8)
    Q = li.Tokens(Q).pack() if packed else Q
    assert li.losses.contrastive(Q, D, temperature=T, hard_negatives=H, reduction="sum").item() == 0


@pytest.mark.parametrize("kept", [None, 0])
def test_queries_with_no_hard_negatives(device, kept):
    Q, D = batch(4, 6, device=device)
    H = Q.new_empty(4, 0, 5, Q.shape[-1]).requires_grad_()
    loss = li.losses.contrastive(Q, D, temperature=T, hard_negatives=H, kept_bytes=kept)
    found, (*mine, of_none) = gradients(loss, (Q, D, H))
    assert_close((found, mine), gradients(reference(Q, D, T), (Q, D)))
    assert of_none.shape == H.shape


@pytest.mark.parametrize("Q", [torch.ones(2, 8, device="meta"), None], ids=["meta", "no-tensor"])
def test_a_refusal_is_told_from_the_device_of_the_queries(Q, monkeypatch):
    told = []
    monkeypatch.setattr(arguments, "join", lambda *args: told.append(args))
    with pytest.raises((TypeError, ValueError), match=r"^Q must be"):
        li.losses.contrastive(Q, torch.ones(2, 3, 8), temperature=T, group="group")
    device = torch.device("cpu" if Q is None else "meta")
    assert told == [("losses.contrastive", "group", None, {}, device)]


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_precision_that_is_named_holds_under_autocast(device, kept):
    Q, D = batch(9, 9, dtype=torch.float32, device=device)
    found = []
    for enabled in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            loss = li.losses.contrastive(Q, D, temperature=0.3, precision="highest", kept_bytes=kept)
            found.append(gradients(loss, (Q, D)))
    assert_same(*found)
