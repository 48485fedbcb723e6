"""Sentence Transformers' losses and retrieval evaluator by blocks, with the installed release: which batches
and evaluations are ours, how large the blocks are, and that nothing depends on them."""

import importlib
import logging
import zlib
from functools import partial
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import late_interaction as li
from late_interaction.integrations import sentence_transformers as ours
from late_interaction.integrations.sentence_transformers import _losses as losses
from late_interaction.integrations.sentence_transformers import _originals as originals
from late_interaction.integrations.sentence_transformers import _ranking as ranking
from late_interaction.integrations.sentence_transformers._colbert import colbert_scores

F64 = torch.float64


pytestmark = pytest.mark.usefixtures("sentence_transformers")


def some(*shape):
    return F.normalize(torch.randn(*shape, dtype=F64), dim=-1)


# ---- losses ----


class Loss:
    """What the blocks ask of a loss. Keeps how many queries were scored at a time."""

    def __init__(self, score_mini_batch_size=None):
        self.score_mini_batch_size, self.taken = score_mini_batch_size, []

    def similarity_fct(self, Q, D, queries_mask, documents_mask):
        self.taken.append(len(Q))
        return colbert_scores(Q, D, queries_mask, documents_mask)


def batch(queries=5, groups=5):
    """Queries of 3 tokens, and two documents of 7 to each."""
    Q, D = some(queries, 3, 4), some(groups, 2, 7, 4)
    q_mask, d_mask = torch.rand(queries, 3) < 0.7, torch.rand(groups, 2, 7) < 0.7
    d_mask[..., 0] = True
    return Q, D, q_mask, d_mask


def test_queries_at_a_time_where_the_kernels_do_not_score(monkeypatch):
    """As many as the loss says, whose own memory that limits. The kernels keep no similarity."""
    inputs = batch()
    wanted = colbert_scores(*inputs)
    for size in (None, 2, 5, 9):
        loss = Loss(size)
        torch.testing.assert_close(losses._scored(loss, *inputs), wanted)
        assert loss.taken == [5]
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    for size, taken in ((None, [5]), (2, [2, 2, 1]), (4, [4, 1]), (5, [5]), (9, [5])):
        loss = Loss(size)
        torch.testing.assert_close(losses._scored(loss, *inputs), wanted)
        assert loss.taken == taken


# ---- the retrieval evaluator ----


class Model:
    """Every text has tokens of its own, by this model's number."""

    def __init__(self, number=0):
        self.number = number

    def encode_query(self, texts, **_):
        return self.encode_document(texts)

    def encode_document(self, texts, **_):
        return [self.tokens(text) for text in texts]

    def tokens(self, text):
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()) + self.number)
        count = int(torch.randint(1, 6, (), generator=generator))
        return F.normalize(torch.randn(count, 4, generator=generator), dim=-1)


def evaluator(corpus=11, **options):
    """Three queries, and a corpus in whose second half the texts of the first are again."""
    kind = importlib.import_module("sentence_transformers.multi_vector_encoder.evaluation")
    queries = {f"q{i}": f"query {i}" for i in range(3)}
    documents = {f"d{(7 * i) % 11}": f"document {i % 6}" for i in range(corpus)}
    relevant = {f"q{i}": {f"d{i}", f"d{2 * i + 3}"} for i in range(3)}
    options = {
        "score_functions": {"maxsim": ours.maxsim, "mean": ours.mean_maxsim},
        "map_at_k": [8],
    } | options
    return kind.MultiVectorInformationRetrievalEvaluator(
        queries, documents, relevant, write_csv=False, **options
    )


def ranks(monkeypatch):
    """The method in the place of its own, the latter, and a list that grows by one for each ranking here."""
    kind = importlib.import_module("sentence_transformers.sentence_transformer.evaluation")
    own, taken, ranked = kind.InformationRetrievalEvaluator.compute_all_metrics, [], ranking._ranked
    monkeypatch.setattr(ranking, "_ranked", lambda *args: taken.append(args) or ranked(*args))
    return ranking.ranked_on_the_device(own), own, taken


def flat(metrics):
    return {
        (name, metric, k): value
        for name, found in metrics.items()
        for metric, values in found.items()
        for k, value in values.items()
    }


def compared(monkeypatch, made, *args, ours_ranks=True, **options):
    method, own, taken = ranks(monkeypatch)
    wanted, found = own(made(), *args, **options), method(made(), *args, **options)
    assert flat(found) == pytest.approx(flat(wanted))
    assert len(taken) == ours_ranks
    return flat(found)


