"""Corpora of documents of different lengths: built, opened and searched."""

import inspect
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction import codecs
from late_interaction.corpus import Corpus, _chunks, _search, _tokens
from late_interaction.lik.varlen import maxsim_varlen
from tests.support import ref
from tests.support.calls import peak
from tests.support.cases import code_limit
from tests.support.coded import INT8, codec_of
from tests.support.corpora import CODES, best_of, created, in_memory, stored_as
from tests.support.packed import pack_sequences

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [3, 0, 7, 40, 1, 33, 64, 5, 130, 31, 32, 300, 0, 0, 17, 2] * 3
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def documents(lengths=LENGTHS, d=16, dtype=torch.float32):
    return [torch.randn(n, d).to(dtype) for n in lengths]


def build(path, docs, kind, ids=None, normalize=True, **options):
    return created(path, docs, ids, **options, **stored_as(kind, docs), normalize=normalize)


def equal(got, expected):
    got, expected = tuple(got), tuple(expected)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def close(got, expected, rounded=1e-5):
    got, expected = tuple(got), tuple(expected)
    torch.testing.assert_close(got[0], expected[0], rtol=rounded, atol=rounded)
    assert torch.equal(got[1], expected[1])


def same(got, expected):
    """Equal on a CPU. A GPU's planner may take another kernel for another number of queries or documents."""
    got, expected = tuple(got), tuple(expected)
    if got[0].is_cuda:
        torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-4)
    else:
        equal(got, expected)


# ---- scores ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("on_device", [False, True])
def test_the_bits_of_all_queries_at_once(dtype, on_device, device):
    """The planner of a GPU may choose another kernel for a small chunk, which adds up in another order."""
    docs, queries = documents(dtype=dtype), documents([32, 5, 17], dtype=dtype)
    tokens, offsets = (x.to(device) for x in pack_sequences(docs))
    Q, q_offsets = (x.to(device) for x in pack_sequences(queries))
    expected = best_of(maxsim_varlen(Q, tokens, q_offsets, offsets), 10)
    corpus = Corpus.from_packed(tokens if on_device else tokens.cpu(), offsets)
    for chunk_bytes in (1, 3000, 20_000, 1 << 30):
        queries_there = [x.to(device) for x in queries]
        found = corpus.search(queries_there, 10, normalize=False, chunk_bytes=chunk_bytes)
        same(found, expected)


@pytest.mark.parametrize("kind", [*CODES, *product((1, 2, 4, 8), (torch.float32, torch.bfloat16))], ids=str)
def test_codes_are_scored_as_by_the_operator(kind, device, tmp_path):
    """Codes with a scale a token have the bits of one document at a time; residuals are rounded otherwise."""
    docs, Q = documents(), torch.randn(3, 9, 16, device=device)
    units, of_residuals = [_tokens.unit(x) for x in docs], kind not in CODES
    if of_residuals:
        codec = codecs.Residual.train(torch.cat(docs), 64, nbits=kind[0], normalize=True, dtype=kind[1])
        q = Q.to(kind[1])
    else:
        codec = codec_of(kind)
        q = codec.encode(_tokens.unit(Q))
    codes = codec.encode(units).to(device)
    corpus = created(tmp_path / "corpus", docs, codec=codec, normalize=True, shard_bytes=700)
    assert len(corpus.shards) > 3 and corpus.dtype == codec.stored and corpus.codec == codec
    if of_residuals:
        scores = li.maxsim(q, codes, normalize=True)
    else:
        scores = torch.cat([li.maxsim(q, codec.encode([x.to(device)])) for x in units], dim=1)
    for own in (corpus, Corpus.from_codes(codes, normalized=True)):
        for chunk_bytes in (1, 700, None):
            found = own.search(Q, 8, chunk_bytes=chunk_bytes, keep_empty=True, normalize=True)
            (close if of_residuals else same)(found, best_of(scores, 8))
        if of_residuals:
            found = own.search(Q, 8, largest=False, keep_empty=True)
            close(found, best_of(li.maxsim(q, codes), 8, largest=False))


@pytest.mark.parametrize("normalize", [True, False])
def test_against_float64(normalize, device, tmp_path):
    docs, Q = documents(), torch.randn(4, 12, 16, device=device)
    q_mask = torch.rand(4, 12, device=device) < 0.7
    corpus = build(tmp_path / "corpus", docs, torch.float32, normalize=False)
    unit = torch.nn.functional.normalize if normalize else lambda x, dim: x
    expected = torch.zeros(4, len(docs), dtype=torch.float64, device=device)
    for j, x in enumerate(docs):
        pair = unit(Q.double(), dim=-1), unit(x.double().to(device), dim=-1)[None]
        expected[:, j : j + 1] = ref.maxsim(*pair, q_mask)[0] if len(x) else 0
    scores, indices = corpus.search(Q, 9, q_mask=q_mask, normalize=normalize, chunk_bytes=5000)
    torch.testing.assert_close(scores.double(), expected.gather(1, indices), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.double(), best_of(expected, 9)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[40] * 9, [34, 1, 33], [34, 0, 34], [40] * 5 + [7, 40], [500] * 40])
