"""Weights of query tokens, and means: every layout against float64, where each query token is a query."""

import pytest
import torch

import late_interaction as li
from late_interaction import ops
from late_interaction.score_pairs import score_pairs_packed
from tests.support import packed, ref
from tests.support.cases import Case, call, inputs, walk
from tests.support.packed import draw_pairs
from tests.support.packed import scored as maxsim_varlen

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
MAXSIM = [
    *walk(34),
    Case("in-batch", 1, 70, 32, 40, 128, torch.bfloat16, normalize=True),
    Case("KD", 5, 3, 32, 65, 128, torch.bfloat16, "holes"),
    Case("pairs", 40, 40, 32, 24, 128, torch.float16),
    Case("in-batch", 3, 5, 1, 1, 512, torch.float32),
    Case("in-batch", 2, 30, 9, 7, 1100, torch.float32, normalize=True),
]
LARGE = [
    Case("in-batch", 70, 40, 32, 65, 128, torch.bfloat16, "holes"),
    Case("in-batch", 9, 3, 130, 300, 768, torch.float16, normalize=True),
    Case("in-batch", 1, 300, 32, 140, 128, torch.bfloat16, normalize=True),
    Case("in-batch", 1, 2, 32, 3001, 128, torch.bfloat16, "dead"),
    Case("in-batch", 150, 3, 64, 20, 128, torch.bfloat16),
    Case("in-batch", 256, 70, 16, 33, 64, torch.float16),
    Case("in-batch", 128, 128, 32, 65, 160, torch.bfloat16),
    Case("in-batch", 128, 70, 32, 65, 200, torch.bfloat16),
    Case("in-batch", 3, 5, 7, 11, 1100, torch.bfloat16),
    Case("KD", 5, 3, 7, 11, 1100, torch.bfloat16),
    Case("pairs", 41, 41, 13, 67, 1100, torch.bfloat16),
    Case("pairs", 41, 41, 13, 67, 2056, torch.float32),
    Case("KD", 64, 8, 32, 300, 128, torch.bfloat16, "holes"),
    Case("pairs", 300, 300, 32, 24, 128, torch.float16),
]


def scores_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw(shape, dtype, device):
    """Weights of both signs, some of them 0."""
    weights = torch.randn(shape, device=device, dtype=scores_dtype(dtype))
    return weights * (torch.rand(shape, device=device) < 0.9)


def check(case, winners, device):
    Q, D, q_mask, d_mask = inputs(case, device)
    weights = draw((case.Lq, case.Nq), case.dtype, device).t()
    maxima, _ = ref.maxima(Q, D, q_mask, d_mask, case.normalize)
    terms = maxima * weights.double().unsqueeze(1)
    with torch.no_grad():
        found = call(li.maxsim_with_winners, case, Q, D, q_mask, d_mask)[1]
    leaves = [x.detach().requires_grad_() for x in (Q, D, weights)]
    out = call(li.maxsim, case, *leaves[:2], q_mask, d_mask, q_weights=leaves[2], winners=winners)
    scale = terms.abs().sum(-1).norm()  # terms of both signs cancel
    limit = ref.UNIT_SCORE_TOLERANCE if case.normalize else ref.tolerance(case.dtype)
    assert float((out.detach().double() - terms.sum(-1)).norm()) <= limit * max(float(scale), 1e-30)

    grad_scores = torch.randn_like(out)
    out.backward(grad_scores)
    grads = grad_scores.double().unsqueeze(-1) * weights.double().unsqueeze(1)
    grad_Q, grad_D = ref.gradients(grads, Q, D, found, case.normalize)
    limit = ref.GRAD_TOLERANCE[case.dtype]
    for leaf, grad, name in zip(leaves, (grad_Q, grad_D), ("grad_Q", "grad_D"), strict=False):
        assert leaf.grad.dtype == case.dtype
        ref.assert_close(leaf.grad, grad, 4 * limit, name)
    of_weights = (maxima * grad_scores.double().unsqueeze(-1)).sum(1)
    ref.assert_close(leaves[2].grad, of_weights, 2e-4 if case.normalize else 2e-5, "grad of the weights")


