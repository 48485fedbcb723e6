"""The two passes of the contrastive loss from inside: what they keep, hold, list and leave out."""

from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction._contrastive import backward, blocks, forward, function
from late_interaction._contrastive.backward import Weights
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.problem import Grid, Problem
from late_interaction._contrastive.softmax import RunningSoftmax, SoftmaxWeights
from late_interaction._contrastive.sums import Sums
from late_interaction._contrastive.tokens import Tokens
from tests.maxsim.test_call_edges import Called
from tests.support.contrastive import assert_close, batch, gradients, reference, small_blocks

T = 0.25
MIB = 1 << 20


def sequences(count, dtype=torch.float32):
    return Tokens(torch.empty(count, 0, 8, dtype=dtype), None)


def problem(q, d, labels=None, symmetric=False, each=0):
    of_rows = Labels(labels)
    return Problem(
        blocks.choose(q, False, False, "highest"), T, of_rows, of_rows.inverse(len(d)) if symmetric else None,
        0.0, 0.0, len(d) + each, len(q), each, False,
    )  # fmt: skip


def recorded(monkeypatch, where, name, seen):
    ours = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **given: seen.append(args) or ours(*args, **given))


# ---- the forward ----


@pytest.mark.parametrize(("queries", "documents", "dtype", "held", "holds"), [
    (2048, 4096, torch.float32, None, True),  # 32 MiB of logits
    (2048, 4097, torch.float32, None, False),
    (2048, 2048, torch.float64, None, True),
    (2048, 2049, torch.float64, None, False),
    (1024, 4096, torch.float32, 4 * MIB, True),  # with those of earlier shards
    (1024, 4096, torch.float32, 4 * MIB + 1, False),
    (1024, 4096, torch.bfloat16, 4 * MIB, True),
    (1024, 4096, torch.bfloat16, 4 * MIB + 1, False),
])  # fmt: skip
def test_logits_that_are_held_until_all_pairs_are_scored(queries, documents, dtype, held, holds):
    grid = SimpleNamespace(q=sequences(queries, dtype), d=sequences(documents, dtype), one_panel=True)
    earlier = [SimpleNamespace(held=None)]
    if held:
        earlier.append(SimpleNamespace(held=(torch.empty(held, device="meta"), (0, 1), [(0, 1)])))
    call = SimpleNamespace(problem=SimpleNamespace(symmetric=False), ring=SimpleNamespace(world=2))
    assert function._holds(call, grid, earlier) == holds


@pytest.mark.parametrize(("symmetric", "world", "one_panel", "holds"), [
    (True, 1, True, True), (True, 2, True, False), (False, 2, True, True), (False, 1, False, False),
])  # fmt: skip
def test_sums_that_travel_are_not_held(symmetric, world, one_panel, holds):
    grid = SimpleNamespace(q=sequences(3), d=sequences(3), one_panel=one_panel)
    call = SimpleNamespace(problem=SimpleNamespace(symmetric=symmetric), ring=SimpleNamespace(world=world))
    assert function._holds(call, grid, []) == holds


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sums_that_nobody_needs_do_not_run(learns, smoothing, monkeypatch):
    Q, D = batch(4, 4)
    seen, temperature = [], torch.tensor(T, dtype=Q.dtype, requires_grad=learns)
    recorded(monkeypatch, function.RunningSoftmax, "empty", seen)
    with small_blocks():
        li.losses.contrastive(Q, D, temperature=temperature, label_smoothing=smoothing, symmetric=True)
    assert [(args[0], *args[-2:]) for args in seen] == [(4, learns, smoothing > 0)] * 2


@pytest.mark.parametrize("each", [0, 2])
def test_hard_negatives_are_scored_where_there_are_any(each, monkeypatch):
    Q, D = batch(4, 4)
    scored, differentiated = [], []
    recorded(monkeypatch, forward, "score_own", scored)
    recorded(monkeypatch, backward, "add_own_gradients", differentiated)
    H = torch.randn(4, each, 3, 8, dtype=Q.dtype, requires_grad=True)
    with small_blocks():
        loss = li.losses.contrastive(Q, D, temperature=T, hard_negatives=H)
        (grad,) = torch.autograd.grad(loss, H)
    assert len(scored) == len(differentiated) == bool(each) and grad.shape == H.shape


