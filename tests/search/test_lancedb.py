"""LanceDB and Qdrant, embedded in this process: the reranker, and the ranking of theirs and of float64.

make lancedb makes an environment that has both; tests/search/test_environments.py runs this file over there.
"""

import asyncio
import pickle
import tempfile
from functools import partial

import pytest
import torch

import late_interaction as li
from late_interaction import Corpus
from late_interaction.integrations import lancedb
from tests.build.test_readme import examples
from tests.lancedb_environment import here, pa
from tests.support.corpora import created, in_memory

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not here("lancedb", "pyarrow"), reason="needs lancedb: make lancedb runs these"),
]
maxsim_reranker = partial(lancedb.maxsim_reranker, normalize=True)  # cosines, as the tables' distances


def documents(count=60, d=8):
    return [torch.randn(n, d) for n in torch.randint(1, 12, (count,)).tolist()]


def float64_scores(Q, docs, normalize=True):
    unit = torch.nn.functional.normalize if normalize else lambda x, dim: x
    queries = unit(Q.double(), dim=-1)
    return torch.stack([(queries @ unit(x.double(), dim=-1).T).amax(1).sum() for x in docs])


def ranking(scores):
    return scores.sort(descending=True, stable=True).indices.tolist()


@pytest.fixture
def table(tmp_path):
    """The table, and its documents."""
    import lancedb

    docs = documents()
    vector = pa.array([x.tolist() for x in docs], pa.list_(pa.list_(pa.float32(), 8)))
    text = [f"common rare{i % 5}" for i in range(len(docs))]
    data = pa.table({"id": list(range(len(docs))), "text": text, "vector": vector})
    made = lancedb.connect(tmp_path).create_table("documents", data)
    made.create_fts_index("text")
    return made, docs


def check(results, Q, docs, normalize=True):
    """Results are in float64's order, with its scores."""
    found = results["id"].to_pylist()
    scores = float64_scores(Q, [docs[i] for i in found], normalize)
    assert len(set(found)) == len(found) and ranking(scores) == list(range(len(found)))
    relevance = torch.tensor(results["_relevance_score"].to_pylist())
    torch.testing.assert_close(relevance.double(), scores, rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize("as_function", [True, False])
def test_vector_search(as_function, table, device):
    table, docs = table
    Q, other, texts = torch.randn(4, 8), torch.randn(3, 8), []

    def encode(text):
        texts.append(text)
        return Q.numpy()

    reranker = maxsim_reranker(encode if as_function else Q, device=device)
    search = table.search(other.numpy()).distance_type("cosine").limit(20)
    before = search.to_arrow()["id"].to_pylist()
    results = search.rerank(reranker, query_string="the text").to_arrow()
    assert sorted(check(results, Q, docs)) == sorted(before)
    assert texts == ["the text"] * as_function
    assert results.column_names == ["id", "text", "vector", "_relevance_score"]


@pytest.mark.parametrize("normalize", [True, False])
def test_full_text_search(normalize, table):
    table, docs = table
    Q = torch.randn(4, 8)
    reranker = maxsim_reranker(Q, normalize=normalize, return_score="all")
    results = table.search("rare3", query_type="fts").limit(50).rerank(reranker).to_arrow()
    assert sorted(check(results, Q, docs, normalize)) == list(range(3, 60, 5))
    assert None not in results["_score"].to_pylist()


def hybrid(table, Q, text, reranker, limit=15):
    search = table.search(query_type="hybrid").vector(Q.numpy()).text(text).distance_type("cosine")
    return search.limit(limit).rerank(reranker).to_arrow()


@pytest.mark.parametrize("return_score", ["relevance", "all"])
def test_hybrid_search(return_score, table):
    table, docs = table
    Q = torch.randn(4, 8)
    results = hybrid(table, Q, "rare2", maxsim_reranker(lambda text: Q, return_score=return_score), 60)
    found = check(results, Q, docs)
    assert sorted(found) == list(range(60))
    assert (
        ("_score" in results.column_names) == ("_distance" in results.column_names) == (return_score == "all")
    )
    if return_score == "all":
        scored = [x is not None for x in results["_score"].to_pylist()]
        assert scored == [i % 5 == 2 for i in found] and None not in results["_distance"].to_pylist()


def test_hybrid_search_of_nothing(table):
    table, docs = table
    Q = torch.randn(4, 8)
    for score in ("relevance", "all"):
        reranker = maxsim_reranker(Q, return_score=score)
        assert len(check(hybrid(table, Q, "nowhere", reranker), Q, docs)) == 15
    none = table.search("nowhere", query_type="fts").rerank(maxsim_reranker(Q)).to_arrow()
    assert len(none) == 0 and "_relevance_score" in none.column_names


def reranked(rows):
    """Results of two chunks, by a query of the first dim."""
    vector = pa.array(rows, pa.list_(pa.list_(pa.float32(), 2)))
    results = pa.table({"id": list(range(len(rows))), "vector": pa.chunked_array([vector[:4], vector[4:]])})
    return maxsim_reranker(torch.tensor([[1.0, 0.0]])).rerank_vector("", results)


def test_ties_keep_the_order_of_the_results():
    got = reranked([[[1.0, 0.0]], [[0.0, 1.0]], [[2.0, 0.0]], [[0.0, 3.0]]] * 3)
    assert got["id"].to_pylist() == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]


