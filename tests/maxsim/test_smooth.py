"""The smooth maximum against its definition in float64."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction.ops.smooth import driver, kernels
from late_interaction.reference import smooth_maxsim_reference
from tests.operators.test_smooth_kernels import judge as smooth_scores
from tests.support import ref
from tests.support.calls import peak
from tests.support.cases import LENGTHS_D, LENGTHS_Q, mask
from tests.support.contrastive import Made

OPS = torch.ops.late_interaction
F64 = torch.float64


def judge(Q, D, q_mask=None, d_mask=None, tau=0.1, normalize=False):
    """Scores in float64, differentiable."""
    Q, D = Q.double(), D.double()
    if normalize:
        Q, D = (x / x.norm(dim=-1, keepdim=True).clamp_min(ref.EPS) for x in (Q, D))
    return smooth_scores(Q, D, q_mask, d_mask, tau)


def embeddings(layout, Nq, N, Lq, Ld, d, device="cpu", dtype=F64, scale=1.0):
    """Leaves: D is [N, Ld, d], [Nq, N, Ld, d], or for pairs [Nq, Ld, d]."""
    documents = {"in-batch": (N,), "KD": (Nq, N), "pairs": (Nq,)}[layout]
    Q = torch.randn(Nq, Lq, d, device=device, dtype=F64) * scale
    D = torch.randn(*documents, Ld, d, device=device, dtype=F64)
    return Q.to(dtype).requires_grad_(), D.to(dtype).requires_grad_()


def call(layout, Q, D, *masks, **options):
    return (li.smooth_maxsim_pairs if layout == "pairs" else li.smooth_maxsim)(Q, D, *masks, **options)


def wanted(layout, Q, D, q_mask=None, d_mask=None, **options):
    if layout != "pairs":
        return judge(Q, D, q_mask, d_mask, **options)
    own = None if d_mask is None else d_mask.unsqueeze(1)
    return judge(Q, D.unsqueeze(1), q_mask, own, **options).squeeze(1)


def gradients(scores, inputs):
    weights = torch.linspace(-1, 2, scores.numel(), dtype=F64, device=scores.device).view(scores.shape)
    return torch.autograd.grad((scores * weights).sum(), inputs)


def both(layout, Q, D, *masks, **options):
    """((scores, gradients), (the judge's)), the judge's in float64."""
    scores = call(layout, Q, D, *masks, **options)
    wide = [x.detach().double().requires_grad_() for x in (Q, D)]
    expected = wanted(layout, *wide, *masks, **options)
    return (scores, *gradients(scores, (Q, D))), (expected, *gradients(expected, wide))


LAYOUTS = ["in-batch", "KD", "pairs"]
MASKS = ["none", "holes", "dead"]
SHAPES = [
    (2, 3, 4, 5, 6),
    (1, 1, 1, 1, 1),
    (3, 2, 1, 7, 8),
    (2, 5, 3, 1, 4),
    (1, 7, 5, 33, 3),
    (4, 1, 2, 70, 2),
]


@pytest.fixture(params=["one block", "small blocks", "tokens apart"])
def blocks(request, monkeypatch):
    """How many numbers of a block: all, those of some documents and groups, or of one document and a row."""
    elements = {"one block": 1 << 18, "small blocks": 200, "tokens apart": 1}[request.param]
    torch.set_num_threads(1)
    monkeypatch.setattr(driver, "_GPU_BLOCK_BYTES", 8 * elements)
    monkeypatch.setattr(driver, "_CPU_THREAD_BLOCK_BYTES", 8 * elements)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_and_gradients(device, blocks, shape, layout, masks, normalize):
    Q, D = embeddings(layout, *shape, device)
    given = mask(Q.shape[:-1], device, masks), mask(D.shape[:-1], device, masks)
    torch.testing.assert_close(*both(layout, Q, D, *given, normalize=normalize), rtol=1e-11, atol=1e-12)


def powers(rows, documents, mask, tau):
    """[groups, documents, rows, Ld] of rows [groups, rows, d] and documents [groups, documents, Ld, d]."""
    powers = torch.einsum("gsd,gjtd->gjst", rows.double(), documents.double()) / tau
    return powers if mask is None else powers.masked_fill(~mask.unsqueeze(2), -math.inf)


def smooth_logs(*args):
    return powers(*args).logsumexp(-1).div(math.log(2)).float()


def smooth_gradient(rows, documents, mask, logs, factors, tau, of_documents):
    logs = logs.double().unsqueeze(-1) * math.log(2)
    weights = (powers(rows, documents, mask, tau) - logs).exp() * factors.double().unsqueeze(-1)
    if of_documents:
        return torch.einsum("gjst,gsd->gjtd", weights, rows.double()).flatten(1, 2).float()
    return torch.einsum("gjst,gjtd->gsd", weights, documents.double()).float()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_done_around_the_kernels_of_a_gpu(monkeypatch, layout, masks, normalize):
    """Masks, norms and units of gradients, seen on a CPU: the kernels are in plain PyTorch."""
    monkeypatch.setattr(kernels, "serve", lambda Q: True)
    plain = {f.__name__: SimpleNamespace(default=f) for f in (smooth_logs, smooth_gradient)}
    monkeypatch.setattr(kernels, "operators", SimpleNamespace(**plain))
    Q, D = embeddings(layout, 3, 4, 5, 7, 16, dtype=torch.bfloat16)
    given = mask(Q.shape[:-1], "cpu", masks), mask(D.shape[:-1], "cpu", masks)
    for mine, theirs in zip(*both(layout, Q, D, *given, normalize=normalize), strict=True):
        ref.assert_close(mine, theirs, 4e-3)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("layout", ["in-batch", "KD"])
def test_the_reference(device, layout, masks):
    Q, D = embeddings(layout, 3, 2, 5, 7, 8, device)
    given = mask(Q.shape[:-1], device, masks), mask(D.shape[:-1], device, masks)
    for options in ({"tau": 0.3}, {"normalize": True}):
        scores, reference = (f(Q, D, *given, **options) for f in (li.smooth_maxsim, smooth_maxsim_reference))
        torch.testing.assert_close(scores, reference, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            gradients(scores, (Q, D)), gradients(reference, (Q, D)), rtol=1e-11, atol=1e-12
        )


@pytest.mark.parametrize(("Lq", "Ld"), [*zip(itertools.cycle(LENGTHS_Q), LENGTHS_D, strict=False)])
def test_lengths(device, Lq, Ld):
    for layout in LAYOUTS:
        Q, D = embeddings(layout, 2, 2, Lq, Ld, 16, device)
        torch.testing.assert_close(
            *both(layout, Q, D, None, mask(D.shape[:-1], device, "dead")), rtol=1e-11, atol=1e-11
        )


@pytest.mark.parametrize(
    ("layout", "at"), [(x, i) for x in LAYOUTS for i in range(4) if (x, i) != ("pairs", 1)]
)
def test_nothing_to_score(device, layout, at):
    sizes = [2, 2, 4, 5]
    sizes[at] = 0
    Q, D = embeddings(layout, *sizes, 6, device)
    scores = call(layout, Q, D)
    assert list(scores.shape) == sizes[: 1 if layout == "pairs" else 2] and not scores.any()
    grads = torch.autograd.grad(scores.sum(), (Q, D))
    assert [g.shape for g in grads] == [Q.shape, D.shape] and not any(g.any() for g in grads)
    if layout != "pairs":
        assert torch.equal(smooth_maxsim_reference(Q, D), scores)


@pytest.mark.parametrize("tau", [1, 0.1, 0.01, 1e-4, 50.0])
def test_tau(device, tau):
    Q, D = embeddings("in-batch", 3, 4, 5, 6, 7, device)
    torch.testing.assert_close(*both("in-batch", Q, D, tau=tau), rtol=1e-11, atol=1e-11)


def test_tau_towards_0_is_maxsim(device):
    Q, D = embeddings("in-batch", 3, 4, 5, 6, 7, device, torch.float32)
    d_mask = mask((4, 6), device, "dead")
    near, hard = (
        li.smooth_maxsim(Q, D, None, d_mask, tau=1e-30),
        li.maxsim(Q, D, None, d_mask, normalize=False),
    )
    torch.testing.assert_close(near, hard)
    torch.testing.assert_close(gradients(near, (Q, D)), gradients(hard, (Q, D)))


@pytest.mark.parametrize(
    ("tau", "error"),
    [(0, ValueError), (0.0, ValueError), (-0.1, ValueError), (math.nan, ValueError), (math.inf, ValueError),
     (-math.inf, ValueError), (1e-40, ValueError), (None, TypeError), ("0.1", TypeError), (True, TypeError),
     (1j, TypeError), ([0.1], TypeError), (torch.tensor(0.1), TypeError)],
)  # fmt: skip
def test_a_tau_that_is_none(tau, error):
    Q, D = embeddings("pairs", 2, 2, 3, 4, 5)
    for function in (li.smooth_maxsim, li.smooth_maxsim_pairs, smooth_maxsim_reference):
        with pytest.raises(error, match=r"^tau must be"):
            function(Q, D, tau=tau)
    if error is ValueError and not tau > 0:
        with pytest.raises(RuntimeError, match="tau must be above 0"):
            OPS.smooth_maxsim(Q, D, None, None, tau)


# ---- shapes, strides, dtypes ----


def test_ranks(device):
    Q, D = embeddings("in-batch", 3, 4, 5, 6, 7, device)
    grid = li.smooth_maxsim(Q, D)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(li.smooth_maxsim(Q[0], D), grid[0], **close)
    torch.testing.assert_close(li.smooth_maxsim(Q, D[1]), grid[:, 1], **close)
    torch.testing.assert_close(li.smooth_maxsim(Q[2], D[3]), grid[2, 3], **close)
    torch.testing.assert_close(li.smooth_maxsim_pairs(Q, D[:3]), grid.diagonal(), **close)
    own = li.smooth_maxsim(Q, D.expand(3, 4, 6, 7))
    torch.testing.assert_close(own, grid, **close)
    q_mask = torch.tensor([1, 0, 2, 0, 1], device=device)
    torch.testing.assert_close(
        li.smooth_maxsim(Q[0], D, q_mask), li.smooth_maxsim(Q[:1], D, q_mask[None] != 0)[0], **close
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_gradients_beside_large_ones(device, dtype):
    """Weights of documents' tokens are float32 numbers: none is lost beside larger ones."""
    Q, D = embeddings("in-batch", 2, 3, 4, 300, 16, device, dtype, scale=0.1)
    factors = torch.tensor([[1e-3], [1.0]], device=device)
    wide = [x.detach().double().requires_grad_() for x in (Q, D)]
    (mine,) = torch.autograd.grad((li.smooth_maxsim(Q, D) * factors).sum(), Q)
    (theirs,) = torch.autograd.grad((judge(*wide) * factors).sum(), wide[0])
    for row in range(2):
        ref.assert_close(mine[row], theirs[row], 4e-3 if dtype == torch.bfloat16 else 1e-3)


# ---- NaN, infinity, masked tokens ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked_tokens_reach_nothing(device, blocks, layout):
    Q, D = embeddings(layout, 3, 4, 5, 6, 7, device)
    q_mask, d_mask = mask(Q.shape[:-1], device, "dead"), mask(D.shape[:-1], device, "dead")
    clean = call(layout, Q, D, q_mask, d_mask)
    poisons = itertools.cycle([torch.nan, torch.inf, -torch.inf, 1e300])
    poisoned = []
    for x, kept in ((Q, q_mask), (D, d_mask)):
        bad = x.detach().clone()
        for place in (~kept).nonzero().tolist():
            bad[tuple(place)] = next(poisons)
        poisoned.append(bad.requires_grad_())
    scores = call(layout, *poisoned, q_mask, d_mask)
    assert torch.equal(scores, clean)
    assert not clean.view(len(Q), -1)[~q_mask.any(-1)].any() and clean.any()
    for mine, theirs, kept in zip(
        gradients(scores, poisoned), gradients(clean, (Q, D)), (q_mask, d_mask), strict=True
    ):
        assert torch.equal(mine, theirs) and not mine[~kept].any()


@pytest.mark.parametrize("large", ["Q", "D"])
def test_masked_tokens_multiply_as_zeros(device, large):
    """What takes their place overflows with no token of the other side, however large that is.

    Over tau, which a product of matrices may apply to either side first, the large side is still finite.
    """
    scales = (1e37, 2e-37) if large == "Q" else (2e-37, 1e37)
    shapes = (2, 3, 16), (2, 4, 16)
    Q, D = (
        ((torch.rand(shape, device=device) / 2 + 0.5) * scale).requires_grad_()
        for shape, scale in zip(shapes, scales, strict=True)
    )
    q_mask = torch.tensor([[True, False, True], [False] * 3], device=device)
    d_mask = torch.tensor([[True, False, True, True], [False] * 4], device=device)
    torch.testing.assert_close(
        *both("in-batch", Q, D, q_mask, d_mask), rtol=1e-4, atol=1e-4, check_dtype=False
    )


@pytest.mark.parametrize("masks", ["none", "holes"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_nan_and_infinity_are_as_pytorch_has_them(device, dtype, masks):
    special = [torch.nan, torch.inf, -torch.inf, 1e30, 0.0]
    seen = set()
    for trial in range(20):
        Q, D = (x.detach() for x in embeddings("in-batch", 3, 4, 4, 5, 3, device, dtype))
        for x in (Q, D):
            x[torch.rand(x.shape, device=device) < 0.05] = special[trial % 5]
        if trial == 19:  # every similarity with a document is -inf
            Q, D[2, :, 0] = Q.abs(), -torch.inf
        given = mask(Q.shape[:-1], device, masks), mask(D.shape[:-1], device, masks)
        scores, expected = (f(Q, D, *given) for f in (li.smooth_maxsim, smooth_maxsim_reference))
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
        torch.testing.assert_close(scores, expected, equal_nan=True, **close)
        seen |= {str(x) for x in expected[~expected.isfinite()].tolist()}
    assert seen == {"nan", "inf", "-inf"}


def test_nan_in_gradients(device):
    Q, D = embeddings("in-batch", 2, 3, 4, 5, 6, device)
    with torch.no_grad():
        Q[0, 1, 2] = D[1, 3, 0] = torch.nan
    pairs = [gradients(f(Q, D), (Q, D)) for f in (li.smooth_maxsim, smooth_maxsim_reference)]
    torch.testing.assert_close(*pairs, equal_nan=True)
    kept = torch.ones(2, 4, dtype=torch.bool, device=device)
    kept[0, 1] = False
    d_mask = torch.ones(3, 5, dtype=torch.bool, device=device)
    d_mask[1, 3] = False
    scores = li.smooth_maxsim(Q, D, kept, d_mask)
    assert all(x.isfinite().all() for x in (scores, *gradients(scores, (Q, D))))


def test_tokens_of_norm_0_or_next_to_it_have_a_finite_gradient(device):
    Q, D = embeddings("in-batch", 2, 3, 4, 5, 6, device)
    with torch.no_grad():
        Q[0, 1] = D[1, 3] = 0
        Q[1, 2] *= 1e-14
        D[2, 0] *= 1e-13
    pairs = [gradients(f(Q, D, normalize=True), (Q, D)) for f in (li.smooth_maxsim, smooth_maxsim_reference)]
    for mine, theirs in zip(*pairs, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


# ---- memory ----


@pytest.mark.parametrize("masks", ["none", "holes"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tensor_grows_with_the_similarities(monkeypatch, layout, masks):
    """None of a step is larger than a block, a document, or what the inputs and scores take in float32."""
    torch.set_num_threads(1)
    block = 1 << 14
    monkeypatch.setattr(driver, "_CPU_THREAD_BLOCK_BYTES", block)
    for n in (8, 40):
        Q, D = (x.detach() for x in embeddings(layout, n, n, 9, 31, 8, dtype=torch.float32))
        given = mask(Q.shape[:-1], "cpu", masks), mask(D.shape[:-1], "cpu", masks)
        options = (0.1, True, "highest", layout == "pairs")
        backward_options = (0.1, True, "highest", True, True, layout == "pairs")
        with Made() as seen:  # below the operators, whose results it would see alone
            scores = driver.smooth_maxsim(Q, D, *given, *options)
            driver.smooth_maxsim_backward(scores, Q, D, *given, *backward_options)
        assert max(seen.bytes) <= max(block, scores.nbytes, Q.nbytes, D.nbytes)
        similarities = scores.numel() * 9 * 31 * 4
        assert layout != "in-batch" or n == 8 or 20 * max(seen.bytes) < similarities


def test_a_document_at_a_time_is_the_least(monkeypatch):
    """Tokens of more than a block: one document and one row."""
    monkeypatch.setattr(driver, "_CPU_THREAD_BLOCK_BYTES", 64)
    for n in (6, 2):  # of 6 the gradient is the largest
        Q, D = (x.detach() for x in embeddings("in-batch", 5, n, 7, 100, 16, dtype=torch.float32))
        with Made() as seen:
            driver.smooth_maxsim_backward(torch.ones(5, n), Q.half(), D.half(), None, None)
        assert max(seen.bytes) == max(4 * 100 * 16, 4 * 5 * 7 * 16, 2 * n * 100 * 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_memory_does_not_grow_with_the_similarities(dtype):
    """The similarities take 640 MiB and 10 GiB in float32."""
    for n in (64, 256):
        Q, D = embeddings("in-batch", n, n, 32, 1280, 64, "cuda", dtype)

        def step(Q=Q, D=D):
            return torch.autograd.grad(li.smooth_maxsim(Q, D).sum(), (Q, D))

        step()
        beside = peak(step) - (Q.nbytes + D.nbytes + 8 * Q.numel())
        assert beside <= 160 << 20, f"{beside / 2**20:.0f} MiB"
