"""Gradients against float64, with the winners that the forward chose."""

import pytest
import torch

import late_interaction as li
from bench.harness.inputs import SKEWED as SKEWED_WINNERS
from bench.harness.inputs import draw
from bench.harness.shape import KD, Shape
from late_interaction.lik.backward import (
    maxsim_backward_lowmem,
    maxsim_backward_unified,
    maxsim_backward_unified_reference,
)
from late_interaction.lik.forward import _run_forward
from tests.support import ref
from tests.support.calls import Called
from tests.support.cases import Case, call, inputs, walk

OPS = torch.ops.late_interaction
STRATEGIES = ["auto", "lowmem", "unified"]


def leaves(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


def check(case, device, backward, skewed=False):
    Q, D, q_mask, d_mask = inputs(case, device)
    if skewed and case.Ld:
        # Real winners are skewed: make a few tokens long, so that they win most rows.
        D = D.contiguous()
        D[..., 0, :] = D[..., 0, :] * 8
        D[..., case.Ld // 2, :] = -D[..., 0, :]
    Q, D = leaves(Q, D)
    scores, winners = call(li.maxsim_with_winners, case, Q, D, q_mask, d_mask, backward=backward)
    ref.assert_gradients(scores, Q, D, winners, ref.GRAD_TOLERANCE[case.dtype], case.normalize)


@pytest.mark.parametrize("backward", STRATEGIES)
@pytest.mark.parametrize("case", list(walk(60)), ids=str)
def test_gradients(case, backward, device):
    check(case, device, backward)


SKEWED = [
    Case("in-batch", 33, 9, 32, 65, 128, torch.bfloat16),
    Case("in-batch", 7, 5, 300, 129, 40, torch.float16, "holes", normalize=True),
    Case("in-batch", 50, 2, 31, 7, 96, torch.float32, "dead"),
    Case("KD", 9, 5, 65, 127, 64, torch.float32, "holes"),
    Case("pairs", 20, 20, 129, 33, 768, torch.bfloat16),
    # Documents of one query, in tiles: up to 256 winners are put in order by comparing them.
    Case("KD", 3, 5, 32, 1030, 128, torch.bfloat16),
    Case("KD", 2, 2, 256, 517, 72, torch.float16, "dead", normalize=True),
    Case("KD", 2, 2, 257, 517, 72, torch.float32, "holes"),
    Case("KD", 2, 3, 31, 70, 7, torch.bfloat16, "holes"),
    Case("pairs", 3, 3, 8, 1031, 515, torch.float16, normalize=True),
    Case("pairs", 2, 2, 1, 300, 1024, torch.float64, normalize=True),
    Case("pairs", 3, 3, 5, 70, 1100, torch.bfloat16),
    Case("pairs", 3, 3, 5, 70, 1100, torch.float32, normalize=True),
    # Several blocks share a document of many queries.
    Case("in-batch", 32, 3, 32, 301, 128, torch.bfloat16, "holes", normalize=True),
    Case("in-batch", 9, 1, 33, 67, 48, torch.float64),
]
LARGE = [
    Case("in-batch", 128, 128, 32, 300, 128, torch.bfloat16, "holes"),
    Case("in-batch", 256, 64, 32, 180, 128, torch.float16, normalize=True),
    Case("in-batch", 8, 8, 1030, 1030, 128, torch.bfloat16),
    Case("in-batch", 64, 64, 33, 65, 96, torch.float32, "dead"),
    Case("in-batch", 70, 4, 66, 700, 64, torch.bfloat16, "holes"),
    Case("in-batch", 64, 2, 33, 1100, 40, torch.float16, normalize=True),
    Case("pairs", 300, 300, 7, 60, 24, torch.float64, "holes", normalize=True),
    Case("in-batch", 600, 3, 64, 20, 128, torch.bfloat16),
    Case("KD", 64, 8, 32, 300, 128, torch.bfloat16, "holes"),
    Case("pairs", 256, 256, 32, 300, 128, torch.float32, "holes", normalize=True),
    Case("in-batch", 16, 16, 40, 90, 1024, torch.bfloat16),
    Case("in-batch", 2, 3, 32, 9000, 128, torch.float16),
]


@pytest.mark.parametrize("backward", STRATEGIES)
@pytest.mark.parametrize("case", SKEWED, ids=str)
def test_skewed_winners(case, backward, device):
    check(case, device, backward, skewed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("skewed", [False, True], ids=["uniform", "skewed"])
@pytest.mark.parametrize("backward", STRATEGIES)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, backward, skewed):
    check(case, "cuda", backward, skewed)


@pytest.mark.parametrize("backward", STRATEGIES)
@pytest.mark.parametrize("form", ["expanded", "transposed", "strided"])
def test_any_gradient_of_the_scores(form, backward, device):
    Q, D = leaves(torch.randn(6, 33, 24, device=device), torch.randn(5, 65, 24, device=device))
    scores, winners = li.maxsim_with_winners(Q, D, backward=backward)
    grad = {
        "expanded": torch.ones((), device=device).expand(6, 5),
        "transposed": torch.randn(5, 6, device=device).t(),
        "strided": torch.randn(6, 15, device=device)[:, ::3],
    }[form]
    ref.assert_gradients(scores, Q, D, winners, 1e-6, grad_scores=grad)


def test_deterministic_algorithms_reach_the_backward(device):
    """On a shape whose gradients would be added atomically otherwise, which on the CPU none are."""
    shapes = (8, 1030, 128), (8, 16, 128)
    assert "method     unified" in li.explain_plan(*shapes)
    Q, D = leaves(*(torch.randn(*shape, device=device) for shape in shapes))
    grad_scores = torch.randn(8, 8, device=device)

    def step(backward):
        with Called() as called:
            gradients = torch.autograd.grad(li.maxsim(Q, D, backward=backward), (Q, D), grad_scores)
        calls = zip(called.names, called.arguments, strict=True)
        return [x["backward"] for name, x in calls if name == "maxsim_backward_no_autograd"], gradients

    seen, wanted = step("lowmem")
    assert seen == ["lowmem"] and step(None)[0] == ["auto"]
    torch.use_deterministic_algorithms(True)
    for backward in (None, *["auto"] * (20 if device == "cuda" else 1)):
        seen, gradients = step(backward)
        assert seen == ["lowmem"] and all(map(torch.equal, gradients, wanted))
    assert step("unified")[0] == ["unified"]  # which was asked for


def real_step(shape, device, backward="lowmem", winners="save"):
    """A step on winners as skewed as the benchmark's: the hottest token wins Ld^(3/4) times the mean."""
    torch.manual_seed(0)
    x = draw(shape, torch.device("cpu"), torch.bfloat16, SKEWED_WINNERS)
    Q, D = leaves(x.Q.to(device), x.D.to(device))
    grad_scores = x.grad_scores.to(device)

    def step():
        scores = li.maxsim(Q, D, backward=backward, winners=winners)
        return scores.detach(), *torch.autograd.grad(scores, (Q, D), grad_scores)

    return step


REAL = [
    Shape("in-batch", 128, 128, 32, 300),
    Shape("long", 16, 16, 1030, 1030),
    Shape("KD", 64, 4, 32, 1030, layout=KD),
    Shape("in parts", 512, 512, 32, 180),
]


@pytest.mark.gpu
@pytest.mark.parametrize("winners", ["save", "recompute"])
@pytest.mark.parametrize("shape", REAL, ids=lambda shape: shape.name)
def test_skewed_steps_are_the_same_bits_on_any_stream(shape, winners):
    # Whatever else the GPU does meanwhile, and so whichever blocks run first, and together.
    step = real_step(shape, "cuda", winners=winners)
    first = step()
    other, side = torch.cuda.Stream(), torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    for run in range(100):
        with torch.cuda.stream(other):
            for _ in range(run % 4):
                noise = noise @ noise
        with torch.cuda.stream(side if run % 2 else torch.cuda.default_stream()):
            again = step()
            same = [torch.equal(a, b) for a, b in zip(first, again, strict=True)]
        assert all(same), f"run {run}"
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("winners", ["save", "recompute"])
@pytest.mark.parametrize("shape", REAL, ids=lambda shape: shape.name)
def test_two_gpus_of_a_kind_give_the_same_bits(shape, winners):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("needs two GPUs of a kind")
    here, there = (real_step(shape, f"cuda:{i}", winners=winners)() for i in (0, 1))
    for a, b in zip(here, there, strict=True):
        assert a.device != b.device and torch.equal(a.cpu(), b.cpu())


def test_the_number_of_threads_changes_no_bit():
    Q, D = leaves(torch.randn(9, 33, 40), torch.randn(7, 65, 40))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        scores = li.maxsim(Q, D, normalize=True)
        results.append((scores, *torch.autograd.grad(scores.sum(), (Q, D))))
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


def test_zero_rows_have_a_finite_jacobian(device):
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(2, 4, 8, device=device)
    Q[0, 0] = 0
    Q, D = leaves(Q, D)
    scores, winners = li.maxsim_with_winners(Q, D, normalize=True)
    ref.assert_gradients(scores, Q, D, winners, 1e-6, True)


@pytest.mark.parametrize("kd_layout", [False, True])
@pytest.mark.parametrize("function", [maxsim_backward_lowmem, maxsim_backward_unified])
def test_strategies_by_themselves(function, kd_layout, device):
    Nq, N, Lq = 4, 3, 7
    Q, D = (
        torch.randn(Nq, Lq, 16, device=device),
        torch.randn(Nq * N if kd_layout else N, 9, 16, device=device),
    )
    q_mask = torch.rand(Nq, Lq, device=device) < 0.7
    documents = D.view(Nq, N, 9, 16) if kd_layout else D
    _, argmax = _run_forward(Q, D, q_mask=None, d_mask=None, save_argmax=True, kd_layout=kd_layout)
    argmax[0, 0] = -1
    grad = torch.randn(Nq, N, device=device)
    winners = argmax.view(Nq, N, Lq).masked_fill(~q_mask.unsqueeze(1), -1)
    grad_Q, grad_D = ref.gradients(grad, Q, documents, winners)
    out_Q, out_D = function(grad, Q, D, argmax, q_mask, kd_layout=kd_layout)
    ref.assert_close(out_Q, grad_Q, 1e-6)
    ref.assert_close(out_D, grad_D.view(D.shape), 1e-6)
    if not kd_layout:
        out_Q, out_D = maxsim_backward_unified_reference(grad, Q, D, argmax, q_mask)
        ref.assert_close(out_Q, grad_Q, 1e-6)
        ref.assert_close(out_D, grad_D, 1e-6)


@pytest.mark.parametrize("layout", ["in-batch", "KD"])
def test_winners_that_are_no_tokens_send_nothing(layout, device):
    # Raw winners may come from anywhere; reading outside a document is not an option.
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(2, 4, 8, device=device)
    if layout == "KD":
        D = D.expand(2, -1, -1, -1)
    winners = torch.full((2, 2, 3), -1, dtype=torch.int16, device=device)
    winners[0, 0, 0], winners[1, 1, 1], winners[1, 0, 2] = 4, 30000, -2
    for backward in STRATEGIES:
        grads = OPS.maxsim_backward(torch.ones(2, 2, device=device), Q, D, winners, False, backward)
        assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("layout", ["in-batch", "KD", "pairs"])
@pytest.mark.parametrize("normalize", [False, True])
def test_recomputing_is_saving_without_keeping(normalize, layout, device):
    case = Case(layout, 4, 4, 33, 65, 40, torch.bfloat16, "dead", normalize=normalize)
    Q, D, q_mask, d_mask = inputs(case, device)
    Q, D = leaves(Q, D)
    results = []
    for winners in ("save", "recompute"):
        scores = call(li.maxsim, case, Q, D, q_mask, d_mask, winners=winners, backward="lowmem")
        results.append((scores, *torch.autograd.grad(scores.square().sum(), (Q, D))))
    assert all(map(torch.equal, *results))


# Calls with so many winners that these are found again a part at a time: grad_Q summed over parts of the
# documents, found apart, summed where it lies; and parts of the queries.
IN_PARTS = [
    Case("in-batch", 96, 2800, 128, 20, 128, torch.bfloat16, "holes", normalize=True),
    Case("in-batch", 1024, 1030, 32, 33, 128, torch.bfloat16, "dead"),
    Case("in-batch", 64, 520, 1030, 20, 64, torch.float32, normalize=True),
    Case("in-batch", 64, 520, 1030, 20, 1100, torch.float16, normalize=True),
    Case("KD", 128, 260, 1000, 12, 64, torch.bfloat16, "holes", normalize=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("needs", ["QD", "Q", "D"])
@pytest.mark.parametrize("case", IN_PARTS, ids=str)
def test_recomputing_in_parts(case, needs):
    Q, D, q_mask, d_mask = inputs(case, "cuda")
    Q, D = leaves(Q, D)
    wanted = [x for name, x in zip("QD", (Q, D), strict=True) if name in needs]
    for x in (Q, D):
        x.requires_grad_(any(x is w for w in wanted))

    def step(winners):
        scores = li.maxsim(Q, D, q_mask, d_mask, normalize=case.normalize, winners=winners, backward="lowmem")
        grad_scores = torch.randn(
            scores.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
        )
        return torch.autograd.grad(scores, wanted, grad_scores)

    saved, first = step("save"), step("recompute")
    for a, b in zip(first, saved, strict=True):
        # Two roundings to the input's dtype, of sums taken in another order.
        ref.assert_close(a, b.double(), 2 * ref.GRAD_TOLERANCE[case.dtype])
    for _ in range(3):
        assert all(map(torch.equal, first, step("recompute")))


# ---- the strategies by themselves, at the bounds of what they take ----


def test_own_documents_of_no_query_and_of_one_that_is_no_divisor():
    none = {"Q": torch.ones(0, 3, 8), "grad_scores": torch.ones(0, 0), "argmax": torch.zeros(0, 3).int()}
    grads = maxsim_backward_lowmem(**none, D=torch.ones(0, 5, 8), kd_layout=True)
    assert [x.shape for x in grads] == [(0, 3, 8), (0, 5, 8)]
    for D in (torch.ones(1, 5, 8), torch.ones(1, 0, 8)):
        with pytest.raises(ValueError, match="kd_layout needs D"):
            maxsim_backward_lowmem(**none, D=D, kd_layout=True)
    argmax = torch.zeros(8, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="kd_layout needs D"):
        maxsim_backward_lowmem(
            torch.ones(2, 4), torch.ones(2, 3, 8), torch.ones(5, 8, 8), argmax, kd_layout=True
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_reference_of_unified_in_each_dtype(dtype):
    """Winners past a document's end match nothing; float64 adds up in float64, others in float32."""
    Q, D = torch.randn(1, 3, 8).to(dtype), torch.randn(2, 5, 8).to(dtype)
    grad = torch.tensor([[1.0, 1e-12]], dtype=torch.float64).to(dtype)
    argmax = torch.tensor([[0, 4, 5], [4, -1, 6]], dtype=torch.int32)
    grad_Q, grad_D = maxsim_backward_unified_reference(grad, Q, D, argmax)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    g, q, x = grad.to(accumulated), Q[0].to(accumulated), D.to(accumulated)
    first = g[0, 0] * x[0, 0] + g[0, 1] * x[1, 4]
    wanted = torch.stack((first, g[0, 0] * x[0, 4], torch.zeros_like(first)))
    assert torch.equal(grad_Q[0], wanted.to(dtype))
    assert torch.equal(grad_D[0, 4], (g[0, 0] * q[1]).to(dtype)) and not grad_D[1, :4].any()


@pytest.mark.parametrize("Ld", [5, 40_000])
def test_masked_query_tokens_of_long_documents(Ld):
    """The longer ones have more tokens than a narrow index has below its sign."""
    Q, D = torch.randn(1, 3, 2), torch.randn(2, Ld, 2)
    argmax = torch.tensor([[0, Ld - 1, 2], [1, 3, Ld - 2]], dtype=torch.int32)
    kept = torch.tensor([[True, True, False]])
    grad = torch.tensor([[1.0, 2.0]])
    expected = maxsim_backward_unified_reference(grad, Q, D, argmax, kept)
    torch.testing.assert_close(maxsim_backward_lowmem(grad, Q, D, argmax, kept), expected)