@pytest.mark.parametrize("winners", ["save", "recompute"])
@pytest.mark.parametrize("case", MAXSIM, ids=str)
def test_scores_and_gradients(case, winners, device):
    check(case, winners, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_scores_and_gradients_of_large_batches(case):
    check(case, "save", "cuda")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("layout", ["in-batch", "KD", "one document", "pairs"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_constant_weights_have_the_gradients_of_learned_ones(dtype, layout, normalize, device):
    many = {"in-batch": (70,), "KD": (9, 3), "one document": (9, 1), "pairs": (9,)}[layout]
    score = li.maxsim_pairs if layout == "pairs" else li.maxsim
    Q, D = (torch.randn(*n, 40, device=device).to(dtype) for n in ((9, 13), (*many, 21)))
    weights = draw((9, 13), dtype, device)
    found = []
    for learned in (False, True):
        leaves = [x.detach().requires_grad_(learned or x is not weights) for x in (Q, D, weights)]
        score(*leaves[:2], q_weights=leaves[2], normalize=normalize).square().sum().backward()
        assert (leaves[2].grad is not None) == learned
        found.append(leaves)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(found[0][:2], found[1][:2], strict=True))


@pytest.mark.parametrize("weight", [torch.nan, torch.inf])
def test_a_token_without_a_gradient_keeps_none(weight, device):
    """Whatever it and its weight hold."""
    for shape in ((2, 3, 64), (70, 3, 64), (2, 1, 3, 64)):
        Q, D = torch.randn(2, 5, 64, device=device).bfloat16(), torch.randn(*shape, device=device).bfloat16()
        Q[1, 2] = torch.nan
        weights = torch.ones(2, 5, device=device)
        weights[1, 3] = weight
        keep = torch.ones(2, 5, dtype=torch.bool, device=device)
        keep[1, 2:4] = False
        leaves = [x.requires_grad_() for x in (Q, D, weights)]
        li.maxsim(*leaves[:2], keep, q_weights=weights).sum().backward()
        assert all(x.grad.isfinite().all() for x in leaves)
        assert (Q.grad[1, 2:4] == 0).all() and (weights.grad[1, 2:4] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 32, 300), (128, 128, 300), (64, 4, 200), (64, 1, 200)])
def test_constant_weights_start_no_kernel_of_their_own(shape):
    (Nq, N, Ld), Lq = shape, 32
    Q = torch.randn(Nq, Lq, 128, device="cuda").bfloat16()
    D = torch.randn(*((Nq, N) if N < 32 else (N,)), Ld, 128, device="cuda").bfloat16()
    scores, winners = ops.maxsim_winners(Q, D, None, None)
    weights = torch.rand(Nq, Lq, device="cuda")

    def kernels(call):
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())

    plain = kernels(lambda: ops.maxsim_backward(scores, Q, D, winners))
    args = (scores, Q, D, weights, winners, False, "auto", True, True, False, False)
    assert 0 < plain == kernels(lambda: ops.maxsim_weighted_backward(*args))


@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_of_one_change_no_bit(dtype, device):
    Q, D = torch.randn(7, 33, 96, device=device).to(dtype), torch.randn(30, 70, 96, device=device).to(dtype)
    ones = torch.ones(7, 33, device=device)
    for normalize in (False, True):
        plain = li.maxsim(Q, D, normalize=normalize)
        assert torch.equal(li.maxsim(Q, D, normalize=normalize, q_weights=ones), plain)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_that_are_not_finite(dtype, bad, device):
    Q, D = torch.randn(3, 5, 32, device=device).to(dtype), torch.randn(4, 9, 32, device=device).to(dtype)
    weights = torch.ones(3, 5, device=device)
    weights[1, 2] = bad
    for options in ({}, {"normalize": True}):
        scores = li.maxsim(Q, D, q_weights=weights, **options)
        assert scores[1].isnan().all()
        assert scores[[0, 2]].isfinite().all()
        keep = torch.ones(3, 5, dtype=torch.bool, device=device)
        keep[1, 2] = False
        weights_of_one = torch.ones_like(weights)
        masked = li.maxsim(Q, D, keep, q_weights=weights, **options)
        assert torch.equal(masked, li.maxsim(Q, D, keep, q_weights=weights_of_one, **options))


