"""Corpora whose tokens are stored as a centroid and a residual."""

import json

import pytest
import torch

import late_interaction as li
from late_interaction import codecs
from late_interaction.corpus import Corpus, CorpusError, _codec_files
from tests.search.test_corpus import best_of

LENGTHS = [3, 0, 7, 40, 1, 33, 64, 5, 130, 31, 32, 300, 0, 0, 17, 2] * 2
D = 16


def documents(dtype=torch.float32):
    return [torch.randn(n, D).to(dtype) for n in LENGTHS]


def unit(x):
    return torch.nn.functional.normalize(x.float(), dim=-1)


def trained(docs, nbits=2, dtype=torch.float32):
    return codecs.Residual.train(torch.cat(docs).float(), 64, nbits=nbits, normalize=True, dtype=dtype)


def build(path, docs, codec, ids=None, normalize=True, **options):
    with Corpus.create(path, d=D, codec=codec, normalize=normalize, **options) as builder:
        for i in range(0, len(docs), 5):
            builder.add(docs[i : i + 5], None if ids is None else ids[i : i + 5])
    return Corpus.open(path)


def expected(Q, docs, codec, normalize=True):
    """The operator on all documents at once."""
    codes = codec.encode([unit(x) for x in docs]).to(Q.device)
    return li.maxsim(Q.to(codec.centroids.dtype), codes, normalize=normalize)


