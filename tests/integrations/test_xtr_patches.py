"""XTR scores of Sentence Transformers and of PyLate, release by release, before and after the patches."""

import contextlib
import functools
import importlib

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction.integrations import pylate as pylate_patch
from late_interaction.integrations import sentence_transformers as ours
from late_interaction.integrations.sentence_transformers import _originals as originals
from tests.support import side_by_side
from tests.support.cases import mask

F64 = torch.float64
XTR_PYLATE = [v for v in side_by_side.releases("pylate") if tuple(map(int, v.split("."))) >= (1, 5)]


@pytest.fixture(scope="module", params=[*side_by_side.releases("sentence-transformers"), None])
def st_release(request):
    with side_by_side.sentence_transformers(request.param):
        yield importlib.import_module(originals.XTR)


@pytest.fixture
def st(st_release):
    assert not originals.exchanged()
    yield st_release
    li.unpatch("sentence-transformers")


@pytest.fixture(scope="module", params=XTR_PYLATE)
def pylate_release(request):
    stand_ins = [side_by_side.anything("datasets")]
    with side_by_side.release("pylate", "pylate", request.param, stand_ins):
        module = importlib.import_module("pylate")
        for name in ("losses", "scores"):
            importlib.import_module(f"pylate.{name}")
        yield module


@pytest.fixture
def pylate(pylate_release):
    assert not pylate_patch._ORIGINAL
    yield pylate_release
    li.unpatch("pylate")


@contextlib.contextmanager
def no_topk(monkeypatch):
    """Whoever selects from the whole grid fails."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", None)
        yield


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


def measured(score, Q, D, **options):
    """Scores and gradients, the weights' included."""
    leaves = [x.detach().clone().requires_grad_() for x in (Q, D)]
    weights = options.get("queries_mask")
    if weights is not None and weights.is_floating_point():
        options["queries_mask"] = weights.detach().clone().requires_grad_()
        leaves.append(options["queries_mask"])
    scores = score(*leaves[:2], **options)
    torch.manual_seed(1)
    factors = torch.randn(scores.shape, device=scores.device).to(scores.dtype)
    return scores.detach(), *torch.autograd.grad(scores, leaves, factors)


def assert_equal(found, wanted, rtol=1e-5, atol=1e-6):
    assert found[0].dtype == wanted[0].dtype
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


class Encoder(torch.nn.Module):
    """What the losses of both libraries need of a model."""

    def __init__(self, device):
        super().__init__()
        self.table = torch.nn.Embedding(5000, 8, dtype=F64, device=device)
        self.skiplist, self.do_query_expansion = [7, 11], False

    def forward(self, features, task=None):
        embeddings = torch.nn.functional.normalize(self.table(features["input_ids"]), dim=-1)
        return {"token_embeddings": embeddings, "attention_mask": features["attention_mask"].bool()}


def texts(device, *shapes):
    """Texts of distinct tokens: the similarities of equal ones tie."""
    ids = torch.randperm(5000, device=device)
    for rows, length in shapes:
        taken, ids = ids[: rows * length].view(rows, length), ids[rows * length :]
        kept = torch.arange(length, device=device) < torch.randint(2, length + 1, (rows, 1), device=device)
        yield {"input_ids": taken, "attention_mask": kept.long()}


# ---- Sentence Transformers ----

ST_NAMES = ["xtr_scores", "xtr_kd_scores", "xtr_scores_pairwise"]
KINDS = [None, "bool", "long", "weights", "documents", "shared"]
TOP_K = [1, 9, 40, 84, 256]


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ST_NAMES)
def test_sentence_transformers(st, device, monkeypatch, name, kind, top_k):
    """In both dtypes by turns: each meets every two of a function, a kind of masks and top_k."""
    dtype = (torch.float32, F64)[(ST_NAMES.index(name) + KINDS.index(kind) + TOP_K.index(top_k)) % 2]
    Q, D = grouped(device, dtype, padded=kind is None)
    options = masks(device, kind)
    if name == "xtr_scores_pairwise":
        D = D[:, 0]
        if "documents_mask" in options:
            options["documents_mask"] = options["documents_mask"][:, 0]
    score = functools.partial(getattr(st, name), top_k=top_k)
    wanted = measured(score, Q, D, **options)
    with no_topk(monkeypatch):
        assert_equal(measured(functools.partial(getattr(ours, name), top_k=top_k), Q, D, **options), wanted)
    li.patch("sentence-transformers")
    with no_topk(monkeypatch):
        assert_equal(measured(score, Q, D, **options), wanted)