def test_codes_of_neighbours_of_one_length(lengths, device, tmp_path):
    """They are scored where they lie; what only looks like them is not."""
    docs, Q = documents(lengths), torch.randn(2, 9, 16, device=device)
    corpus = build(tmp_path / "corpus", docs, torch.int8)
    scores, indices = corpus.search(Q, len(docs), keep_empty=True, normalize=True)
    for i, x in enumerate(corpus):
        unit = INT8.decode(INT8.encode(_tokens.unit(Q))).values
        expected = (unit @ x.to(device).T).amax(-1).sum(-1) if len(x) else torch.zeros(2, device=device)
        ref.assert_close(scores[indices == i], expected.double(), code_limit(torch.int8, device))


def test_normalized_while_stored_and_while_searched(tmp_path):
    docs, Q = documents(), torch.randn(2, 8, 16)
    stored = build(tmp_path / "corpus", docs, torch.float32)
    assert stored.normalized and not in_memory(docs).normalized
    norms = torch.cat([shard.tokens for shard in stored.shards]).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
    equal(stored.search(Q, 8, normalize=True), in_memory(docs).search(Q, 8, normalize=True))


def test_ties_go_to_the_lowest_index(device):
    docs = [torch.randint(-1, 2, (n, 4), device=device).float() for n in [2, 1, 3] * 40]
    Q = torch.randint(-1, 2, (3, 5, 4), device=device).float()
    corpus = in_memory(docs, device)
    for largest in (True, False):
        scores = maxsim_varlen(
            Q.flatten(0, 1), corpus.shards[0].tokens, torch.arange(0, 16, 5, device=device),
            corpus.shards[0].offsets.to(device),
        )  # fmt: skip
        options = {"normalize": False, "largest": largest, "chunk_bytes": 200}
        equal(corpus.search(Q, 30, **options), best_of(scores, 30, largest))


@pytest.mark.parametrize("kind", [torch.float32, "residuals"], ids=str)
def test_shapes_of_queries(kind, device, tmp_path):
    docs, Q = documents(), torch.randn(3, 6, 16, device=device)
    corpus = in_memory(docs, device) if kind == torch.float32 else build(tmp_path / "corpus", docs, kind)
    batch = corpus.search(Q, 4)
    assert batch.scores.shape == batch.indices.shape == (3, 4) and batch.indices.dtype == torch.int64
    same(corpus.search(Q[1], 4), (batch.scores[1], batch.indices[1]))
    same(corpus.search(list(Q), 4), batch)
    mask = torch.arange(6, device=device) < torch.tensor([[6], [2], [4]], device=device)
    ragged = [Q[0], Q[1, :2], Q[2, :4]]
    found = corpus.search(ragged, 4)
    same(corpus.search(Q, 4, q_mask=mask), found)
    for query, scores, indices in zip(ragged, *found, strict=True):
        close(corpus.search(query, 4), (scores, indices), 1e-4 if Q.is_cuda else 1e-5)
    assert corpus.search(Q, 1000).scores.shape == (3, len(LENGTHS))
    assert corpus.search(Q[:0], 4).scores.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_nothing_to_find(dtype, tmp_path):
    with Corpus.create(tmp_path / "none", d=16, **stored_as(dtype)) as builder:
        builder.add([])
    assert Corpus.open(tmp_path / "none").search(torch.randn(2, 3, 16), 5).scores.shape == (2, 0)
    empty = build(tmp_path / "empty", documents([0, 0]), dtype)
    Q = torch.randn(1, 3, 16)
    equal(empty.search(Q, 5, keep_empty=True), (torch.zeros(1, 2), torch.tensor([[0, 1]])))
    equal(empty.search(Q, 5), (torch.full((1, 2), -torch.inf), torch.tensor([[-1, -1]])))


def test_progress_and_precision():
    docs, Q = documents(), torch.randn(2, 6, 16)
    seen = []
    corpus = in_memory(docs)
    got = corpus.search(
        Q, 5, precision="medium", chunk_bytes=10_000, progress=lambda *x: seen.append(x), normalize=True
    )
    assert seen == sorted(seen) and len(seen) > 3 and seen[-1] == (len(docs), len(docs))
    expected = li.maxsim(Q, docs[11], normalize=True, precision="medium")
    place = (got.indices[0] == 11).nonzero()
    assert len(place) and abs(float(got.scores[0, place[0]]) - float(expected[0])) < 0.05


# ---- what a corpus holds ----