def test_overflow_of_a_weight_and_a_norm_is_not_a_mask(device):
    """1e38 / 1e-10 is beyond float32: the score is not finite, where 0 would be wrong and quiet."""
    Q, D = 1e-10 * torch.eye(8, device=device).unsqueeze(0), torch.eye(8, device=device).unsqueeze(0)
    for many in (1, 400):
        weights = torch.full((many, 8), -1e38, device=device)
        scores = li.maxsim(Q.expand(many, 8, 8), D, normalize=True, q_weights=weights)
        assert not scores.isfinite().any()


def test_a_document_without_a_token_scores_zero(device):
    Q, D = torch.randn(2, 3, 16, device=device), torch.randn(2, 4, 16, device=device)
    keep = torch.tensor([[True] * 4, [False] * 4], device=device)
    weights = torch.full((2, 3), torch.nan, device=device)
    assert torch.equal(li.maxsim(Q, D, None, keep, q_weights=weights)[:, 1], torch.zeros(2, device=device))


# ---- packed tokens ----

PACKED = [
    (name, packed.DIMS[i % len(packed.DIMS)], FLOATS[i % 4], i % 2 * 3)
    for i, name in enumerate(packed.LENGTHS)
    if name != "long query"
]


def packed_inputs(name, d, dtype, stray, device):
    lengths_q, lengths_d = packed.LENGTHS[name]
    Q, cu_q = packed.pack(lengths_q, d, dtype, device, stray)
    D, cu_d = packed.pack(lengths_d, d, dtype, device, stray)
    return Q, D, draw(len(Q), dtype, device), cu_q, cu_d


@pytest.mark.parametrize(("name", "d", "dtype", "stray"), PACKED)
def test_varlen(name, d, dtype, stray, device):
    Q, D, weights, cu_q, cu_d = packed_inputs(name, d, dtype, stray, device)
    of_tokens = torch.arange(len(Q) + 1)  # each as a query
    maxima, _ = packed.scores_and_winners(Q, D, of_tokens, cu_d)
    terms = maxima * weights.double().unsqueeze(1)
    scores = torch.stack([terms[:0].sum(0), *(x.sum(0) for x in packed.slices(terms, cu_q))])[1:]
    leaves = [x.detach().requires_grad_() for x in (Q, D, weights)]
    out = maxsim_varlen(*leaves[:2], cu_q, cu_d, q_weights=leaves[2])
    torch.testing.assert_close(out.double(), scores, rtol=1e-4, atol=1e-4)

    grad_scores = torch.randn_like(out)
    out.backward(grad_scores)
    found = packed.widened(ops.maxsim_varlen_winners(Q, D, cu_q, cu_d)[1], len(D)).long()
    own = torch.zeros_like(maxima)  # for tokens of no query, too
    own[cu_q[0] : cu_q[-1]] = grad_scores.double().repeat_interleave(cu_q.diff(), 0)
    grads = packed.gradients(own * weights.double().unsqueeze(1), Q, D, of_tokens, cu_d, found)
    ref.assert_close(leaves[0].grad, grads[0], 2 * ref.GRAD_TOLERANCE[dtype], "grad_Q")
    ref.assert_close(leaves[1].grad, grads[1], 2 * ref.GRAD_TOLERANCE[dtype], "grad_D")
    torch.testing.assert_close(leaves[2].grad.double(), (own * maxima).sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [13, 400])