@pytest.mark.parametrize("wanted", ["Q", "D", "H", "T"])
def test_work_for_gradients_that_nobody_needs(wanted, monkeypatch):
    Q, D = batch(4, 4)
    leaves = {"Q": Q, "D": D, "H": torch.randn(4, 2, 3, 8, dtype=Q.dtype), "T": torch.tensor(T).double()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    sums, own, found, ours = [], [], [], function._backward
    recorded(monkeypatch, function, "sums_of_queries", sums)
    recorded(monkeypatch, backward, "add_own_gradients", own)
    monkeypatch.setattr(function, "_backward", lambda *args: found.append(ours(*args)) or found[-1])
    with small_blocks():
        loss = li.losses.contrastive(Q, D, temperature=leaves["T"], hard_negatives=leaves["H"])
        torch.autograd.grad(loss, leaves[wanted])
    assert [args[-2:] for args in sums] == [(wanted == "Q", wanted == "D")]
    assert [(args[-2] is not None, args[-1]) for args in own] == (
        [(wanted == "Q", wanted == "H")] if wanted in "QH" else []
    )
    assert [x is not None for x in found[0]] == [name == wanted for name in "QDHT"]


def test_a_query_that_is_left_out_has_no_weights():
    """NaN in it included."""
    Q, D = batch(6, 7)
    labels = torch.tensor([0, 1, -100, 3, 4, 5])
    kept = labels >= 0
    wanted = gradients(reference(Q[kept], D, T, labels=labels[kept]), (Q, D))
    with torch.no_grad():
        Q[2, 1, 3] = float("nan")
    with small_blocks():
        ours = gradients(li.losses.contrastive(Q, D, temperature=T, labels=labels), (Q, D))
    torch.testing.assert_close(ours[0], wanted[0])
    torch.testing.assert_close(ours[1][0][kept], wanted[1][0][kept])
    torch.testing.assert_close(ours[1][1], wanted[1][1])
    assert not ours[1][0][2].any()


@pytest.mark.parametrize("keeps", [False, True])
def test_scores_of_one_block_become_logits_in_place(keeps, monkeypatch):
    """Unless they are kept; those of several blocks go into a panel."""
    q, d = (Tokens(x.detach()) for x in batch(3, 6))
    p, found = problem(q, d), []
    ours = blocks.Kernels.scores

    def scores(self, q, d):
        found.append(ours(self, q, d))
        return found[-1]

    monkeypatch.setattr(blocks.Kernels, "scores", scores)
    monkeypatch.setattr(
        blocks.Kernels, "scores_and_winners", lambda self, q, d: (scores(self, q, d), torch.empty(0))
    )
    kept, stay = None, []
    if keeps:
        kept = SimpleNamespace(has_room=lambda q, d: True, keep=lambda *args: stay.append(args))
    wanted = ours(p.kernels, q, d) / T
    one = forward._panel(p, (q, (0, 3)), [(d, (0, 6))], kept)
    torch.testing.assert_close(one, wanted)
    assert (one.data_ptr() == found[0].data_ptr()) == (not keeps)
    parts = [(d.part(block), block) for block in ((0, 3), (3, 6))]
    torch.testing.assert_close(forward._panel(p, (q, (0, 3)), parts, kept), wanted)
    assert len(stay) == 3 * keeps
    for rows, (begin, end), kept_scores, _ in stay:
        assert rows == (0, 3)
        torch.testing.assert_close(kept_scores, T * wanted[:, begin:end])


def test_a_pass_holds_no_panel_unless_it_is_told_to(monkeypatch):
    """Panels are as large as the largest block of queries allows."""
    q, d = (Tokens(x.detach()) for x in batch(8, 9))
    seen = []
    recorded(monkeypatch, forward, "panels", seen)
    with small_blocks():
        p = problem(q, d)
        to = forward.SoftmaxPass(
            RunningSoftmax.empty(8, q.values, torch.float64, False, False), None, None, True
        )
        forward.score_shard(p, Grid.of(p.kernels, q, d), to)
    assert to.held is None and [queries for _, queries in seen] == [3]


def own_blocks(queries, each, mean_bytes):
    class Sequences(SimpleNamespace):
        def __len__(self):
            return queries

    return forward.own_blocks(Sequences(), SimpleNamespace(mean_bytes=mean_bytes), each)


def test_hard_negatives_of_a_block_take_16_MiB():
    assert own_blocks(10**4, 4, 16 << 10)[0] == (0, 256)
    for each, mean_bytes in ((1, 1.0), (0, 1.0), (3, 0.0)):
        assert own_blocks(32 * MIB, each, mean_bytes) == [(0, 16 * MIB), (16 * MIB, 32 * MIB)]
    assert own_blocks(0, 3, 8.0) == []


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", ["number", "labels", "left out"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_logits_of_labels(symmetric, form, masked, monkeypatch):
    """Queries with their documents, and documents with their queries; NaN where there are none. As many at a
    time as a block has queries."""
    q, d = (Tokens(x.detach()) for x in batch(7, 7))
    if masked:
        d = Tokens(d.values, torch.rand(7, 7) < 0.6)
    index = None if form == "number" else torch.tensor([3, 0, 6, 5, 2, 1, 4])
    if form == "left out":
        index[2] = -100
    seen = []
    recorded(monkeypatch, forward, "_scores_of_labels", seen)
    with small_blocks():
        p = problem(q, d, index, symmetric)
        grid = Grid.of(p.kernels, q, d)
        rows, columns = (RunningSoftmax.empty(7, q.values, torch.float64, False, False) for _ in range(2))
        to = forward.SoftmaxPass(rows, columns if symmetric else None, None, True)
        of_rows, of_columns = forward.label_logits(p, grid, to)
    S = p.kernels.scores(q, d) / T
    labels = torch.arange(7) if index is None else index
    wanted = S[torch.arange(7), labels.clamp_min(0)].masked_fill(labels < 0, torch.nan)
    torch.testing.assert_close(of_rows, wanted, equal_nan=True)
    assert (of_columns is not None) == symmetric
    if symmetric:
        back = torch.full((7,), torch.nan, dtype=S.dtype)
        back[labels[labels >= 0]] = wanted[labels >= 0]
        torch.testing.assert_close(of_columns, back, equal_nan=True)
    assert all(block[1] - block[0] <= 3 for _, _, block, _ in seen)
    elsewhere = forward.SoftmaxPass(rows, columns if symmetric else None, None, False)
    assert forward.label_logits(p, grid, elsewhere) == (rows.target, columns.target if symmetric else None)


# ---- the backward ----


def test_smoothing_of_more_queries_than_hard_negatives(device, monkeypatch):
    """In one block, each query with a gradient of its own."""
    Q, D = batch(3, 5, device=device)
    H = torch.randn(3, 3, 4, 8, dtype=Q.dtype, device=device, requires_grad=True)
    with small_blocks():
        monkeypatch.setattr(forward, "_OWN_BYTES", MIB)
        options = {"reduction": "none"}
        loss = li.losses.contrastive(Q, D, temperature=T, hard_negatives=H, label_smoothing=0.2, **options)
        ours = gradients(loss, (Q, D, H))
    assert_close(ours, gradients(reference(Q, D, T, H=H, smoothing=0.2, **options), (Q, D, H)))


def test_a_weight_at_the_threshold_counts():
    p = SimpleNamespace(tail=0.25)
    weights = Weights(p, None, None, True)
    amount = torch.tensor([0.5, -0.5, 0.499, -0.499, torch.nan, 0.0])
    factor = torch.tensor([8.0, -8.0, 8.0, 8.0, 8.0, 0.0])  # times a quarter of a fourth
    assert weights._above(amount, factor, 4).tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize(
    ("queries", "listed", "at_once"), [(3, False, True), (4, False, False), (3, True, False)]
)
def test_one_block_of_queries_writes_gradients_at_once(queries, listed, at_once, monkeypatch):
    """Documents' gradients, which nothing is added to."""
    q, d = (Tokens(x.detach()) for x in batch(queries, 9))
    seen = []
    recorded(monkeypatch, Sums, "open", seen)
    rows = SoftmaxWeights(torch.zeros(queries).double(), torch.ones(queries), torch.ones(queries), False)
    with small_blocks():
        p = problem(q, d)
        grid = Grid.of(p.kernels, q, d)
        given = None
        if listed:
            none = torch.empty(0, dtype=torch.int32)
            dense = {(rows, columns[0]) for rows in grid.q_blocks for columns in grid.d_blocks}
            given = backward.Found((none, none, torch.empty(0)), dense, True)
        sums = Sums.zeros(q), Sums.by_blocks(d)
        backward.add_gradients(Weights(p, rows, None, True), grid, sums, given)
    assert [args[2] for args in seen] == [at_once] * 3
    S = p.kernels.scores(q, d)
    weights = (S / T).exp()
    weights[torch.arange(queries), torch.arange(queries)] -= 1
    Q, D = (x.values.clone().requires_grad_() for x in (q, d))
    best = torch.einsum("qsd,ktd->qkst", Q, D).amax(-1).sum(-1)
    for got, want in zip(sums, torch.autograd.grad((weights * best).sum(), (Q, D)), strict=True):
        torch.testing.assert_close(got.finished(), want)


def test_pairs_of_a_call_take_32_MiB_of_winners():
    grid = SimpleNamespace(q=SimpleNamespace(longest=8))
    assert backward._pairs_of_call(grid) == MIB
    grid.q.longest = 0
    assert backward._pairs_of_call(grid) == 32 * MIB


@pytest.mark.parametrize(("change", "whole"), [
    ({}, True), ({"pairs": 6}, False), ({"all_queries": False}, False), ({"all_documents": False}, False),
    ({"begun": (True, False)}, True), ({"begun": (False, True)}, False),
    ({"in_blocks": (False, False)}, True),
    ({"begun": (True, True), "in_blocks": (False, False)}, True),
    ({"begun": (True, False), "in_blocks": (True, False)}, False),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("by_documents", [False, True])
def test_when_one_call_takes_all_listed_pairs(by_documents, change, whole, monkeypatch):
    """Up to 5 pairs, of all tokens, of sums that can take them at once. Else blocks of the outermost side
    take 64 MiB of sums each."""
    what = {"pairs": 5, "all_queries": True, "all_documents": True} | change
    begun, in_blocks = (what | change).get("begun", (False, False)), change.get("in_blocks", (False, True))
    taken, asked = [], []
    monkeypatch.setattr(backward, "_take_listed", lambda *args: taken.append(args))
    monkeypatch.setattr(backward, "_pairs_of_call", lambda grid: 5)
    tokens = [
        SimpleNamespace(
            mean_bytes=1024.0, values=torch.empty(1, dtype=torch.bfloat16), side=side,
            blocks=lambda most, side=side: asked.append((side, most)) or [],
        )
        for side in ("queries", "documents")
    ]  # fmt: skip
    sums = [
        SimpleNamespace(tokens=x, begun=b, in_blocks=i)
        for x, b, i in zip(tokens, begun, in_blocks, strict=True)
    ]
    grid = SimpleNamespace(
        packed_q=SimpleNamespace(is_all=what["all_queries"]),
        packed_d=SimpleNamespace(is_all=what["all_documents"]),
    )
    pairs = tuple(torch.zeros(what["pairs"], dtype=torch.int32) for _ in range(3))
    backward._add_listed(SimpleNamespace(p="p"), grid, sums, pairs, by_documents)
    if whole:
        assert [args[0] for args in taken] == ["p"] and not asked
    else:
        assert not taken and asked == [("documents" if by_documents else "queries", 32 << 10)]


def test_queries_that_are_left_out_have_no_listed_pairs():
    """A query has its label and its hardest negative, unless it is left out."""
    Q, D = batch(6, 6)
    labels = torch.tensor([0, 1, -100, 3, 4, 5])
    with small_blocks(), Called() as called:
        li.losses.pairwise(Q, D, temperature=T, labels=labels).backward()
    counts = [x["pair_q"].numel() for x in called.arguments if "grad_scores" in x]
    assert sum(counts) == 10