@pytest.mark.parametrize("kind", [*FLOATS, *CODES, "residuals"], ids=str)
def test_stored_and_read(kind, tmp_path):
    docs = documents()
    ids = ["", *(f"док {i}" * (i % 3 + 1) for i in range(1, len(docs)))]
    corpus = build(tmp_path / "corpus", docs, kind, ids, normalize=False, shard_bytes=3000)
    assert len(corpus) == len(docs) and corpus.tokens == sum(LENGTHS) and len(corpus.shards) > 3
    (stored,) = stored_as(kind, docs).values()
    assert (corpus.d, corpus.codec or corpus.dtype, corpus.normalized) == (16, stored, False)
    assert list(corpus.ids) == ids and corpus.ids[-2:] == ids[-2:]
    for got, x in zip(corpus, docs, strict=True):
        assert torch.equal(got, x.to(kind) if kind in FLOATS else stored.decode(stored.encode(x))[0])
    corpus.verify()
    where = str(tmp_path / "corpus")
    counts = f"{len(docs)} documents, {corpus.tokens} tokens"
    assert repr(corpus) == f"Corpus({counts}, d=16, {stored}, in {where!r})"


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("into", [*CODES, torch.float32, "residuals", "other residuals"], ids=str)
@pytest.mark.parametrize("kind", [*CODES, torch.float32, "residuals"], ids=str)
def test_codes_are_copied_into_a_corpus_where_they_are_what_it_stores(
    kind, into, own, wanted, tmp_path, monkeypatch
):
    """Codes of its codec, that are normalized if it is. All else is encoded anew."""
    docs, ids = [3 * x for x in documents()], [str(i) for i in range(len(LENGTHS))]
    first = build(tmp_path / "first", docs, kind, ids, normalize=own, shard_bytes=2000)
    encode, encoded = _tokens.encode, []
    monkeypatch.setattr(_tokens, "encode", lambda *args: encoded.append(args) or encode(*args))
    how = stored_as("residuals", docs[3:]) if into == "other residuals" else stored_as(into, docs)
    with Corpus.create(tmp_path / "second", d=16, **how, normalize=wanted) as builder:
        builder.extend(first)
    second = Corpus.open(tmp_path / "second")
    copied = kind == into != torch.float32 and (own or not wanted)
    assert bool(encoded) != copied and second.normalized == wanted
    assert [second.codec or second.dtype] == list(how.values())
    assert list(second.ids) == ids and len(second.shards) == 1 < len(first.shards)
    for x, y in zip(first, second, strict=True):
        if not copied:
            stored = _tokens.Stored(16, second.dtype, second.codec)
            x = _tokens.decode(*encode(x, stored, wanted), second.codec)
        assert torch.equal(x, y)


def test_numpy_shares_memory(tmp_path):
    tokens = np.random.default_rng(0).standard_normal((20, 16), np.float32)
    offsets = np.array([2, 5, 5, 19])
    corpus = Corpus.from_numpy(tokens, offsets, ids=["a", "b", "c"])
    assert corpus.shards[0].tokens.data_ptr() == tokens.ctypes.data and corpus.tokens == 17
    assert torch.equal(corpus[2], torch.from_numpy(tokens[5:19])) and corpus.ids[2] == "c"
    tokens.tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", np.float32, "r", shape=(20, 16))
    Q = torch.randn(4, 16)
    equal(Corpus.from_numpy(mapped, offsets).search(Q, 3), corpus.search(Q, 3))


def test_codes_of_tokens_that_were_not_normalized(tmp_path):
    corpus = build(tmp_path / "corpus", documents(), torch.int8, normalize=False)
    with pytest.raises(ValueError, match=r"normalize must be False for codes of Int8\(\)"):
        corpus.search(torch.ones(3, 16), 3, normalize=True)
    assert corpus.search(torch.ones(3, 16), 3, normalize=False).indices.shape == (3,)


def test_over_codes(device):
    """Padded ones are packed; only some codecs can be searched."""
    docs = documents([3, 0, 5], 8)
    for codec in (codec_of(dtype) for dtype in CODES):
        packed = codec.encode(docs).to(device)
        for codes in (packed, packed.to_padded()):
            corpus = Corpus.from_codes(codes, ids=["a", "b", "c"])
            assert [len(x) for x in corpus] == [3, 0, 5] and corpus.codec == codec and corpus.ids[2] == "c"
            assert torch.equal(corpus[2], codec.decode(codes)[2])
    for codes, words in (
        (li.codecs.Bits(1).encode(docs), "codes must be of Fp8.*, Int8.* or a Residual, got Bits"),
        (li.codecs.Fp8(torch.float8_e5m2).encode(docs), "codes must be of .*, got Fp8"),
        (docs, "codes must be late_interaction.Codes, got"),
    ):
        with pytest.raises(TypeError, match=words):
            Corpus.from_codes(codes)


