"""Sentence Transformers' calls at the edges of what the kernels take, with the installed release: which of
them the kernels score, and that the others give what its own functions give."""

import contextlib
import inspect

import pytest
import torch

from late_interaction.integrations import sentence_transformers as ours
from late_interaction.integrations.sentence_transformers import _chunks as chunks
from late_interaction.integrations.sentence_transformers import _inputs as inputs
from late_interaction.integrations.sentence_transformers import _originals as originals
from late_interaction.integrations.sentence_transformers import _ranking as ranking
from late_interaction.integrations.sentence_transformers import _weights as weights
from late_interaction.integrations.sentence_transformers import _xtr as xtr
from tests import side_by_side

F64 = torch.float64


@pytest.fixture(scope="module", autouse=True)
def _sentence_transformers():
    pytest.importorskip("sentence_transformers", reason="make test installs it (requirements/demo.txt)")
    assert not originals.exchanged()


def of(name):
    """The function of Sentence Transformers that bears a name of ours."""
    place = next(p for p in (originals.SIMILARITY, originals.COLBERT, originals.XTR) if _has(p, name))
    return getattr(originals.module(place), name)


def _has(place, name):
    return hasattr(originals.module(place), name)


def outcome(function, *args, **options):
    try:
        return function(*args, **options)
    except Exception as error:
        return type(error)


def assert_same(name, *args, **options):
    """What ours gives and what its own gives, or the errors that they raise."""
    wanted, found = outcome(of(name), *args, **options), outcome(getattr(ours, name), *args, **options)
    if isinstance(wanted, type):
        assert found is wanted
        return
    assert isinstance(found, torch.Tensor), found
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@contextlib.contextmanager
def counted(**wanted):
    """The operators that are called in here, and how often."""
    with side_by_side.Calls() as calls:
        yield
    assert calls.of == wanted


# ---- signatures ----


@pytest.mark.parametrize("name", ours.__all__)
def test_arguments_and_defaults(name):
    found, wanted = inspect.signature(getattr(ours, name)), inspect.signature(of(name))
    assert [(p.name, p.default) for p in found.parameters.values()] == [
        (p.name, p.default) for p in wanted.parameters.values()
    ]