@pytest.mark.parametrize(("name", "d", "dtype", "stray"), PACKED)
def test_listed_pairs(name, d, dtype, stray, count, device):
    Q, D, weights, cu_q, cu_d = packed_inputs(name, d, dtype, stray, device)
    pair_q, pair_d = draw_pairs(len(cu_q) - 1, len(cu_d) - 1, count, device)
    leaves = [x.detach().requires_grad_() for x in (Q, D, weights)]
    out = score_pairs_packed(*leaves[:2], cu_q, cu_d, pair_q, pair_d, q_weights=leaves[2])
    unlearned = score_pairs_packed(Q, D, cu_q, cu_d, pair_q, pair_d, q_weights=weights)
    same = [x.detach().requires_grad_() for x in (Q, D, weights)]
    grid = maxsim_varlen(*same[:2], cu_q, cu_d, q_weights=same[2])
    picked = grid[pair_q.long(), pair_d.long()]
    torch.testing.assert_close(out, picked, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(unlearned, picked, rtol=1e-4, atol=1e-4)
    grad_scores = torch.randn_like(out)
    out.backward(grad_scores)
    picked.backward(grad_scores)
    limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    for mine, theirs, what in zip(leaves, same, ("grad_Q", "grad_D", "grad of weights"), strict=True):
        ref.assert_close(mine.grad, theirs.grad, limit, what)


# ---- means ----


def test_mean_divides_by_the_tokens_that_count(device):
    Q, D = torch.randn(3, 5, 16, device=device), torch.randn(4, 7, 16, device=device)
    keep = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0] * 5], dtype=torch.bool, device=device)
    weights = torch.tensor([1.0, 0.5, 0.0, -1.0, 2.0], device=device).expand(3, 5)
    assert torch.equal(li.maxsim(Q, D, mean=True), li.maxsim(Q, D) / 5)
    counts = torch.tensor([[5.0], [2.0], [1.0]], device=device)
    assert torch.equal(li.maxsim(Q, D, keep, mean=True), li.maxsim(Q, D, keep) / counts)
    counts = torch.tensor([[4.0], [1.0], [1.0]], device=device)
    plain = li.maxsim(Q, D, keep, q_weights=weights)
    assert torch.equal(li.maxsim(Q, D, keep, q_weights=weights, mean=True), plain / counts)
    pairs = li.maxsim_pairs(Q, D[:3], keep, q_weights=weights, mean=True)
    assert torch.equal(pairs, li.maxsim_pairs(Q, D[:3], keep, q_weights=weights) / counts[:, 0])
    assert torch.equal(li.maxsim(Q[0], D[0], mean=True), li.maxsim(Q[0], D[0]) / 5)
    assert torch.equal(li.maxsim(Q[:, :0], D, mean=True), torch.zeros(3, 4, device=device))


def test_mean_of_packed(device):
    """Queries have 3, 0 and 5 tokens, of two of which a weight is 0; listed pairs of them too."""
    (Q, cu_q), (D, cu_d) = (packed.pack(n, 16, torch.float32, device) for n in ([3, 0, 5], [4, 7]))
    weights = torch.ones(len(Q), device=device)
    weights[[1, 4]] = 0.0
    for given, counts in ((None, [3.0, 1.0, 5.0]), (weights, [2.0, 1.0, 4.0])):
        counts = torch.tensor(counts, device=device)
        plain, mean = (maxsim_varlen(Q, D, cu_q, cu_d, q_weights=given, mean=x) for x in (False, True))
        assert torch.equal(mean, plain / counts.unsqueeze(1))
        for n in range(4):
            pairs = [torch.tensor(x, device=device)[:n] for x in ([2, 0, 1], [1, 1, 0])]
            plain, mean = (
                score_pairs_packed(Q, D, cu_q, cu_d, *pairs, q_weights=given, mean=x) for x in (False, True)
            )
            assert torch.equal(mean, plain / counts[pairs[0]])


# ---- as citizens of PyTorch ----


