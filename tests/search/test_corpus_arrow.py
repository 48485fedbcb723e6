"""Columns of Arrow and parquet files as corpora: memory that is shared, and messages that name the row.

pyarrow is no package of the other tests: tests/search/test_lancedb.py says how these run.
"""

import sys

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction import codecs
from late_interaction.corpus import Corpus, CorpusError, _parquet
from late_interaction.lik.varlen import maxsim_varlen
from tests.lancedb_environment import here
from tests.support.coded import stored_as
from tests.support.packed import pack_sequences

pa = pytest.importorskip("pyarrow") if here("pyarrow") else None
pq = pytest.importorskip("pyarrow.parquet") if here("pyarrow") else None
needs_pyarrow = pytest.mark.skipif(pa is None, reason="pyarrow is not installed: make lancedb runs these")
LENGTHS = [3, 0, 7, 40, 1, 33, 0]


def test_without_pyarrow(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ImportError, match=r"Arrow arrays need pyarrow: pip install 'late-interaction\[arrow\]'"
    ):
        Corpus.from_arrow([[[1.0]]])


def documents(lengths=LENGTHS, d=4):
    return [torch.randn(n, d) for n in lengths]


def column(docs, inner="fixed", value="float32", large=False):
    """A column of these documents."""
    list_of = pa.large_list if large else pa.list_
    own = {"float16": np.float16}.get(value, float)
    rows = [[[own(y) for y in token] for token in x.tolist()] for x in docs]
    value = {"float32": pa.float32(), "float16": pa.float16(), "float64": pa.float64()}[value]
    token = pa.list_(value, docs[0].shape[1]) if inner == "fixed" else list_of(value)
    return pa.array(rows, list_of(token))


def values_of(array):
    """Where the values of a column begin."""
    return array.values.values.buffers()[1].address


@needs_pyarrow
@pytest.mark.parametrize("inner", ["fixed", "list"])
@pytest.mark.parametrize("value", ["float32", "float16"])
@pytest.mark.parametrize("large", [False, True])
def test_layouts(inner, value, large):
    docs = documents()
    array = column(docs, inner, value, large)
    corpus = Corpus.from_arrow(array)
    assert (corpus.d, corpus.dtype, len(corpus)) == (4, getattr(torch, value), len(docs))
    for got, x in zip(corpus, docs, strict=True):
        assert torch.equal(got, x.to(corpus.dtype))
    assert corpus.shards[0].tokens.data_ptr() == values_of(array)


@needs_pyarrow
@pytest.mark.parametrize("inner", ["fixed", "list"])
def test_slices_share_memory(inner):
    docs = documents()
    array = column(docs, inner)
    for start, stop in ((0, 3), (2, 6), (3, 4), (6, 7), (5, 5)):
        corpus = Corpus.from_arrow(array[start:stop], d=4)
        assert len(corpus) == stop - start
        for got, x in zip(corpus, docs[start:stop], strict=True):
            assert torch.equal(got, x)
        if corpus.tokens:
            skipped = sum(LENGTHS[:start]) * 4 * 4
            assert corpus.shards[0].tokens.data_ptr() == values_of(array) + skipped


@needs_pyarrow
def test_slices_of_every_level():
    """A column whose tokens, and whose values, are slices of longer arrays."""
    values = pa.array(torch.arange(48.0).tolist(), pa.float32())
    tokens = pa.FixedSizeListArray.from_arrays(values[4:44], 4)[1:]
    array = pa.ListArray.from_arrays(pa.array([0, 2, 2, 5, 9], pa.int32()), tokens)[1:]
    corpus = Corpus.from_arrow(array)
    expected = torch.arange(48.0)[8:].view(-1, 4)
    assert [x.tolist() for x in corpus] == [[], expected[2:5].tolist(), expected[5:9].tolist()]
    assert corpus.shards[0].tokens.data_ptr() == values.buffers()[1].address + (8 + 8) * 4


