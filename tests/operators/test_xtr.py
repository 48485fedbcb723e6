"""XTR scores against the grid of all similarities, by definition."""

import itertools

import pytest
import torch

import late_interaction as li
from late_interaction.ops import xtr as driver
from late_interaction.reference import xtr_scores_reference
from tests.maxsim.test_call_edges import Called
from tests.support import side_by_side
from tests.support.calls import peak
from tests.support.cases import mask, tokens
from tests.support.contrastive import Made

OPS = torch.ops.late_interaction
RULES = ["paper", "pylate"]
F64 = torch.float64


def judge(Q, D, k, q_mask=None, d_mask=None, rule="paper", q_weights=None):
    """(scores, winners), cell by cell, in Python's own floats."""
    (Nq, Lq), (Nd, Ld) = Q.shape[:2], D.shape[:2]
    scores = torch.zeros(Nq, Nd, dtype=F64)
    winners = torch.full((Nq, Nd, Lq), -1)
    counts = torch.zeros(Nq, Nd, dtype=F64)
    grid = (Q.detach().double().flatten(0, 1) @ D.detach().double().flatten(0, 1).t()).view(Nq, Lq, Nd, Ld)
    for i, s in itertools.product(range(Nq), range(Lq)):
        if q_mask is not None and not q_mask[i, s]:
            continue
        cells = {}
        for j, t in itertools.product(range(Nd), range(Ld)):
            kept = d_mask is None or bool(d_mask[j, t])
            cells[j, t] = float(grid[i, s, j, t]) if kept else torch.finfo(F64).min
        chosen = set(sorted(cells, key=lambda c: (-cells[c], c))[:k])
        if k < len(cells) and d_mask is not None:  # masked cells are selected where all are
            chosen = {c for c in chosen if d_mask[c]}
        weight = 1.0 if q_weights is None else float(q_weights[i, s])
        for j in range(Nd):
            own = [(j, t) for t in range(Ld)]
            real = [c for c in own if c in chosen and (d_mask is None or d_mask[c])]
            best = max(real, key=lambda c: (cells[c], -c[1])) if real else None
            value = cells[best] if best else None
            if rule == "pylate" and not set(own) <= chosen and (value is None or value <= 0):
                best, value = None, 0.0
            elif rule == "pylate" and best is None and Ld:
                value = torch.finfo(F64).min
            if best:
                winners[i, j, s] = best[1]
            scores[i, j] += weight * (value or 0.0)
            counted = best is not None and weight != 0
            counts[i, j] += counted if rule == "paper" else weight * (value or 0.0) > 0
    return scores / counts.clamp_min(1.0 if rule == "paper" else 1e-3), winners


def embeddings(Nq, Nd, Lq, Ld, d, device="cpu", dtype=F64):
    return (
        torch.randn(Nq, Lq, d, dtype=dtype, device=device, requires_grad=True),
        torch.randn(Nd, Ld, d, dtype=dtype, device=device, requires_grad=True),
    )


def gradients(scores, inputs):
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype, device=scores.device)
    return torch.autograd.grad((scores * weights.view(scores.shape)).sum(), inputs)


