"""Corpora of documents of different lengths: built, opened and searched."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction.corpus import Corpus, _chunks, _tokens
from late_interaction.lik.varlen import maxsim_varlen
from tests.support import ref
from tests.support.calls import peak
from tests.support.cases import code_limit
from tests.support.coded import INT8, codec_of, stored_as
from tests.support.packed import pack_sequences

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [3, 0, 7, 40, 1, 33, 64, 5, 130, 31, 32, 300, 0, 0, 17, 2] * 3
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
CODES = [torch.float8_e4m3fn, torch.int8]


def documents(lengths=LENGTHS, d=16, dtype=torch.float32):
    return [torch.randn(n, d).to(dtype) for n in lengths]


def build(path, docs, dtype, ids=None, normalize=True, **options):
    options |= stored_as(dtype) | {"normalize": normalize}
    with Corpus.create(path, d=docs[0].shape[1], **options) as builder:
        for i in range(0, len(docs), 7):
            builder.add(docs[i : i + 7], None if ids is None else ids[i : i + 7])
    return Corpus.open(path)


def best_of(scores, k, largest=True):
    order = scores.sort(dim=-1, descending=largest, stable=True).indices[..., :k]
    return scores.gather(-1, order), order


def equal(got, expected):
    got, expected = tuple(got), tuple(expected)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def same(got, expected):
    """Equal on a CPU. A GPU's planner may take another kernel for another number of queries or documents."""
    got, expected = tuple(got), tuple(expected)
    if got[0].is_cuda:
        torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-4)
    else:
        equal(got, expected)


def packed(docs, device="cpu", **options):
    tokens, offsets = pack_sequences(docs)
    return Corpus.from_packed(tokens.to(device), offsets, **options)


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


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("on_device", [False, True])
def test_the_bits_of_each_document_of_codes(dtype, on_device, device, tmp_path):
    docs, Q = documents(), torch.randn(3, 9, 16, device=device)
    corpus = build(tmp_path / "corpus", docs, dtype, shard_bytes=4000)
    assert len(corpus.shards) > 2
    codec = codec_of(dtype)
    q = codec.encode(_tokens.unit(Q))
    columns = [li.maxsim(q, codec.encode([_tokens.unit(x).to(device)])) for x in docs]
    expected = best_of(torch.cat(columns, dim=1), 12)
    if on_device:
        codes = codec.encode([_tokens.unit(x) for x in docs]).to(device)
        corpus = Corpus.from_codes(codes, normalized=True)
    for chunk_bytes in (1, 700, 1 << 30):
        same(corpus.search(Q, 12, chunk_bytes=chunk_bytes, normalize=True), expected)


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
    assert stored.normalized and not packed(docs).normalized
    norms = torch.cat([shard.tokens for shard in stored.shards]).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
    equal(stored.search(Q, 8, normalize=True), packed(docs).search(Q, 8, normalize=True))


def test_ties_go_to_the_lowest_index(device):
    docs = [torch.randint(-1, 2, (n, 4), device=device).float() for n in [2, 1, 3] * 40]
    Q = torch.randint(-1, 2, (3, 5, 4), device=device).float()
    corpus = packed(docs, device)
    for largest in (True, False):
        scores = maxsim_varlen(
            Q.flatten(0, 1), corpus.shards[0].tokens, torch.arange(0, 16, 5, device=device),
            corpus.shards[0].offsets.to(device),
        )  # fmt: skip
        options = {"normalize": False, "largest": largest, "chunk_bytes": 200}
        equal(corpus.search(Q, 30, **options), best_of(scores, 30, largest))


def test_shapes_of_queries(device):
    corpus, Q = packed(documents(), device), torch.randn(3, 6, 16, device=device)
    batch = corpus.search(Q, 4)
    assert batch.scores.shape == batch.indices.shape == (3, 4) and batch.indices.dtype == torch.int64
    same(corpus.search(Q[1], 4), (batch.scores[1], batch.indices[1]))
    same(corpus.search(list(Q), 4), batch)
    mask = torch.arange(6, device=device) < torch.tensor([[6], [2], [4]], device=device)
    same(corpus.search(Q, 4, q_mask=mask), corpus.search([Q[0], Q[1, :2], Q[2, :4]], 4))
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
    corpus = packed(docs)
    got = corpus.search(
        Q, 5, precision="medium", chunk_bytes=10_000, progress=lambda *x: seen.append(x), normalize=True
    )
    assert seen == sorted(seen) and len(seen) > 3 and seen[-1] == (len(docs), len(docs))
    expected = li.maxsim(Q, docs[11], normalize=True, precision="medium")
    place = (got.indices[0] == 11).nonzero()
    assert len(place) and abs(float(got.scores[0, place[0]]) - float(expected[0])) < 0.05