@needs_pyarrow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_chunks_are_shards_and_score_where_they_lie(dtype, device):
    docs, ids = documents(LENGTHS * 3), [str(i) for i in range(21)]
    whole = pa.chunked_array([column(docs[:9], value=dtype), column(docs[9:10], value=dtype),
                              column(docs[10:], value=dtype)])  # fmt: skip
    corpus = Corpus.from_arrow(whole, ids=ids)
    assert [shard.documents for shard in corpus.shards] == [9, 1, 11] and list(corpus.ids) == ids
    assert [x.tokens.data_ptr() for x in corpus.shards if len(x.tokens)] == [
        values_of(chunk) for chunk, x in zip(whole.chunks, corpus.shards, strict=True) if len(x.tokens)
    ]
    tokens, offsets = pack_sequences([x.to(corpus.dtype).to(device) for x in docs])
    Q = torch.randn(3, 5, 4, device=device).to(corpus.dtype)
    scores = maxsim_varlen(Q.flatten(0, 1), tokens, torch.arange(0, 16, 5, device=device), offsets)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :8]
    for chunk_bytes in (50, 1 << 20):
        got = corpus.search(Q, 8, normalize=False, chunk_bytes=chunk_bytes)
        assert torch.equal(got.indices, order) and torch.equal(got.scores, scores.gather(1, order))


@needs_pyarrow
def test_searching_copies_nothing(monkeypatch):
    """What the operator is given on the CPU is the memory of the column."""
    from late_interaction.corpus import _queries

    array, given = column(documents()), []

    def spy(Q, D, **options):
        given.append((D.values.data_ptr(), D.values.shape[0]))
        return li.maxsim(Q, D, **options)

    monkeypatch.setattr(_queries, "maxsim", spy)
    Corpus.from_arrow(array, normalized=True).search(torch.randn(2, 4), 3, chunk_bytes=10 * 16)
    begin, rows = values_of(array), 0
    for address, count in given:
        assert address == begin + rows * 16 or count == 0
        rows += count
    assert len(given) > 2 and rows == sum(LENGTHS)


@needs_pyarrow
def test_nothing():
    fixed = pa.list_(pa.list_(pa.float32(), 4))
    for array in (pa.array([], fixed), pa.chunked_array([], fixed), pa.array([[], []], fixed)):
        corpus = Corpus.from_arrow(array)
        assert (len(corpus), corpus.tokens, corpus.d) == (len(array), 0, 4)
        assert [shard.tokens.shape for shard in corpus.shards] == [(0, 4)]  # no token that no document has
        assert corpus.search(torch.randn(2, 4), 3, keep_empty=True).scores.tolist() == [0.0] * len(array)
    with pytest.raises(ValueError, match="d must be given for lists without a single token"):
        Corpus.from_arrow(pa.array([[], []], pa.list_(pa.list_(pa.float32()))))
    assert Corpus.from_arrow(pa.array([[], []], pa.list_(pa.list_(pa.float32()))), d=4).d == 4


def columns_without_rows():
    """A column may have any type, or none, as a writer of no rows may leave it."""
    inner = pa.float16(), pa.float32()
    kinds = [pa.list_(kind(x)) for x in inner for kind in (pa.list_, pa.large_list, lambda y: pa.list_(y, 8))]
    return [pa.array([], kind) for kind in (*kinds, pa.null())]


def nothing_is_found(corpus):
    """By queries of any d, unless the corpus says what it is."""
    assert (len(corpus), corpus.tokens, list(corpus)) == (0, 0, [])
    for d in (corpus.d,) if corpus.d else (1, 8):
        for normalize in (True, False):
            scores, indices = corpus.search(torch.randn(3, 2, d), 5, normalize=normalize)
            assert scores.shape == indices.shape == (3, 0) and indices.dtype == torch.int64
    mined = li.hard_negatives(torch.randn(2, 3, corpus.d or 8), corpus, [[], []])
    assert mined.indices.tolist() == [[-1] * 3] * 2
    assert [len(part) for part in corpus.parts(2)] == [0, 0]