def test_half_weights_are_rounded_no_further(device):
    Q, D = torch.randn(4, 9, 32, device=device), torch.randn(5, 20, 32, device=device)
    weights = torch.rand(4, 9, device=device).half().requires_grad_()
    scores = li.maxsim(Q, D, q_weights=weights)
    assert torch.equal(scores, li.maxsim(Q, D, q_weights=weights.float()))
    scores.sum().backward()
    assert weights.grad.dtype == torch.float16


@pytest.mark.gpu
def test_a_batch_beyond_the_cache_is_the_sum_of_its_parts():
    Q = torch.nn.functional.normalize(torch.randn(2048, 32, 128, device="cuda"), dim=-1).bfloat16()
    D = torch.nn.functional.normalize(torch.randn(1024, 180, 128, device="cuda"), dim=-1).bfloat16()
    weights, grad_scores = torch.randn(2048, 32, device="cuda"), torch.randn(2048, 1024, device="cuda")
    for normalize in (False, True):
        leaves = [x.detach().requires_grad_() for x in (Q, D, weights)]
        scores = li.maxsim(*leaves[:2], q_weights=leaves[2], normalize=normalize)
        scores.backward(grad_scores)
        summed = [torch.zeros_like(x, dtype=torch.float32) for x in (Q, D, weights)]
        for j in range(0, 1024, 64):
            part = [x.detach().requires_grad_() for x in (Q, D[j : j + 64], weights)]
            own = li.maxsim(*part[:2], q_weights=part[2], normalize=normalize)
            torch.testing.assert_close(own, scores[:, j : j + 64], rtol=1e-3, atol=1e-3)
            own.backward(grad_scores[:, j : j + 64])
            summed[0] += part[0].grad
            summed[1][j : j + 64] += part[1].grad
            summed[2] += part[2].grad
        ref.assert_close(leaves[0].grad, summed[0], 1e-2, "grad_Q")
        ref.assert_close(leaves[1].grad, summed[1], 1e-2, "grad_D")
        ref.assert_close(leaves[2].grad, summed[2], 1e-3, "grad of weights")


# ---- what is refused ----

REFUSED = {
    "no tensor": (lambda w: [[1.0]], TypeError, "q_weights must be a torch.Tensor"),
    "integers": (lambda w: w.long(), TypeError, "q_weights must be"),
    "shape": (lambda w: w[:, :-1], ValueError, "q_weights must be \\[2, 3\\], the shape of"),
    "rank": (lambda w: w.unsqueeze(-1), ValueError, "q_weights must be \\[2, 3\\]"),
    "device": (lambda w: w.to("meta"), ValueError, "q_weights must be on the device of"),
}


@pytest.mark.parametrize("how", list(REFUSED))
def test_refused(how, device):
    spoil, error, message = REFUSED[how]
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(2, 4, 8, device=device)
    weights = spoil(torch.rand(2, 3, device=device))
    for score in (li.maxsim, li.maxsim_pairs):
        with pytest.raises(error, match=message):
            score(Q, D, q_weights=weights)
    with pytest.raises(error, match="q_weights must be"):
        maxsim_varlen(Q[0], D[0], torch.tensor([0, 3], device=device), torch.tensor([0, 4], device=device),
                      q_weights=weights)  # fmt: skip


def test_one_query_has_weights_of_one_dim(device):
    Q, D = torch.randn(3, 8, device=device), torch.randn(4, 5, 8, device=device)
    weights = torch.randn(3, device=device)
    expected = li.maxsim(Q[None], D, q_weights=weights[None])[0]
    for given in (weights, weights[None]):
        assert torch.equal(li.maxsim(Q, D, q_weights=given), expected)
        assert torch.equal(li.maxsim(Q, D, q_weights=given, winners="recompute"), expected)
    torch.testing.assert_close(li.maxsim(Q, D, q_weights=weights, mean=True), expected / 3)
    for shape in ((4,), (2, 3), (3, 1)):
        with pytest.raises(ValueError, match=r"q_weights must be \[1, 3\]"):
            li.maxsim(Q, D, q_weights=torch.randn(shape, device=device))