def test_classes_and_chunks_of_sentence_transformers(st, device, monkeypatch):
    Q, D = grouped(device)
    scores, kd_scores = st.XTRScores(top_k=20, chunk_elements=200), st.XTRKDScores(top_k=20)
    wanted = measured(scores, Q, D), measured(kd_scores, Q, D)
    li.patch("sentence-transformers")
    with no_topk(monkeypatch):
        assert_equal(measured(scores, Q, D), wanted[0])
        assert_equal(measured(kd_scores, Q, D), wanted[1])


def test_an_empty_document_ranks_last(st, device):
    Q, D = grouped(device)
    D[1, 2] = 0
    Q[1, 3:] = 1
    none = torch.ones(4, 3, 7, dtype=torch.bool, device=device)
    none[0, 1] = False
    for options, column in (({}, 5), ({"documents_mask": none}, 1)):
        wanted = st.xtr_scores(Q, D, top_k=30, **options)
        scores = ours.xtr_scores(Q, D, top_k=30, **options)
        assert (scores[:, column] == -1e9).all()
        torch.testing.assert_close(scores, wanted)


def test_arrays_integers_and_more_documents_than_queries(st):
    Q, D = (x.float() for x in grouped("cpu", groups=6))
    for convert in (lambda x: x.numpy(), lambda x: (20 * x).int(), lambda x: x.tolist()):
        wanted = st.xtr_scores(convert(Q), convert(D), top_k=33)
        torch.testing.assert_close(ours.xtr_scores(convert(Q), convert(D), top_k=33), wanted)
        assert wanted.shape == (4, 18)


def test_what_it_refuses_it_refuses_in_its_own_words(st):
    Q, D = grouped("cpu")
    li.patch("sentence-transformers")
    for top_k in (0, -1, True):
        with pytest.raises(ValueError, match="top_k must be a positive integer"):
            st.xtr_scores(Q, D, top_k=top_k)
    with pytest.raises((RuntimeError, ValueError)):
        st.xtr_scores(Q, D[0])
    with pytest.raises(RuntimeError):
        st.xtr_scores(Q, D[..., :2])


def test_disabled_and_unpatched(st, monkeypatch):
    Q, D = grouped("cpu")
    wanted = st.xtr_scores(Q, D, top_k=9)
    li.patch("sentence-transformers")
    with side_by_side.Calls() as calls:
        st.xtr_scores(Q, D, top_k=9)
    assert calls.of == {"xtr_winners": 1}
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    with side_by_side.Calls() as calls:
        assert torch.equal(st.xtr_scores(Q, D, top_k=9), wanted)
        assert torch.equal(ours.xtr_kd_scores(Q, D, top_k=9), st.xtr_kd_scores(Q, D, top_k=9))
    assert not calls.of
    monkeypatch.delenv("LATE_INTERACTION_DISABLE")
    li.unpatch("sentence-transformers")
    with side_by_side.Calls() as calls:
        assert torch.equal(st.xtr_scores(Q, D, top_k=9), wanted)
    assert not calls.of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(st, device, dtype):
    """Similarities are not rounded: closer to those of float64 inputs than its own."""
    unit = torch.nn.functional.normalize
    Q = unit(torch.randn(4, 8, 32, device=device), dim=-1).to(dtype)
    D = unit(torch.randn(4, 2, 9, 32, device=device), dim=-1).to(dtype)
    wanted = st.xtr_scores(Q.double(), D.double(), top_k=20)
    torch.testing.assert_close(ours.xtr_scores(Q, D, top_k=20), wanted, rtol=1e-5, atol=1e-5)


def test_compiled(st):
    Q, D = grouped("cpu", torch.float32)
    wanted = st.xtr_scores(Q, D, top_k=9)
    li.patch("sentence-transformers")
    compiled = torch.compile(functools.partial(st.xtr_scores, top_k=9), backend="aot_eager")
    torch.testing.assert_close(compiled(Q, D), wanted)


ST_LOSSES = {
    "MultiVectorMultipleNegativesRankingLoss": lambda st: st.XTRScores(top_k=20),
    "CachedMultiVectorMultipleNegativesRankingLoss": lambda st: st.XTRScores(top_k=20),
    "MultiVectorDistillKLDivLoss": lambda st: st.XTRKDScores(top_k=20),
    "MultiVectorMarginMSELoss": lambda st: functools.partial(st.xtr_scores_pairwise, top_k=20),
}


