"""Laws of every function that scores: the same bits in every run, whatever the memory layout; float32 as
PyTorch says; half precision; gradients against finite differences; nothing waits for a GPU, and a CUDA graph
captures it."""

import pytest
import torch

import late_interaction as li
from late_interaction.fused_head import maxsim_from_hidden
from late_interaction.lik import plaid
from late_interaction.score_pairs import score_pairs_packed
from tests.support import ref
from tests.support.calls import in_graph, waiting_for_nothing
from tests.support.cases import tokens

SIZES = 4, 6, 9, 40, 64
SMALL = 2, 3, 3, 4, 5


def scorers(device, sizes=SIZES):
    """{name: f(Q, D)} with Q ``[Nq, Lq, d]`` and D ``[Nd, Ld, d]`` of any dtype."""
    Nq, Nd, Lq, Ld, d = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    masks = [(torch.rand(n, L, generator=generator) < 0.8).to(device) for n, L in ((Nq, Lq), (Nd, Ld))]
    masks[1][0] = False
    weights, W, b = normal(Nq, Lq), normal(d, d) / d**0.5, normal(d)
    cu_q, cu_d = (torch.arange(n + 1, device=device).int() * L for n, L in ((Nq, Lq), (Nd, Ld)))
    pairs = torch.arange(5, device=device).int() % Nq, torch.arange(5, device=device).int() % Nd
    lengths = torch.arange(Nq, device=device) % Lq + 1, torch.arange(Nq, device=device).view(Nq, 1) % Ld + 1
    codes = torch.randint(7, (Nd, Ld), generator=generator).to(device)
    residuals = torch.randint(256, (Nd, Ld, (d * 2 + 7) // 8), generator=generator).byte().to(device)
    centroids, buckets, extents = normal(7, d), normal(4), torch.full((Nd,), Ld, device=device)

    def scale(Q):
        return weights.to(torch.float64 if Q.dtype == torch.float64 else torch.float32)

    def flat(function, *rest):
        hints = {"max_seqlen_q": Lq, "max_seqlen_d": Ld}  # without them lengths are read from the GPU
        return lambda Q, D: function(Q.flatten(0, 1), D.flatten(0, 1), cu_q, cu_d, *rest, **hints)

    return {
        "maxsim": lambda Q, D: li.maxsim(Q, D, *masks, backward="lowmem"),
        "normalized": lambda Q, D: li.maxsim(Q, D, *masks, normalize=True, backward="lowmem"),
        "recompute": lambda Q, D: li.maxsim(Q, D, *masks, winners="recompute", backward="lowmem"),
        "of own": lambda Q, D: li.maxsim(Q, D.expand(Nq, *D.shape), backward="lowmem"),
        "pairs": lambda Q, D: li.maxsim_pairs(Q, D[:Nq], masks[0], masks[1][:Nq], backward="lowmem"),
        "weighted": lambda Q, D: li.maxsim(Q, D, *masks, q_weights=scale(Q), mean=True, backward="lowmem"),
        "padded": lambda Q, D: li.lik.maxsim_padded(Q, D[:Nq, None], *lengths),
        "varlen": flat(li.lik.maxsim_varlen),
        "listed pairs": flat(score_pairs_packed, *pairs),
        "smooth": lambda Q, D: li.smooth_maxsim(Q, D, *masks, tau=0.5),
        "smooth, normalized": lambda Q, D: li.smooth_maxsim(Q, D, *masks, tau=0.5, normalize=True),
        "smooth pairs": lambda Q, D: li.smooth_maxsim_pairs(Q, D[:Nq]),
        "XTR": lambda Q, D: li.xtr_scores(Q, D, Nd * Ld, *masks, backward="lowmem"),
        "XTR, weighted": lambda Q, D: li.xtr_scores(
            Q, D, Nd * Ld, rule="pylate", q_weights=scale(Q), backward="lowmem"
        ),
        "from hidden": lambda Q, D: maxsim_from_hidden(
            Q, D, W.to(Q.dtype), b.to(Q.dtype), masks[1], normalize=True
        ),
        "residual": lambda Q, D: (
            plaid.maxsim_residual(
                Q, codes, residuals, extents, centroids.to(Q.dtype), buckets, 2, normalize=False
            )
            + 0.0 * D.sum()
        ),
    }


NAMES = list(scorers("cpu"))
EVERY = pytest.mark.parametrize("name", NAMES)
# Their tokens are rounded to the dtype that they multiply in.
ROUNDED = ("from hidden", "residual")
# The residual scores of late-interaction-kernels look for empty documents where a gradient is wanted.
WITHOUT_WAITS = pytest.mark.parametrize("name", [name for name in NAMES if name != "residual"])


def drawn(name, device, dtype=torch.float32, sizes=SIZES, form="contiguous"):
    Nq, Nd, Lq, Ld, d = sizes
    Q, D = tokens((Nq, Lq, d), dtype, device, form), tokens((Nd, Ld, d), dtype, device, form)
    return scorers(device, sizes)[name], Q.requires_grad_(), D.requires_grad_()


def step(f, Q, D):
    scores = f(Q, D)
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype, device=scores.device)
    return scores.detach(), *torch.autograd.grad((scores.flatten() * weights).sum(), (Q, D))


def widely(f, Q, D):
    return step(f, *(x.detach().double().requires_grad_() for x in (Q, D)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@EVERY
def test_the_same_bits_in_every_run(name, dtype, device):
    f, Q, D = drawn(name, device, dtype)
    first = step(f, Q, D)
    for _ in range(100 if device == "cuda" else 5):
        assert all(map(torch.equal, first, step(f, Q, D)))


@pytest.mark.parametrize("form", ["transposed", "sliced", "offset", "expanded"])
@EVERY
def test_the_memory_layout_changes_no_result(name, form, device):
    f, Q, D = drawn(name, device, torch.float64, form=form)
    same = step(f, *(x.detach().contiguous().requires_grad_() for x in (Q, D)))
    torch.testing.assert_close(step(f, Q, D), same, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@EVERY
def test_scores_and_gradients_of_each_dtype(name, dtype, device):
    """Those of the same numbers in float64; gradients are rounded to the dtype of the inputs. What is said of
    float32 is none of half precision's business."""
    if dtype != torch.float32:
        torch.set_float32_matmul_precision("medium")
    f, Q, D = drawn(name, device, dtype)
    found, wanted = step(f, Q, D), widely(f, Q, D)
    assert [x.dtype for x in found] == [torch.float32, dtype, dtype]
    rounded = dtype != torch.float32 and (name in ROUNDED or (device == "cuda" and "smooth, n" in name))
    ref.assert_close(found[0], wanted[0], 6e-3 if rounded else 2e-5)
    if name not in ROUNDED:
        for mine, theirs in zip(found[1:], wanted[1:], strict=True):
            ref.assert_close(mine, theirs, 2e-5 if dtype == torch.float32 else 5e-3, "gradient")


@EVERY
def test_float32_multiplies_as_pytorch_says(name, device):
    f, Q, D = drawn(name, device)
    exact, found = widely(f, Q, D)[0], []
    for precision, limit in (("highest", 1e-5), ("high", 3e-3), ("medium", 3e-2)):
        torch.set_float32_matmul_precision(precision)
        found.append(f(Q, D).detach())
        ref.assert_close(found[-1], exact, limit, precision)
        assert torch.get_float32_matmul_precision() == precision
    exact_here = device == "cpu" and "smooth" in name  # a CPU may multiply more exactly than it is asked
    assert exact_here or not torch.equal(found[0], found[2])
    torch.set_float32_matmul_precision("highest")
    with torch.autocast(device, torch.bfloat16):
        scores = f(Q, D)
        grads = torch.autograd.grad(scores.sum(), (Q, D))
    assert scores.dtype == torch.float32 and {x.dtype for x in grads} == {torch.float32}
    ref.assert_close(scores, exact, 3e-2, "autocast")
    assert exact_here or not torch.equal(scores, found[0])


@EVERY
def test_gradcheck(name, device):
    f, Q, D = drawn(name, device, torch.float64, SMALL)
    # A document's direction is its own derivative's null space: rows near 0 are no place for differences.
    Q, D = (torch.randn(x.shape, dtype=x.dtype, device=device).requires_grad_() for x in (Q, D))
    assert torch.autograd.gradcheck(f, (Q, D))


@pytest.mark.gpu
@WITHOUT_WAITS
def test_nothing_waits_for_a_gpu(name):
    f, Q, D = drawn(name, "cuda", torch.bfloat16)
    step(f, Q, D)
    torch.cuda.synchronize()
    with waiting_for_nothing():
        step(f, Q, D)


@pytest.mark.gpu
@WITHOUT_WAITS
def test_a_cuda_graph_captures_scores_and_gradients(name):
    f, Q, D = drawn(name, "cuda", torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(f, Q, D)
    torch.cuda.current_stream().wait_stream(side)
    graph, captured = in_graph(lambda: step(f, Q, D))
    for _ in range(3):
        with torch.no_grad():
            Q.normal_()
            D.normal_()
        graph.replay()
        for found, wanted in zip(captured, step(f, Q, D), strict=True):
            ref.assert_close(found, wanted.double(), 5e-3)


@pytest.mark.parametrize("name", ["maxsim", "varlen", "listed pairs", "XTR"])
def test_a_precision_that_is_given_beats_autocast(name, device):
    Q, D = torch.randn(30, 64, device=device), torch.randn(50, 64, device=device)
    cu = torch.tensor([0, 30], device=device).int(), torch.tensor([0, 50], device=device).int()
    zero = torch.zeros(1, device=device).int()
    f = {
        "maxsim": lambda **how: li.maxsim(Q, D, **how),
        "varlen": lambda **how: li.maxsim(li.Tokens.packed(Q, cu[0]), [D], **how),
        "listed pairs": lambda **how: score_pairs_packed(Q, D, *cu, zero, zero, **how),
        "XTR": lambda **how: li.xtr_scores(Q, D, 50, **how),
    }[name]
    exact = f(precision="highest")
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(f(precision="highest"), exact) and not torch.equal(f(), exact)
