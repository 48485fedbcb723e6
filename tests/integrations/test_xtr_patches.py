"""XTR scores of Sentence Transformers and of PyLate, release by release, before and after the patches."""

import functools

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction.integrations import sentence_transformers as ours
from tests.support import side_by_side
from tests.support.cases import mask
from tests.support.side_by_side import Encoder, called, loss_and_gradient, measured, no_topk, texts

F64 = torch.float64
XTR_PYLATE = [v for v in side_by_side.releases("pylate") if tuple(map(int, v.split("."))) >= (1, 5)]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
unchanged = functools.partial(side_by_side.assert_unchanged, without=no_topk, **CLOSE)


@pytest.fixture
def xtr(st):
    return st.xtr


@pytest.fixture(scope="module", params=XTR_PYLATE)
def pylate_release(request):
    with side_by_side.pylate(request.param) as module:
        yield module


def grouped(device, dtype=F64, groups=4, padded=True):
    """Unit tokens, and many similarities below 0. Rows of zeros are padding; where a mask counts them their
    similarities tie, and nothing says which of them torch.topk selects."""
    unit = torch.nn.functional.normalize
    Q = unit(torch.randn(4, 5, 3, dtype=dtype, device=device), dim=-1)
    D = unit(torch.randn(groups, 3, 7, 3, dtype=dtype, device=device), dim=-1)
    if padded:
        Q[1, 3:] = 0
        D[-1, 1, 4:] = 0
    return Q, D


def masks(device, kind):
    """(queries', documents')."""
    if kind is None:
        return {}
    d_mask = mask((4, 3, 7), device, "holes")
    d_mask[..., 0] = True
    q_mask = {
        "bool": torch.rand(4, 5, device=device) < 0.6,
        "long": (torch.rand(4, 5, device=device) < 0.6).long(),
        "weights": torch.rand(4, 5, device=device) * (torch.rand(4, 5, device=device) < 0.7),
        "documents": None,
        "shared": torch.rand(1, 5, device=device) < 0.6,
    }[kind]
    return {"queries_mask": q_mask, "documents_mask": d_mask.long() if kind == "long" else d_mask}


# ---- Sentence Transformers ----

ST_NAMES = ["xtr_scores", "xtr_kd_scores", "xtr_scores_pairwise"]
KINDS = [None, "bool", "long", "weights", "documents", "shared"]
TOP_K = [1, 9, 40, 84, 256]


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ST_NAMES)
def test_sentence_transformers(xtr, device, name, kind, top_k):
    """In both dtypes by turns: each meets every two of a function, a kind of masks and top_k."""
    dtype = (torch.float32, F64)[(ST_NAMES.index(name) + KINDS.index(kind) + TOP_K.index(top_k)) % 2]
    Q, D = grouped(device, dtype, padded=kind is None)
    options = masks(device, kind)
    if name == "xtr_scores_pairwise":
        D = D[:, 0]
        if "documents_mask" in options:
            options["documents_mask"] = options["documents_mask"][:, 0]

    def measure(functions):
        return measured(functools.partial(getattr(functions, name), top_k=top_k), Q, D, **options)

    wanted = unchanged("sentence-transformers", lambda: measure(xtr))
    li.unpatch("sentence-transformers")
    with no_topk():
        torch.testing.assert_close(measure(ours), wanted, **CLOSE)


def test_classes_and_chunks_of_sentence_transformers(xtr, device):
    Q, D = grouped(device)
    for scores in (xtr.XTRScores(top_k=20, chunk_elements=200), xtr.XTRKDScores(top_k=20)):
        unchanged("sentence-transformers", functools.partial(measured, scores, Q, D))
        li.unpatch("sentence-transformers")