def test_rows_that_take_no_rank_come_last():
    """Without a token, or with a score of NaN: behind negative scores, in the order of the results."""
    got = reranked([[], [[-1.0, 0.0]], [[torch.nan, 0.0]], [[-0.6, 0.8]], []])
    assert got["id"].to_pylist() == [3, 1, 0, 2, 4]
    scores = torch.tensor(got["_relevance_score"].to_pylist())
    torch.testing.assert_close(scores, torch.tensor([-0.6, -1.0, *[-torch.inf] * 3]))


def test_several_searches_and_the_asynchronous_interface(table, tmp_path):
    import lancedb

    table, docs = table
    Q = torch.randn(4, 8)
    both = [table.search(torch.randn(2, 8).numpy()).distance_type("cosine").with_row_id(True).limit(20)
            for _ in range(2)]  # fmt: skip
    results = maxsim_reranker(Q).rerank_multivector([x.to_arrow() for x in both], "", deduplicate=True)
    check(results, Q, docs)

    async def search():
        database = await lancedb.connect_async(tmp_path)
        there = await database.open_table("documents")
        query = there.query().nearest_to(list(Q.numpy())).distance_type("cosine").limit(10)
        return await query.rerank(maxsim_reranker(Q), query_string="text").to_arrow()

    check(asyncio.run(search()), Q, docs)


def test_refused(table):
    table, _ = table
    Q = torch.randn(4, 8)
    search = table.search(Q.numpy()).distance_type("cosine").select(["id"])
    with pytest.raises(ValueError, match=r"results must have the column 'vector' .*: name it in select\(\)"):
        search.rerank(maxsim_reranker(Q), query_string="").to_arrow()
    search = table.search(Q.numpy()).distance_type("cosine")
    with pytest.raises(ValueError, match=r"query must be, or make, \[L, d\] embeddings, got \[8\]"):
        search.rerank(maxsim_reranker(lambda text: Q[0]), query_string="").to_arrow()
    with pytest.raises(ValueError, match=r"d must be that of the lists, 8, or None, got 5"):
        search.rerank(maxsim_reranker(Q[:, :5]), query_string="").to_arrow()
    with pytest.raises(TypeError, match=r"query must be a function or a torch.Tensor, got list"):
        maxsim_reranker([[1.0]])
    with pytest.raises(ValueError, match=r"return_score must be 'relevance' or 'all', got 'some'"):
        maxsim_reranker(Q, return_score="some")


