"""Edges of a search of a corpus: no documents, other devices, the size of its chunks, searches by a group."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from late_interaction.corpus import Corpus, _chunks, _parquet, _search
from late_interaction.corpus.builder import CorpusBuilder
from tests.search.test_corpus import build, documents, packed
from tests.support.coded import INT8


def test_queries_of_several_devices():
    """The message names the query that is elsewhere than the first one."""
    Q = [torch.ones(3, 16), torch.ones(2, 16), torch.ones(2, 16, device="meta")]
    with pytest.raises(ValueError, match=r"Q\[2\] must be on cpu as Q\[0\], got meta"):
        packed(documents()).search(Q, 3)


@pytest.mark.parametrize("Q", [torch.ones(2, 16, device="meta"), [torch.ones(2, 16, device="meta")]])
def test_queries_on_another_device_than_the_corpus(Q):
    with pytest.raises(ValueError, match=r"Q must be on the device of the corpus .* got meta and cpu"):
        packed(documents()).search(Q, 3)


@pytest.mark.parametrize(
    ("queries", "options", "size", "most"),
    [
        (1, {"normalize": True}, 256 << 20, 6),
        (2, {"normalize": True}, 256 << 20, 3),
        (7, {"normalize": True}, 256 << 20, 1),  # a chunk has a document, however many queries there are
        (2, {}, 256 << 20, 3),
        (2, {"normalize": True, "chunk_bytes": 1000}, 1000, 3),
    ],
)
@pytest.mark.parametrize("normalized", [True, False])
def test_chunks_are_bounded_by_scores_and_bytes(
    queries, options, size, most, normalized, monkeypatch, tmp_path
):
    """By the bytes that the documentation names. A CPU normalizes smaller chunks, each in a copy."""
    corpus = build(tmp_path / "corpus", documents(), torch.float32, normalize=normalized)
    if options == {"normalize": True} and not normalized:
        size = 4 << 20
    monkeypatch.setattr(_search, "MOST_SCORES", 6)
    plan, given = _chunks.plan, []
    monkeypatch.setattr(
        _chunks, "plan", lambda shards, *limits: given.append(limits) or plan(shards, *limits)
    )
    corpus.search(torch.randn(queries, 3, 16), 4, **options)
    assert given == [(size, most)]


# ---- from a file ----


def test_options_of_a_corpus_of_a_file(tmp_path, monkeypatch):
    """What the caller gives goes before what is found in the file."""
    docs = documents()

    def copy(source, column, id_column, create, d):
        assert (source, column, id_column, d) == ("file", "vector", None, None)
        with create(d=16, total=100) as builder:
            assert isinstance(builder, CorpusBuilder)
            builder.add(docs)

    monkeypatch.setattr(_parquet, "copy", copy)
    seen = []
    options = {"codec": INT8, "total": 70, "progress": lambda *x: seen.append(x)}
    corpus = Corpus.from_parquet("file", tmp_path / "corpus", column="vector", **options)
    assert corpus.d == 16 and corpus.dtype is torch.int8 and len(corpus) == len(docs)
    assert seen[-1] == (len(docs), 70)


@pytest.mark.parametrize("make", [Corpus.from_packed, Corpus.from_numpy, Corpus.from_arrow])
def test_tokens_count_as_not_normalized_unless_the_caller_says(make):
    assert inspect.signature(make).parameters["normalized"].default is False


@pytest.mark.parametrize("starts, most", [(None, 2**30), (torch.zeros(2, dtype=torch.int64), 2**28)])
def test_a_chunk_has_as_many_tokens_as_operators_take(starts, most):
    asked = []

    def ranges(most_tokens, most_documents):
        asked.append((most_tokens, most_documents))
        return [(0, 2)]

    shard = SimpleNamespace(tokens=torch.empty(4, 16), documents=2, starts=starts, ranges=ranges)
    assert [chunk.place for chunk in _chunks.plan([shard, shard], 1 << 50, 10)] == [0, 2]
    assert asked == [(most, 10)] * 2