@pytest.mark.parametrize("kind", [torch.float32, torch.int8, "residuals"], ids=str)
def test_queries_without_tokens(kind, device, tmp_path):
    corpus = build(tmp_path / "corpus", documents(), kind)
    Q = [torch.randn(n, 16, device=device) for n in (3, 0)]
    scores, indices = corpus.search(Q, 4, keep_empty=True)
    alone = corpus.search(Q[:1], 4, keep_empty=True)
    (same if kind == "residuals" else equal)((scores[:1], indices[:1]), alone)
    assert scores[1].tolist() == [0.0] * 4 and indices[1].tolist() == [0, 1, 2, 3]
    equal(corpus.search(Q[1], 4, keep_empty=True), (scores[1], indices[1]))


@pytest.mark.gpu
def test_a_corpus_on_a_gpu_wants_its_queries_there():
    corpus = in_memory(documents(), "cuda")
    with pytest.raises(ValueError, match="Q must be on the device of the corpus"):
        corpus.search(torch.ones(3, 16), 3)


# ---- memory ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_bounded_memory_of_a_gpu(dtype, tmp_path):
    corpus = build(tmp_path / "corpus", documents([500] * 400, d=128), dtype)
    Q = torch.randn(4, 32, 128, device="cuda")
    corpus.search(Q, 9, chunk_bytes=1 << 20, normalize=True)
    taken = peak(lambda: corpus.search(Q, 9, chunk_bytes=1 << 20, normalize=True))
    assert taken < 8 << 20 < corpus.tokens * 128


@pytest.mark.skipif(
    "LATE_INTERACTION_SANITIZED_LIBRARY" in os.environ,
    reason="the address sanitizer's allocator takes memory of its own",
)
def test_bounded_memory_of_the_host(tmp_path):
    """tests/support/corpus_worker.py searches corpora of 48 MB with 36 MB of memory that it may take."""
    command = [sys.executable, "-m", "tests.support.corpus_worker", "search", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "float16 and int8 in bounded memory, float16 without chunks refused it\n"


@pytest.mark.parametrize(
    "most_bytes, most_documents, ranges",
    [
        (1, 9, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (3 * 16, 9, [(0, 1), (1, 3), (3, 4)]),
        (5 * 16, 9, [(0, 3), (3, 4)]),
        (5 * 16, 2, [(0, 2), (2, 3), (3, 4)]),
        (1 << 20, 9, [(0, 4)]),
    ],
)
def test_chunks_hold_no_more_than_they_may(most_bytes, most_documents, ranges):
    """Two shards of documents of 3, 1, 1 and 9 tokens, 16 bytes each."""
    shard = in_memory(documents([3, 1, 1, 9], d=4)).shards[0]
    found = _chunks.plan([shard, shard], most_bytes, most_documents)
    assert [(chunk.first, chunk.stop) for chunk in found] == ranges * 2
    assert [chunk.place for chunk in found] == [first + more for more in (0, 4) for first, _ in ranges]
    for chunk in found:
        assert chunk.tokens == len(chunk.sources()[0]) == chunk.offsets(torch.device("cpu"))[-1]


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


@pytest.mark.parametrize("starts, most", [(None, 2**30), (torch.zeros(2, dtype=torch.int64), 2**28)])
def test_a_chunk_has_as_many_tokens_as_operators_take(starts, most):
    asked = []

    def ranges(most_tokens, most_documents):
        asked.append((most_tokens, most_documents))
        return [(0, 2)]

    shard = SimpleNamespace(tokens=torch.empty(4, 16), documents=2, starts=starts, ranges=ranges)
    assert [chunk.place for chunk in _chunks.plan([shard, shard], 1 << 50, 10)] == [0, 2]
    assert asked == [(most, 10)] * 2


@pytest.mark.parametrize("make", [Corpus.from_packed, Corpus.from_numpy, Corpus.from_arrow])
def test_tokens_count_as_not_normalized_unless_the_caller_says(make):
    assert inspect.signature(make).parameters["normalized"].default is False


@pytest.mark.parametrize("ids", [None, ["a"]])
def test_a_part_without_documents_has_ids_if_the_corpus_has(ids):
    some, none = Corpus.from_packed(*pack_sequences(documents([3])), ids=ids).parts(2)
    assert (some.ids is None) == (none.ids is None) == (ids is None) and len(none) == 0


def test_tokens_of_one_dim():
    corpus = Corpus.from_packed(torch.tensor([[1.0], [3.0], [2.0]]), torch.tensor([0, 1, 3]))
    scores, found = corpus.search(torch.ones(1, 1, 1), 2, normalize=False)
    assert scores.tolist() == [[3.0, 1.0]] and found.tolist() == [[1, 0]]
