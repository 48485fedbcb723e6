"""A corpus that changes: what it holds after any history, in every process, and after any crash."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import late_interaction as li
from late_interaction import codecs
from late_interaction.corpus import Corpus, CorpusError, _files
from tests.lancedb_environment import needs_pyarrow, pa
from tests.selection import examples
from tests.support import corpora
from tests.support.coded import INT8

ROOT = Path(__file__).resolve().parents[2]


def documents(count, seed=0, d=8):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(i % 5, d, generator=generator) for i in range(count)]


def names(count, prefix="a"):
    return [f"{prefix}{i}" for i in range(count)]


def created(path, count=12, columns=False, **options):
    columns = {"year": list(range(2000, 2000 + count))} if pa and columns else None
    options = {"d": 8, "dtype": torch.float32, "shard_bytes": 300} | options
    return corpora.created(path, documents(count), names(count), columns, **options)


def in_memory(count=12):
    return corpora.in_memory(documents(count), ids=names(count))


# ---- any history, against a list ----


class History(RuleBasedStateMachine):
    """Calls on a corpus in a folder, with a second one that refreshes, or on one in memory."""

    lengths = st.lists(st.integers(0, 4), min_size=1, max_size=4)

    def __init__(self):
        super().__init__()
        self.model, self.count = {}, 0

    @initialize(shard_bytes=st.sampled_from([60, 200, 1 << 20]), memory=st.booleans())
    def begin(self, shard_bytes, memory):
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        if memory:
            empty = torch.empty(0, 4), torch.tensor([0])
            self.corpus = self.reader = Corpus.from_packed(*empty, ids=[])
            return
        with Corpus.create(self.folder / "c", d=4, dtype=torch.float32, shard_bytes=shard_bytes) as builder:
            builder.add([], [])
        self.corpus, self.reader = Corpus.open(self.folder / "c"), Corpus.open(self.folder / "c")

    def made(self, lengths):
        """Documents of small integers, whose scores are exact, and a column."""
        generator = torch.Generator().manual_seed(self.count)
        docs = [torch.randint(-3, 4, (n, 4), generator=generator).float() for n in lengths]
        self.count += 1
        return docs, {"n": [self.count * 10 + i for i in range(len(docs))]} if pa else None

    def hold(self, ids, docs, columns):
        numbers = columns["n"] if columns else [0] * len(ids)
        self.model |= {i: (x, n) for i, x, n in zip(ids, docs, numbers, strict=True)}

    @rule(lengths=lengths)
    def add(self, lengths):
        docs, columns = self.made(lengths)
        ids = [f"{self.count}-{i}" for i in range(len(docs))]
        self.corpus.add(docs, ids, columns)
        self.hold(ids, docs, columns)

    def chosen(self, data):
        return data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=4, unique=True))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data):
        ids, form = self.chosen(data), data.draw(st.sampled_from(["ids", "indices", "mask"]))
        places = [list(self.model).index(x) for x in ids]
        mask = torch.zeros(len(self.model), dtype=torch.bool)
        mask[places] = True
        self.corpus.delete({"ids": ids, "indices": places, "mask": mask}[form])
        for x in ids:
            del self.model[x]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def update(self, data):
        ids = self.chosen(data)
        docs, columns = self.made([data.draw(st.integers(0, 4)) for _ in ids])
        if data.draw(st.booleans()):  # columns are kept
            columns = {"n": [self.model[x][1] for x in ids]} if pa else None
            self.corpus.update(docs, ids)
        else:
            self.corpus.update(docs, ids, columns)
        for x in ids:
            del self.model[x]
        self.hold(ids, docs, columns)

    @rule()
    def compact(self):
        before = self.corpus.search(torch.ones(2, 4), 5)
        self.corpus.compact()
        after = self.corpus.search(torch.ones(2, 4), 5)
        assert torch.equal(before.scores, after.scores) and torch.equal(before.indices, after.indices)
        assert all(shard.starts is None for shard in self.corpus.shards)

    @rule()
    def reopen(self):
        if self.corpus.path is not None:
            self.corpus = Corpus.open(self.corpus.path, verify=True)
        else:
            self.corpus = self.reader = pickle.loads(pickle.dumps(self.corpus))

    @rule(text=st.sampled_from(["repeated", "unknown"]))
    def refuse(self, text):
        known = list(self.model)[:1] or ["none"]
        docs, columns = self.made([1])
        with pytest.raises(ValueError, match="ids must"):
            if text == "repeated":
                self.corpus.add(docs * 2, [known[0], known[0]], columns and {"n": [1, 2]})
            else:
                self.corpus.delete([*known, "nobody"])

    @invariant()
    def the_corpus_is_the_list(self):
        self.reader.refresh()
        for corpus in (self.corpus, self.reader):
            assert list(corpus.ids or ()) == list(self.model) and len(corpus) == len(self.model)
            docs = [x for x, _ in self.model.values()]
            assert all(torch.equal(x, y) for x, y in zip(corpus[:], docs, strict=True))
            if not docs:
                continue
            Q = torch.tensor([[1.0, -2, 0, 1], [0, 1, 3, -1]])
            kept = torch.tensor([len(x) > 0 for x in docs])
            options = {"subset": list(self.model)[::2]}
            kept[1::2] = False
            if pa:
                options["filter"] = pa.compute.field("n") > 25
                kept &= torch.tensor([n > 25 for _, n in self.model.values()])
            exact = [(Q.double() @ x.double().T).amax(1).sum() if len(x) else 0.0 for x in docs]
            wanted = torch.tensor(exact).masked_fill(~kept, -torch.inf)
            found = corpus.search(Q, len(docs), **options)
            order = wanted.sort(descending=True, stable=True)
            assert torch.equal(found.scores.double(), order.values.double())
            for coarse in ("bits", "muvera"):
                again = corpus.search(Q, len(docs), coarse=coarse, candidates=len(docs), **options)
                assert torch.equal(again.scores, found.scores) and again.ids == found.ids
            count = int(kept.sum())
            assert torch.equal(found.indices[:count], order.indices[:count])
            assert found.ids == [list(self.model)[i] for i in order.indices[:count]] + [None] * (
                len(docs) - count
            )
            assert corpus.columns is None or corpus.columns["n"].to_pylist() == [
                n for _, n in self.model.values()
            ]

    def teardown(self):
        shutil.rmtree(self.folder, ignore_errors=True)


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=examples(20),
    stateful_step_count=10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("kind", [torch.float16, *corpora.CODES, "residuals"], ids=str)
def test_changed_documents_are_stored_and_scored_as_new_ones(kind, memory, tmp_path, device):
    docs, more = documents(20), documents(9, seed=1)
    options = {"normalize": True, "shard_bytes": 500} | corpora.stored_as(kind, docs)
    corpus = corpora.created(tmp_path / "corpus", docs, names(20), **options)
    if memory:
        corpus = corpus.parts(1)[0].to(device)
    corpus.add(more, names(9, "b"))
    corpus.delete([*names(20)[2:14:3], "b4"])
    corpus.update([docs[5]], ["b7"])
    wanted = dict(zip(names(20) + names(9, "b"), docs + more, strict=True))
    for x in [*names(20)[2:14:3], "b4", "b7"]:
        del wanted[x]
    wanted["b7"] = docs[5]
    new = corpora.created(tmp_path / "new", list(wanted.values()), list(wanted), **options)
    Q = torch.randn(3, 4, 8, device=device)
    for _ in range(2):
        assert list(corpus.ids) == list(new.ids)
        torch.testing.assert_close(corpus[:], new[:], rtol=0, atol=0, check_device=False)
        for options in ({}, {"normalize": True}, {"chunk_bytes": 50}, {"keep_empty": True, "largest": False}):
            found, expected = corpus.search(Q, 30, **options), new.search(Q, 30, **options)
            torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=0 if Q.is_cpu else 1e-4)
            assert Q.is_cuda or (torch.equal(found.indices, expected.indices) and found.ids == expected.ids)
        corpus.compact()


@pytest.mark.parametrize("coarse", [None, "bits", "muvera"])
def test_a_copy_on_a_device_is_a_corpus_of_its_own(coarse, tmp_path, device):
    corpus = created(tmp_path / "a", columns=True)
    corpus.delete(["a3", "a7"])
    copy = corpus.to(torch.device(device))
    assert (copy is corpus) == (device == "cpu") and list(copy.ids) == list(corpus.ids)
    assert {x.tokens.device.type for x in copy.shards} == {device}
    assert all(torch.equal(x.cpu(), y) for x, y in zip(copy, corpus, strict=True))
    Q, options = torch.randn(2, 4, 8, device=device), {"coarse": coarse, "candidates": coarse and 30}
    if pa:
        options["filter"] = pa.compute.field("year") > 2002
        assert copy.columns == corpus.columns
    found, wanted = copy.search(Q, 5, **options), corpus.search(Q, 5, **options)
    torch.testing.assert_close(found.scores, wanted.scores)
    assert found.ids == wanted.ids
    copy.delete(["a2"])
    assert ("a2" in corpus.ids) == (device != "cpu")
    with pytest.raises(RuntimeError, match="nonsense"):
        corpus.to("nonsense")


@pytest.mark.parametrize("memory", [False, True])
def test_another_corpus_is_added_with_its_ids(memory, tmp_path):
    corpus = in_memory() if memory else created(tmp_path / "a")
    others = documents(7, seed=1)
    for prefix in "bc":  # on the second call it has grown already
        corpus.extend(corpora.in_memory(others, ids=names(7, prefix)))
    assert list(corpus.ids) == [*names(12), *names(7, "b"), *names(7, "c")]
    wanted = [*documents(12), *others, *others]
    assert all(torch.equal(x, y) for x, y in zip(corpus, wanted, strict=True))
    corpus.delete(["b3", "a0"])
    assert "b3" not in corpus.ids and torch.equal(corpus["b4"], others[4])
    if not memory:
        assert list(Corpus.open(tmp_path / "a").ids) == list(corpus.ids)


@pytest.mark.parametrize("memory", [False, True])
def test_codes_of_another_corpus_are_copied_or_encoded(memory, tmp_path):
    docs, more = documents(5), documents(9, seed=1)
    codec = codecs.Residual.train(torch.randn(400, 8), 16, nbits=2)
    codes = codec.encode(more)
    corpus = Corpus.from_codes(codec.encode(docs))
    if not memory:
        corpus = corpora.created(tmp_path / "a", docs, codec=codec)
    corpus.extend(Corpus.from_codes(codes))
    assert torch.equal(corpus.shards[-1].tokens, codes.values)
    assert torch.equal(corpus.shards[-1].beside, codes.centroids)
    int8 = Corpus.from_codes(INT8.encode(more))
    int8.extend(Corpus.from_codes(codes))
    assert torch.equal(int8[9 + 3], INT8.decode(INT8.encode([codec.decode(codes)[3]]))[0])


def test_another_corpus_is_refused_whole(tmp_path):
    corpus = created(tmp_path / "a")
    with pytest.raises(ValueError, match=r"ids must differ, got ids\[11\] = 'a11', which another document"):
        corpus.extend(corpora.in_memory(documents(12), ids=[*names(11, "b"), "a11"]))
    with pytest.raises(ValueError, match=r"ids must differ, got ids\[0\] = 'a0'"):
        corpus.extend(corpus)
    for d in (7, 9):
        with pytest.raises(ValueError, match=f"corpus must have d = 8, got {d}"):
            corpus.extend(corpora.in_memory([torch.eye(d)], ids=["c"]))
    with pytest.raises(ValueError, match="ids must be given for all documents"):
        corpus.extend(corpora.in_memory(documents(2)))
    with pytest.raises(TypeError, match="corpus must be a Corpus, got "):
        corpus.extend(documents(3))
    assert list(Corpus.open(tmp_path / "a").ids) == list(corpus.ids) == names(12)
    assert Corpus.open(tmp_path / "a").generation == corpus.generation


@pytest.mark.parametrize("memory", [False, True])
def test_a_corpus_of_which_all_is_deleted(memory, tmp_path):
    corpus = in_memory() if memory else created(tmp_path / "corpus")
    corpus.delete(names(12))
    for own in (corpus, pickle.loads(pickle.dumps(corpus)), corpus.parts(2)[1]):
        for _ in range(2):
            found = own.search(torch.ones(2, 3, 8), 5)
            assert found.scores.shape == (2, 0) and found.ids == [[], []]
            with pytest.raises(ValueError, match=r"subset must hold ids of documents, got \['a3'\]"):
                own.search(torch.ones(2, 3, 8), subset=["a3"])
            own.compact()
    corpus.add(documents(2), ["x", "y"])
    assert list(corpus.ids) == ["x", "y"]


def test_what_an_index_may_be(tmp_path):
    corpus = created(tmp_path / "corpus")
    corpus.delete(["a1", "a3"])
    left = [x for i, x in enumerate(documents(12)) if i not in (1, 3)]
    for index, wanted in (
        (slice(1, 9, 3), left[1:9:3]),
        ([3, 0, -1], [left[3], left[0], left[-1]]),
        (torch.tensor([2, 2]), [left[2]] * 2),
        (["a4", "a0"], [left[2], left[0]]),
    ):
        assert all(map(torch.equal, corpus[index], wanted)) and len(corpus[index]) == len(wanted)
    assert torch.equal(corpus["a11"], left[-1])
    with pytest.raises(KeyError, match="no document has the id 'a1'"):
        corpus["a1"]
    with pytest.raises(IndexError):
        corpus[10]


def test_many_deletions_in_memory():
    corpus = in_memory(1200)
    for _ in range(1100):
        corpus.delete([0])
    assert list(corpus.ids) == names(1200)[1100:] and all(map(torch.equal, corpus, documents(1200)[1100:]))


# ---- generations ----


def test_copies_and_pickles_have_the_generation_they_were_made_of(tmp_path):
    corpus = created(tmp_path / "corpus")
    texts = []
    for change in (
        lambda: corpus.add(documents(3, 1), names(3, "b")),
        lambda: corpus.delete(["a0", "b1"]),
        lambda: corpus.update(documents(2, 2), ["a5", "b2"]),
    ):
        texts += [(pickle.dumps(x), list(x.ids), x[:]) for x in (corpus, corpus.parts(2)[1])]
        change()
    for text, ids, docs in texts:
        again = pickle.loads(text)
        assert list(again.ids) == ids and all(map(torch.equal, again[:], docs)) and len(text) < 1000
    whole = pickle.loads(texts[0][0])
    assert whole.refresh() and list(whole.ids) == list(corpus.ids) and not whole.refresh()
    older = Corpus.open(tmp_path / "corpus")
    ids, docs = list(older.ids), older[:]
    corpus.compact()
    words = rf"generation {older.generation} of .* was removed by compact\(\), which made generation"
    for read in (lambda: pickle.loads(pickle.dumps(older)), older.verify):
        with pytest.raises(CorpusError, match=words):
            read()
    assert list(older.ids) == ids and all(map(torch.equal, older[:], docs))  # its files stay mapped
    with pytest.raises(CorpusError, match=r"newer generation than the one that is open.* refresh\(\) first"):
        older.delete([0])
    assert older.refresh()
    older.delete([0])
    older.verify()


def test_compact_leaves_large_shards_as_they_are(tmp_path):
    corpus = created(tmp_path / "corpus", count=30)
    before = {x.name for x in (tmp_path / "corpus").iterdir()}
    corpus.compact()
    assert {x.name for x in (tmp_path / "corpus").iterdir()} == before
    for i in range(5):
        corpus.add(documents(2, i), names(2, f"x{i}-"))
    corpus.delete(["a0"])
    shards = len(corpus.shards)
    corpus.compact()
    files = {x.name for x in (tmp_path / "corpus").iterdir()}
    assert len(corpus.shards) < shards and len(files & before) > len(before) / 2
    assert "shard-00000.tokens" not in files and not any(x.startswith("deleted") for x in files)
    corpus.delete(list(corpus.ids))
    corpus.compact()
    assert len(corpus) == 0 and [x.name for x in (tmp_path / "corpus").iterdir()] == ["metadata.json"]
    assert corpus.search(torch.ones(1, 8), 3).scores.shape == (0,)
    corpus.add(documents(3), names(3))
    assert list(Corpus.open(tmp_path / "corpus", verify=True).ids) == names(3)


def test_one_writer_at_a_time(tmp_path):
    corpus = created(tmp_path / "corpus")
    handle = _files.lock_folder(tmp_path / "corpus")
    for write in (lambda: corpus.add(documents(1), ["new"]), lambda: corpus.delete(["a1"]), corpus.compact):
        with pytest.raises(RuntimeError, match="is being written by another process or thread"):
            write()
    assert len(corpus) == len(Corpus.open(tmp_path / "corpus")) == 12
    _files.unlock(handle, os.getpid())
    corpus.delete(["a1"])


def test_a_fork_of_a_writer_does_not_keep_the_folder(tmp_path):
    """It has a copy of the handle that holds the lock."""
    corpus = created(tmp_path / "corpus")
    read, write = os.pipe()
    with corpus._edit():
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until the parent is done
            os._exit(0)
    try:
        corpus.delete(["a1"])
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_threads_search_while_another_one_writes(tmp_path):
    corpus, done = created(tmp_path / "corpus", count=40), threading.Event()
    reader = Corpus.open(tmp_path / "corpus")

    def search():
        while not done.is_set():
            reader.refresh()
            found = reader.search(torch.ones(1, 8), 60)
            ids = [x for x in found.ids if x is not None]
            assert len(set(ids)) == len(ids)

    with ThreadPoolExecutor(3) as pool:
        searches = [pool.submit(search) for _ in range(3)]
        try:
            for i in range(12):
                corpus.delete(list(corpus.ids)[::5])
                corpus.add(documents(7, i), names(7, f"{i}-"))
                corpus.compact()
        finally:
            done.set()
        assert [x.result() for x in searches] == [None] * 3


# ---- failures ----


def faults(monkeypatch, number, kind):
    """The n-th write to a file, or what follows, meets a full disk."""
    calls = []

    def fails(function):
        def wrapped(*args):
            calls.append(0)
            if len(calls) == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args)

        return wrapped

    if kind == "write":
        monkeypatch.setattr(_files.HashedFile, "write", fails(_files.HashedFile.write))
    else:
        monkeypatch.setattr(os, kind, fails(getattr(os, kind)))


@pytest.mark.parametrize("call", ["add", "delete", "update", "compact"])
@pytest.mark.parametrize(("kind", "most"), [("write", 12), ("fsync", 9), ("replace", 1)])
def test_a_full_disk_leaves_the_generation_before(call, kind, most, tmp_path, monkeypatch):
    corpus = created(tmp_path / "corpus")
    corpus.delete(["a4"])
    calls = {
        "add": lambda: corpus.add(documents(5, 1), names(5, "b")),
        "delete": lambda: corpus.delete(["a2"]),
        "update": lambda: corpus.update(documents(3, 1), ["a1", "a2", "a3"]),
        "compact": corpus.compact,
    }
    for number in range(1, most + 1):
        before = [*corpus.ids], corpus.generation
        with monkeypatch.context() as patch:
            faults(patch, number, kind)
            try:
                calls[call]()
                break  # it needs fewer
            except OSError as error:
                assert error.errno == errno.ENOSPC
                assert "the corpus has the documents that it had before; free some space" in str(error)
        assert ([*corpus.ids], corpus.generation) == before
        found = Corpus.open(tmp_path / "corpus", verify=True)
        # The last fsync comes after the metadata, which is in force then.
        assert [*found.ids] == before[0] or kind == "fsync"
        named = set(li.corpus._generations.files_of(found._generation.entries)) | {"metadata.json"}
        assert kind == "fsync" or {x.name for x in (tmp_path / "corpus").iterdir()} == named
        if [*found.ids] != before[0]:
            return
    else:
        calls[call]()
    assert corpus.generation == before[1] + 1 and Corpus.open(tmp_path / "corpus", verify=True)


@pytest.mark.parametrize("how", [["kill", "50"], ["read", "3"]])
def test_processes_are_killed_or_read_beside_a_writer(how):
    """What tests/corpus_crash.py says. `make crash` does it a thousand times, and for ten minutes."""
    command = [sys.executable, "-m", "tests.corpus_crash", *how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- columns ----


@needs_pyarrow
def test_filters(tmp_path):
    field, corpus = pa.compute.field, created(tmp_path / "corpus", columns=True)
    table = pa.table({"year": pa.array([None, 2050], pa.int64())})
    corpus.add([torch.ones(1, 8)] * 2, ["x", "y"], table)
    Q = torch.ones(1, 8)

    def found(condition, **options):
        return {x for x in corpus.search(Q, 20, keep_empty=True, filter=condition, **options).ids if x}

    assert found(field("year") >= 2010) == {"a10", "a11", "y"}
    assert found((field("year") < 2002) | field("year").is_null()) == {"a0", "a1", "x"}
    assert found(field("year").isin([2003, 2004]), subset=["a4", "a5"]) == {"a4"}
    assert found(field("year") > 3000) == set()
    for condition, error, words in (
        ("year > 3", TypeError, r"filter must be a pyarrow\.compute\.Expression, got 'year > 3'"),
        (field("year"), TypeError, "filter must be a condition, whose type is bool, got one of int64"),
        (field("yeer") > 3, ValueError, r"filter must be a condition on year \(int64\), got .*yeer > 3"),
        (field("year") > "2020", ValueError, r"filter must be a condition on year \(int64\), got .*\"2020\""),
    ):
        with pytest.raises(error, match=words):
            corpus.search(Q, filter=condition)
    with pytest.raises(ValueError, match="filter must be None for documents without columns"):
        in_memory().search(Q, filter=field("year") > 3)
    with pytest.raises(ValueError, match="filter must be None but for a Corpus with columns"):
        li.search(Q, torch.ones(2, 3, 8), filter=field("year") > 3)


@needs_pyarrow
def test_columns(tmp_path):
    corpus, docs = created(tmp_path / "corpus", columns=True), [torch.ones(1, 8)]
    for columns, error, words in (
        (None, ValueError, "columns must be given for all documents of the corpus or for none, got None"),
        ({"yeer": [1]}, ValueError, "columns must be year, as those of the documents before, got yeer"),
        ({"year": [1, 2]}, ValueError, "columns must have a row for each of the 1 documents, got 2"),
        ({"year": ["new"]}, ValueError, r"columns must be year \(int64\), as those .* before, .*new"),
        ({"year": [[2001]]}, ValueError, r"columns must be year \(int64\), as those .* before, .*list"),
        ({"year": pa.array(["a"], pa.string_view())}, TypeError, "columns must be of types .*string_view"),
        ([2001], TypeError, r"columns must be a pyarrow\.Table or a dict of lists, got"),
    ):
        with pytest.raises(error, match=words):
            corpus.add(docs, ["new"], columns)
    with pytest.raises(ValueError, match=r"columns must be given for all .* but others have none"):
        in_memory().add(docs, ["new"], {"year": [1]})
    assert len(corpus) == len(Corpus.open(tmp_path / "corpus")) == 12


@needs_pyarrow
@pytest.mark.parametrize("shard_bytes", [60, 1 << 20])
@pytest.mark.parametrize("first", [[], [None, None]])
def test_columns_that_begin_with_nulls(first, shard_bytes, tmp_path):
    with Corpus.create(tmp_path / "corpus", d=8, shard_bytes=shard_bytes) as builder:
        docs, ids = [torch.ones(1, 8)] * len(first), names(len(first))
        builder.add(docs, ids, {"by": first, "tags": [[] for _ in first]})
        builder.add([torch.ones(1, 8)] * 2, ["x", "y"], {"by": ["me", None], "tags": [["t"], None]})
    corpus = Corpus.open(tmp_path / "corpus")
    for by in ("you", None):
        corpus.add([torch.ones(1, 8)], [f"new {by}"], {"by": [by], "tags": [[]]})
    with pytest.raises(ValueError, match=r"columns must be by \(string\), tags \(list<"):
        corpus.add([torch.ones(1, 8)], ["z"], {"by": [[1]], "tags": [[]]})
    for _ in range(2):
        assert corpus.columns["by"].to_pylist() == [*first, "me", None, "you", None]
        assert corpus.columns["tags"].to_pylist() == [*([] for _ in first), ["t"], None, [], []]
        written = corpus.search(
            torch.ones(1, 8), 9, filter=pa.compute.match_like(pa.compute.field("by"), "%")
        )
        assert [x for x in written.ids if x] == ["x", "new you"]
        corpus.compact()
