"""Gradients of short documents, with winners as given: ways of their own on GPUs (backward/short_docs)."""

import pytest
import torch

import late_interaction as li
from tests import ref

OPS = torch.ops.late_interaction
BF16, FP16 = torch.bfloat16, torch.float16

# (Nq, N, Lq, Ld, d) that the planner gives to these kernels. One query: rows of one step of 16 and of two,
# embeddings of one slice and of many.
LONE = [
    (1, 1000, 32, 64, 128),
    (1, 2700, 16, 24, 128),
    (1, 9000, 1, 7, 128),
    (1, 1400, 31, 63, 96),
    (1, 1301, 17, 33, 200),
    (1, 2303, 5, 7, 512),
    (1, 800, 32, 127, 104),
    (1, 63000, 3, 1, 128),
]
# Many queries: units of one to four steps, rows of a query that fill no step or take several units, slices of
# 64, 96 and 128 dims, fewer documents than a block has room for, blocks of 192 rows and of 128.
MANY = [
    (64, 1000, 16, 24, 128),
    (2, 1003, 513, 17, 96),
    (32, 1100, 32, 8, 128),
    (70, 1000, 15, 13, 256),
    (36, 1009, 29, 1, 72),
    (34, 1001, 31, 23, 200),
    (70, 1000, 15, 22, 512),
    (128, 1000, 32, 48, 64),
    (130, 1003, 32, 64, 64),
    (300, 1000, 15, 30, 40),
    (140, 1001, 30, 33, 8),
    (128, 128, 32, 32, 128),
    (700, 50, 16, 5, 128),
    (40, 230, 61, 48, 104),
    (260, 63, 32, 40, 96),
    (70, 1500, 15, 20, 128),
    (34, 3000, 31, 48, 64),
]


def drawn_winners(Nq, N, Lq, Ld, kind, device):
    winners = torch.randint(Ld, (Nq, N, Lq), device=device)
    if kind == "skewed":
        winners = (torch.rand(Nq, N, Lq, device=device) ** 4 * Ld).long().clamp_max(Ld - 1)
    elif kind == "holes":
        winners[torch.rand(Nq, N, Lq, device=device) < 0.3] = -1
        winners[:, 0], winners[0] = -1, -1
    return winners


def batch(shape, dtype, device, kind="uniform"):
    Nq, N, Lq, Ld, d = shape
    torch.manual_seed(0)
    Q, D = torch.randn(Nq, Lq, d, device=device), torch.randn(N, Ld, d, device=device)
    grad = torch.randn(Nq, N, device=device)
    return grad, Q.to(dtype), D.to(dtype), drawn_winners(Nq, N, Lq, Ld, kind, device)


def gradients(grad, Q, D, winners, need_grad_Q=True, need_grad_D=True, backward="lowmem"):
    narrow = winners.to(torch.int16)
    return OPS.maxsim_backward(grad, Q, D, narrow, False, backward, need_grad_Q, need_grad_D)


def reference(grad, Q, D, winners):
    """(grad_Q, grad_D) in float64, a query at a time."""
    N, Ld, d = D.shape
    rows, grad_D = D.double().view(-1, d), torch.zeros(N * Ld, d, dtype=torch.float64, device=D.device)
    grad_Q = torch.zeros_like(Q, dtype=torch.float64)
    first = torch.arange(N, device=D.device).unsqueeze(1) * Ld
    for i in range(len(Q)):
        j, s = (winners[i] >= 0).nonzero(as_tuple=True)
        at = first[j, 0] + winners[i, j, s]
        scale = grad[i].double()[j].unsqueeze(1)
        grad_Q[i].index_add_(0, s, scale * rows[at])
        grad_D.index_add_(0, at, scale * Q[i].double()[s])
    return grad_Q, grad_D.view(N, Ld, d)


def check(grad, Q, D, winners):
    got = gradients(grad, Q, D, winners)
    for out, wanted, name in zip(got, reference(grad, Q, D, winners), ("grad_Q", "grad_D"), strict=True):
        assert out.dtype == Q.dtype
        ref.assert_close(out, wanted, ref.GRAD_TOLERANCE[Q.dtype], name)
    return got