@needs_pyarrow
def test_columns_without_rows():
    for array in columns_without_rows():
        for column in (array, pa.chunked_array([array, array]), pa.chunked_array([], array.type)):
            corpus = Corpus.from_arrow(column, ids=[])
            nothing_is_found(corpus)
            assert corpus.d == getattr(getattr(array.type, "value_type", None), "list_size", 0)
            nothing_is_found(Corpus.from_arrow(column, d=8))
    with pytest.raises(TypeError, match=r"documents must be list<fixed_size_list<float>> or .*, got null"):
        Corpus.from_arrow(pa.array([None, None]))


@needs_pyarrow
@pytest.mark.parametrize(
    "options", [{}, {"codec": codecs.Int8(), "normalize": True}, {"d": 8}, {"codec": True}], ids=str
)
def test_parquet_files_without_rows(options, tmp_path):
    if options.get("codec") is True:
        options = {"codec": codecs.Residual.train(torch.randn(30, 8), 4)}
    for i, array in enumerate(columns_without_rows()):
        fixed = hasattr(getattr(array.type, "value_type", None), "list_size")
        source, path = tmp_path / f"{i}.parquet", tmp_path / str(i)
        pq.write_table(pa.table({"vector": array, "id": pa.array([], pa.string())}), source)
        given = {"progress": pytest.fail} | options
        nothing_is_found(Corpus.from_parquet(source, path, column="vector", id_column="id", **given))
        corpus = Corpus.open(path, verify=True)
        known = fixed or "d" in options or isinstance(options.get("codec"), codecs.Residual)
        assert corpus.d == (8 if known else 0)
        with Corpus.create(tmp_path / f"more {i}", d=16) as builder:
            builder.extend(corpus)  # what has no documents has none of another d
            builder.add([torch.ones(2, 16)])
        assert len(Corpus.open(tmp_path / f"more {i}")) == 1


@needs_pyarrow
@pytest.mark.parametrize("d", [1, 2, 3])
def test_d_is_that_of_the_only_token(d):
    """Wherever it is: in the first, a middle or the last document, and in the second chunk."""
    kind = pa.list_(pa.list_(pa.float32()))
    token = [[2.0] * d]
    for rows in ([token], [token, []], [[], token], [[], token, []], [[], [], token, [], []]):
        for array in (pa.array(rows, kind), pa.chunked_array([pa.array([[]], kind), pa.array(rows, kind)])):
            corpus = Corpus.from_arrow(array)
            assert corpus.d == d and corpus.tokens == 1 and len(corpus) == len(array)
        before = pa.array([token, [], *rows, token], kind)[1 : 2 + rows.index(token)]
        with pytest.raises(ValueError, match="d must be given for lists without a single token"):
            Corpus.from_arrow(before)


@needs_pyarrow
@pytest.mark.parametrize(
    "row, length", [([[1.0, 2.0], [3.0]], 1), ([[1.0, 2.0, 3.0]], 3), ([[1.0, 2.0], [], [3.0]], 0)]
)
def test_tokens_of_other_lengths_name_their_row(row, length):
    """The first of them."""
    kind = pa.list_(pa.list_(pa.float32()))
    rows = [[[0.0, 0.0]], [], row, [[1.0, 2.0], [4.0, 5.0, 6.0]]]
    message = f"^row 2 of documents must have tokens of 2 values, got one of {length}$"
    with pytest.raises(ValueError, match=message):
        Corpus.from_arrow(pa.array(rows, kind))
    with pytest.raises(ValueError, match=r"^row 0 of documents must have tokens of 1 values, got one of 0$"):
        Corpus.from_arrow(pa.array([[[]]], kind))


