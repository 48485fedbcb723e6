"""CUDA's kernels of the smooth maximum about the edges of their tiles, against float64."""

import math

import pytest
import torch

import late_interaction as li
from tests.support import ref
from tests.support.cases import mask

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
# Document tokens about the edges of 8, 64 and 128; query rows about those of a warp (32) and of a warpgroup
# (64); dims of one and of two chunks, whole and not.
LENGTHS = [1, 7, 8, 9, 31, 63, 64, 65, 127, 129, 192, 300, 601]
ROWS = [(1, 1), (1, 32), (3, 43), (2, 64), (5, 13), (9, 57), (1, 127), (2, 129), (16, 32), (3, 300)]
DIMS = [128, 64, 8, 72, 120, 40]


@pytest.fixture(params=[None, 80], autouse=True)
def planned(request, planned_as):
    """With wgmma, where the GPU has it, and without."""
    if request.param is not None:
        planned_as(request.param)


def judge(Q, D, q_mask, d_mask, tau):
    """Float64 scores, of documents that all queries share or that each query has."""
    if q_mask is not None:
        Q = Q.masked_fill(~q_mask.unsqueeze(-1), 0.0)
    if d_mask is not None:
        D = D.masked_fill(~d_mask.unsqueeze(-1), 0.0)
    similarities = torch.einsum("isd,ijtd->ijst", Q, ref.per_query(D, len(Q)))
    if d_mask is not None:
        dropped = ~(d_mask if d_mask.dim() == 3 else d_mask.unsqueeze(0)).unsqueeze(2)
        similarities = similarities.masked_fill(dropped, -math.inf)
    logs = (similarities / tau).logsumexp(-1).mul(tau)
    logs = logs.masked_fill(logs.isneginf(), 0.0)
    return (logs if q_mask is None else logs * q_mask.unsqueeze(1)).sum(-1)


def cases():
    for i in range(3 * len(LENGTHS)):
        layout, masks = ("in-batch", "KD", "pairs")[i % 3], ("none", "holes", "dead", "none")[i % 4]
        N = (3, 37, 130)[i % 5 % 3] if layout == "in-batch" else 4
        tau = (0.1, 0.02, 1.0, 50.0, 1e-3)[i % 5]
        shape = (*ROWS[i % len(ROWS)], N, LENGTHS[i % len(LENGTHS)], DIMS[i % len(DIMS)])
        normalize = i % 4 == 1
        yield layout, shape, masks, max(tau, 0.1) if normalize else tau, normalize


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("layout", "shape", "masks", "tau", "normalize"), list(cases()), ids=str)
def test_scores_and_gradients(layout, shape, masks, tau, normalize, dtype):
    """Nothing that lies behind a mask counts, and a second call gives the same bits."""
    Nq, Lq, N, Ld, d = shape
    documents = {"in-batch": (N,), "KD": (Nq, N), "pairs": (Nq, 1)}[layout]
    Q, D = (
        torch.nn.functional.normalize(torch.randn(*s, d, device="cuda"), dim=-1).mul(1 + normalize).to(dtype)
        for s in ((Nq, Lq), (*documents, Ld))
    )
    q_mask, d_mask = mask(Q.shape[:-1], "cuda", masks), mask(D.shape[:-1], "cuda", masks)
    wide = [x.double().requires_grad_() for x in (Q, D)]
    for x, kept in ((Q, q_mask), (D, d_mask)):
        if kept is not None:
            x[~kept] = math.nan
    Q.requires_grad_(), D.requires_grad_()

    def step():
        if layout == "pairs":
            own = None if d_mask is None else d_mask[:, 0]
            scores = li.smooth_maxsim_pairs(Q, D[:, 0], q_mask, own, **options).unsqueeze(1)
        else:
            scores = li.smooth_maxsim(Q, D, q_mask, d_mask, **options)
        return scores, *torch.autograd.grad((scores * weights).sum(), (Q, D))

    options = {"tau": tau, "normalize": normalize}
    units = [x / x.norm(dim=-1, keepdim=True) for x in wide] if normalize else wide
    expected = judge(*units, q_mask, d_mask, tau)
    weights = torch.randn_like(expected, dtype=torch.float32)
    expected_grads = torch.autograd.grad((expected * weights).sum(), wide)
    first, second = step(), step()
    atol = (1e-3 if normalize else 1e-5) * max(tau, 1.0) * Lq**0.5  # units are rounded to float16
    torch.testing.assert_close(first[0].double(), expected, rtol=2e-6, atol=atol)
    limit = 4e-3 if dtype == BF16 or normalize else 1e-3
    for mine, theirs in zip(first[1:], expected_grads, strict=True):
        ref.assert_close(mine, theirs, limit, "gradient")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("of_documents", [False, True])
