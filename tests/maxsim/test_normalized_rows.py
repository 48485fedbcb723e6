"""Rows that are normalized where many meet a document, by fp16 copies of unit rows."""

import pytest
import torch

import late_interaction as li
from tests import ref

SCORES, WINNERS = ref.UNIT_SCORE_TOLERANCE, ref.UNIT_WINNER_TOLERANCE
HALF = [torch.bfloat16, torch.float16]


def test_the_planner_makes_them_where_products_outweigh_the_pass():
    def made(Q, D, **options):
        options = {
            "dtype": torch.bfloat16,
            "normalize": True,
            "winners": False,
            "sm": 90,
            "sm_count": 132,
        } | options
        return "in fp16, normalized" in li.explain_plan(Q, D, **options)

    train = (256, 32, 128), (256, 300, 128)
    assert made(*train) and made(*train, dtype=torch.float16)
    assert made((64, 32, 768), (64, 300, 768)) and made((2, 2048, 128), (2, 30, 300, 128))
    assert not made(*train, normalize=False)
    assert not made(*train, d_mask=True)  # copies of what a mask keeps are enough
    assert made(*train, d_mask=True, dtype=torch.float32, precision="high")
    assert not made((1, 1024, 128), (1000, 1024, 128))  # few rows meet a token
    assert made((32, 32, 128), (128, 300, 128)) and made((32, 32, 768), (32, 300, 768))  # that stay in L2
    assert not made((32, 32, 128), (1000, 300, 128)) and not made((31, 32, 128), (128, 300, 128))
    assert not made((256, 32, 100), (256, 300, 100))  # rows of no whole 16 bytes
    assert not made((256, 32, 1032), (256, 300, 1032))
    assert not made((256, 32, 128), (20000, 300, 128))  # copies of over a GiB
    assert made(*train, sm=80, sm_count=108)
    # No kernel that wants whole rows takes these.
    assert not made((64, 32, 768), (64, 300, 768), sm=80, sm_count=108)
    assert not made(*train, dtype=torch.float32, precision="highest")
    assert made(*train, dtype=torch.float32, precision="high")


def overflowing(dtype, device):
    """Q and D with some rows whose norms overflow in `dtype`."""
    torch.manual_seed(0)
    huge = 1e160 if dtype == torch.float64 else 1e19
    Q, D = torch.randn(5, 33, 40, device=device), torch.randn(6, 70, 40, device=device)
    Q, D = Q.to(dtype), D.to(dtype)
    Q[0, 1], Q[3, :], D[1, 3], D[2, 5:], D[4] = -huge, huge * Q[3].sign(), huge, -huge, huge * D[4].sign()
    return Q, D


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", ["in-batch", "pairs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_whose_norm_overflows_counts_as_zeros(dtype, layout, masked, device):
    """As torch.nn.functional.normalize returns it, and never as NaN."""
    Q, D = overflowing(dtype, device)
    Q, D = (Q, D[:5]) if layout == "pairs" else (Q, D)
    d_mask = torch.rand(D.shape[:2], device=device) < 0.7 if masked else None
    zeros = [torch.nn.functional.normalize(x, dim=-1).abs().amax(-1, keepdim=True) == 0 for x in (Q, D)]
    assert zeros[0][3].all() and zeros[1][4].all() and not zeros[0][1].any()
    units = [ref.unit(x.double()).masked_fill(zero, 0) for x, zero in zip((Q, D), zeros, strict=True)]
    expected, _ = ref.maxsim(*units, None, d_mask)
    expected = expected.diagonal() if layout == "pairs" else expected
    Q.requires_grad_()
    D.requires_grad_()
    score = li.maxsim_pairs if layout == "pairs" else li.maxsim
    scores = score(Q, D, d_mask=d_mask, normalize=True)
    ref.assert_close(scores.detach(), expected, ref.tolerance(dtype))
    scores.sum().backward()
    assert Q.grad.isfinite().all() and D.grad.isfinite().all()
    assert Q.grad[3].abs().max() == 0 and D.grad[4].abs().max() == 0 and Q.grad[1].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_that_is_not_finite_is_no_row_of_zeros(dtype, device):
    Q, D = overflowing(dtype, device)
    D[1, 3, 2], Q[2, 7, 5] = torch.inf, -torch.inf
    scores = li.maxsim(Q, D, normalize=True)
    assert scores[:, 1].isnan().all() and scores[2].isnan().all()
    assert scores[[0, 1, 3, 4]][:, [0, 2, 3, 4, 5]].isfinite().all()


def problem(d=128, dtype=torch.bfloat16, N=30, Ld=90, rows=(70, 33)):
    Q, D = torch.randn(*rows, d, device="cuda").to(dtype), torch.randn(N, Ld, d, device="cuda").to(dtype)
    assert "in fp16, normalized" in li.explain_plan(Q, D, normalize=True, winners=False, precision="high")
    return Q, D