@pytest.mark.parametrize("name", ST_LOSSES)
def test_losses_of_sentence_transformers(st, device, monkeypatch, name):
    losses = importlib.import_module("sentence_transformers.multi_vector_encoder.losses")
    encoder = Encoder(device)
    batch = list(texts(device, (5, 6), (5, 9), (5, 7)))
    labels = None if "Ranking" in name else torch.randn(5, 2, device=device).double()
    options = {"mini_batch_size": 2} if name.startswith("Cached") else {}
    loss = getattr(losses, name)(encoder, similarity_fct=ST_LOSSES[name](st), **options)
    wanted = side_by_side.loss_and_gradient(loss, batch, labels)
    li.patch("sentence-transformers")
    with no_topk(monkeypatch):
        assert_equal(side_by_side.loss_and_gradient(loss, batch, labels), wanted)
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
def test_pylate(pylate, device, monkeypatch, name, kind, k):
    """Of 84 tokens; no document has a masked token where all are selected, which would score -inf. Dtypes by
    turns, as above."""
    dtype = (torch.float32, F64)[((name == "XTRScores") + KINDS.index(kind) + TOP_K.index(k)) % 2]
    Q, D = grouped(device, dtype, padded=False)
    options = pylate_masks(device, kind)
    if k > 30:
        options.pop("documents_mask", None)
    score = getattr(pylate.scores, name)(k=k)
    wanted = measured(score, Q, D, **options)
    li.patch("pylate")
    with no_topk(monkeypatch):
        assert_equal(measured(score, Q, D, **options), wanted)


def test_a_document_that_is_selected_whole_may_score_below_zero(pylate, device):
    Q = torch.tensor([[[1.0, 0.0]]], device=device)
    D = torch.tensor([[[[-1.0, 0.0], [-2.0, 0.0]]], [[[-3.0, 0.0], [4.0, 0.0]]]], device=device)
    for k in (1, 2, 3, 4):
        wanted = measured(pylate.scores.XTRScores(k=k), Q, D)
        li.patch("pylate")
        assert_equal(measured(pylate.scores.XTRScores(k=k), Q, D), wanted)
        li.unpatch("pylate")
    assert wanted[0][0].tolist() == pytest.approx([-1000, 4])


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive", "Distillation"])
def test_losses_of_pylate(pylate, device, monkeypatch, name):
    encoder, labels = Encoder(device), None
    shapes, metric = [(5, 6), (5, 9), (5, 9)], pylate.scores.XTRScores(k=20)
    if name == "Distillation":
        shapes, metric = [(4, 6), (12, 9)], pylate.scores.XTRKDScores(k=20)
        labels = torch.randn(4, 3, device=device).double()
    options = {"mini_batch_size": 3} if name == "CachedContrastive" else {}
    batch = list(texts(device, *shapes))

    loss = getattr(pylate.losses, name)(encoder, score_metric=metric, **options)
    wanted = side_by_side.loss_and_gradient(loss, batch, labels)
    li.patch("pylate")
    with no_topk(monkeypatch):
        assert_equal(side_by_side.loss_and_gradient(loss, batch, labels), wanted)
    assert wanted[1].any()


def test_default_instances_arrays_and_chunks_of_pylate(pylate):
    rng = np.random.default_rng(0)
    Q = rng.standard_normal((4, 20, 8)).astype(np.float32)
    D = rng.standard_normal((4, 2, 40, 8)).astype(np.float32)

    def results():
        yield pylate.scores.xtr_scores(Q, D)
        yield pylate.scores.xtr_kd_scores(Q, D)
        yield pylate.scores.XTRScores(k=5, document_chunk_size=3)(Q, D)

    wanted = list(results())
    li.patch("pylate")
    with side_by_side.Calls() as calls:
        for one, other in zip(results(), wanted, strict=True):
            torch.testing.assert_close(one, other)
    assert calls.of == {"xtr_winners": 3}


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
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    with side_by_side.Calls() as calls:
        assert torch.equal(score(Q, D), wanted)
    assert not calls.of
    monkeypatch.delenv("LATE_INTERACTION_DISABLE")
    if pylate.__version__ != "1.5.0":
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
        with side_by_side.Calls() as calls:
            assert torch.equal(score(Q, D), wanted)
        assert not calls.of
        monkeypatch.delenv("PYLATE_SCORES_BACKEND")
    torch.testing.assert_close(compiled(Q, D), wanted)
    li.unpatch("pylate")
    assert pylate.scores.XTRScores._score is own
    with side_by_side.Calls() as calls:
        assert torch.equal(score(Q, D), wanted)
        torch.testing.assert_close(compiled(Q, D), wanted)
    assert not calls.of