def test_the_ranking_of_lancedb(table):
    """Its own search of a multivector column, that of a corpus over what it returns, and one of the table."""
    table, docs = table
    Q = torch.randn(6, 8)
    theirs = table.search(Q.numpy()).distance_type("cosine").limit(60).to_arrow()
    ids, distances = list(map(str, theirs["id"].to_pylist())), torch.tensor(theirs["_distance"].to_pylist())
    assert ids == list(map(str, ranking(float64_scores(Q, docs))))
    for corpus in (Corpus.from_arrow(theirs["vector"], ids=ids), lancedb.open_corpus(table, id_column="id")):
        found = corpus.search(Q, 60, normalize=True)
        zero = float(
            distances[0] + found.scores[0]
        )  # the number of query tokens, or 1, as the release has it
        assert found.ids == ids and round(zero, 4) in (6, 1)
        torch.testing.assert_close(zero - found.scores, distances, rtol=1e-4, atol=1e-4)


# ---- a table as a corpus ----


def rows_read(monkeypatch):
    """The rows that corpora read from now on."""
    read, tokens = [], lancedb._Rows.tokens

    def watched(self, first, stop):
        if self._last is None or self._last[0] != (first, stop):
            read.append((first, stop))
        return tokens(self, first, stop)

    monkeypatch.setattr(lancedb._Rows, "tokens", watched)
    return read


@pytest.mark.parametrize("block_bytes", [1, 400, 32 << 20])
def test_a_table_is_searched_where_it_lies(block_bytes, table, device, monkeypatch):
    monkeypatch.setattr(lancedb, "_BLOCK_BYTES", block_bytes)
    table, docs = table
    table.delete("id = 7 or id = 59")
    table.add(table.search().where("id = 3").to_arrow())  # a fragment of its own
    kept = [*(i for i in range(59) if i != 7), 3]
    read = rows_read(monkeypatch)
    corpus = lancedb.open_corpus(table)
    assert not read and len(corpus) == 59 and (corpus.d, corpus.dtype) == (8, torch.float32)
    Q = torch.randn(4, 6, 8, device=device)
    for normalize in (True, False):
        read.clear()
        scores, order = corpus.search(Q, 59, normalize=normalize)
        wanted = [
            float64_scores(q.cpu(), [docs[i] for i in kept], normalize).sort(descending=True) for q in Q
        ]
        wanted = torch.stack([x.values for x in wanted]).float()
        torch.testing.assert_close(scores.cpu(), wanted, rtol=1e-5, atol=1e-5)
        assert set(order[0].tolist()) == set(range(59))
        again = normalize or len(corpus.shards) > 1  # the only block is kept
        assert read == [shard.span for shard in corpus.shards] * again
    assert (len(corpus.shards) == 1) == (block_bytes > 1000)
    assert torch.equal(corpus[57], docs[58]) and torch.equal(corpus[58], docs[3])


def test_a_table_stays_as_it_is_and_is_imported(table, tmp_path, monkeypatch):
    monkeypatch.setattr(lancedb, "_BLOCK_BYTES", 1000)
    table, docs = table
    corpus = lancedb.open_corpus(table, id_column="id")
    for own in (corpus, corpus.parts(3)[1], pickle.loads(pickle.dumps(corpus.parts(3)[1]))):
        for change in (lambda own=own: own.delete([0]), own.compact, lambda own=own: own.extend(corpus)):
            with pytest.raises(ValueError, match="documents of a table of LanceDB stay as they are: extend"):
                change()
        first = int(own.ids[0])
        assert all(torch.equal(x, docs[first + i]) for i, x in enumerate(own))
    codec = li.codecs.Int8()
    mine = created(tmp_path / "mine", [torch.ones(2, 8)], ["first"], codec=codec)
    mine.extend(corpus)
    assert list(mine.ids) == ["first", *map(str, range(60))]
    assert torch.equal(mine["17"], codec.decode(codec.encode(docs[17])).values[0])
    assert table.version == corpus.shards[0].table._version


def test_a_table_at_another_version_is_refused(table):
    table, docs = table
    corpus = lancedb.open_corpus(table)
    version = table.version
    table.delete("id = 3")
    with pytest.raises(ValueError, match=f"table must be at version {version}, .*: open it again"):
        corpus.search(torch.randn(4, 8))
    assert len(lancedb.open_corpus(table)) == 59
    table.checkout(version)
    assert torch.equal(corpus[3], docs[3])