SHAPES = [
    (2, 3, 4, 5, 6),
    (1, 1, 1, 1, 1),
    (3, 2, 1, 7, 8),
    (2, 5, 3, 1, 4),
    (1, 7, 5, 33, 3),
    (4, 1, 2, 70, 2),
]
KS = [1, 2, 3, 7, 20, 10_000]
MASKS = ["none", "holes", "dead"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_winners_and_gradients(device, shape, k, masks, rule):
    Q, D = embeddings(*shape, device)
    q_mask, d_mask = mask(Q.shape[:2], device, masks), mask(D.shape[:2], device, masks)
    scores = li.xtr_scores(Q, D, k, q_mask, d_mask, rule=rule)
    wanted, winners = judge(Q, D, k, q_mask, d_mask, rule)
    torch.testing.assert_close(scores.cpu(), wanted, rtol=1e-12, atol=1e-12)
    _, denominators, found = OPS.xtr_winners(Q, D, q_mask, d_mask, k, rule)
    assert not denominators.requires_grad and torch.equal(found.cpu().long(), winners)
    reference = xtr_scores_reference(Q, D, k, q_mask, d_mask, rule=rule)
    torch.testing.assert_close(scores, reference, rtol=1e-12, atol=1e-12)
    found, wanted = gradients(scores, (Q, D)), gradients(reference, (Q, D))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_weights_of_query_tokens(device, rule):
    Q, D = embeddings(3, 4, 5, 6, 7, device)
    weights = torch.randn(3, 5, dtype=F64, device=device)
    weights[0, 1] = weights[2, 2] = 0
    weights.requires_grad_()
    q_mask = mask((3, 5), device, "holes")
    inputs = (Q, D, weights)
    scores = li.xtr_scores(Q, D, 9, q_mask, rule=rule, q_weights=weights)
    torch.testing.assert_close(
        scores.cpu(), judge(Q, D, 9, q_mask, None, rule, weights)[0], rtol=1e-12, atol=1e-12
    )
    reference = xtr_scores_reference(Q, D, 9, q_mask, rule=rule, q_weights=weights)
    found, wanted = gradients(scores, inputs), gradients(reference, inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    alone = li.xtr_scores(Q.detach(), D.detach(), 9, rule=rule, q_weights=weights)
    assert gradients(alone, weights)[0].any()


@pytest.mark.parametrize("size", [1e-7, 1e5, 1e30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_half_precision_does_not_hold(device, dtype, size):
    """A weighted token of Q is never rounded to the dtype of Q: float16 ends at 65504."""
    Q, D = (x.detach().to(dtype).requires_grad_() for x in embeddings(3, 4, 5, 9, 16, device))
    weights = (torch.randn(3, 5, device=device) * size).requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (Q, D, weights)]
    scores = li.xtr_scores(Q, D, 36, q_weights=weights) / size
    reference = xtr_scores_reference(wide[0], wide[1], 36, q_weights=wide[2]) / size
    inputs = gradients(scores, (Q, D, weights)), gradients(reference, wide)
    for mine, theirs in zip(*inputs, strict=True):
        assert (mine.double() - theirs).norm() < 0.02 * theirs.norm()


# Panels of one row, of a few and of all; documents on both sides of 16-cell segments.
@pytest.mark.parametrize("panel", [1, 4000, 1 << 20])
@pytest.mark.parametrize("rule", RULES)
def test_panels_change_nothing(device, monkeypatch, panel, rule):
    Q, D = embeddings(5, 9, 7, 37, 8, device)
    d_mask = mask(D.shape[:2], device, "dead")
    args = (Q, D, None, d_mask, 60, rule)
    whole = OPS.xtr_winners(*args)
    monkeypatch.setattr(driver, "_PANEL_BYTES", {"cuda": panel})
    monkeypatch.setattr(driver, "_PANEL_BYTES_OF_A_CPU", panel)
    torch.testing.assert_close(OPS.xtr_winners(*args), whole, rtol=1e-13, atol=1e-13)


def panel_of(kind, rows, tokens, device, dtype):
    if kind == "random":
        return torch.randn(rows, tokens, dtype=dtype, device=device)
    if kind == "ties":  # of both signs of zero, too
        return torch.randint(-2, 3, (rows, tokens), device=device).to(dtype) * -0.5
    if kind == "equal":
        return torch.full((rows, tokens), 0.25, dtype=dtype, device=device)
    x = torch.randn(rows, tokens, dtype=dtype, device=device)
    special = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -torch.nan], dtype=dtype, device=device
    )
    where = torch.rand(rows, tokens, device=device) < (0.9 if kind == "mostly special" else 0.05)
    return torch.where(where, special[torch.randint(6, (rows, tokens), device=device)], x)


def selection(panel, d_mask, Ld, k, zero_unless_all):
    """What xtr_select_ writes, by a stable sort."""
    rows, documents = len(panel), panel.shape[1] // Ld
    lowest = torch.finfo(panel.dtype).min
    cells = panel if d_mask is None else panel.masked_fill(~d_mask.flatten(), lowest)
    # On the CPU: a GPU's stable sort goes by bits, and puts a NaN with a sign below every number.
    order = cells.cpu().argsort(dim=-1, descending=True, stable=True)[:, :k].to(cells.device)
    chosen = torch.zeros_like(cells, dtype=torch.bool).scatter_(1, order, True)
    if zero_unless_all:  # a NaN is one, selected or not
        chosen |= cells.isnan()
    real = chosen if d_mask is None else chosen & d_mask.flatten()
    real, chosen, cells = (x.view(rows, documents, Ld) for x in (real, chosen, cells))
    best = cells.masked_fill(~real, -torch.inf).max(-1).values
    hit = real & torch.where(best.isnan().unsqueeze(-1), cells.isnan(), cells == best.unsqueeze(-1))
    winners = hit.int().argmax(-1)
    some, all_ = real.any(-1), chosen.all(-1)
    kept = some & (all_ | ~(best <= 0)) if zero_unless_all else some
    maxima = torch.where(kept, best, 0.0)
    if zero_unless_all:
        maxima = torch.where(all_ & ~some, lowest, maxima)
    return maxima, torch.where(kept, winners, -1).int()


def check_selection(op, given, panel, *options):
    """options: the mask, a document's tokens, k, and whether less than a whole document above 0 is none."""
    shape = len(panel), panel.shape[1] // options[1]
    maxima, winners = panel.new_full(shape, 7.0), panel.new_full(shape, 7, dtype=torch.int32)
    op(*given, *options, maxima, winners)
    wanted, k = selection(panel, *options), options[2]
    torch.testing.assert_close(maxima, wanted[0], rtol=0, atol=0, equal_nan=True, msg=f"k = {k}")
    assert torch.equal(winners, wanted[1]), f"k = {k}"


@pytest.mark.parametrize("zero_unless_all", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "special", "mostly special"])
@pytest.mark.parametrize(
    ("documents", "Ld"), [(7, 5), (1, 1), (40, 1), (1, 300), (33, 61), (256, 37), (5, 1031)]
)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_selection(device, dtype, documents, Ld, kind, masked, zero_unless_all):
    count = documents * Ld
    panel = panel_of(kind, 4, count, device, dtype)
    d_mask = mask((documents, Ld), device, "dead") if masked else None
    for k in sorted(
        {1, 2, min(255, count), max(count // 16, 1), max(count - 1, 1), count} & {*range(1, count + 1)}
    ):
        check_selection(OPS.xtr_select_, [panel], panel, d_mask, Ld, k, zero_unless_all)


@pytest.mark.parametrize("k", [1, 200, 3000, 5000, 30_000, 69_999])
def test_selection_of_long_rows(device, k):
    """Where a GPU finds candidates, and where it searches the row itself; rows that lie apart."""
    panel = torch.randn(3, 70_003, device=device)[:, :70_000]
    d_mask = mask((350, 200), device, "holes")
    for zero_unless_all in (False, True):
        check_selection(OPS.xtr_select_, [panel], panel, d_mask, 200, k, zero_unless_all)


def group_case(kind, tokens, d, dtype, rows=5):
    """(Q, D, their similarities) whose products are exact in float32, and of more bits than dtype has."""
    steps = 2 if kind == "coarse" else 16

    def embeddings(n):
        return (torch.randint(-steps, steps + 1, (n, d), device="cuda") / steps).to(dtype)

    Q, D = embeddings(rows), embeddings(tokens)
    if kind == "special":
        D[torch.rand(len(D)) < 0.02, 0] = torch.nan
        D[torch.rand(len(D)) < 0.02, 3] = torch.inf
    if kind == "equal":
        D[:] = D[0]
    return Q, D, (Q.double() @ D.double().t()).float()


def group_maxima(Q, D, d_mask=None):
    panel = Q.new_full((len(Q), -(-len(D) // 64) * 32), 7.0)
    OPS.xtr_group_maxima_(Q, D, d_mask, panel)
    return panel


def maxima_by_definition(exact, d_mask, dtype):
    """Groups of a tile of 64 tokens: by pairs of columns, then by 8-column blocks."""
    if d_mask is not None:
        exact = exact.masked_fill(~d_mask.flatten(), -torch.inf)
    exact = torch.nn.functional.pad(exact, (0, -exact.shape[1] % 64), value=-torch.inf)
    # [rows, tile, block, pair, column] -> [rows, tile, pair, block, column]
    cells = exact.view(len(exact), -1, 8, 4, 2).transpose(2, 3)
    return cells.reshape(len(exact), -1, 2).amax(-1).to(dtype)


@pytest.fixture
def capability(request, planned_as):
    planned_as(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [0, 80], indirect=True)  # 0: of this GPU
@pytest.mark.parametrize("kind", ["fine", "special"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 255, 700])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 129, 9001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maxima_of_groups(dtype, tokens, rows, masked, kind, capability):
    for d in (8, 72, 128, 200, 520):  # within a k chunk, in several, and where query tokens pass by
        Q, D, exact = group_case(kind, tokens, d, dtype, rows)
        d_mask = mask((1, tokens), "cuda", "holes") if masked else None
        wanted = maxima_by_definition(exact, d_mask, dtype)
        torch.testing.assert_close(group_maxima(Q, D, d_mask), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("zero_unless_all", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["fine", "coarse", "special", "equal"])
@pytest.mark.parametrize(
    ("documents", "Ld"), [(7, 6), (1, 2), (1, 1), (40, 1), (33, 62), (256, 37), (6, 1030), (5, 9001)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_selection_in_groups(dtype, documents, Ld, kind, masked, zero_unless_all):
    for d in (8, 24, 128):
        Q, D, exact = group_case(kind, documents * Ld, d, dtype)
        d_mask = mask((documents, Ld), "cuda", "dead") if masked else None
        panel = group_maxima(Q, D, d_mask)
        for k in sorted({1, 2, 40, 256, 1024, len(D) - 1, len(D)} & {*range(1, len(D) + 1)}):
            options = d_mask, Ld, k, zero_unless_all
            check_selection(OPS.xtr_select_in_groups_, (panel, Q, D), exact, *options)


@pytest.mark.gpu
def test_sums_of_another_order_leave_k_candidates():
    """Sums cancel, so those of tensor cores and of float32 round to different numbers of half precision."""
    torch.manual_seed(3)
    Q = torch.randn(64, 128, device="cuda")
    D = torch.randn(4096, 128, device="cuda")
    D -= (D @ Q[:32].T) @ torch.linalg.pinv(Q[:32].T)
    Q, D = Q.bfloat16(), D.bfloat16()
    exact = Q.double() @ D.double().t()
    panel = group_maxima(Q, D)
    for k in (1, 17, 128, 1000):
        maxima = torch.empty(64, 64, device="cuda")
        winners = torch.empty(64, 64, dtype=torch.int32, device="cuda")
        OPS.xtr_select_in_groups_(panel, Q, D, None, 64, k, False, maxima, winners)
        least = exact.topk(k).values[:, -1:]
        found = winners >= 0
        best = exact.view(64, 64, 64).gather(2, winners.clamp_min(0).long().unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(maxima[found], best[found].float(), rtol=1e-5, atol=1e-5)
        assert (best >= least - 1e-5)[found].all() and found.any(1).all()
        missed = exact.view(64, 64, 64).amax(2).masked_fill(found, -torch.inf)
        assert (missed <= least + 1e-5).all()


@pytest.mark.gpu
def test_a_gpu_selects_in_groups_where_few_are_selected(monkeypatch):
    """Both ways select the same and have the same maxima; dims that are no multiple of 8, many selected cells
    and addresses that lie anywhere go by one of them."""
    Q, D = embeddings(9, 12, 8, 50, 64, "cuda", torch.bfloat16)
    d_mask = mask((13, 50), "cuda", "dead")[1:]
    found = []
    for most in (1024, 0):
        monkeypatch.setattr(driver, "_MOST_IN_GROUPS", most)
        with side_by_side.Calls() as calls:
            driver._xtr_winners(Q.detach(), D.detach(), None, d_mask, 18)
        names = ["xtr_group_maxima_", "xtr_select_in_groups_"] if most else ["xtr_select_"]
        assert [*calls.of] == names
        found.append(OPS.xtr_winners(Q, D, None, d_mask, 18))
    assert torch.equal(found[0][2], found[1][2])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(driver, "_MOST_IN_GROUPS", 1024)
    for shape, k in (((3, 4, 4, 50, 12), 5), ((3, 4, 4, 50, 8), 13), ((3, 40, 4, 900, 8), 1025)):
        q, d = (x.detach() for x in embeddings(*shape, "cuda", torch.bfloat16))
        with side_by_side.Calls() as calls:
            driver._xtr_winners(q, d, None, None, k)
        assert {*calls.of} == {"xtr_select_"}
    q, d = (
        tokens((3, 4, 16), torch.bfloat16, "cuda", "offset"),
        tokens((60, 7, 16), torch.bfloat16, "cuda", "offset"),
    )
    flags = torch.ones(421, dtype=torch.bool, device="cuda")[1:].view(60, 7)
    wanted = li.xtr_scores(q.float(), d.float(), 11)
    torch.testing.assert_close(li.xtr_scores(q, d, 11, None, flags), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_ties_go_to_the_lowest_token(device, rule):
    Q = torch.ones(1, 2, 3, dtype=F64, device=device)
    D = torch.ones(4, 5, 3, dtype=F64, device=device)
    winners = OPS.xtr_winners(Q, D, None, None, 7, rule)[2]
    assert winners[0].tolist() == [[0, 0], [0, 0], [-1, -1], [-1, -1]]
    D[3, 4] = 2
    assert OPS.xtr_winners(Q, D, None, None, 6, rule)[2][0, :, 0].tolist() == [0, -1, -1, 4]


def test_documents_that_nobody_selects(device):
    Q, D = embeddings(2, 6, 3, 4, 5, device)
    D = torch.cat((D[:5], -9 * Q.detach().sum((0, 1)).expand(1, 4, 5))).detach().requires_grad_()
    scores = li.xtr_scores(Q, D, 1)
    missing = OPS.xtr_winners(Q, D, None, None, 1)[2].amax(-1) < 0
    assert missing.any() and not scores[missing].any()
    for rule in RULES:
        few = li.xtr_scores(Q, D, 1, d_mask=torch.zeros(6, 4, dtype=torch.bool, device=device), rule="paper")
        assert not few.any()
        grad_Q, grad_D = torch.autograd.grad(li.xtr_scores(Q, D, 1, rule=rule).sum(), (Q, D))
        assert grad_Q.isfinite().all() and int(grad_D.any(-1).sum()) <= 6


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "shape", [(0, 3, 4, 5, 6), (3, 0, 4, 5, 6), (3, 2, 0, 5, 6), (3, 2, 4, 0, 6)], ids=str
)
def test_empty(device, shape, rule):
    Q, D = embeddings(*shape, device)
    scores = li.xtr_scores(Q, D, 3, rule=rule)
    assert scores.shape == (shape[0], shape[1]) and not scores.any()
    assert (OPS.xtr_winners(Q, D, None, None, 1, rule)[2] == -1).all()
    grads = torch.autograd.grad(scores.sum(), (Q, D))
    assert [g.shape for g in grads] == [Q.shape, D.shape] and not any(g.any() for g in grads)
    assert xtr_scores_reference(Q, D, 3, rule=rule).shape == scores.shape


def test_layouts(device):
    Q, D = embeddings(3, 6, 4, 5, 8, device)
    grid = li.xtr_scores(Q, D, 11)
    own = li.xtr_scores(Q, D.view(3, 2, 5, 8), 11)
    assert torch.equal(own, torch.stack([grid[i, 2 * i : 2 * i + 2] for i in range(3)]))
    torch.testing.assert_close(li.xtr_scores(Q[0], D, 11), grid[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(li.xtr_scores(Q[:1], D[0], 11), li.xtr_scores(Q[:1], D[:1], 11).squeeze(1))
    assert li.xtr_scores(Q[0], D[0], 2).shape == () and li.xtr_scores(Q, D[0], 2).shape == (3,)
    own_mask = torch.rand(3, 2, 5, device=device) < 0.6
    grid = li.xtr_scores(Q, D, 11, None, own_mask.flatten(0, 1))
    own = li.xtr_scores(Q, D.view(3, 2, 5, 8), 11, None, own_mask)
    assert torch.equal(own, torch.stack([grid[i, 2 * i : 2 * i + 2] for i in range(3)]))
    d_mask = (torch.rand(5, 6, device=device) < 0.6).t()
    wanted = li.xtr_scores(Q, D, 11, None, d_mask.contiguous())
    assert torch.equal(li.xtr_scores(Q, D, 11, None, d_mask), wanted)


@pytest.mark.parametrize("rule", RULES)
def test_nan(device, rule):
    Q, D = embeddings(2, 3, 4, 5, 6, device)
    with torch.no_grad():
        Q[0, 1, 2] = D[1, 3, 0] = torch.nan
    scores = li.xtr_scores(Q, D, 6, rule=rule)
    torch.testing.assert_close(scores, xtr_scores_reference(Q, D, 6, rule=rule), equal_nan=True)
    assert scores[:, 1].isnan().all() and not scores[1, [0, 2]].isnan().any()
    kept = torch.ones(2, 4, dtype=torch.bool, device=device)
    kept[0, 1] = False
    d_mask = torch.ones(3, 5, dtype=torch.bool, device=device)
    d_mask[1, 3] = False
    assert li.xtr_scores(Q, D, 6, kept, d_mask, rule=rule).isfinite().all()


# ---- memory ----


def test_temporaries_do_not_grow_with_the_batch(monkeypatch):
    """No tensor of a call but its inputs, gradients and results is larger than a panel."""
    monkeypatch.setattr(driver, "_PANEL_BYTES_OF_A_CPU", 1 << 16)
    largest = []
    for n in (8, 32):
        Q, D = embeddings(n, n, 8, 16, 4, dtype=torch.float32)
        with Made() as seen:
            driver._xtr_winners(Q.detach(), D.detach(), None, None, 20)
        results = max(4 * n * n, 2 * n * n * 8, 4 * n * 16 * 4)
        assert max(seen.bytes) <= max(1 << 16, results)
        largest.append(max(seen.bytes))
    assert largest[1] <= max(largest[0], 1 << 16) and 4 * largest[1] < 4 * (32 * 8) * (32 * 16)


def test_a_panel_takes_as_many_queries_as_fit(monkeypatch):
    """Each takes 32 bytes for every token and document. More take more memory, fewer more time."""
    Q, D = embeddings(12, 6, 8, 5, 4, dtype=torch.float32)
    monkeypatch.setattr(driver, "_PANEL_BYTES_OF_A_CPU", 4 * 32 * 8 * 6)
    with Made() as seen:
        driver._xtr_winners(Q.detach(), D.detach(), None, None, 20)
    of_queries = [n / (8 * 6) for n in seen.elements if n % (8 * 6) == 0]
    assert of_queries.count(4) >= 3 and not {3, 5, 6} & set(of_queries)


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_with_the_grid():
    """Beside inputs, gradients and winners; the grids take 40 and 640 MiB."""
    peaks = []
    for n in (64, 256):
        Q, D = embeddings(n, n, 32, 80, 64, "cuda", torch.bfloat16)
        kept = 2 * (Q.nbytes + D.nbytes) + 2 * n * n * 32
        peaks.append(peak(lambda Q=Q, D=D: li.xtr_scores(Q, D, 256).sum().backward()) - kept)
    assert peaks[1] <= 300 << 20


def test_one_query_has_weights_of_one_dim():
    Q, D, weights = torch.randn(3, 8), torch.randn(4, 5, 8), torch.randn(3)
    expected = li.xtr_scores(Q[None], D, 3, q_weights=weights[None])[0]
    for given in (weights, weights[None]):
        assert torch.equal(li.xtr_scores(Q, D, 3, q_weights=given), expected)


@pytest.mark.parametrize(("k", "rule", "wanted"), [
    (11, "paper", 0.0), (12, "paper", 0.0), (11, "pylate", 0.0), (12, "pylate", -torch.inf),
])  # fmt: skip
def test_a_document_whose_tokens_are_all_masked(k, rule, wanted):
    """Its tokens are selected after all others: the 12th of the batch is one of them."""
    Q, D = torch.randn(2, 3, 8), torch.randn(3, 4, 8)
    d_mask = torch.ones(3, 4, dtype=torch.bool)
    d_mask[1] = False
    q_mask = torch.tensor([[True, True, False], [True, True, True]])
    scores = li.xtr_scores(Q, D, k, q_mask, d_mask, rule=rule)
    assert scores[:, 1].tolist() == [wanted] * 2 and scores[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize("k", range(1, 7))
def test_equally_masked_documents_score_alike(device, k):
    """Wherever they stand; PyLate's function leaves to the ties of topk which of them it selects."""
    Q, D = torch.ones(1, 1, 4, device=device), torch.ones(3, 2, 4, device=device)
    for kept in range(3):
        d_mask = torch.zeros(3, 2, dtype=torch.bool, device=device)
        d_mask[kept] = True
        scores = li.xtr_scores(Q, D, k, None, d_mask, rule="pylate")[0].tolist()
        assert scores.pop(kept) == 4 and scores == [-torch.inf if k == 6 else 0.0] * 2


@pytest.mark.parametrize("k", [4, 5])
def test_documents_masked_in_part_score_alike(device, k):
    """A maximum below 0 counts if all of a document is selected: with masked tokens, at the largest k."""
    Q, D = -torch.ones(1, 1, 4, device=device), torch.ones(3, 2, 4, device=device)
    d_mask = torch.tensor([[True, False]] * 3, device=device)
    assert li.xtr_scores(Q, D, k, None, d_mask, rule="pylate").tolist() == [[0, 0, 0]]
    whole = li.xtr_scores(Q, D, 6, None, d_mask, rule="pylate")
    assert whole[0].tolist() == pytest.approx([-4000] * 3)


def test_the_divisor_of_weighted_maxima(device):
    """The paper's counts those whose weight is not 0, PyLate's those that are positive once weighted."""
    Q = torch.eye(3, device=device).unsqueeze(0)
    D = torch.tensor([[[1.0, 2.0, -3.0]], [[-4.0, 5.0, 6.0]]], device=device)
    weights = torch.tensor([[2.0, 0.0, -1.0]], device=device)
    assert li.xtr_scores(Q, D, 2, q_weights=weights).tolist() == [[2.5, -7.0]]
    pylate = li.xtr_scores(Q, D, 2, rule="pylate", q_weights=weights)
    torch.testing.assert_close(pylate, torch.tensor([[2.5, -14_000.0]], device=device))


class OnGpu(torch.Tensor):
    """A tensor in the CPU's memory that says it is on a GPU."""

    is_cuda = property(lambda self: True)


@pytest.mark.parametrize(
    "tokens, d, k, grouped",
    [
        (100, 16, 6, True),
        (100, 16, 7, False),
        (100, 12, 6, False),
        ((1 << 15), 8, 1024, True),
        ((1 << 15), 8, 1025, False),
    ],
)
def test_a_gpu_selects_few_in_groups(tokens, d, k, grouped):
    """A panel of groups holds a quarter of the bytes, where few are selected and rows are whole vectors."""
    Q, D = torch.randn(1, 3, d), torch.randn(1, tokens, d)
    for dtype, precision in ((torch.bfloat16, "highest"), (torch.float32, "medium"), (torch.float32, "fp16")):
        q, documents = (x.to(dtype).as_subclass(OnGpu) for x in (Q, D))
        panels, needed = driver._panels(q, documents, k, precision)
        assert needed == "highest" and panels.Q.dtype == panels.D.dtype != torch.float32
        assert (panels.row_bytes < 2 * tokens) == grouped and panels.row_bytes <= 4 * tokens


@pytest.mark.parametrize(
    "given, deterministic, wanted",
    [("auto", False, "auto"), ("auto", True, "lowmem"), ("unified", True, "unified")],
)
def test_a_deterministic_backward_is_lowmem(given, deterministic, wanted):
    scores = li.xtr_scores(torch.randn(2, 4, 8).requires_grad_(), torch.randn(3, 5, 8), 6, backward=given)
    torch.use_deterministic_algorithms(deterministic)
    with Called() as called:
        scores.sum().backward()
    assert called.arguments[-1]["backward"] == wanted


def test_a_k_that_changes_compiles_whole():
    scored = torch.compile(li.xtr_scores, fullgraph=True, dynamic=True, backend="aot_eager")
    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    for k in (3, 5, 7):
        assert torch.equal(scored(Q, D, k), li.xtr_scores(Q, D, k))
