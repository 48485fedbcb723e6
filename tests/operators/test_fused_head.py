"""Hidden states to scores: against float64, in chunks, with masks, and as an operator."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import late_interaction as li
from late_interaction import fused_head
from late_interaction.ops.from_hidden import chunking, driver, fallback
from late_interaction.ops.from_hidden.fallback import sum_dtype
from late_interaction.ops.winners import narrow, winner_dtype
from tests.support import cases, ref
from tests.support.calls import peak

OPS = torch.ops.late_interaction
maxsim_from_hidden = partial(fused_head.maxsim_from_hidden, normalize=True)  # as ColBERT models score
# The projected tokens are rounded once to the dtype they multiply in, unit tokens once more.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 3e-6, torch.float64: 1e-13}

# Nq, Nd, Lq, Ld, d, d_model
SHAPES = [
    (2, 3, 32, 65, 128, 768),
    (1, 5, 1, 300, 8, 16),
    (5, 1, 33, 1, 40, 200),
    (3, 4, 7, 31, 1, 7),
    (4, 2, 64, 129, 96, 129),
    (2, 7, 127, 257, 48, 384),
    (1, 2, 300, 33, 200, 64),
    (2, 3, 5, 130, 768, 1024),
    (2, 6, 5, 40, 48, 64),
    (1, 4, 32, 300, 128, 768),
]
EMPTY = [(0, 2, 3, 4, 8, 8), (2, 0, 3, 4, 8, 8), (2, 3, 0, 4, 8, 8), (2, 3, 4, 0, 8, 8)]


def inputs(shape, dtype, device, bias=True, masks="none", form="contiguous"):
    Nq, Nd, Lq, Ld, d, d_model = shape
    Q = cases.tokens((Nq, Lq, d), dtype, device, form)
    H = cases.tokens((Nd, Ld, d_model), dtype, device, form)
    W = (torch.randn(d, d_model, device=device) / d_model**0.5).to(dtype)
    b = torch.randn(d, device=device).to(dtype) if bias else None
    return Q, H, W, b, cases.mask((Nq, Lq), device, masks), cases.mask((Nd, Ld), device, masks)


def projected(H, W, b, normalize):
    D = F.linear(H.double(), W.double(), None if b is None else b.double())
    return ref.unit(D) if normalize else D


def expected_gradients(grad_scores, Q, H, W, b, winners, normalize):
    """By autograd in float64, with the winners as given; hidden states that lost cannot matter."""
    i, j, s = (winners >= 0).nonzero(as_tuple=True)
    t = winners[i, j, s].long()
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (Q, H, W, b)]
    q, h, w, bias = leaves
    D = projected(h[j, t], w, bias, normalize)
    total = (grad_scores.double()[i, j] * (q[i, s] * D).sum(-1)).sum()
    wanted = [x for x in leaves if x is not None]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def winners_of(Q, H, W, b, q_mask, d_mask, normalize):
    found = OPS.maxsim_from_hidden_winners(Q, H, W, b, q_mask, d_mask, normalize)[1]
    return li.ops.winners.widen(found, H.shape[1])


def check(shape, dtype, device, normalize=True, bias=True, masks="none", form="contiguous"):
    Q, H, W, b, q_mask, d_mask = inputs(shape, dtype, device, bias, masks, form)
    leaves = [x for x in (Q, H, W, b) if x is not None]
    for x in leaves:
        x.requires_grad_()
    limit = TOLERANCE[dtype]
    scores = maxsim_from_hidden(Q, H, W, b, d_mask, normalize=normalize, q_mask=q_mask)
    exact, _ = ref.maxsim(Q, projected(H, W, b, normalize), q_mask, d_mask)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    ref.assert_close(scores, exact, limit)
    with torch.no_grad():
        alone = maxsim_from_hidden(Q, H, W, b, d_mask, normalize=normalize, q_mask=q_mask)
        winners = winners_of(Q, H, W, b, q_mask, d_mask, normalize)
    ref.assert_close(alone, exact, limit)
    grad_scores = torch.randn_like(scores)
    got = torch.autograd.grad(scores, leaves, grad_scores)
    wanted = expected_gradients(grad_scores, Q, H, W, b, winners, normalize)
    for x, g, w, name in zip(leaves, got, wanted, ("Q", "H", "W", "b"), strict=False):
        assert g.dtype == x.dtype and g.shape == x.shape
        ref.assert_close(g, w, 4 * limit, f"grad_{name}")
    lost = torch.ones(H.shape[:2], dtype=torch.bool, device=device)
    i, j, s = (winners >= 0).nonzero(as_tuple=True)
    lost[j, winners[i, j, s].long()] = False
    assert not got[1][lost].any(), "a token that lost has a gradient"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype, device):
    check(shape, dtype, device, normalize=shape[4] > 1)  # the direction of a number has no gradient


@pytest.mark.parametrize("masks", cases.MASKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_options(dtype, normalize, bias, masks, device):
    check((3, 5, 33, 70, 96, 160), dtype, device, normalize, bias, masks)
    check((2, 5, 7, 70, 96, 160), dtype, device, normalize, bias, masks)


@pytest.fixture
def small_chunks(monkeypatch):
    """Two documents of 70 tokens at a time."""
    monkeypatch.setattr(driver, "gpu_of", lambda index: chunking.Gpu(1 << 16, 132))
    monkeypatch.setattr(chunking, "_CPU_CACHE", 1 << 16)


@pytest.mark.parametrize("masks", ["none", "dead"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_many_chunks(dtype, masks, small_chunks, device, monkeypatch):
    check((3, 11, 33, 70, 96, 160), dtype, device, masks=masks)
    monkeypatch.setattr(chunking, "_MOST_CONVERTED", 1 << 15)  # where hidden states are converted
    # As many query tokens as above: of a few, rounding is up to 7.5e-3 of a score in bfloat16.
    check((3, 11, 33, 70, 96, 160), dtype, device, masks=masks, form="transposed")


@pytest.mark.parametrize("d_model", [64, 160, 384])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_that_lie_in_the_memory_of_later_gradients(dtype, bias, d_model, small_chunks, device):
    check((3, 23, 33, 70, 96, d_model), dtype, device, bias=bias)


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("bias", [False, True])
def test_nothing_to_score(shape, bias, device):
    check(shape, torch.float32, device, bias=bias)


def test_a_token_of_zeros_has_a_finite_gradient(device):
    Q, H, W, _, _, _ = inputs((2, 2, 3, 5, 8, 8), torch.float32, device, bias=False)
    H[0] = 0
    H.requires_grad_(), W.requires_grad_()
    grads = torch.autograd.grad(maxsim_from_hidden(Q, H, W).sum(), (H, W))
    assert all(g.isfinite().all() for g in grads)


def test_ranks(device):
    Q, H, W, b, _, d_mask = inputs((3, 4, 5, 20, 16, 24), torch.float32, device, masks="holes")
    scores = maxsim_from_hidden(Q, H, W, b, d_mask)
    torch.testing.assert_close(maxsim_from_hidden(Q[1], H, W, b, d_mask.int()), scores[1])
    torch.testing.assert_close(maxsim_from_hidden(Q, H[:1], W, b, d_mask[0]), scores[:, :1])


@pytest.mark.parametrize("normalize", [False, True])
def test_query_side_head(normalize, device):
    _, H, W, b, _, _ = inputs((3, 4, 5, 20, 16, 24), torch.float32, device)
    states = torch.randn(3, 5, 24, device=device)
    leaves = [x.requires_grad_() for x in (states, H, W, b)]
    got = maxsim_from_hidden(states, H, W, b, normalize=normalize, project_Q=True)
    Q, D = F.linear(states, W, b), F.linear(H, W, b)
    expected = li.maxsim(Q, D, normalize=normalize)
    torch.testing.assert_close(got, expected)
    got, expected = (torch.autograd.grad(x.logsumexp(1).sum(), leaves) for x in (got, expected))
    torch.testing.assert_close(got, expected)


def test_float32_weights_and_half_states(device):
    Q, H, W, b, _, d_mask = inputs((3, 4, 5, 20, 16, 24), torch.float32, device, masks="holes")
    H = H.bfloat16()
    leaves = [x.requires_grad_() for x in (Q, H, W, b)]
    halves = [x.detach().bfloat16().requires_grad_() for x in leaves]
    mixed, half = (maxsim_from_hidden(*x, d_mask) for x in (leaves, halves))
    assert torch.equal(mixed, half)
    mixed, half = (torch.autograd.grad(s.sum(), x) for s, x in ((mixed, leaves), (half, halves)))
    for x, m, h in zip(leaves, mixed, half, strict=True):
        assert m.dtype == x.dtype
        ref.assert_close(m, h, 5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_half_and_keeps_dtypes(dtype, device):
    Q, H, W, b, _, d_mask = inputs((3, 4, 5, 20, 16, 24), torch.float32, device, masks="holes")
    leaves = [x.requires_grad_() for x in (Q, H, W, b)]
    with torch.autocast(device, dtype=dtype):
        scores = maxsim_from_hidden(*leaves, d_mask)
        exact = maxsim_from_hidden(*leaves, d_mask, precision="highest")
        mixed = maxsim_from_hidden(Q, H.to(dtype), W, b, d_mask)
    halves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    assert torch.equal(scores, maxsim_from_hidden(*halves, d_mask)) and torch.equal(scores, mixed)
    assert torch.equal(exact, maxsim_from_hidden(*leaves, d_mask, precision="highest"))
    grads = torch.autograd.grad(scores.sum(), leaves)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


# ---- the kernels of the steps ----


@pytest.mark.gpu
@pytest.mark.parametrize("d", [8, 40, 128, 129, 768, 1030, 2])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_normalized_rows_and_back(dtype, d):
    x = torch.randn(77 * 13, d, device="cuda").to(dtype)
    x[3] = 0
    unit = x.clone()
    inverse = OPS.l2_normalize_rows_(unit)
    ref.assert_close(unit, ref.unit(x.double()), TOLERANCE[dtype])
    Q, D = torch.randn(2, 9, d, device="cuda").to(dtype), unit.view(77, 13, d)
    scores, winners = OPS.maxsim_winners(Q, D, None, None)
    lost = torch.ones(77, 13, dtype=torch.bool, device="cuda")
    lost.scatter_(1, winners.transpose(0, 1).flatten(1).long(), False)
    D.masked_fill_(lost.unsqueeze(-1), float("nan"))
    for norms in (inverse, None):
        mine, theirs = ((torch.full_like(Q, 7.0), torch.full_like(D, 7.0)) for _ in range(2))
        OPS.maxsim_backward_into_(scores, Q, D, norms, winners, *mine, None, True, True)
        fallback.maxsim_backward_into(scores, Q, D, norms, winners, *theirs, None, True, True)
        assert torch.equal(mine[0], theirs[0]) and not mine[1][lost].any()
        grad_Q, in_place = torch.empty_like(Q), D.clone()
        OPS.maxsim_backward_into_(scores, Q, in_place, norms, winners, grad_Q, in_place, None, True, True)
        assert torch.equal(grad_Q, mine[0]) and torch.equal(in_place, mine[1])
        ref.assert_close(mine[1][1:], theirs[1][1:], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_sums_of_several_calls(dtype, device):
    Q, D = torch.randn(3, 9, 24, device=device).to(dtype), torch.randn(7, 13, 24, device=device).to(dtype)
    scores, winners = OPS.maxsim_winners(Q, D, None, None)
    wanted, _ = OPS.maxsim_backward(scores, Q, D, winners, False, "lowmem")
    sums = torch.full(Q.shape, float("nan"), device=device, dtype=sum_dtype(dtype))
    grad_Q, grad_D = torch.full_like(Q, float("nan")), D.new_empty(0)
    for part, first, last in ((slice(0, 3), True, False), (slice(3, 7), False, True)):
        kept = winners[:, part].contiguous()
        outputs = grad_Q, grad_D, sums
        OPS.maxsim_backward_into_(scores[:, part], Q, D[part], None, kept, *outputs, first, last)
    ref.assert_close(grad_Q, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("with_Q", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_gradient_that_is_added_to_sums_of_documents(dtype, with_Q, device):
    Q, D = torch.randn(5, 9, 24, device=device).to(dtype), torch.randn(7, 13, 24, device=device).to(dtype)
    scores, winners = OPS.maxsim_winners(Q, D, None, None)
    wanted = OPS.maxsim_backward(scores, Q, D, winners, False, "lowmem")
    before = torch.randn(D.shape, device=device, dtype=sum_dtype(dtype))
    d_sums, none = before.clone(), D.new_empty(0)
    grad_Q = torch.full_like(Q, float("nan"))
    for part in (slice(0, 2), slice(2, 5)):
        to = grad_Q[part] if with_Q else none
        OPS.maxsim_backward_into_(
            scores[part], Q[part], D, None, winners[part].contiguous(), to, none, None, True, True, d_sums
        )
    ref.assert_close(d_sums - before, wanted[1], TOLERANCE[dtype])
    if with_Q:
        ref.assert_close(grad_Q, wanted[0], TOLERANCE[dtype])


def test_sums_of_documents_of_no_tokens_stay(device):
    Q, D = torch.randn(2, 3, 8, device=device), torch.randn(4, 0, 8, device=device)
    scores, winners = OPS.maxsim_winners(Q, D, None, None)
    d_sums = torch.ones(D.shape, device=device)
    grad_Q = torch.full_like(Q, 7.0)
    OPS.maxsim_backward_into_(scores, Q, D, None, winners, grad_Q, D, None, True, True, d_sums)
    assert not grad_Q.any()
    Q, D = torch.randn(0, 3, 8, device=device), torch.randn(4, 5, 8, device=device)
    scores, winners = OPS.maxsim_winners(Q, D, None, None)
    d_sums = torch.ones(D.shape, device=device)
    OPS.maxsim_backward_into_(scores, Q, D, None, winners, Q, D.new_empty(0), None, True, True, d_sums)
    assert (d_sums == 1).all()


@pytest.mark.parametrize("Ld", [1, 7, 300, 40000, 65535])
def test_argmax_mask(Ld, device):
    dtype = winner_dtype(Ld)
    argmax = torch.randint(-1, Ld, (3, 5, 32), device=device, dtype=torch.int32)
    won = OPS.argmax_mask(narrow(argmax, Ld), Ld).view(5, Ld)
    for document in range(5):
        found = argmax[:, document].unique()
        assert torch.equal(won[document].nonzero().squeeze(1).int(), found[found >= 0])
    nobody = torch.full((3, 5, 32), -1, device=device, dtype=dtype)
    assert not OPS.argmax_mask(nobody, Ld).any()


PROJECTIONS = [
    (1, 8, 8),
    (63, 40, 72),
    (385, 128, 768),
    (5000, 128, 768),
    (60_000, 96, 136),
    (3000, 64, 1032),
]


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("shape", PROJECTIONS)
@pytest.mark.parametrize("share", [None, 0.0, 0.02, 0.4, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_project_rows(dtype, bias, normalize, share, shape):
    count, d, d_model = shape
    # Rows lie apart from each other, on whole 16 bytes.
    hidden = torch.randn(count, d_model + 8, device="cuda").to(dtype)[:, :d_model]
    W = (torch.randn(d, d_model, device="cuda") / d_model**0.5).to(dtype)
    b = torch.randn(d, device="cuda").to(dtype) if bias else None
    assert OPS.can_project_rows(hidden, W, b)
    wanted = None if share is None else torch.rand(count, device="cuda") < share
    kept = torch.ones(count, device="cuda", dtype=torch.bool) if wanted is None else wanted
    exact = projected(hidden, W, b, False)
    norms = exact.norm(dim=1)
    exact = exact / norms.unsqueeze(1) if normalize else exact
    hidden[~kept] = float("nan")
    rows = torch.full((count, d), 7.0, device="cuda", dtype=dtype)
    inverse = OPS.project_rows_(rows, hidden, W, b, wanted, normalize)
    assert bool((rows[~kept] == 7).all())
    ref.assert_close(rows[kept], exact[kept], TOLERANCE[dtype])
    assert inverse.shape == ((count,) if normalize else (0,))
    if normalize:
        ref.assert_close(inverse[kept].double(), 1 / norms[kept], 1e-4)
    again = torch.full_like(rows, 7.0)
    OPS.project_rows_(again, hidden, W, b, wanted, normalize)
    assert torch.equal(again, rows)
    if share == 0.4:  # the same bits as among others
        OPS.project_rows_(again, hidden, W, b, None, normalize)
        assert torch.equal(again[kept], rows[kept])


# Nq, Nd, Lq, Ld, d, d_model: of up to 64 query tokens; documents of less and more than a warp's 16 rows, and
# more rows than the tiles of all blocks hold.
SCORED = [
    (1, 1, 1, 1, 8, 8),
    (1, 300, 32, 1, 128, 64),
    (3, 70, 7, 5, 40, 72),
    (2, 9, 32, 16, 128, 768),
    (1, 13, 64, 17, 96, 136),
    (5, 400, 12, 300, 128, 264),
    (1, 3, 33, 30_000, 64, 128),
]


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SCORED)
@pytest.mark.parametrize("masks", cases.MASKS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_project_scores(dtype, normalize, masks, shape):
    Q, H, W, b, q_mask, d_mask = inputs(shape, dtype, "cuda", normalize, masks)
    hidden, Ld = H.flatten(0, 1), shape[3]
    rows = torch.empty(hidden.shape[0], shape[4], device="cuda", dtype=dtype)
    OPS.project_rows_(rows, hidden, W, b, None, normalize)
    exact, _ = ref.maxsim(Q, rows.view(*H.shape[:2], -1), q_mask, d_mask)
    if d_mask is not None:
        hidden[~d_mask.flatten()] = float("nan")
    args = (Q, hidden, W, b, q_mask, d_mask, Ld, normalize)
    scores = OPS.project_scores(*args)
    ref.assert_close(scores, exact, 1e-5)
    for _ in range(20):
        assert torch.equal(OPS.project_scores(*args), scores)
    assert torch.equal(maxsim_from_hidden(Q, H, W, b, d_mask, normalize=normalize, q_mask=q_mask), scores)


@pytest.mark.gpu
def test_project_scores_of_nan_and_infinity():
    Q, H, W, _, _, _ = inputs((1, 4, 5, 40, 128, 64), torch.bfloat16, "cuda", bias=False)
    H[1, 7, 3], H[2, 0, 0] = float("nan"), float("inf")
    scores = maxsim_from_hidden(Q, H, W, normalize=False)
    D = F.linear(H, W)
    wanted = li.maxsim(Q, D)
    assert bool(scores[0, 1].isnan()) and torch.equal(scores.isfinite(), wanted.isfinite())
    assert torch.equal(scores.nan_to_num(7.0).isposinf(), wanted.nan_to_num(7.0).isposinf())
    ref.assert_close(scores[:, ::3], wanted[:, ::3], TOLERANCE[torch.bfloat16])


@pytest.mark.native
@pytest.mark.gpu
def test_project_rows_of_zeros_and_nan():
    hidden = torch.zeros(3, 64, device="cuda", dtype=torch.bfloat16)
    hidden[1, 5] = float("nan")
    rows = torch.empty(3, 128, device="cuda", dtype=torch.bfloat16)
    inverse = OPS.project_rows_(rows, hidden, torch.ones(128, 64, device="cuda").bfloat16(), None, None, True)
    assert not rows[0].any() and not rows[2].any() and bool(rows[1].isnan().all())
    assert inverse[0] == inverse[2] == 1e12


@pytest.mark.gpu
def test_what_project_rows_has_no_kernel_for():
    hidden = torch.randn(50, 48, device="cuda", dtype=torch.bfloat16)
    W = torch.randn(32, 48, device="cuda", dtype=torch.bfloat16)
    none = [
        (hidden.float(), W.float()),
        (hidden[:, :47], W[:, :47]),  # no whole 16 bytes
        (hidden.view(-1)[1 : 1 + 49 * 48].view(49, 48), W),  # not aligned
        (hidden.t(), torch.randn(32, 50, device="cuda", dtype=torch.bfloat16)),
        (hidden, W[:31]),
        (hidden, torch.randn(136, 48, device="cuda", dtype=torch.bfloat16)),  # too many dims
        (hidden, W.half()),
    ]
    for given in none:
        assert not OPS.can_project_rows(*given, None)
    rows = torch.empty(49, 32, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="can_project_rows says no"):
        OPS.project_rows_(rows, *none[2], None, None, True)


@pytest.fixture(params=[0, 80])
def capability(request, planned_as):
    """Its own, and an older one: wgmma and mma.sync."""
    planned_as(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(1, 8, 8), (33, 128, 256), (5000, 128, 768), (4097, 136, 264), (300, 40, 1024), (20000, 768, 72)],
)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("splits", [1, 5, 44])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wgrad_splitk(dtype, splits, share, shape, capability):
    rows, d, d_model = shape
    grad, hidden = (torch.randn(rows, n, device="cuda").to(dtype) for n in (d, d_model))
    wanted = torch.rand(rows, device="cuda") < share
    hidden[~wanted] = float("nan")
    parts = torch.full((splits, d, d_model), float("nan"), device="cuda")
    OPS.wgrad_splitk_(parts, grad, hidden, wanted, True)
    OPS.wgrad_splitk_(parts, grad, hidden, wanted, False)
    exact = grad.double().t() @ hidden.double().masked_fill(~wanted.unsqueeze(-1), 0.0)
    ref.assert_close(parts.double().sum(0), 2 * exact, 5e-5)  # tensor cores truncate as they add
    again = torch.empty_like(parts)
    OPS.wgrad_splitk_(again, grad, hidden, wanted, True)
    OPS.wgrad_splitk_(again, grad, hidden, wanted, False)
    assert torch.equal(again, parts)


@pytest.mark.gpu
@pytest.mark.parametrize("Nq", [1, 16])
@pytest.mark.parametrize("train", [False, True])
def test_memory_of_a_step(train, Nq):
    Q, H, W, _, _, _ = inputs((Nq, 256, 32, 1024, 128, 768), torch.bfloat16, "cuda", bias=False)
    leaves = [x.requires_grad_(train) for x in (Q, H, W)]

    def step():
        scores = maxsim_from_hidden(*leaves)
        return torch.autograd.grad(scores.sum(), leaves) if train else ()

    step()
    gradients = sum(x.nbytes for x in leaves) if train else 0
    assert peak(step) - gradients <= 64 << 20


@pytest.mark.parametrize("precision", ["medium", "highest", None])
def test_queries_are_projected_in_the_precision_of_the_rest(precision, device):
    """Under autocast by PyTorch's own rules, unless a precision is named: that beats autocast."""
    linear, normalize = torch.nn.functional.linear, torch.nn.functional.normalize
    Q, H, W = (torch.randn(*s, device=device) for s in ((3, 4, 16), (5, 6, 16), (8, 16)))
    with torch.autocast(device, dtype=torch.bfloat16):
        found = maxsim_from_hidden(Q, H, W, project_Q=True, precision=precision)
        units = normalize(linear(Q, W), dim=-1, eps=1e-12)
        wanted = maxsim_from_hidden(units, H, W)
    if precision is not None:
        assert torch.equal(found, maxsim_from_hidden(Q, H, W, project_Q=True, precision=precision))
        dtype = torch.float32 if precision == "highest" else torch.bfloat16
        units = normalize(linear(Q.to(dtype), W.to(dtype)), dim=-1, eps=1e-12)
        wanted = maxsim_from_hidden(units, H, W, precision=precision)
    assert torch.equal(found, wanted)


def test_the_operator_takes_all_its_options_under_autocast():
    Q, H, W = torch.randn(3, 4, 8), torch.randn(5, 6, 16), torch.randn(8, 16)
    op = torch.ops.late_interaction.maxsim_from_hidden
    expected = op(Q, H, W, None, None, None, False, "medium")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(op(Q, H, W, None, None, None, False, "high"), expected)