def test_tables_and_columns_that_are_no_corpus(table, tmp_path):
    import lancedb as database

    table, _ = table
    for bad, message in (
        ({"column": "text"}, "must be list<fixed_size_list<float>>"),
        ({"column": 3}, "column must be the name of a column, got int"),
        ({"id_column": 3}, "id_column must be the name of a column, got int"),
    ):
        with pytest.raises(TypeError, match=message):
            lancedb.open_corpus(table, **bad)
    with pytest.raises(ValueError, match="id_column must be one of id, text, vector, got 'name'"):
        lancedb.open_corpus(table, id_column="name")
    with pytest.raises(TypeError, match=r"table must be a lancedb\.table\.Table, got list"):
        lancedb.open_corpus([])
    made = database.connect(tmp_path / "other")
    fixed = pa.list_(pa.list_(pa.float16(), 2))
    holes = pa.table({"vector": pa.array([[[1.0, 2.0]], None, [[1.0, 2.0]]], fixed)})
    with pytest.raises(ValueError, match="row 1 of documents must not be null"):
        lancedb.open_corpus(made.create_table("holes", holes))
    ragged = pa.table({"vector": pa.array([[[1.0, 2.0]]], pa.list_(pa.list_(pa.float32())))})
    with pytest.raises(TypeError, match="column must be list<fixed_size_list<float>>, got list<item: list"):
        lancedb.open_corpus(made.create_table("ragged", ragged))
    none = lancedb.open_corpus(made.create_table("none", schema=pa.schema([("vector", fixed)])))
    assert len(none) == 0 and none.search(torch.randn(3, 2)).scores.shape == (0,)
    blank = pa.table({"vector": pa.array([[], [[1.0, 2.0]], []], fixed)})
    found = lancedb.open_corpus(made.create_table("blank", blank)).search(torch.ones(1, 2).half(), 3)
    assert found.indices.tolist() == [1, -1, -1] and found.scores[0] == 3


def test_the_ranking_of_qdrant():
    pytest.importorskip("qdrant_client", reason="qdrant-client is not installed: make lancedb runs this")
    from qdrant_client import QdrantClient, models

    docs, Q = documents(), torch.randn(6, 8)
    client = QdrantClient(":memory:")
    comparator = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    config = models.VectorParams(size=8, distance=models.Distance.COSINE, multivector_config=comparator)
    client.create_collection("documents", vectors_config=config)
    client.upsert("documents", [models.PointStruct(id=i, vector=x.tolist()) for i, x in enumerate(docs)])
    theirs = client.query_points("documents", query=Q.tolist(), limit=60).points
    scores, order = in_memory(docs).search(Q, 60, normalize=True)
    assert order.tolist() == [x.id for x in theirs] == ranking(float64_scores(Q, docs))
    torch.testing.assert_close(scores, torch.tensor([x.score for x in theirs]), rtol=1e-5, atol=1e-5)


def test_the_examples_of_the_guide(tmp_path, monkeypatch):
    Q = torch.nn.functional.normalize(torch.randn(4, 3, 128), dim=-1)
    names = {
        "torch": torch,
        "li": li,
        "tempfile": tempfile,
        "normalize": torch.nn.functional.normalize,
        "Q": Q,
    }
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pages = ("docs/guide/search.md", "docs/guide/libraries.md")
    blocks = [x for page in pages for x in examples(page) if "import pyarrow" in x]
    assert len(blocks) == 3 and "import lancedb" in blocks[2]
    for block in blocks:
        exec(compile(block, "guide", "exec"), names)
    assert names["rows"].tolist() == [1]
    scores = names["best"]["_relevance_score"].to_pylist()
    assert scores == sorted(scores, reverse=True) and len(scores) == 10
    exact = names["exact"]
    assert exact.ids[0] == names["best"]["name"][0].as_py() and len(exact.ids) == 10
    torch.testing.assert_close(exact.scores, torch.tensor(scores), rtol=1e-5, atol=1e-5)