# ---- scores ----


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_the_operator(nbits, dtype, device, tmp_path):
    docs, Q = documents(), torch.randn(3, 9, D, device=device)
    codec = trained(docs, nbits, dtype)
    corpus = build(tmp_path / "corpus", docs, codec, shard_bytes=700)
    assert len(corpus.shards) > 3 and corpus.dtype == torch.uint8 and corpus.codec.nbits == nbits
    wanted = best_of(expected(Q, docs, codec), 8)
    for chunk_bytes in (1, 200, None):
        scores, indices = corpus.search(Q, 8, chunk_bytes=chunk_bytes, keep_empty=True, normalize=True)
        torch.testing.assert_close(scores, wanted[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(indices, wanted[1])
    wanted = best_of(expected(Q, docs, codec, normalize=False), 8, largest=False)
    scores, indices = corpus.search(Q, 8, normalize=False, largest=False, keep_empty=True)
    torch.testing.assert_close(scores, wanted[0], rtol=1e-5, atol=1e-5)


def test_queries_of_different_lengths_and_masks(device, tmp_path):
    docs = documents()
    corpus = build(tmp_path / "corpus", docs, trained(docs))
    queries = [torch.randn(n, D, device=device) for n in (9, 1, 0, 5)]
    scores, indices = corpus.search(queries, len(docs))
    for query, own, order in zip(queries, scores, indices, strict=True):
        alone, places = corpus.search(query, len(docs))
        torch.testing.assert_close(own, alone, rtol=1e-5, atol=1e-5)
        assert torch.equal(order, places)
    padded = torch.nn.utils.rnn.pad_sequence(queries, batch_first=True, padding_value=7.0)
    lengths = torch.tensor([len(x) for x in queries], device=device)
    mask = torch.arange(9, device=device) < lengths.unsqueeze(1)
    masked, places = corpus.search(padded, len(docs), q_mask=mask)
    assert torch.equal(masked, scores) and torch.equal(places, indices)


def test_documents_come_back_as_they_are_scored(tmp_path):
    docs = documents(torch.float16)
    codec = trained(docs, nbits=4)
    corpus = build(tmp_path / "corpus", docs, codec, ids=[f"d{i}" for i in range(len(docs))])
    assert corpus.ids[5] == "d5" and corpus.tokens == sum(LENGTHS) and corpus.d == D
    for x, own in zip(docs, corpus, strict=True):
        assert torch.equal(own, codec.decode(codec.encode(unit(x)))[0])
    assert repr(corpus).startswith(
        f"Corpus({len(docs)} documents, {sum(LENGTHS)} tokens, d=16, Residual(64 centroids, d=16, nbits=4"
    )
    assert torch.equal(corpus.codec.bucket_cutoffs, codec.bucket_cutoffs)


def test_over_tensors(device):
    docs, Q = documents(), torch.randn(2, 5, D, device=device)
    codec = trained(docs)
    codes = codec.encode([unit(x) for x in docs]).to(device)
    corpus = Corpus.from_codes(codes, ids=[str(i) for i in range(32)])
    assert corpus.shards[0].tokens.data_ptr() == codes.values.data_ptr() and corpus.ids[3] == "3"
    scores, indices = corpus.search(Q, 6, normalize=True)
    wanted = best_of(expected(Q, docs, codec), 6)
    torch.testing.assert_close(scores, wanted[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(indices, wanted[1])


# ---- the folder ----


def test_codecs_are_equal_by_their_values():
    codec = trained(documents())
    tables = codec.centroids, codec.bucket_cutoffs, codec.bucket_weights
    assert not _codec_files.equal(None, None) and _codec_files.equal(codec, codec)
    assert not _codec_files.equal(codec, None) and not _codec_files.equal(None, codec)
    assert _codec_files.equal(codec, codecs.Residual(*(x.clone() for x in tables)))
    assert not _codec_files.equal(codec, codecs.Residual(*(x + 1 for x in tables)))


def test_another_corpus_is_copied_or_encoded(tmp_path):
    docs = documents()
    codec = trained(docs)
    first = build(tmp_path / "first", docs, codec)
    same = codecs.Residual(
        *(x.clone() for x in (codec.centroids, codec.bucket_cutoffs, codec.bucket_weights))
    )
    with Corpus.create(tmp_path / "same", d=D, codec=same, normalize=True) as builder:
        builder.extend(first)
    copied = Corpus.open(tmp_path / "same")
    for a, b in zip(first.shards, copied.shards, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.beside, b.beside)
    with Corpus.create(tmp_path / "float", d=D, dtype=torch.float32, normalize=False) as builder:
        builder.extend(first)
    floats = Corpus.open(tmp_path / "float")
    assert all(torch.equal(a, b) for a, b in zip(first, floats, strict=True))
    other = trained(docs, nbits=8)
    with Corpus.create(tmp_path / "other", d=D, codec=other, normalize=True) as builder:
        builder.extend(first)
    for a, b in zip(first, Corpus.open(tmp_path / "other"), strict=True):
        assert torch.equal(b, other.decode(other.encode(unit(a)))[0])


def interrupted(path, docs, codec):
    builder = Corpus.create(path, d=D, codec=codec, normalize=True)
    builder.add(docs[:9])
    builder.flush()
    builder.add(docs[9:12])
    builder._cut_away("stopped")


@pytest.mark.parametrize("lost", [None, "codec.centroids", "codec.bucket_weights"])
def test_a_corpus_is_resumed(lost, tmp_path):
    docs = documents()
    codec = trained(docs)
    whole = build(tmp_path / "whole", docs, codec)
    interrupted(tmp_path / "parts", docs, codec)
    if lost:  # as if the process had ended while it wrote the codec
        (tmp_path / "parts" / lost).write_bytes(b"")
    with Corpus.create(tmp_path / "parts", d=D, codec=codec, normalize=True, resume=True) as builder:
        assert builder.documents == 9
        builder.add(docs[9:])
    resumed = Corpus.open(tmp_path / "parts", verify=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_corpus_is_resumed_with_its_own_codec_alone(tmp_path):
    docs = documents()
    codec = trained(docs)
    interrupted(tmp_path, docs, codec)
    weights = codec.bucket_weights + 0.01
    other = codecs.Residual(codec.centroids, codec.bucket_cutoffs, weights)
    with pytest.raises(ValueError, match="codec of the corpus to resume is"):
        Corpus.create(tmp_path, d=D, codec=other, normalize=True, resume=True)
    with pytest.raises(ValueError, match="dtype of the corpus to resume is 'residuals', got 'float16'"):
        Corpus.create(tmp_path, d=D, normalize=True, resume=True)


@pytest.mark.parametrize("part", ["centroids", "bucket_cutoffs", "bucket_weights"])
def test_a_codec_that_was_changed_is_an_error(part, tmp_path):
    docs = documents()
    build(tmp_path, docs, trained(docs))
    path = tmp_path / f"codec.{part}"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorpusError, match=f"codec.{part} does not have the checksum"):
        Corpus.open(tmp_path)
    path.write_bytes(bytes(data[:-1]))
    with pytest.raises(CorpusError, match=f"codec.{part} must have .* bytes, got .* cut short"):
        Corpus.open(tmp_path)
    path.unlink()
    with pytest.raises(CorpusError, match=f"codec.{part} is missing"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize("kind", ["tokens", "codes", "offsets"])
def test_a_shard_that_was_changed_is_an_error(kind, tmp_path):
    docs = documents()
    corpus = build(tmp_path, docs, trained(docs))
    path = tmp_path / f"shard-00000.{kind}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorpusError, match=rf"shard-00000.{kind} must have"):
        Corpus.open(tmp_path)
    assert json.loads((tmp_path / "metadata.json").read_text())["dtype"] == "residuals" and len(corpus)


# ---- bad input ----


def test_bad_options(tmp_path):
    codec = codecs.Residual.train(torch.randn(64, D), 4)
    with pytest.raises(ValueError, match=r"dtype must be None where a codec is given, got torch\.float16"):
        Corpus.create(tmp_path, d=D, dtype=torch.float16, codec=codec)
    with pytest.raises(ValueError, match="codec must be for d = 8, got one for 16"):
        Corpus.create(tmp_path, d=8, codec=codec)
    with pytest.raises(ValueError, match="codec must be for d = 24, got one for 16"):
        Corpus.create(tmp_path, d=24, codec=codec)
    with pytest.raises(TypeError, match=r"codec must be Fp8.*, Int8.* or a Residual, got 2"):
        Corpus.create(tmp_path, d=8, codec=2)
    bad = [torch.ones(2, D), torch.full((2, D), float("nan"))]
    match = r"documents\[1\] must have tokens that residuals can hold"
    with Corpus.create(tmp_path, d=D, codec=codec) as builder, pytest.raises(ValueError, match=match):
        builder.add(bad)
