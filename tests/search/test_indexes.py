"""Indexes of ColBERT, fast-plaid and PyLate, opened where they lie. Their files are written by definition."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from late_interaction import codecs
from late_interaction.corpus import Corpus, CorpusError, _tokens
from tests.build.test_readme import examples
from tests.support.corpora import best_of, created, in_memory
from tests.support.index_files import FORMATS, D, Index, unit, write_ids, write_npy

LENGTHS = [3, 0, 7, 40, 1, 33, 64, 5, 17, 2]
COUNT = len(LENGTHS)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_scores_are_those_of_decompressed_tokens(nbits, form, device, tmp_path):
    index = Index(LENGTHS, nbits)
    corpus = Corpus.open(index.write(tmp_path, form), verify=True)
    assert (len(corpus), corpus.tokens, corpus.d, corpus.ids) == (COUNT, sum(LENGTHS), D, None)
    assert corpus.codec.nbits == nbits and corpus.normalized and len(corpus.shards) == 3
    for own, wanted in zip(corpus, index.tokens(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-6, atol=1e-6)
    Q = torch.randn(3, 5, D, device=device)
    Q[1, 2] = 0
    close = {"rtol": 1e-5, "atol": 1e-5, "check_device": False}
    for queries in (Q, unit(Q)):  # as the models of these libraries make them, and others
        wanted = best_of(index.scores(queries), COUNT - 1)
        for chunk_bytes in (1, None):
            scores, order = corpus.search(queries, COUNT - 1, chunk_bytes=chunk_bytes, precision="highest")
            torch.testing.assert_close(scores, wanted[0], **close)
            assert torch.equal(order.cpu(), wanted[1])
    scores, _ = corpus.search(Q, COUNT - 1, normalize=True, precision="highest")
    torch.testing.assert_close(scores, best_of(index.scores(unit(Q)), COUNT - 1)[0], **close)


@pytest.mark.parametrize("form", FORMATS)
def test_files_are_mapped_and_not_read(form, tmp_path):
    """What is written to a file after it was opened is what a shard holds."""
    index = Index(LENGTHS, 2)
    corpus = Corpus.open(index.write(tmp_path, form))
    path = tmp_path / {"colbert": "0.residuals.pt", "chunks": "0.residuals.npy"}.get(
        form, "merged_residuals.npy"
    )
    first = bytes(index.residuals[:3].flatten().tolist())
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(data.index(first))
        file.write(bytes(len(first)))
    assert not corpus.shards[0].tokens[:3].any()


@pytest.mark.parametrize("form", FORMATS)
def test_an_index_stays_as_it_is(form, tmp_path):
    index = Index(LENGTHS, 2)
    corpus = Corpus.open(index.write(tmp_path, form))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    part = corpus.parts(2)[0]
    for own in (corpus, part, pickle.loads(pickle.dumps(part))):
        for change in (
            lambda own=own: own.add([torch.ones(2, D)]),
            lambda own=own: own.delete([0]),
            lambda own=own: own.update([torch.ones(2, D)], ["a"]),
            lambda own=own: own.extend(corpus),
            own.compact,
        ):
            with pytest.raises(ValueError, match=r"stay as they are: extend\(\) another corpus by this one"):
                change()
    corpus.search(torch.randn(2, D))
    with pytest.raises(FileExistsError, match=r"holds an index of .*: open it, or name another folder"):
        Corpus.create(tmp_path, d=D)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_pickles_and_parts_open_it_again_and_refresh_takes_up_changes(tmp_path):
    index, newer = Index(LENGTHS, 2), Index(LENGTHS[2:], 2)
    corpus = Corpus.open(index.write(tmp_path, "chunks"))
    data = pickle.dumps(corpus.parts(2)[1])
    assert len(data) < 1000
    part = pickle.loads(data)
    wanted = index.tokens()[COUNT - len(part) :]
    assert all(torch.equal(x, y) for x, y in zip(part, wanted, strict=True))
    assert not corpus.refresh()
    newer.write(tmp_path, "chunks")
    assert corpus.refresh() and not corpus.refresh() and len(corpus) == COUNT - 2
    with pytest.raises(CorpusError, match="holds another corpus than the one that was pickled"):
        pickle.loads(data)


# ---- PyLate ----


@pytest.mark.parametrize("sqlite", [False, True])
@pytest.mark.parametrize("form", ["colbert", "chunks"])
def test_ids_of_pylate(form, sqlite, device, tmp_path):
    """Beside the folder of fast-plaid, or beside ColBERT's files. Documents 2 and 7 were deleted."""
    index = Index(LENGTHS, 4)
    inner = tmp_path if form == "colbert" else tmp_path / "fast_plaid_index"
    index.write(inner, form)
    kept = [i for i in range(COUNT) if i not in (2, 7)]
    write_ids(tmp_path, {i: f"document {i}" if i % 2 else i for i in kept}, sqlite)
    for folder in {tmp_path, inner}:
        corpus = Corpus.open(folder)
        assert list(corpus.ids) == [f"document {i}" if i % 2 else str(i) for i in kept]
        tokens = index.tokens()
        assert torch.equal(corpus["document 3"], tokens[3]) and torch.equal(corpus["8"], tokens[8])
        Q = unit(torch.randn(2, 5, D, device=device))
        found = corpus.search(Q, len(kept) - 1, precision="highest")
        wanted = best_of(index.scores(Q)[:, kept], len(kept) - 1)
        torch.testing.assert_close(found.scores, wanted[0], rtol=1e-5, atol=1e-5, check_device=False)
        assert torch.equal(found.indices.cpu(), wanted[1])
        assert found.ids == [[corpus.ids[i] for i in own] for own in found.indices.tolist()]
    # A document that was added again has its id two times, which no other corpus takes.
    write_ids(tmp_path, dict.fromkeys(range(COUNT), "again"))
    assert list(Corpus.open(tmp_path).ids) == ["again"] * COUNT