def check(Q, D, q_mask=None, d_mask=None, limit=SCORES, precision="high"):
    scores, winners = ref.maxsim(Q, D, q_mask, d_mask, normalize=True)
    out, found = li.maxsim_with_winners(Q, D, q_mask, d_mask, normalize=True, precision=precision)
    ref.assert_close(out, scores, limit)
    ref.assert_winners_close(found, winners, Q, D, WINNERS, normalize=True)
    assert torch.equal(li.maxsim(Q, D, q_mask, d_mask, normalize=True, precision=precision), out)
    return out, found


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("d", [8, 40, 48, 96, 128, 192, 256, 264, 768, 1024])
def test_scores_and_winners(d, dtype, masked):
    Q, D = problem(d, dtype)
    q_mask = d_mask = None
    if masked:
        q_mask, d_mask = torch.rand(70, 33, device="cuda") < 0.9, torch.rand(30, 90, device="cuda") < 0.7
        d_mask[3], d_mask[4, 5:] = False, False
        D[~d_mask] = float("nan")
        scores = li.maxsim(Q, D, q_mask, d_mask, normalize=True, precision="high")
        D[~d_mask] = 0
        assert torch.equal(scores, li.maxsim(Q, D, q_mask, d_mask, normalize=True, precision="high"))
        assert not scores[:, 3].any()
    check(Q, D, q_mask, d_mask, limit=SCORES if d > 8 else 2 * SCORES)


@pytest.mark.native
@pytest.mark.gpu
def test_float32_at_medium_takes_them_too():
    Q, D = problem(dtype=torch.float32)
    check(Q, D, precision="medium")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_documents_of_each_query(dtype):
    Q, D = (
        torch.randn(2, 2100, 64, device="cuda").to(dtype),
        torch.randn(2, 45, 90, 64, device="cuda").to(dtype),
    )
    check(Q, D)
    check(Q, D, None, torch.rand(2, 45, 90, device="cuda") < 0.6)


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("form", ref.LAID)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_inputs_that_lie_otherwise(form, dtype):
    laid, plain = ref.laid(form, *problem(dtype=dtype))
    options = {"normalize": True, "precision": "high"}
    assert all(
        map(torch.equal, li.maxsim_with_winners(*laid, **options), li.maxsim_with_winners(*plain, **options))
    )


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-19, 1e-12, 1e-5, 1e5, 1e17])
def test_any_length(scale):
    Q, D = problem()
    check(Q * scale, D)
    check(Q, D * scale)
    lengths = torch.logspace(-8, 8, 90, device="cuda").view(1, -1, 1).bfloat16()
    check(Q * lengths[:, :33], D * lengths)


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_rows_that_are_zero_or_not_finite(dtype):
    Q, D = problem(dtype=dtype)
    Q[0, 0], D[0], D[1, 2] = 0, 0, 0
    check(Q, D)
    Q[1, 1, 0], D[2, 5, 3], D[4, 9, 1] = float("inf"), -float("inf"), float("nan")
    scores, winners = ref.maxsim(Q, D, normalize=True)
    out, found = li.maxsim_with_winners(Q, D, normalize=True, precision="high")
    ref.assert_close(out, scores, SCORES)
    settled = scores.isnan().unsqueeze(-1) & torch.ones_like(winners, dtype=torch.bool)
    settled[1] = False  # what an infinite element of Q makes of similarities is for its products to say
    assert torch.equal(found.long()[settled], winners[settled])


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_equal_tokens_tie(dtype):
    Q, D = problem(dtype=dtype, Ld=180)
    D[:, 90:] = D[:, :90]
    _, found = check(Q, D)
    assert found.max() < 90
    d_mask = torch.rand(30, 180, device="cuda") < 0.5
    _, found = check(Q, D, None, d_mask)
    twin = (found - 90).clamp_min(0).long()
    kept = d_mask.expand(70, -1, -1).gather(-1, twin)
    assert not (kept & (found >= 90)).any()


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
@pytest.mark.parametrize("winners", ["save", "recompute"])
def test_gradients_are_of_the_rows_as_they_are(winners, backward):
    Q, D = (x.requires_grad_() for x in problem())
    _, found = li.maxsim_with_winners(Q.detach(), D.detach(), normalize=True)
    scores = li.maxsim(Q, D, normalize=True, backward=backward, winners=winners)
    grad = torch.randn_like(scores)
    scores.backward(grad)
    for name, x, expected in zip("QD", (Q, D), ref.gradients(grad, Q, D, found, True), strict=True):
        ref.assert_close(x.grad, expected, ref.GRAD_TOLERANCE[torch.bfloat16], f"grad_{name}")


@pytest.mark.native
@pytest.mark.gpu
def test_a_hundred_runs_give_the_same_bits():
    Q, D = problem(Ld=300)
    first = li.maxsim_with_winners(Q, D, normalize=True)
    for _ in range(100):
        assert all(map(torch.equal, first, li.maxsim_with_winners(Q, D, normalize=True)))