def test_the_steps_alone(of_documents):
    """Logs of base 2, and the gradient of a sum of them with factors: groups of their own documents."""
    Q, D = (torch.randn(*s, 64, device="cuda").div(8).bfloat16() for s in ((3, 70), (3, 5, 40)))
    wide = [x.double().requires_grad_() for x in (Q, D)]
    expected = torch.einsum("gsd,gjtd->gjst", *wide).div(0.5).logsumexp(-1)
    logs = torch.ops.late_interaction.smooth_logs(Q, D, None, 0.5)
    torch.testing.assert_close(logs.double() * math.log(2), expected, rtol=1e-5, atol=1e-5)
    factors = torch.rand_like(logs)
    args = (Q, D, None, logs, factors, 0.5, of_documents)
    grad = torch.ops.late_interaction.smooth_gradient(*args)
    wanted = torch.autograd.grad((0.5 * expected * factors).sum(), wide)[of_documents]
    ref.assert_close(grad.view(wanted.shape), wanted, 4e-3, "gradient")


def test_strided_and_expanded_operands():
    Q = torch.randn(3, 2 * 33, 136, device="cuda", dtype=BF16)[:, ::2, 4:132]
    D = torch.randn(5, 70, 128, device="cuda", dtype=BF16).transpose(0, 1)[:5, :5].expand(3, 5, 5, 128)
    expected = judge(Q.double(), D.double(), None, None, 0.5)
    torch.testing.assert_close(li.smooth_maxsim(Q, D, tau=0.5).double(), expected, rtol=1e-5, atol=1e-4)


def test_infinities_and_nan_are_kept():
    Q = torch.ones(1, 2, 16, device="cuda", dtype=BF16)
    D = torch.ones(4, 70, 16, device="cuda", dtype=BF16)
    D[0, 3, 0], D[1, 66, 0], D[2, 69, 5] = math.inf, -math.inf, math.nan
    scores = li.smooth_maxsim(Q, D, tau=0.1)[0].tolist()
    assert scores[0] == math.inf and math.isnan(scores[2])
    expected = [2 * (16 + 0.1 * math.log(n)) for n in (69, 70)]
    assert [scores[1], scores[3]] == pytest.approx(expected, rel=1e-5)


def test_gradients_of_very_different_sizes():
    """The gradient of a query, and of a document, has the precision of its own weights."""
    Q, D = (torch.randn(n, 40, 64, device="cuda").div(8).to(FP16).requires_grad_() for n in (3, 5))
    weights = torch.tensor([1e-4, 1.0, 1e4], device="cuda").unsqueeze(1) * torch.tensor(
        [1.0, 1e-3, 1e3, 1.0, 0.0], device="cuda"
    )
    wide = [x.detach().double().requires_grad_() for x in (Q, D)]
    expected = torch.autograd.grad((judge(*wide, None, None, 0.1) * weights).sum(), wide)
    found = torch.autograd.grad((li.smooth_maxsim(Q, D, tau=0.1) * weights * 1e-3).sum(), (Q, D))
    for mine, theirs in zip(found, expected, strict=True):
        for row, wanted in zip(mine, theirs, strict=True):
            torch.testing.assert_close(
                row.double(), wanted * 1e-3, rtol=1e-3, atol=2e-3 * float(wanted.abs().amax()) * 1e-3 + 6e-8
            )