def test_a_pickle_of_ids_calls_nothing(tmp_path):
    class Call:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "called"),)

    Index(LENGTHS, 2).write(tmp_path, "colbert")
    write_ids(tmp_path, {0: Call()})
    with pytest.raises(
        CorpusError, match=r"documents_ids.pkl must map numbers to ids: .* asks for \w+.mkdir"
    ):
        Corpus.open(tmp_path)
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("ids", [{10: "a"}, {0: None}, {0: 1.5}, {"a": "b"}, ["a"], 3])
def test_ids_that_do_not_fit(ids, tmp_path):
    Index(LENGTHS, 2).write(tmp_path, "colbert")
    write_ids(tmp_path, ids)
    with pytest.raises(CorpusError, match=r"plaid_ids_to_documents_ids\.pkl must map numbers"):
        Corpus.open(tmp_path)


# ---- extend ----


@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_copied_into_a_corpus_of_the_same_codec(form, device, tmp_path, monkeypatch):
    index = Index(LENGTHS, 2)
    other = Corpus.open(index.write(tmp_path / "index", form))
    mine = created(tmp_path / "mine", [unit(torch.randn(4, D))], codec=other.codec, normalize=True)
    monkeypatch.setattr(_tokens, "encode", lambda *args: pytest.fail("codes of its codec were encoded anew"))
    mine.extend(other)
    own = [x for x in mine.shards if x.documents > 1]
    assert torch.equal(torch.cat([x.tokens for x in own]), codecs.reverse_bits(index.residuals))
    assert torch.equal(torch.cat([x.beside for x in own]), index.codes.int())
    Q = unit(torch.randn(3, 5, D, device=device))
    wanted = best_of(index.scores(Q), COUNT - 1)
    scores, order = mine.search(Q, COUNT - 1, normalize=True, subset=range(1, COUNT + 1))
    # It scores in the codec's dtype, float16.
    torch.testing.assert_close(scores, wanted[0], rtol=2e-3, atol=2e-3, check_device=False)
    assert torch.equal(order[:, 0].cpu() - 1, wanted[1][:, 0])


@pytest.mark.parametrize("memory", [False, True])
def test_other_corpora_store_decompressed_tokens_with_their_ids(memory, tmp_path):
    index = Index(LENGTHS, 4)
    index.write(tmp_path / "index" / "fast_plaid_index", "merged")
    write_ids(tmp_path / "index", {i: f"p{i}" for i in range(COUNT)})
    mine = in_memory([torch.ones(2, D)], ids=["first"])
    if not memory:
        mine = created(tmp_path / "mine", [torch.ones(2, D)], ["first"], dtype=torch.float32)
    mine.extend(Corpus.open(tmp_path / "index"))
    assert list(mine.ids) == ["first", *(f"p{i}" for i in range(COUNT))]
    for i, wanted in enumerate(index.tokens()):
        torch.testing.assert_close(mine[f"p{i}"], wanted, rtol=1e-6, atol=1e-6)
    mine.delete(["first"])
    mine.compact()
    assert len(mine) == COUNT and torch.equal(mine["p3"], mine[3])


def test_the_example_of_the_guide(tmp_path, monkeypatch):
    Index([40] * 12, 2).write(tmp_path / "indexes" / "plaid" / "fast_plaid_index", "merged")
    write_ids(tmp_path / "indexes" / "plaid", {i: f"p{i}" for i in range(12)})
    (block,) = [x for x in examples("docs/guide/libraries.md") if "indexes/" in x]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, "guide", "exec"), names)
    assert len(names["result"].ids) == 4 and set(names["result"].ids[0]) <= {f"p{i}" for i in range(12)}
    assert len(names["corpus"]) == 10 and len(names["index"]) == 12


