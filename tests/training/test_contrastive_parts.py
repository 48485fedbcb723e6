"""Parts of the contrastive loss by themselves: sums of gradients, runs of blocks, what a failure asks for."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction._contrastive import blocks, shards, whole
from late_interaction._contrastive.backward import Sums
from late_interaction._contrastive.problem import Grid
from late_interaction._contrastive.ring import Ring
from late_interaction._contrastive.tail import PairList
from late_interaction._contrastive.tokens import Tokens, even_blocks
from tests.maxsim.test_call_edges import Called
from tests.support.contrastive import assert_close, batch, gradients, reference, small_blocks
from tests.training.test_contrastive import T, packed


def tokens(offsets=None):
    values = torch.arange(12.0).view(3, 2, 2) if offsets is None else torch.arange(12.0).view(6, 2)
    if offsets is None:
        return Tokens(values, None)
    return Tokens(values, None, torch.tensor(offsets, dtype=torch.int32), tuple(offsets))


@pytest.mark.parametrize("first", ["take", "add", "whole", "block"])
def test_sums_begin_with_what_comes_first(first):
    x = tokens()
    sums = Sums.by_blocks(x) if first == "block" else Sums.zeros(x)
    assert not sums.begun and not sums.finished().any()
    wanted = torch.ones_like(x.values)
    if first == "take":
        sums.take(wanted.clone())
        assert sums.begun and torch.equal(sums.finished(), wanted)
        assert torch.equal(sums.whole, wanted)  # to which more can be added
    elif first == "add":
        sums.add(wanted.clone())
    elif first == "whole":
        sums.whole.add_(1)
    else:
        for block in ((0, 2), (2, 3)):
            sums.open(block)
            sums.of(block).add_(1)
            sums.close(block)
    assert sums.begun and torch.equal(sums.finished(), wanted)


@pytest.mark.parametrize("first", ["take", "add"])
def test_sums_that_are_added_to_what_came_before(first):
    x = tokens()
    sums = Sums.zeros(x)
    getattr(sums, first)(torch.ones_like(x.values))
    sums.add(torch.full_like(x.values, 2.0))
    sums.of((1, 3)).add_(4)
    assert sums.finished()[:, 0, 0].tolist() == [3, 7, 7]


@pytest.mark.parametrize(
    "queries, runs",
    [
        (1, [[(3, 5), (5, 8), (8, 11), (11, 12)]]),
        (2, [[(3, 5), (5, 8)], [(8, 11), (11, 12)]]),
        (3, [[(3, 5)], [(5, 8)], [(8, 11), (11, 12)]]),
        (9, [[(3, 5)], [(5, 8)], [(8, 11)], [(11, 12)]]),
        (0, [[(3, 5), (5, 8), (8, 11), (11, 12)]]),
    ],
)
def test_runs_of_blocks_hold_no_more_logits_than_a_panel(queries, runs, monkeypatch):
    monkeypatch.setattr(blocks, "_PANEL", 12)
    assert blocks.panels([(3, 5), (5, 8), (8, 11), (11, 12)], queries) == runs
    assert blocks.panels([], queries) == []


@pytest.mark.parametrize(
    "queries, documents, one", [(3, 6, True), (3, 9, False), (4, 6, False), (1, 9, True)]
)
def test_pairs_that_pass_as_one_panel(queries, documents, one):
    x, y = Tokens(torch.ones(queries, 2, 2), None), Tokens(torch.ones(documents, 2, 2), None)
    with small_blocks():  # of 3 by 3, panels of 24 logits
        assert Grid.of(blocks.choose(x, False, False, "highest"), x, y).one_panel == one


@pytest.mark.parametrize(
    "offsets, keeps, size", [(None, False, 36), (None, True, 72), ([0, 2, 4, 6], True, 108)]
)
def test_bytes_of_a_batch_that_is_kept_whole(offsets, keeps, size):
    """3 x 3 scores of 4 bytes, and winners of 2 tokens each, of 4 bytes where they are packed."""
    x = tokens(offsets)
    kernels = blocks.choose(x, False, False, "highest")
    assert whole.fits(kernels, x, x, keeps, size, False) and not whole.fits(
        kernels, x, x, keeps, size - 1, False
    )
    assert whole.default_budget("cpu", True) == whole.default_budget("cpu", False) == whole.KEPT_BYTES["cpu"]


@pytest.mark.parametrize("learns", [False, True])
def test_a_batch_that_is_kept_whole_finds_winners_for_a_backward_alone(learns):
    Q, D = batch(3, 4)
    with Called() as called, torch.set_grad_enabled(learns):
        li.losses.contrastive(Q, D, temperature=T, kept_bytes=1 << 20)
    assert [name.removesuffix("_no_autograd") for name in called.names] == ["maxsim" + "_winners" * learns]


def test_blocks_of_packed_sequences():
    """Each has about as many tokens as so many sequences of mean length, or is one sequence."""
    for lengths in ([3] * 7, [1, 1, 1, 30, 1, 1, 1, 1], [0] * 9, [0, 0, 40, 0, 0, 0, 0, 0], [2], []):
        bounds = tuple(accumulate(lengths, initial=5))
        values = torch.ones(bounds[-1], 2)
        x = Tokens(values, None, torch.tensor(bounds, dtype=torch.int32), bounds)
        mean = max(sum(lengths), 1) / max(len(lengths), 1)
        for most in (1, 2, 3):
            found = x.blocks(most)
            assert [i for a, b in found for i in range(a, b)] == list(range(len(lengths)))
            for a, b in found:
                held = bounds[b] - bounds[a]
                assert b - a <= 4 * most and (b - a == 1 or held <= max(1.0, most * mean))
                room = b < len(lengths) and b - a < 4 * most
                assert not room or bounds[b + 1] - bounds[a] > max(1.0, most * mean)
    assert x.mean_bytes == 40 and len(x) == 0  # of the tokens of no sequence
    assert tokens([0, 2, 4, 6]).mean_bytes == 16 and tokens([0, 6]).mean_bytes == 48


def test_a_list_of_no_pairs():
    assert [len(x) for x in PairList().tensors(torch.ones(2))] == [0, 0, 0]


def test_which_tokens_are_of_no_sequence():
    assert tokens().is_all and tokens().longest == 2 and tokens([0, 2, 6]).longest == 4
    assert tokens([0, 2, 6]).is_all and not tokens([0, 2, 5]).is_all and not tokens([1, 6]).is_all
    for shape in ((0, 3, 2), (3, 0, 2), (2, 3, 1)):
        x = Tokens(torch.ones(shape), None).as_packed()
        assert len(x) == shape[0] and x.longest == (shape[1] if shape[0] else 0) and x.is_all
        assert list(x.bounds) == x.offsets.tolist()


@pytest.mark.parametrize(
    "n, most, size", [(63, 200, 63), (64, 200, 64), (65, 200, 96), (130, 70, 70), (130, 200, 160)]
)
def test_large_blocks_are_whole_tiles(n, most, size):
    assert even_blocks(n, most)[0] == (0, min(size, n))


@pytest.mark.parametrize("offsets", [None, [0, 2, 4, 6]])
@pytest.mark.parametrize("winners", [False, True])
def test_what_a_failed_block_wanted_memory_for(offsets, winners, monkeypatch):
    def fails(*_):
        raise RuntimeError("API call failed")

    failing, asked = SimpleNamespace(default=fails), []
    names = ("maxsim", "maxsim_winners", "maxsim_varlen", "maxsim_varlen_winners")
    monkeypatch.setattr(blocks, "_ops", SimpleNamespace(**dict.fromkeys(names, failing)))
    for name in ("forward_failed", "varlen_failed"):
        monkeypatch.setattr(blocks._oom, name, lambda *args, name=name: asked.append((name, args[-1])))
    x = tokens(offsets)
    kernels = blocks.choose(x, False, False, "highest")
    with pytest.raises(RuntimeError, match="API call failed"):
        (kernels.scores_and_winners if winners else kernels.scores)(x, x)
    assert asked == [("forward_failed" if offsets is None else "varlen_failed", winners)]


@pytest.mark.parametrize("queries, each", [(1, 3), (1, 1), (4, 1), (4, 0), (1, 0)])
def test_packed_hard_negatives_are_those_of_the_padded_form(queries, each, device):
    (Q, cu_q), (D, cu_d), (H, cu_h) = (
        packed([3] * n, 8, torch.float64, device) for n in (queries, 5, queries * each)
    )
    q, d, h = (li.Tokens.packed(*x) for x in ((Q, cu_q), (D, cu_d), (H, cu_h)))
    with small_blocks():
        loss = li.losses.contrastive(q, d, temperature=T, hard_negatives=h)
        ours = gradients(loss, (Q, D, H))
    shapes = ((queries, 3, 8), (5, 3, 8), (queries, each, 3, 8))
    q, d, h = (x.view(shape) for x, shape in zip((Q, D, H), shapes, strict=True))
    wanted = reference(q, d, T, H=h if each else None)
    loss, found = gradients(wanted, (Q, D, H) if each else (Q, D))
    assert_close(ours, (loss, found if each else (*found, torch.zeros_like(H))))


# ---- process groups ----


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("offsets", "winner"), [(None, 2), ([0, 2, 4, 6], 4)])
def test_blocks_of_a_group_stay_all_or_none(offsets, winner, kept, monkeypatch):
    """3 queries of 2 tokens and 9 documents of all processes: scores of 4 bytes, winners of 2 or 4."""
    x, size = tokens(offsets), 3 * 9 * (4 + 2 * winner) - (not kept)
    budgets = {False: size, True: None}  # not that of listed pairs
    monkeypatch.setattr(shards.whole, "default_budget", lambda device, listed: budgets[listed])
    monkeypatch.setattr(shards.KeptBlocks, "of", lambda kernels, budget, device: budget)
    ring, problem = Ring("group", 0, 2, [3, 2], [4, 5]), SimpleNamespace(kernels=None)
    call = SimpleNamespace(keeps=True, ring=ring, problem=problem, kept_bytes=1)
    assert shards.Call.kept_blocks(call, x) == (size if kept else None)
    call.ring = Ring.alone(3, 4, True)
    assert shards.Call.kept_blocks(call, x) == 1  # what the caller says
    call.keeps = False
    assert shards.Call.kept_blocks(call, x) is None


@pytest.mark.parametrize(
    ("change", "stay"),
    [
        ({}, True),
        ({"most": 479}, False),
        ({"keeps": False}, False),
        ({"symmetric": True}, False),
        ({"world": 3}, False),
        ({"world": 1}, False),
    ],
    ids=str,
)
def test_when_the_documents_of_the_other_process_stay(change, stay, monkeypatch):
    """The largest shard has 240 numbers of 2 bytes."""
    what = {"most": 480, "keeps": True, "symmetric": False, "world": 2} | change
    monkeypatch.setattr(shards, "_LAST_BYTES", what["most"])
    ring = Ring("group", 0, what["world"], [], [], [(4, 6, 8), (5, 6, 8)])
    problem = SimpleNamespace(symmetric=what["symmetric"])
    call = SimpleNamespace(keeps=what["keeps"], ring=ring, problem=problem)
    assert shards.Call.keeps_last(call, torch.ones(1, dtype=torch.bfloat16)) == stay


@pytest.mark.parametrize(
    ("change", "in_blocks"),
    [
        ({}, True),
        ({"documents": 12}, False),  # as many numbers as the queries
        ({"documents": 13}, False),
        ({"world": 2}, False),
        ({"h": "hard negatives"}, False),
        ({"needs_d": False}, False),
    ],
    ids=str,
)
def test_queries_that_add_up_block_by_block(change, in_blocks):
    what = {"documents": 11, "world": 1, "h": None, "needs_d": True} | change
    call = SimpleNamespace(ring=SimpleNamespace(world=what["world"]), h=what["h"])
    given = tokens(), torch.ones(what["documents"])
    sums = shards.sums_of_queries(call, *given, True, what["needs_d"])
    assert sums.needed and sums.in_blocks == in_blocks
    assert not shards.sums_of_queries(call, *given, False, what["needs_d"]).needed


@pytest.mark.parametrize(("world", "wanted"), [(2, 1.0), (3, 1 + 2**-7)])
def test_more_than_two_gradients_add_up_in_float32(world, wanted, monkeypatch):
    """1 and of each other process 2**-8 of bfloat16, which added to 1 one at a time is lost."""
    x = Tokens(torch.ones(3, 2, 2, dtype=torch.bfloat16), None)
    monkeypatch.setattr(
        shards.backward, "add_gradients", lambda weights, grid, sums, given: sums[1].add(x.values.clone())
    )
    monkeypatch.setattr(
        shards, "_send_home", lambda *_: SimpleNamespace(wait=lambda: [torch.full_like(x.values, 2**-8)])
    )
    monkeypatch.setattr(shards.Grid, "of", lambda *_: None)
    ring = SimpleNamespace(
        world=world, wants=[True] * world, owner=lambda step: -step % world,
        shards=lambda d, extra: iter([(0, d, extra)] * world),
    )  # fmt: skip
    call, problem = SimpleNamespace(ring=ring), SimpleNamespace(kernels=None)
    found = shards.add_shards(call, problem, Sums.zeros(x), x, True, lambda *_: (None, None))
    assert found.dtype == torch.bfloat16 and found.eq(wanted).all()


@pytest.mark.parametrize("needs_q", [False, True])
@pytest.mark.parametrize("needs_d", [False, True])
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_shards_whose_gradients_are_found_and_sent(world, others, needs_d, needs_q, monkeypatch):
    """A shard's products are only found for a gradient that somebody wants. A rank that wants none itself
    still sends the others theirs; of one process that wants none, not even the weights are found."""
    x, weighed, found, sent = tokens(), [], [], []
    wants = [needs_d] + [others] * (world - 1)
    monkeypatch.setattr(
        shards.backward, "add_gradients",
        lambda weights, grid, sums, given: found.append(
            (weights, [y.needed for y in sums], sums[1].in_blocks)
        ),
    )  # fmt: skip
    monkeypatch.setattr(
        shards, "_send_home",
        lambda ring, step, sums: sent.append(step) or SimpleNamespace(wait=lambda: [torch.ones(3, 2, 2)]),
    )  # fmt: skip
    monkeypatch.setattr(shards.Grid, "of", lambda *_: None)
    ring = SimpleNamespace(
        world=world, wants=wants, owner=lambda step: -step % world,
        shards=lambda d, extra: iter([(0, d, (extra, step)) for step in range(world)]),
    )  # fmt: skip
    call, problem = SimpleNamespace(ring=ring), SimpleNamespace(kernels=None)
    q_sums = Sums.zeros(x) if needs_q else Sums(x)

    def of_shard(step, travelled):
        weighed.append((step, travelled))
        return step, None

    grad = shards.add_shards(call, problem, q_sums, x, needs_d, of_shard, "extra")
    idle = world == 1 and not (needs_q or needs_d)
    assert weighed == ([] if idle else [(step, ("extra", step)) for step in range(world)])
    needed = [needs_d, *[others] * (world - 1)]
    # Other ranks' gradients, and those of one process whose queries' are whole, take no memory for a sum of
    # all documents in float32.
    assert found == [
        (i, [needs_q, needed[i]], needed[i] and (i > 0 or world == 1))
        for i in range(world) if needs_q or needed[i]
    ]  # fmt: skip
    assert sent == ([*range(1, world)] if any(wants) else [])
    assert (grad is not None) == needs_d
    if needs_d:
        assert grad.eq(len(sent)).all()


def test_documents_of_the_other_rank_that_stayed_come_first(monkeypatch):
    """Their gradient is on its way while that of the own documents is found; no document travels."""
    own, last = (Tokens(torch.full((3, 2, 2), x), None) for x in (1.0, 2.0))
    done = []
    monkeypatch.setattr(
        shards.backward, "add_gradients",
        lambda weights, grid, sums, given: done.append(weights) or sums[1].add(sums[1].tokens.values.clone()),
    )  # fmt: skip
    monkeypatch.setattr(shards.Grid, "of", lambda kernels, queries, documents: None)

    def send_home(ring, step, sums):
        done.append(("sent", step, sums.finished().flatten().tolist()))
        return SimpleNamespace(wait=lambda: [torch.full((3, 2, 2), 10.0)])

    monkeypatch.setattr(shards, "_send_home", send_home)
    ring = SimpleNamespace(world=2, wants=[True, True], owner=lambda step: -step % 2)
    call, problem = SimpleNamespace(ring=ring), SimpleNamespace(kernels=None)
    of_shard = lambda step, travelled: ((step, travelled), None)  # noqa: E731
    found = shards.add_shards(call, problem, Sums(own), own, True, of_shard, last=last)
    assert done == [(1, None), ("sent", 1, [2.0] * 12), (0, None)]
    assert found.eq(11).all()


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_gradient_goes_to_the_rank_whose_documents_it_is_of(own, theirs, step, monkeypatch):
    """That rank is so many steps behind. Nothing travels where nobody wants it."""
    x, exchanged = tokens(), []
    monkeypatch.setattr(Ring, "exchange", lambda ring, *given: exchanged.append(given))
    ring = Ring("group", 0, 3, [1] * 3, [5, 3, 3], [(5, 4, 2), (3, 2, 2), (3, 2, 2)], wants=[own, True, True])
    sums = Sums.zeros(x) if theirs else Sums(x)
    if theirs:
        sums.add(torch.full_like(x.values, 2.0))
    shards._send_home(ring, step, sums)
    (((leaving,), (arriving,), what, ahead),) = exchanged
    assert (what, ahead) == ("gradients", -step)
    assert torch.equal(leaving, torch.full_like(x.values, 2.0) if theirs else torch.empty(0))
    assert arriving.shape == ((5, 4, 2) if own else (0,))