# ---- what a corpus holds ----


@pytest.mark.parametrize("dtype", FLOATS + CODES)
def test_stored_and_read(dtype, tmp_path):
    docs = documents()
    ids = ["", *(f"док {i}" * (i % 3 + 1) for i in range(1, len(docs)))]
    corpus = build(tmp_path / "corpus", docs, dtype, ids, normalize=False, shard_bytes=3000)
    assert len(corpus) == len(docs) and corpus.tokens == sum(LENGTHS) and len(corpus.shards) > 3
    assert (corpus.d, corpus.dtype, corpus.normalized) == (16, dtype, False)
    assert list(corpus.ids) == ids and corpus.ids[-2:] == ids[-2:]
    for got, x in zip(corpus, docs, strict=True):
        codec = stored_as(dtype).get("codec")
        expected = codec.decode(codec.encode(x))[0] if codec else x.to(dtype)
        assert torch.equal(got, expected)
    corpus.verify()
    where = str(tmp_path / "corpus")
    counts = f"{len(docs)} documents, {corpus.tokens} tokens"
    assert repr(corpus) == f"Corpus({counts}, d=16, {corpus.codec or dtype}, in {where!r})"


def test_shards_end_before_they_are_too_large(tmp_path):
    docs = documents([10, 10, 10, 100, 1, 1, 29])
    corpus = build(tmp_path / "corpus", docs, torch.float32, shard_bytes=30 * 64 + 24)
    assert [shard.documents for shard in corpus.shards] == [3, 1, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_corpus_of_a_corpus(dtype, tmp_path):
    docs, ids = documents(), [str(i) for i in range(len(LENGTHS))]
    first = build(tmp_path / "first", docs, torch.int8, ids, shard_bytes=2000)
    with Corpus.create(
        tmp_path / "second", d=16, **stored_as(dtype), shard_bytes=20_000, normalize=True
    ) as builder:
        builder.extend(first)
    second = Corpus.open(tmp_path / "second")
    assert list(second.ids) == ids and len(second.shards) < len(first.shards)
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x if dtype == torch.int8 else _tokens.unit(x), y, rtol=1e-6, atol=1e-6)
    for shard in second.shards if dtype == torch.int8 else ():
        assert shard.tokens.dtype == torch.int8


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("into", [*CODES, torch.float32])
@pytest.mark.parametrize("dtype", [*CODES, torch.float32])
def test_codes_are_copied_into_a_corpus_where_they_are_what_it_stores(
    dtype, into, own, wanted, tmp_path, monkeypatch
):
    """Codes of its dtype, that are normalized if it is. All else is encoded anew."""
    first = build(tmp_path / "first", [3 * x for x in documents()], dtype, normalize=own)
    encode, encoded = _tokens.encode, []
    monkeypatch.setattr(_tokens, "encode", lambda *args: encoded.append(args) or encode(*args))
    with Corpus.create(tmp_path / "second", d=16, **stored_as(into), normalize=wanted) as builder:
        builder.extend(first)
    second = Corpus.open(tmp_path / "second")
    copied = dtype == into and into in CODES and (own or not wanted)
    assert bool(encoded) != copied and second.normalized == wanted and second.dtype == into
    for x, y in zip(first, second, strict=True):
        if not copied:
            codec = stored_as(into).get("codec")
            x = _tokens.decode(*encode(x, _tokens.Stored(16, into, codec), wanted), codec)
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