@needs_pyarrow
@pytest.mark.parametrize("inner", ["fixed", "list"])
@pytest.mark.parametrize(
    "row, message",
    [
        (None, "row 5 of documents must not be null"),
        ([[1.0, 2.0], None], "row 5 of documents has a null for a token"),
        ([[1.0, 2.0], [3.0, None]], "row 5 of documents has a null for a value"),
    ],
)
def test_nulls_name_their_row(inner, row, message):
    token = pa.list_(pa.float32(), 2) if inner == "fixed" else pa.list_(pa.float32())
    rows = [[[1.0, 1.0]], [], [[2.0, 2.0], [3.0, 3.0]]]
    first = pa.array(rows, pa.list_(token))
    array = pa.chunked_array([first, pa.array([*rows[:2], row, rows[0]], pa.list_(token))])
    with pytest.raises(ValueError, match=message):
        Corpus.from_arrow(array)
    assert len(Corpus.from_arrow(array[:5])) == 5  # a null outside a slice is no matter
    with pytest.raises(ValueError, match=message.replace("5", "2")):
        Corpus.from_arrow(array[3:])
    with pytest.raises(ValueError, match=message.replace("5", "8")):
        Corpus.from_arrow(pa.chunked_array([first, *array.chunks]))


@needs_pyarrow
@pytest.mark.parametrize(
    "make, options, message",
    [
        (lambda: [[1.0]], {}, "documents must be a pyarrow.Array or pyarrow.ChunkedArray, got list"),
        (
            lambda: column(documents(), value="float64"),
            {},
            r"got list<\w+: fixed_size_list<.*double>.*: cast it",
        ),
        (lambda: pa.array([[1.0]]), {}, r"documents must be list<fixed_size_list<float>>"),
        (lambda: column(documents()), {"d": 5}, "d must be that of the lists, 4, or None, got 5"),
        (lambda: column(documents()), {"d": 3}, "d must be that of the lists, 4, or None, got 3"),
        (lambda: column(documents()), {"ids": ["a"]}, "ids must be as many as the 7 documents, got 1"),
        (
            lambda: pa.array([[], [[1.0, 2.0]], [[1.0, 2.0], [1.0]]], pa.list_(pa.list_(pa.float32()))),
            {},
            "row 2 of documents must have tokens of 2 values, got one of 1",
        ),
    ],
)
def test_refused(make, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Corpus.from_arrow(make(), **options)


# ---- parquet ----


def write_parquet(path, docs, inner="fixed", ids=None, group=10):
    import pyarrow.parquet as pq

    table = pa.table({"id": ids or list(range(len(docs))), "vector": column(docs, inner)})
    pq.write_table(table, path, row_group_size=group)
    return path


@needs_pyarrow
@pytest.mark.parametrize("inner", ["fixed", "list"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_parquet(inner, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(_parquet, "_ROWS", 4)
    docs = documents(LENGTHS * 4)
    source = write_parquet(tmp_path / "file.parquet", docs, inner)
    seen = []
    options = {"normalize": False, **stored_as(dtype), "progress": lambda *x: seen.append(x)}
    corpus = Corpus.from_parquet(source, tmp_path / "corpus", column="vector", id_column="id", **options)
    assert list(corpus.ids) == [str(i) for i in range(28)] and seen[-1] == (28, 28) and len(seen) >= 7
    for got, x in zip(corpus, docs, strict=True):
        torch.testing.assert_close(got, x, atol=0 if dtype == torch.float32 else 0.02, rtol=0)


@needs_pyarrow
@pytest.mark.parametrize("kept", [3, 10, 17, 28])
def test_parquet_resumed(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(_parquet, "_ROWS", 4)
    docs = documents(LENGTHS * 4)
    source = write_parquet(tmp_path / "file.parquet", docs, ids=[f"d{i}" for i in range(28)])
    with pytest.raises(KeyError), Corpus.create(tmp_path / "corpus", d=4) as builder:
        builder.add(docs[:kept], [f"d{i}" for i in range(kept)])
        builder.flush()
        raise KeyError
    with pytest.raises(CorpusError, match="not finished"):
        Corpus.open(tmp_path / "corpus")
    options = {"column": "vector", "id_column": "id", "resume": True}
    corpus = Corpus.from_parquet(source, tmp_path / "corpus", **options)
    whole = Corpus.from_parquet(source, tmp_path / "whole", column="vector", id_column="id")
    assert list(corpus.ids) == list(whole.ids) and all(map(torch.equal, corpus, whole))


@needs_pyarrow
@pytest.mark.parametrize(("done", "groups", "batches"), [
    (0, [0, 1, 2], [(0, 7), (7, 7), (14, 7), (21, 7)]),
    (3, [0, 1, 2], [(3, 4), (7, 7), (14, 7), (21, 7)]),
    (7, [0, 1, 2], [(7, 7), (14, 7), (21, 7)]),
    (10, [1, 2], [(10, 7), (17, 7), (24, 4)]),
    (17, [1, 2], [(17, 7), (24, 4)]),
    (27, [2], [(27, 1)]),
    (28, [], []),
])  # fmt: skip
@pytest.mark.parametrize("id_column", [None, "id"])
def test_what_is_read_of_a_parquet_file(done, groups, batches, id_column, tmp_path, monkeypatch):
    """Row groups of 10, 10 and 8 rows, 7 rows at a time: no group and no row that the folder has already."""
    import pyarrow.parquet as pq

    monkeypatch.setattr(_parquet, "_ROWS", 7)
    docs = documents([1] * 28)
    file = pq.ParquetFile(write_parquet(tmp_path / "file.parquet", docs))
    read, iterate = [], file.iter_batches
    monkeypatch.setattr(file, "iter_batches", lambda n, row_groups, columns: (
        read.append((n, [*row_groups], columns)), iterate(n, row_groups=row_groups, columns=columns))[1]
    )  # fmt: skip
    names = ["vector"] if id_column is None else ["vector", "id"]
    found = list(_parquet._batches(file, "vector", id_column, done))
    assert read == [(7, groups, names)] and [(row, len(batch)) for row, batch in found] == batches
    for row, batch in found:
        assert batch.schema.names == names
        values = torch.tensor(batch.column(0).to_pylist()).squeeze(1)
        assert torch.equal(values, torch.cat(docs[row : row + len(batch)]))


@needs_pyarrow
def test_d_of_a_parquet_file(tmp_path, monkeypatch):
    """That of the first token, which may be in a later batch of rows."""
    monkeypatch.setattr(_parquet, "_ROWS", 4)
    source = write_parquet(tmp_path / "file.parquet", documents([0] * 6 + [2, 0, 3]), "list")
    assert Corpus.from_parquet(source, tmp_path / "corpus", column="vector").d == 4
    source = write_parquet(tmp_path / "empty.parquet", documents([0] * 6), "list")
    with pytest.raises(ValueError, match="d must be given for lists without a single token, got None"):
        Corpus.from_parquet(source, tmp_path / "empty", column="vector")
    corpus = Corpus.from_parquet(source, tmp_path / "given", column="vector", d=4)
    assert (len(corpus), corpus.tokens, corpus.d) == (6, 0, 4)


@needs_pyarrow
def test_ids_of_a_parquet_file_that_are_null(tmp_path, monkeypatch):
    monkeypatch.setattr(_parquet, "_ROWS", 4)
    ids = [str(i) for i in range(14)]
    source = write_parquet(tmp_path / "file.parquet", documents(LENGTHS * 2), ids=[*ids[:9], None, *ids[10:]])
    with pytest.raises(ValueError, match=r"^row 9 of the ids must not be null$"):
        Corpus.from_parquet(source, tmp_path / "corpus", column="vector", id_column="id")
    with pytest.raises(KeyError, match="the file has no column 'ids', only id, vector"):
        Corpus.from_parquet(source, tmp_path / "other", column="vector", id_column="ids")


@needs_pyarrow
def test_parquet_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_parquet, "_ROWS", 4)
    docs = documents(LENGTHS * 2)
    docs[9][0, 2] = float("nan")
    source = write_parquet(tmp_path / "file.parquet", docs)
    with pytest.raises(KeyError, match="the file has no column 'text', only id, vector"):
        Corpus.from_parquet(source, tmp_path / "corpus", column="text")
    with pytest.raises(ValueError, match=r"vector\[9\] must have tokens that float16 can hold"):
        Corpus.from_parquet(source, tmp_path / "corpus", column="vector")
    with pytest.raises(CorpusError, match="not finished"):
        Corpus.open(tmp_path / "corpus")