def test_whose_models_and_embeddings(monkeypatch, tmp_path):
    """Lists of embeddings are ranked here, and a tensor of them by its own code, as is what is written."""
    texts = evaluator().corpus
    embedded = Model(2).encode_document(texts)
    padded = torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True)
    found = [
        compared(monkeypatch, evaluator, Model()),
        compared(monkeypatch, evaluator, Model(), corpus_model=Model(1)),
        compared(monkeypatch, evaluator, Model(), corpus_embeddings=embedded),
        compared(monkeypatch, evaluator, Model(), corpus_embeddings=padded, ours_ranks=False),
    ]
    assert found[2] == pytest.approx(found[3])
    assert found[0] != found[1] != found[2] != found[0]
    writing = partial(evaluator, write_predictions=True)
    compared(monkeypatch, evaluator, Model(), output_path=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    compared(monkeypatch, writing, Model())
    compared(monkeypatch, writing, Model(), output_path=str(tmp_path / "some"), ours_ranks=False)
    assert any((tmp_path / "some").iterdir())


def test_scores_that_are_ranked_here(monkeypatch):
    theirs = originals.module(originals.SIMILARITY)
    for score in (theirs.maxsim, theirs.mean_maxsim, ours.maxsim, ours.mean_maxsim):
        assert ranking._is_maxsim(score)
        for options in (
            {},
            {"chunk_elements": 9},
            {"length_normalize": True, "device": "cpu", "chunk_elements": 9},
        ):
            assert ranking._is_maxsim(partial(score, **options))
        assert not ranking._is_maxsim(partial(score, a_mask=None))
        assert not ranking._is_maxsim(partial(score, a_mask=None, device="cpu"))
        assert not ranking._is_maxsim(partial(score, torch.ones(1, 2)))
        assert not ranking._is_maxsim(partial(score, torch.ones(1, 2), device="cpu"))
    for other in (ours.maxsim_pairwise, len, partial(ours.maxsim_pairwise), lambda a, b: ours.maxsim(a, b)):
        assert not ranking._is_maxsim(other)
    mixed = partial(evaluator, score_functions={"a": ours.maxsim, "b": lambda a, b: 2 * ours.maxsim(a, b)})
    compared(monkeypatch, mixed, Model(), ours_ranks=False)
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    compared(monkeypatch, evaluator, Model(), ours_ranks=False)


def test_a_corpus_without_documents(monkeypatch):
    assert set(compared(monkeypatch, partial(evaluator, 0), Model()).values()) == {0}


@pytest.mark.parametrize("shown", [True, False])
def test_progress_and_log(monkeypatch, caplog, shown):
    """Its own bar over chunks of the corpus, and its own lines."""
    method, own, _ = ranks(monkeypatch)
    bars, trange = [], own.__globals__["trange"]
    monkeypatch.setitem(
        own.__globals__, "trange",
        lambda *args, **options: bars.append((args, options)) or trange(*args, **options | {"disable": True}),
    )  # fmt: skip
    lines = []
    for ranked in (own, method):
        caplog.clear()
        with caplog.at_level(logging.INFO, own.__globals__["logger"].name):
            ranked(evaluator(corpus_chunk_size=4, show_progress_bar=shown), Model())
        lines.append([record.getMessage() for record in caplog.records])
    assert bars[0] == bars[1] == ((0, 11, 4), {"desc": "Corpus Chunks", "disable": not shown})
    assert lines[0] == lines[1] and "Score-Function: mean" in lines[0]


# ---- methods that are taken over ----


def function(names, like=lambda self, model, corpus_model, corpus_embeddings, output_path: None):
    return FunctionType(like.__code__, names, "function", None, like.__closure__)


# What each of them finds in its namespace, what others find there, and how others are written.
METHODS = {
    "multi_vector_encoder.losses.MultiVectorMultipleNegativesRankingLoss.forward": (
        {"torch": torch, "F": F},
        [{"torch": torch, "F": torch}, {"torch": F, "F": F}],
        (lambda held: lambda self: held)(3),
    ),
    "sentence_transformer.evaluation.InformationRetrievalEvaluator.compute_all_metrics": (
        {"trange": None, "logger": None},
        [],
        lambda self, model, corpus_model, corpus_embeddings: None,
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_another_form_are_left_alone(monkeypatch, method):
    names, others, like = METHODS[method]
    namespaces = [{}, *({key: value} for key, value in names.items()), *others]
    kinds = [len, partial(function(names)), SimpleNamespace(__globals__=names, __closure__=None)]
    for other in (*kinds, function(names, like), *map(function, namespaces)):
        monkeypatch.setattr(f"sentence_transformers.{method}", other)
        with pytest.warns(RuntimeWarning, match=f"did not find .*{method.rpartition('.')[2]}"):
            li.patch("sentence-transformers")
        li.unpatch("sentence-transformers")
