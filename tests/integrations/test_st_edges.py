"""Sentence Transformers' calls at the edges of what the kernels take, with the installed release: which of
them the kernels score, and that the others give what its own functions give."""

import inspect

import pytest
import torch

from late_interaction.integrations import sentence_transformers as ours
from late_interaction.integrations.sentence_transformers import _chunks as chunks
from late_interaction.integrations.sentence_transformers import _originals as originals
from late_interaction.integrations.sentence_transformers import _ranking as ranking
from tests.support.side_by_side import called

F64 = torch.float64


pytestmark = pytest.mark.usefixtures("sentence_transformers")


def of(name):
    """The function of Sentence Transformers that bears a name of ours."""
    places = map(originals.module, (originals.SIMILARITY, originals.COLBERT, originals.XTR))
    return next(getattr(place, name) for place in places if hasattr(place, name))


def some(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def outcome(function, *args, **options):
    try:
        return function(*args, **options)
    except Exception as error:
        return type(error)


def assert_same_outcome(own, function, *args, rtol=None, atol=None, **options):
    """Both give the same, or raise the same kind of error."""
    wanted, found = outcome(own, *args, **options), outcome(function, *args, **options)
    if isinstance(wanted, type):
        assert found is wanted
        return
    assert isinstance(found, torch.Tensor), found
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def assert_same(name, *args, **options):
    """What ours gives and what its own gives, or the errors that they raise."""
    assert_same_outcome(of(name), getattr(ours, name), *args, rtol=1e-5, atol=1e-5, **options)


# ---- signatures ----


@pytest.mark.parametrize("name", ours.__all__)
def test_arguments_and_defaults(name):
    found, wanted = inspect.signature(getattr(ours, name)), inspect.signature(of(name))
    assert [(p.name, p.default) for p in found.parameters.values()] == [
        (p.name, p.default) for p in wanted.parameters.values()
    ]


# ---- query masks, and sides of odd forms ----

ALL_PAIRS, PAIRS = ["maxsim", "mean_maxsim"], ["maxsim_pairwise", "mean_maxsim_pairwise"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, F64, torch.int64])
@pytest.mark.parametrize("numbers", [[0, 1, 1], [0, 0, 0], [0, 1, 2], [-1, 0, 1]])
@pytest.mark.parametrize("name", ALL_PAIRS + PAIRS)
def test_a_query_mask_multiplies_the_maxima_whatever_its_numbers(name, numbers, dtype):
    mask = torch.tensor([numbers, numbers[::-1]], dtype=dtype)
    assert_same(name, some(2, 3, 5), some(2, 4, 5), a_mask=mask)
    assert_same(name, some(2, 3, 5), some(2, 4, 5), a_mask=mask[:1])


def test_a_compiled_call_has_the_same_scores():
    Q, D, mask = some(2, 3, 5), some(4, 6, 5), torch.tensor([[1.0, 0.5, 0.0]]).expand(2, 3)
    compiled = torch.compile(ours.maxsim, backend="eager")
    torch.testing.assert_close(compiled(Q, D, mask), of("maxsim")(Q, D, mask), rtol=1e-5, atol=1e-5)


def sides():
    x = some(3, 4, 5)
    return {
        "one token": x[0, 0], "four dims": x[None], "no sequence": x[:0], "sparse": x.to_sparse(), "none": [],
        "tensors of three dims": [x], "two widths": [x[0], x[0, :, :4]], "tokens": [x[0, 0], x[1, 0]],
        "two dtypes": [x[0], x[1].double(), x[2].bfloat16()], "one sequence": x[0], "one of a list": [x[0]],
        "integers": (9 * x).int(), "integers in a list": [*(9 * x).int()], "an array": x.numpy(),
        "arrays": [y.numpy() for y in x], "float64": x.double(),
        "padding": x * torch.tensor([1.0, 1, 0, 0])[:, None],
    }  # fmt: skip