# ---- files that are damaged ----


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def entries(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def lengths(value):
    return lambda path: path.write_text(json.dumps(value))


def saved(value):
    return lambda path: torch.save(value, path)


def rows(value):
    return lambda path: write_npy(path, value)


TOO_WIDE, TOO_FEW = torch.zeros(50, 9, dtype=torch.uint8), torch.zeros(60, dtype=torch.int64)
OBJECTS = np.array([{}], dtype=object)
# What happens to a file, by the format of the index, and what is said of it.
DAMAGE = {
    "colbert": [
        ("1.codes.pt", cut, "1.codes.pt must be an array .* cut short"),
        ("doclens.1.json", cut, "doclens.1.json must be JSON"),
        ("metadata.json", cut, "metadata.json must be JSON"),
        ("2.residuals.pt", Path.unlink, "2.residuals.pt is missing"),
        ("centroids.pt", Path.unlink, "centroids.pt is missing"),
        ("doclens.0.json", Path.unlink, "doclens.0.json is missing"),
        ("doclens.1.json", lengths([1, 2]),
         r"1.codes.pt must have integers \[3\], for the 3 tokens of doclens.1"),
        ("doclens.1.json", lengths([-1, 104]), "doclens.1.json must be a list of the lengths"),
        ("0.residuals.pt", saved(TOO_WIDE),
         r"0.residuals.pt must have contiguous uint8 \[50, 4\], .* got torch.uint8 \[50, 9\]"),
        ("0.codes.pt", saved(torch.zeros(50)), "0.codes.pt must have integers"),
        ("0.codes.pt", saved([1]), r"0.codes.pt must be a tensor, got \[1\]"),
        ("buckets.pt", saved(torch.zeros(4)), "buckets.pt must have cutoffs and"),
        ("buckets.pt", saved((torch.zeros(3), torch.zeros(8))),
         "must have centroids, and cutoffs and weights of buckets: .*bucket_weights"),
        ("buckets.pt", saved((torch.zeros(1), torch.zeros(2))),
         "must have buckets of the 2 bits of its metadata.json"),
        ("metadata.json", entries(config={"nbits": 3}),
         "metadata.json must have num_chunks, and nbits of 1, 2, 4 or 8, got 3 and 3"),
        ("metadata.json", entries(config=None), "metadata.json must have num_chunks, and nbits"),
    ],
    "chunks": [
        ("1.codes.npy", cut, "1.codes.npy must be an array .* cut short"),
        ("1.codes.npy", lambda x: x.write_bytes(b"\x93NUMPY\x01"), "1.codes.npy must be an array"),
        ("1.codes.npy", Path.unlink, "1.codes.npy is missing"),
        ("centroids.npy", Path.unlink, "centroids.npy is missing"),
        ("0.codes.npy", lambda x: np.save(x, OBJECTS, allow_pickle=True), "0.codes.npy must be an array"),
        ("centroids.npy", rows(torch.full((20, D), torch.nan)),
         "must have centroids, .*: centroids must be finite"),
    ],
    "merged": [
        ("merged_codes.npy", cut, "merged_codes.npy must be an array"),
        ("merged_codes.npy", rows(TOO_FEW),
         r"merged_codes.npy must have integers \[103\], for the 103 tokens of doclens.1.*, got .* \[10\]"),
        ("doclens.1.json", lengths([1, 2]), r"merged_codes.npy must have integers \[3\], .* got .* \[103\]"),
        ("merged_codes.manifest.json", entries(**{"1.codes.npy": 3}),
         "merged_codes.manifest.json must have the rows of each chunk"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("form", "damage"), [(form, x) for form, own in DAMAGE.items() for x in own])
def test_a_damaged_index_is_refused_by_the_name_of_the_file(form, damage, tmp_path):
    name, change, message = damage
    Index(LENGTHS, 2).write(tmp_path, form)
    change(tmp_path / name)
    with pytest.raises(CorpusError, match=message) as caught:
        Corpus.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("form", FORMATS)
def test_verify_finds_a_code_of_no_centroid(form, tmp_path):
    index = Index(LENGTHS, 2)
    index.codes[5] = 20
    corpus = Corpus.open(index.write(tmp_path, form))
    with pytest.raises(CorpusError, match="must have codes of its 20 centroids, got 0 to 20 in chunk 0"):
        corpus.verify()


def test_other_folders_are_no_indexes(tmp_path):
    Index(LENGTHS, 2).write(tmp_path, "colbert")
    (tmp_path / "metadata.json").unlink()  # as when ColBERT was stopped
    with pytest.raises(FileNotFoundError, match=r"there is no corpus in .* no metadata\.json"):
        Corpus.open(tmp_path)
    created(tmp_path / "own", [torch.ones(2, D)])
    shutil.copy(tmp_path / "plan.json", tmp_path / "own")
    assert len(Corpus.open(tmp_path / "own")) == 1