def test_an_empty_document_ranks_last(xtr, device):
    Q, D = grouped(device)
    D[1, 2] = 0
    Q[1, 3:] = 1
    none = torch.ones(4, 3, 7, dtype=torch.bool, device=device)
    none[0, 1] = False
    for options, column in (({}, 5), ({"documents_mask": none}, 1)):
        wanted = xtr.xtr_scores(Q, D, top_k=30, **options)
        scores = ours.xtr_scores(Q, D, top_k=30, **options)
        assert (scores[:, column] == -1e9).all()
        torch.testing.assert_close(scores, wanted)


@pytest.mark.parametrize("top_k", [0, -1, True, "of 3 dims", "of another d"])
def test_what_it_refuses_it_refuses_in_its_own_words(xtr, top_k):
    Q, D = grouped("cpu")
    D, top_k = {"of 3 dims": (D[0], 9), "of another d": (D[..., :2], 9)}.get(top_k, (D, top_k))
    side_by_side.assert_refused_as_before("sentence-transformers", lambda: xtr.xtr_scores(Q, D, top_k=top_k))


def test_disabled_and_unpatched(xtr, monkeypatch):
    Q, D = grouped("cpu")
    score = functools.partial(xtr.xtr_scores, Q, D, top_k=9)
    side_by_side.assert_left_alone("sentence-transformers", score, "1")
    assert called(score) == {"xtr_winners": 1}
    li.unpatch("sentence-transformers")
    assert not called(score)
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    assert torch.equal(ours.xtr_kd_scores(Q, D, top_k=9), xtr.xtr_kd_scores(Q, D, top_k=9))
    assert not called(ours.xtr_kd_scores, Q, D, top_k=9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(xtr, device, dtype):
    """Similarities are not rounded: closer to those of float64 inputs than its own."""
    unit = torch.nn.functional.normalize
    Q = unit(torch.randn(4, 8, 32, device=device), dim=-1).to(dtype)
    D = unit(torch.randn(4, 2, 9, 32, device=device), dim=-1).to(dtype)
    wanted = xtr.xtr_scores(Q.double(), D.double(), top_k=20)
    torch.testing.assert_close(ours.xtr_scores(Q, D, top_k=20), wanted, rtol=1e-5, atol=1e-5)


def test_compiled(xtr):
    Q, D = grouped("cpu", torch.float32)
    wanted = xtr.xtr_scores(Q, D, top_k=9)
    li.patch("sentence-transformers")
    compiled = torch.compile(functools.partial(xtr.xtr_scores, top_k=9), backend="aot_eager")
    torch.testing.assert_close(compiled(Q, D), wanted)


ST_LOSSES = {
    "MultiVectorMultipleNegativesRankingLoss": lambda xtr: xtr.XTRScores(top_k=20),
    "CachedMultiVectorMultipleNegativesRankingLoss": lambda xtr: xtr.XTRScores(top_k=20),
    "MultiVectorDistillKLDivLoss": lambda xtr: xtr.XTRKDScores(top_k=20),
    "MultiVectorMarginMSELoss": lambda xtr: functools.partial(xtr.xtr_scores_pairwise, top_k=20),
}


@pytest.mark.parametrize("name", ST_LOSSES)
def test_losses_of_sentence_transformers(st, device, name):
    batch = texts(device, (5, 6), (5, 9), (5, 7), shortest=2)
    labels = None if "Ranking" in name else torch.randn(5, 2, device=device).double()
    options = {"mini_batch_size": 2} if name.startswith("Cached") else {}
    loss = getattr(st.losses, name)(Encoder(device), similarity_fct=ST_LOSSES[name](st.xtr), **options)
    wanted = unchanged("sentence-transformers", lambda: loss_and_gradient(loss, batch, labels))
    assert wanted[1].any()


# ---- PyLate ----


def pylate_masks(device, kind):
    options = masks(device, kind)
    if kind == "documents":
        options.pop("queries_mask")
    return options


@pytest.mark.parametrize("k", TOP_K[:-1])
@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("name", ["XTRScores", "XTRKDScores"])
def test_pylate(pylate, device, name, kind, k):
    """Of 84 tokens; no document has a masked token where all are selected, which would score -inf. Dtypes by
    turns, as above."""
    dtype = (torch.float32, F64)[((name == "XTRScores") + KINDS.index(kind) + TOP_K.index(k)) % 2]
    Q, D = grouped(device, dtype, padded=False)
    options = pylate_masks(device, kind)
    if k > 30:
        options.pop("documents_mask", None)
    score = getattr(pylate.scores, name)(k=k)
    unchanged("pylate", lambda: measured(score, Q, D, **options))


def test_a_document_that_is_selected_whole_may_score_below_zero(pylate, device):
    Q = torch.tensor([[[1.0, 0.0]]], device=device)
    D = torch.tensor([[[[-1.0, 0.0], [-2.0, 0.0]]], [[[-3.0, 0.0], [4.0, 0.0]]]], device=device)
    for k in (1, 2, 3, 4):
        wanted = unchanged("pylate", functools.partial(measured, pylate.scores.XTRScores(k=k), Q, D))
        li.unpatch("pylate")
    assert wanted[0][0].tolist() == pytest.approx([-1000, 4])


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive", "Distillation"])
def test_losses_of_pylate(pylate, device, name):
    shapes, metric, labels = [(5, 6), (5, 9), (5, 9)], pylate.scores.XTRScores(k=20), None
    if name == "Distillation":
        shapes, metric = [(4, 6), (12, 9)], pylate.scores.XTRKDScores(k=20)
        labels = torch.randn(4, 3, device=device).double()
    options = {"mini_batch_size": 3} if name == "CachedContrastive" else {}
    batch = texts(device, *shapes, shortest=2)
    loss = getattr(pylate.losses, name)(Encoder(device), score_metric=metric, **options)
    assert unchanged("pylate", lambda: loss_and_gradient(loss, batch, labels))[1].any()


def test_default_instances_arrays_and_chunks_of_pylate(pylate):
    rng = np.random.default_rng(0)
    Q = rng.standard_normal((4, 20, 8)).astype(np.float32)
    D = rng.standard_normal((4, 2, 40, 8)).astype(np.float32)

    def results():
        chunks = pylate.scores.XTRScores(k=5, document_chunk_size=3)
        return pylate.scores.xtr_scores(Q, D), pylate.scores.xtr_kd_scores(Q, D), chunks(Q, D)

    unchanged("pylate", results, rtol=1.3e-6)
    assert called(results) == {"xtr_winners": 3}


def test_what_pylate_refuses_it_refuses_itself(pylate):
    Q, D = grouped("cpu")
    li.patch("pylate")
    with pytest.raises(RuntimeError, match="out of range"):
        pylate.scores.XTRScores(k=85)(Q, D)
    with pytest.raises((RuntimeError, ValueError)):
        pylate.scores.XTRScores(k=3)(Q, D[0])


def test_pylate_unpatched_disabled_and_by_its_backend(pylate, monkeypatch):
    Q, D = grouped("cpu")
    score = pylate.scores.XTRScores(k=9)
    own = pylate.scores.XTRScores._score
    wanted = score(Q, D)
    li.patch("pylate")
    compiled = pylate.scores.XTRScores(k=9)
    compiled.compile(backend="eager")
    assert pylate.scores.XTRScores._score is not own

    def left(variable, said):
        monkeypatch.setenv(variable, said)
        assert torch.equal(score(Q, D), wanted) and not called(score, Q, D)
        monkeypatch.delenv(variable)

    left("LATE_INTERACTION_DISABLE", "1")
    if pylate.__version__ != "1.5.0":
        left("PYLATE_SCORES_BACKEND", "torch")
    torch.testing.assert_close(compiled(Q, D), wanted)
    li.unpatch("pylate")
    assert pylate.scores.XTRScores._score is own
    torch.testing.assert_close(compiled(Q, D), wanted)
    assert torch.equal(score(Q, D), wanted) and not called(score, Q, D) and not called(compiled, Q, D)