@pytest.mark.parametrize("kind", sides())
def test_sides_of_any_form(kind):
    side, D = sides()[kind], some(3, 6, 5)
    for name in ALL_PAIRS + PAIRS:
        assert_same(name, side, D)
        assert_same(name, D, side)
    for mask in (torch.ones(3, 3), torch.ones(3), torch.ones(3, 4, 5), [[1] * 4] * 3, torch.rand(3, 4) < 0.5):
        assert_same("maxsim", side, D, a_mask=mask)
        assert_same("maxsim", D, side, b_mask=mask)


# ---- blocks of documents ----


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
    scores = ours.maxsim(Q, D, device="cpu:0", chunk_elements=budget, **options)
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)
    options["chunk_elements"] = budget
    assert called(ours.maxsim, Q, D, device="cpu:0", **options) == {"maxsim": blocks}
    assert called(ours.maxsim, Q, D, **options) == {"maxsim": 1}


@pytest.mark.parametrize("d", [1, 2, 6])
def test_lists_go_a_block_at_a_time(d):
    """Documents of 4, 3, 7 and 1 tokens by 8 at a time; pairs of 9, 4 and 10 by 13 at a time."""
    Q, D = [some(n, d) for n in (5, 1, 3)], [some(n, d) for n in (4, 3, 7, 1)]
    assert_same("maxsim", Q, D, chunk_elements=8 * d)
    assert_same("maxsim_pairwise", Q, D[:3], chunk_elements=13 * d)
    for most, count in ((8 * d, 2), (8 * d - 1, 3), (None, 1)):
        assert called(ours.maxsim, Q, D, chunk_elements=most) == {"maxsim_varlen": count}
    for most, count in ((13 * d, 2), (12 * d, 3), (None, 1)):
        assert called(ours.maxsim_pairwise, Q, D[:3], chunk_elements=most) == {"maxsim_pairs_packed": count}


def test_padded_pairs_are_one_call_and_a_token_of_one_element_counts_once():
    """Its own code would cut pairs by the budget, one at a time here."""
    Q, D = some(3, 5, 6), some(3, 7, 6)
    assert called(ours.maxsim_pairwise, Q, D, chunk_elements=1) == {"maxsim": 1}
    elsewhere = {"device": "cpu:0", "chunk_elements": 4}
    assert called(ours.maxsim, some(2, 3, 1), some(8, 1, 1), **elsewhere) == {"maxsim": 2}


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
            assert_same_outcome(own, score, Q, D, a_mask, b_mask)
    for a, b in ((Q[0], D), (Q, D[0]), (Q[0], D[0]), (Q[None], D[None])):
        assert_same_outcome(own, score, a, b, None, None, rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL_PAIRS + PAIRS)
def test_embeddings_of_no_dims(name):
    Q, D = torch.zeros(2, 3, 0), torch.zeros(2, 5, 0)
    for a, b in ((Q, D), (list(Q), list(D)), (Q, list(D)), (list(Q), D)):
        for device in (None, "cpu", "cpu:0"):
            assert_same(name, a, b, device=device)


@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise"])
def test_a_device_by_its_name(name):
    Q, D = some(3, 5, 6), some(3, 7, 6)
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        assert_same(name, Q, D, device=device)
        assert_same(name, list(Q), list(D), device=device)
    assert called(getattr(ours, name), Q, D, device="cpu") == {"maxsim": 1}


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
    others = torch.rand(3, 5), torch.rand(3, 4) < 0.6
    for given in (mask, mask[:1], mask.long(), *others, mask[0], mask.numpy()):
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
        for masks in ((), (bools, mask)):
            assert called(getattr(ours, name), Q, D, *masks) == {"maxsim": 1}
    assert called(ours.colbert_scores, Q[:2], D) == {"maxsim": 1}
    for top_k in (1, 2, 42, 43):
        assert called(ours.xtr_scores, Q, D, bools, MASKS["flat"](), top_k=top_k) == {"xtr_winners": 1}


def test_groups_of_other_ranks_are_left_to_its_own_xtr():
    Q, D = some(3, 5, 6), groups(3, 2, 7, 6)
    for a, b in ((Q[0], D), (Q[None], D), (Q, D[0]), (Q, D[None]), (Q, D[..., :4])):
        assert not called(outcome, ours.xtr_scores, a, b, top_k=9)


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