# ---- query masks ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("numbers", [[0, 1, 1], [1, 1, 1], [0, 0, 0]])
def test_numbers_of_zero_and_one_are_a_mask(dtype, numbers):
    mask, weighted = weights.split(torch.tensor([numbers], dtype=dtype))
    assert weighted is None and mask.dtype == torch.bool and mask.tolist() == [[bool(x) for x in numbers]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("numbers", [[0, 1, 2], [2, 2, 2], [-1, 0, 1], [-1, -1, 1]])
def test_other_numbers_are_weights(dtype, numbers):
    given = torch.tensor([numbers], dtype=dtype)
    mask, weighted = weights.split(given)
    assert mask is None and weighted.tolist() == given.tolist()
    assert weighted.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert weighted is given or not dtype.is_floating_point


def test_a_bool_mask_and_none_stay():
    mask = torch.tensor([[True, False]])
    assert weights.split(None) == (None, None) and weights.split(mask)[0] is mask


def test_whether_numbers_are_a_mask_is_not_asked_where_they_cannot_be_read():
    """A mask would have no gradient, and a compiled graph or a GPU would wait for the answer."""
    learned = torch.ones(1, 3, requires_grad=True)
    assert weights.split(learned) == (None, learned)
    elsewhere = torch.ones(1, 3, device="meta")
    assert weights.split(elsewhere) == (None, elsewhere)
    taken = []

    def split(mask):
        taken.append(weights.split(mask)[1] is not None)
        return mask + 1

    torch.compile(split, fullgraph=True, backend="eager")(torch.ones(1, 3))
    assert taken == [True]


# ---- one side of a call ----


def test_what_is_no_side_of_the_kernels():
    x = torch.randn(3, 4, 5)
    for side in (x[0, 0], x[None], x[:0], x.to_sparse(), [], [x], [x[0], x[0, :, :4]], [x[0, 0], x[1, 0]]):
        assert inputs.side_of(side, None, "a_mask") is None
    for side in ([x[0].to_sparse(), x[1].to_sparse()], [x[0], x[1].double()], [x[0], x[1].bfloat16(), x[2]]):
        assert inputs.side_of(side, None, "a_mask") is None
    assert inputs.side_of([x[0], x[1]], torch.ones(2, 4), "a_mask") is None
    assert inputs.side_of(x, torch.ones(3, 3), "a_mask") is None
    for mask in (None, torch.ones(3, 4), torch.ones(1, 4)):
        side = inputs.side_of(x, mask, "a_mask")
        assert side.tokens is x and (mask is None or side.mask.shape == (3, 4))
    one = inputs.side_of([x[0]], None, "a_mask")
    assert one.lengths == [4] and torch.equal(one.items[0], x[0])
    assert inputs.side_of(x[0], None, "a_mask").tokens.shape == (1, 4, 5)


def test_numbers_become_float32():
    whole = torch.tensor([[1, 2]])
    assert inputs.side_of([whole, whole], None, "a_mask").items[1].dtype == torch.float32
    assert inputs.side_of([whole.double()], None, "a_mask").items[0].dtype == F64
    assert inputs.side_of(whole[None], None, "a_mask").tokens.dtype == torch.float32


def test_a_mask_that_all_share():
    x = torch.randn(3, 2, 4, 5)
    shared = torch.ones(1, 2, 4)
    assert inputs.each(shared, x).shape == (3, 2, 4)
    for other in (torch.ones(3, 2, 4), torch.ones(2, 2, 4), torch.ones(1, 4), torch.ones(1, 2, 4, 5)):
        assert inputs.each(other, x) is other
    assert inputs.each(None, x) is None


def test_whether_a_mask_fits():
    x = torch.randn(3, 4, 5)
    assert inputs.mask_fits(None, x) and inputs.mask_fits(torch.ones(3, 4), x)
    for mask in (torch.ones(3, 3), torch.ones(3), torch.ones(3, 4, 5), [[1] * 4] * 3):
        assert not inputs.mask_fits(mask, x)
    assert not inputs.mask_fits(torch.ones(3, 4, device="meta"), x)


def test_where_scores_go():
    cpu, meta = torch.ones(2, 3), torch.ones(2, 3, device="meta")
    for documents, queries, wanted in (
        (meta, cpu, "meta"), (cpu, meta, "cpu"), ([meta], [cpu], "meta"), (cpu.numpy(), meta, "meta"),
        (cpu.numpy(), cpu.numpy(), "cpu"), ([cpu.numpy()], [meta], "meta"),
    ):  # fmt: skip
        assert inputs.home_of(documents, queries) == torch.device(wanted)


def test_where_a_call_is_scored(monkeypatch):
    home = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for device, wanted in ((None, "cpu"), ("cpu", "cpu"), ("cuda:1", "cuda:1"), ("cuda", "cuda:3")):
        assert chunks._place(device, home) == torch.device(wanted)
    assert chunks._place(None, torch.device("cuda", 2)) == torch.device("cuda", 2)


def test_whether_tokens_learn():
    x = torch.ones(1)
    assert not inputs.learns(x) and inputs.learns(x.clone().requires_grad_())
    with torch.no_grad():
        assert not inputs.learns(x.clone().requires_grad_())


def test_what_is_kept():
    x = torch.ones(2, 3, 2)
    assert inputs.kept(x, None) is None and inputs.kept(x, torch.ones(2, 3)) is None
    x[0, 1, 0] = x[1, 2] = 0
    assert inputs.kept(x, None).tolist() == [[True] * 3, [True, True, False]]
    assert inputs.kept(x, torch.tensor([[0, 2, 1], [0, 0, 0]])).tolist() == [[False, True, True], [False] * 3]
    assert inputs.kept(x.to("meta"), torch.ones(2, 3, device="meta")) is not None
    taken = []

    def asked(tokens):
        taken.append(inputs.kept(tokens, None) is None)
        return tokens + 1

    torch.compile(asked, fullgraph=True, backend="eager")(torch.ones(2, 3, 2))
    assert taken == [False]


# ---- blocks of documents ----


def some(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


@pytest.mark.parametrize(
    ("budget", "blocks"), [(48, 4), (47, 7), (1, 7), (0, 7), (72, 3), (96, 2), (168, 1), (10**9, 1)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_padded_documents_that_are_scored_elsewhere_go_a_block_at_a_time(budget, blocks, masked):
    """Of 7 documents of 4 tokens. A device with an index is another than one without, to PyTorch."""
    Q, D = some(3, 5, 6), some(7, 4, 6)
    D[2], D[3, 2:] = 0, 0
    options = {"b_mask": torch.rand(7, 4) < 0.6} if masked else {}
    wanted = of("maxsim")(Q, D, **options)
    with counted(maxsim=blocks):
        scores = ours.maxsim(Q, D, device="cpu:0", chunk_elements=budget, **options)
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)
    with counted(maxsim=1):
        ours.maxsim(Q, D, chunk_elements=budget, **options)


@pytest.mark.parametrize("d", [1, 2, 6])
def test_lists_go_a_block_at_a_time(d):
    """Documents of 4, 3, 7 and 1 tokens by 8 at a time; pairs of 9, 4 and 10 by 13 at a time."""
    Q, D = [some(n, d) for n in (5, 1, 3)], [some(n, d) for n in (4, 3, 7, 1)]
    wanted = of("maxsim")(Q, D), of("maxsim_pairwise")(Q, D[:3])
    with counted(maxsim_varlen=2, maxsim_pairs_packed=2):
        found = ours.maxsim(Q, D, chunk_elements=8 * d), ours.maxsim_pairwise(Q, D[:3], chunk_elements=13 * d)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    with counted(maxsim_varlen=3, maxsim_pairs_packed=3):
        ours.maxsim(Q, D, chunk_elements=8 * d - 1)
        ours.maxsim_pairwise(Q, D[:3], chunk_elements=12 * d)
    with counted(maxsim_varlen=1, maxsim_pairs_packed=1):
        ours.maxsim(Q[:1], D[:1])
        ours.maxsim_pairwise(Q[:1], D[:1])


def test_padded_pairs_are_one_call_and_a_token_of_one_element_counts_once():
    """Its own code would cut pairs by the budget, one at a time here."""
    Q, D = some(3, 5, 6), some(3, 7, 6)
    with counted(maxsim=1):
        ours.maxsim_pairwise(Q, D, chunk_elements=1)
    with counted(maxsim=2):
        ours.maxsim(some(2, 3, 1), some(8, 1, 1), device="cpu:0", chunk_elements=4)


@pytest.mark.parametrize("form", ["tensors", "lists"])
@pytest.mark.parametrize("counts", [(3, 2), (2, 3), (1, 3), (3, 1)])
def test_other_numbers_of_queries_and_documents_are_no_pairs(counts, form):
    Q, D = some(counts[0], 5, 6), some(counts[1], 7, 6)
    given = (Q, D) if form == "tensors" else (list(Q), list(D))
    for name in ("maxsim_pairwise", "mean_maxsim_pairwise"):
        assert_same(name, *given)
        with pytest.raises(ValueError, match="same number of items"):
            getattr(ours, name)(*given)


@pytest.mark.parametrize("name", ["_maxsim_score_documents", "_maxsim_score_pairs"])
def test_chunks_with_masks_that_do_not_fit(name):
    """Its own function takes these, and stretches a mask of one row or one column."""
    score = {"_maxsim_score_documents": chunks.score_chunk, "_maxsim_score_pairs": chunks.score_pairs}[name]
    own = getattr(originals.module(originals.SIMILARITY), name)
    Q, D, q_mask, d_mask = some(3, 5, 6), some(3, 7, 6), torch.rand(3, 5) < 0.6, torch.rand(3, 7) < 0.6
    for a_mask in (None, q_mask, q_mask[:1], q_mask[:, :1], q_mask[:2], q_mask[:, :4]):
        for b_mask in (None, d_mask, d_mask[:1], d_mask[:, :1], d_mask[:2], d_mask[:, :6]):
            wanted, found = outcome(own, Q, D, a_mask, b_mask), outcome(score, Q, D, a_mask, b_mask)
            if isinstance(wanted, type):
                assert found is wanted
            else:
                torch.testing.assert_close(found, wanted)
    for a, b in ((Q[0], D), (Q, D[0]), (Q[0], D[0]), (Q[None], D[None])):
        wanted, found = outcome(own, a, b, None, None), outcome(score, a, b, None, None)
        assert found is wanted if isinstance(wanted, type) else torch.equal(found, wanted)


NOTHING = {
    "a dim of 0": lambda n, length: torch.zeros(n, length, 0),
    "no token": lambda n, length: torch.zeros(n, 0, 4),
    "no item": lambda n, length: torch.zeros(0, length, 4),
}


@pytest.mark.parametrize("form", ["tensors", "lists", "tensor and list", "list and tensor"])
@pytest.mark.parametrize("kind", NOTHING)
@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise", "mean_maxsim", "mean_maxsim_pairwise"])
def test_calls_with_nothing_to_score(name, kind, form):
    Q, D = NOTHING[kind](2, 3), NOTHING[kind](2, 5)
    Q = list(Q) if form in ("lists", "list and tensor") else Q
    D = list(D) if form in ("lists", "tensor and list") else D
    for device in (None, "cpu", "cpu:0"):
        assert_same(name, Q, D, device=device)


@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise"])
def test_a_device_by_its_name(name):
    Q, D = some(3, 5, 6), some(3, 7, 6)
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        assert_same(name, Q, D, device=device)
        assert_same(name, list(Q), list(D), device=device)
    with counted(maxsim=1):
        getattr(ours, name)(Q, D, device="cpu")


# ---- groups of documents ----


def groups(*shape):
    """Documents, of which one has a row of zeros and one has no token."""
    D = some(*shape)
    D[0, 0, -2:] = D[-1, -1] = 0
    return D


MASKS = {
    "fits": lambda: torch.rand(3, 2, 7) < 0.6,
    "long": lambda: (torch.rand(3, 2, 7) < 0.6).long(),
    "flat": lambda: torch.rand(6, 7) < 0.6,
    "one group's": lambda: torch.rand(1, 2, 7) < 0.6,
    "too short": lambda: torch.rand(3, 2, 6) < 0.6,
    "of the groups": lambda: torch.rand(3, 2) < 0.6,
    "array": lambda: (torch.rand(3, 2, 7) < 0.6).numpy(),
    "list": lambda: (torch.rand(3, 2, 7) < 0.6).tolist(),
}
GROUPED = ["colbert_scores", "mean_colbert_scores", "colbert_kd_scores", "mean_colbert_kd_scores"]
XTR = ["xtr_scores", "xtr_kd_scores"]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", GROUPED + XTR)
def test_masks_of_groups(name, kind):
    assert_same(name, some(3, 5, 6), groups(3, 2, 7, 6), documents_mask=MASKS[kind]())


@pytest.mark.parametrize("name", GROUPED + XTR)
def test_query_masks_of_groups(name):
    Q, D = some(3, 5, 6), groups(3, 2, 7, 6)
    Q[1, 3:] = 0
    mask = torch.rand(3, 5) < 0.6
    for given in (
        mask,
        mask[:1],
        mask.long(),
        torch.rand(3, 5),
        torch.rand(3, 4) < 0.6,
        mask[0],
        mask.numpy(),
    ):
        assert_same(name, Q, D, queries_mask=given)
    assert_same(name, Q.double(), D.double(), queries_mask=torch.rand(3, 5, dtype=F64))


@pytest.mark.parametrize("name", GROUPED + XTR)
def test_ranks_and_counts_of_groups(name):
    Q, D = some(3, 5, 6), groups(3, 2, 7, 6)
    sides = [
        (Q[0], D), (Q, D[0]), (Q, D[0, 0]), (Q, D[None]), (Q[None], D), (Q[:2], D), (Q, D[:2]),
        (Q[:1], D[:1]), (Q, D[..., :0, :]), (Q, D[..., :4]), (Q, D.double()), (Q.numpy(), D.numpy()),
        (list(Q), list(D)), ((9 * Q).int(), (9 * D).int()),
    ]  # fmt: skip
    for a, b in sides:
        assert_same(name, a, b)


@pytest.mark.parametrize("name", ["colbert_scores", "mean_colbert_scores"])
def test_no_documents_in_groups(name):
    """Its own code has no scores to put together then, and raises an error of torch.cat."""
    Q, D = torch.ones(3, 5, 6), torch.ones(3, 2, 7, 6)
    assert getattr(ours, name)(Q[:0], D[:0]).shape == (0, 0)
    assert getattr(ours, name)(Q, D[:, :0]).shape == (3, 0)


def test_which_groups_go_by_the_kernels():
    Q, D, mask = some(3, 5, 6), groups(3, 2, 7, 6), MASKS["fits"]()
    bools = torch.rand(3, 5) < 0.6
    for name in GROUPED:
        with counted(maxsim=1):
            getattr(ours, name)(Q, D)
        with counted(maxsim=1):
            getattr(ours, name)(Q, D, bools, mask)
    with counted(maxsim=1):
        ours.colbert_scores(Q[:2], D)
    for top_k in (1, 2, 42, 43):
        with counted(xtr_winners=1):
            ours.xtr_scores(Q, D, bools, MASKS["flat"](), top_k=top_k)


def test_groups_of_other_ranks_are_left_to_its_own_xtr():
    Q, D = some(3, 5, 6), groups(3, 2, 7, 6)
    for a, b in ((Q[0], D), (Q[None], D), (Q, D[0]), (Q, D[None]), (Q, D[..., :4])):
        assert isinstance(xtr._scores(a, b, None, None, 9), str)
    assert xtr._scores(Q, D, None, None, 9).shape == (3, 6)


@pytest.mark.parametrize("top_k", [0, -1, True, 2.0, None, "3", 1, 2, 41, 42, 43])
@pytest.mark.parametrize("name", XTR)
def test_counts_of_selected_tokens(name, top_k):
    assert_same(name, some(3, 5, 6), some(3, 2, 7, 6), top_k=top_k)


def test_a_document_whose_score_is_nan_is_no_hit_of_the_evaluator():
    best = ranking._Best(3)
    best.add(torch.tensor([[1.0, torch.nan], [torch.nan] * 2]), torch.tensor([2, 0]))
    best.add(torch.tensor([[torch.nan, -torch.inf], [torch.nan] * 2]), torch.tensor([3, 1]))
    hits = [{"corpus_id": "c", "score": 1.0}, {"corpus_id": "b", "score": -torch.inf}]
    assert ranking._listed(best, ["a", "b", "c", "d"], 2) == [hits, []]