@pytest.mark.parametrize("shape", LONE + MANY, ids=str)
def test_the_planner_gives_them_these_calls(shape):
    Nq, N, Lq, Ld, d = shape
    text = plan((Nq, Lq, d), (N, Ld, d))
    assert "products" in text and "gather" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "skewed", "holes"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", LONE + MANY, ids=str)
def test_gradients(shape, dtype, kind):
    check(*batch(shape, dtype, "cuda", kind))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LONE[0], LONE[1], MANY[0], MANY[1], MANY[7]], ids=str)
def test_gradients_that_nearly_cancel(shape):
    # As a cross entropy's: those of a query sum to zero, and rows have much in common.
    grad, Q, D, winners = batch(shape, BF16, "cuda")
    grad, Q, D = grad - grad.mean(1, keepdim=True), (Q + 4).to(BF16), (D + 4).to(BF16)
    check(grad - grad.mean(0) if len(Q) > 1 else grad, Q, D, winners)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LONE[0], LONE[1], MANY[0], MANY[1], MANY[7]], ids=str)
@pytest.mark.parametrize("where", ["Q", "D", "grad"])
def test_what_is_not_finite_reaches_its_winners_alone(where, shape):
    grad, Q, D, winners = batch(shape, BF16, "cuda", "holes")
    x = {"Q": Q, "D": D, "grad": grad}[where]
    x.view(-1)[3], x.view(-1)[-1] = float("nan"), float("-inf")
    got = gradients(grad, Q, D, winners)
    for out, wanted in zip(got, reference(grad, Q, D, winners), strict=True):
        ref.assert_close(out, wanted, ref.GRAD_TOLERANCE[BF16])


@pytest.mark.gpu
def test_sums_over_very_many_documents_do_not_drift():
    # Tensor cores truncate as they accumulate: terms of one sign would show it.
    grad, Q, D, winners = batch((64, 60_000, 16, 2, 32), BF16, "cuda")
    grad, Q, D = grad.abs(), Q.abs(), D.abs()
    got = gradients(grad, Q, D, winners)
    for out, wanted in zip(got, reference(grad, Q, D, winners), strict=True):
        assert abs((out.double() / wanted - 1).mean().item()) < 2**-12


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", [LONE[3], MANY[1], MANY[9]], ids=str)
def test_strided_tokens_and_gradients(shape, dtype):
    Nq, N, Lq, Ld, d = shape
    grad, Q, D, winners = batch(shape, dtype, "cuda")
    wide_Q, wide_D = Q.new_zeros(Nq, Lq + 1, d + 8), D.new_zeros(N, Ld + 3, d + 16)
    wide_Q[:, 1:, 8:], wide_D[:, 2 : 2 + Ld, 8 : 8 + d] = Q, D
    strided = wide_Q[:, 1:, 8:], wide_D[:, 2 : 2 + Ld, 8 : 8 + d]
    expected = gradients(grad, Q, D, winners)
    for some_grad in (grad, grad.t().contiguous().t(), torch.stack([grad, -grad], 2)[..., 0]):
        assert all(map(torch.equal, gradients(some_grad, *strided, winners), expected))
    check(torch.ones((), device="cuda").expand(Nq, N), Q, D, winners)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MANY[0], MANY[1], MANY[2], MANY[3], MANY[13]], ids=str)
def test_winners_may_start_at_any_element(shape):
    grad, Q, D, winners = batch(shape, BF16, "cuda", "holes")
    narrow = winners.to(torch.int16)
    expected = OPS.maxsim_backward(grad, Q, D, narrow, False, "lowmem", True, True)
    for elements in (1, 2, 7):
        moved = narrow.new_empty(narrow.numel() + elements)[elements:].view(narrow.shape).copy_(narrow)
        assert moved.data_ptr() % 16
        got = OPS.maxsim_backward(grad, Q, D, moved, False, "lowmem", True, True)
        assert all(map(torch.equal, got, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LONE[0], LONE[1], MANY[0], MANY[2], MANY[8]], ids=str)