@pytest.mark.parametrize(
    "tokens, offsets, message",
    [
        (np.ones((4, 2)), np.array([0, 4]), "tokens must be float32 or float16, got float64"),
        ([[1.0]], np.array([0, 1]), "tokens must be a numpy.ndarray, got list"),
        (np.ones((4, 4), np.float32)[:, :2], np.array([0, 4]), "tokens must be in C order"),
        (np.ones((4, 2), np.float32), np.array([0, 5]), r"offsets must not decrease and lie within \[0, 4\]"),
        (np.ones((4, 2), np.float32), np.array([0.0]), "offsets must be int32 or int64, got float64"),
        (np.ones(4, np.float32), np.array([0, 4]), r"tokens must be \[tokens, d\]"),
        (np.ones((4, 2, 2), np.float32), np.array([0, 4]), r"tokens must be \[tokens, d\]"),
    ],
)
def test_bad_arrays(tokens, offsets, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Corpus.from_numpy(tokens, offsets)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": 0}, "k must be at least 1"),
        ({"Q": torch.ones(3, 4, 5)}, "Q must have the d of the corpus, 16"),
        ({"Q": [torch.ones(3, 16), torch.ones(16)]}, r"Q\[1\] must be \[L, 16\]"),
        ({"Q": [torch.ones(3, 16), torch.ones(1, 3, 16)]}, r"Q\[1\] must be \[L, 16\]"),
        ({"Q": []}, "Q must be a torch.Tensor, got list"),
        ({"Q": [torch.ones(3, 16)], "q_mask": torch.ones(1, 3)}, "q_mask must be None where Q is Tok"),
        ({"Q": torch.ones(3, 16, dtype=torch.int8)}, "Q must be bfloat16"),
        ({"Q": torch.ones(2, 3, 4, 16)}, r"Q must be \[N, L, d\] or \[L, d\]"),
        ({"normalize": 1}, "normalize must be True or False"),
        ({"chunk_bytes": 0}, "chunk_bytes must be at least 1"),
        ({"precision": "low"}, "precision must be one of"),
    ],
)
def test_bad_searches(change, message):
    arguments = {"Q": torch.ones(3, 16), "k": 3} | change
    with pytest.raises((TypeError, ValueError), match=message):
        packed(documents()).search(**arguments)


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
    with pytest.raises(TypeError, match=r"tokens must be of one of float32, .*, got torch\.int8"):
        Corpus.from_packed(packed.values.to(torch.int8), packed.offsets)


def test_strided_tokens_are_refused():
    with pytest.raises(ValueError, match=r"tokens must be contiguous, got strides \(16, 1\)"):
        Corpus.from_packed(torch.randn(6, 16)[:, :8], torch.tensor([0, 6]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_queries_without_tokens(dtype, device, tmp_path):
    corpus = build(tmp_path / "corpus", documents(), dtype)
    Q = [torch.randn(n, 16, device=device) for n in (3, 0)]
    scores, indices = corpus.search(Q, 4, keep_empty=True)
    equal((scores[:1], indices[:1]), corpus.search(Q[:1], 4, keep_empty=True))
    assert scores[1].tolist() == [0.0] * 4 and indices[1].tolist() == [0, 1, 2, 3]
    equal(corpus.search(Q[1], 4, keep_empty=True), (scores[1], indices[1]))


@pytest.mark.gpu
def test_a_corpus_on_a_gpu_wants_its_queries_there():
    corpus = packed(documents(), "cuda")
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
    shard = packed(documents([3, 1, 1, 9], d=4)).shards[0]
    found = _chunks.plan([shard, shard], most_bytes, most_documents)
    assert [(chunk.first, chunk.stop) for chunk in found] == ranges * 2
    assert [chunk.place for chunk in found] == [first + more for more in (0, 4) for first, _ in ranges]
    for chunk in found:
        assert chunk.tokens == len(chunk.sources()[0]) == chunk.offsets(torch.device("cpu"))[-1]


@pytest.mark.parametrize("ids", [None, ["a"]])
def test_a_part_without_documents_has_ids_if_the_corpus_has(ids):
    some, none = Corpus.from_packed(*pack_sequences(documents([3])), ids=ids).parts(2)
    assert (some.ids is None) == (none.ids is None) == (ids is None) and len(none) == 0


def test_tokens_of_one_dim_and_of_none():
    corpus = Corpus.from_packed(torch.tensor([[1.0], [3.0], [2.0]]), torch.tensor([0, 1, 3]))
    scores, found = corpus.search(torch.ones(1, 1, 1), 2, normalize=False)
    assert scores.tolist() == [[3.0, 1.0]] and found.tolist() == [[1, 0]]
    with pytest.raises(ValueError, match="d of at least 1"):
        Corpus.from_packed(torch.ones(3, 0), torch.tensor([0, 1, 3]))
    with pytest.raises(TypeError, match="offsets must be a"):
        Corpus.from_packed(torch.ones(3, 2), [0, 1, 3])
