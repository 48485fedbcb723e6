"""Columns of Arrow and parquet files as corpora: memory that is shared, and messages that name the row.

pyarrow is no package of the other tests: tests/search/test_environments.py runs these.
"""

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction import codecs
from late_interaction.corpus import Corpus, CorpusError, _parquet
from late_interaction.lik.varlen import maxsim_varlen
from tests.lancedb_environment import needs_pyarrow, pa
from tests.support.corpora import best_of, stored_as
from tests.support.packed import pack_sequences

pytestmark = needs_pyarrow
pq = pytest.importorskip("pyarrow.parquet") if pa else None
LENGTHS = [3, 0, 7, 40, 1, 33, 0]


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


def test_slices_of_every_level():
    """A column whose tokens, and whose values, are slices of longer arrays."""
    values = pa.array(torch.arange(48.0).tolist(), pa.float32())
    tokens = pa.FixedSizeListArray.from_arrays(values[4:44], 4)[1:]
    array = pa.ListArray.from_arrays(pa.array([0, 2, 2, 5, 9], pa.int32()), tokens)[1:]
    corpus = Corpus.from_arrow(array)
    expected = torch.arange(48.0)[8:].view(-1, 4)
    assert [x.tolist() for x in corpus] == [[], expected[2:5].tolist(), expected[5:9].tolist()]
    assert corpus.shards[0].tokens.data_ptr() == values.buffers()[1].address + (8 + 8) * 4


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
    for chunk_bytes in (50, 1 << 20):
        got = corpus.search(Q, 8, normalize=False, chunk_bytes=chunk_bytes)
        assert all(map(torch.equal, got, best_of(scores, 8)))


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


def test_columns_without_rows():
    for array in columns_without_rows():
        for column in (array, pa.chunked_array([array, array]), pa.chunked_array([], array.type)):
            corpus = Corpus.from_arrow(column, ids=[])
            nothing_is_found(corpus)
            assert corpus.d == getattr(getattr(array.type, "value_type", None), "list_size", 0)
            nothing_is_found(Corpus.from_arrow(column, d=8))
    with pytest.raises(TypeError, match=r"documents must be list<fixed_size_list<float>> or .*, got null"):
        Corpus.from_arrow(pa.array([None, None]))


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
    ],
)
def test_refused(make, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Corpus.from_arrow(make(), **options)


# ---- parquet ----


def write_parquet(path, docs, inner="fixed", ids=None, group=10):
    table = pa.table({"id": ids or list(range(len(docs))), "vector": column(docs, inner)})
    pq.write_table(table, path, row_group_size=group)
    return path


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
    again = Corpus.from_parquet(source, tmp_path / "again", column="vector", total=70, **options)
    assert again.ids is None and seen[-1] == (28, 70)  # what the caller gives goes before what the file says


@pytest.mark.parametrize("kept", [0, 3, 7, 10, 17, 27, 28])
@pytest.mark.parametrize("id_column", [None, "id"])
def test_parquet_resumed(kept, id_column, tmp_path, monkeypatch):
    """Row groups of 10, 10 and 8 rows, 7 rows at a time: no group is read that the folder has already."""
    monkeypatch.setattr(_parquet, "_ROWS", 7)
    docs, ids = documents(LENGTHS * 4), [f"d{i}" for i in range(28)]
    source = write_parquet(tmp_path / "file.parquet", docs, ids=ids)
    options = {"column": "vector", "id_column": id_column}
    whole = Corpus.from_parquet(source, tmp_path / "whole", **options)
    with pytest.raises(KeyError), Corpus.create(tmp_path / "corpus", d=4) as builder:
        builder.add(docs[:kept], ids[:kept] if id_column else None)
        builder.flush()
        raise KeyError
    with pytest.raises(CorpusError, match="not finished"):
        Corpus.open(tmp_path / "corpus")
    read, iterate = [], pq.ParquetFile.iter_batches

    def watched(file, rows, row_groups, columns):
        read.append((rows, [*row_groups], columns))
        return iterate(file, rows, row_groups=row_groups, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    corpus = Corpus.from_parquet(source, tmp_path / "corpus", resume=True, **options)
    groups = [i for i, stop in enumerate((10, 20, 28)) if kept < stop]
    assert read == [(7, groups, ["vector", "id"] if id_column else ["vector"])]
    assert all(torch.equal(x, y) for x, y in zip(corpus, whole, strict=True))
    assert len(corpus) == 28 and (id_column is None or list(corpus.ids) == ids)


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


def test_ids_of_a_parquet_file_that_are_null(tmp_path, monkeypatch):
    monkeypatch.setattr(_parquet, "_ROWS", 4)
    ids = [str(i) for i in range(14)]
    source = write_parquet(tmp_path / "file.parquet", documents(LENGTHS * 2), ids=[*ids[:9], None, *ids[10:]])
    with pytest.raises(ValueError, match=r"^row 9 of the ids must not be null$"):
        Corpus.from_parquet(source, tmp_path / "corpus", column="vector", id_column="id")
    with pytest.raises(KeyError, match="the file has no column 'ids', only id, vector"):
        Corpus.from_parquet(source, tmp_path / "other", column="vector", id_column="ids")


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