def test_the_same_bits_in_every_run_and_of_each_gradient_alone(shape):
    inputs = batch(shape, BF16, "cuda", "skewed")
    grad_Q, grad_D = gradients(*inputs)
    for _ in range(20):
        assert all(map(torch.equal, gradients(*inputs), (grad_Q, grad_D)))
    only_Q, nothing = gradients(*inputs, need_grad_D=False)
    assert torch.equal(only_Q, grad_Q) and nothing.numel() == 0
    nothing, only_D = gradients(*inputs, need_grad_Q=False)
    assert torch.equal(only_D, grad_D) and nothing.numel() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LONE[0], MANY[0], MANY[7]], ids=str)
def test_masked_training_steps(shape):
    Nq, N, Lq, Ld, _ = shape
    grad, Q, D, _ = batch(shape, BF16, "cuda")
    q_mask = torch.rand(Nq, Lq, device="cuda") < 0.7
    d_mask = torch.rand(N, Ld, device="cuda") < 0.6
    d_mask[0] = False
    Q.masked_fill_(~q_mask.unsqueeze(-1), float("nan"))
    D.masked_fill_(~d_mask.unsqueeze(-1), float("nan"))
    Q.requires_grad_(), D.requires_grad_()
    scores, winners = li.maxsim_with_winners(Q, D, q_mask, d_mask, backward="lowmem")
    scores.backward(grad)
    wanted = reference(grad, Q.detach(), D.detach(), winners.long())
    for x, expected in zip((Q, D), wanted, strict=True):
        ref.assert_close(x.grad, expected, ref.GRAD_TOLERANCE[BF16])
    assert not D.grad[~d_mask].any() and not Q.grad[~q_mask].any()


def plan(q_shape, d_shape, **options):
    return li.explain_plan(q_shape, d_shape, **{"sm": 90, "sm_count": 132, **options}).partition(
        "backward\n"
    )[2]


def test_plans_of_short_documents():
    lone = plan((1, 32, 128), (20_000, 64, 128))
    assert "grad_Q     added up in registers by 132 blocks of 8 warps, 2 warps to a document" in lone
    many = plan((64, 16, 128), (4096, 24, 128))
    assert (
        "grad_Q     as products of gradients with winning tokens of documents, by 96 blocks of up to 128 rows"
        in many
    )
    assert "in clusters of 6 that share out documents" in many
    assert (
        "grad_D     as products of 0 and 1 with queries, by 512 blocks of up to 192 rows and 128 dims" in many
    )
    half = plan((64, 16, 128), (4096, 24, 128), dtype=FP16)
    assert (
        "grad_Q     as products of 0 and 1 with documents, by 64 blocks of up to 128 rows and 128 dims"
        in half
    )
    # Where auto else adds atomically, they are faster and deterministic.
    assert "method     lowmem" in plan((17, 513, 96), (2000, 17, 96))


@pytest.mark.parametrize(
    "options",
    [{"normalize": True}, {"dtype": torch.float32}, {"backward": "unified"}, "long", "odd"],
    ids=str,
)
@pytest.mark.parametrize("Nq", [1, 64])
def test_the_planner_leaves_other_calls_to_other_kernels(Nq, options):
    Ld, d = 5000 if options == "long" else 24, 100 if options == "odd" else 128
    options = {} if isinstance(options, str) else options
    text = plan((Nq, 16, d), (3000, Ld, d), **options)
    assert "gather" in text and "products" not in text and "added up in registers" not in text


@pytest.mark.parametrize("sm", [80, 86, 89, 100, 120])
def test_plans_of_older_gpus_and_of_newer_ones(sm):
    lone, many = (plan((Nq, 16, 128), (3000, 24, 128), sm=sm) for Nq in (1, 64))
    assert "added up in registers" in lone
    assert "as products of gradients with winning tokens" in many and "in groups of 8 that share" in many
    assert "as products of 0 and 1 with queries" in many and "up to 192 rows and 64 dims" in many
    half = plan((64, 16, 128), (3000, 24, 128), sm=sm, dtype=FP16)  # grad_Q of fp16 is gathered from L2
    assert "grad_Q     as" not in half and "grad_D     as products of 0 and 1" in half
