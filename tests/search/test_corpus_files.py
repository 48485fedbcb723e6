"""A corpus that was killed, cut short or changed, and a disk that is full: an error or a resumption."""

import errno
import fcntl
import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import late_interaction as li
from late_interaction.corpus import Corpus, CorpusError, _files, _shards, _tokens
from tests.lancedb_environment import pa
from tests.support.coded import INT8
from tests.support.corpora import created, stored_as
from tests.support.corpus_worker import documents

ROOT = Path(__file__).resolve().parents[2]
CODEC = stored_as("residuals", documents(100))["codec"]
OPTIONS = {"d": 16, "codec": INT8, "normalize": True, "shard_bytes": 4000}
OF_RESIDUALS = OPTIONS | {"codec": CODEC}
IDS = [str(i) for i in range(100)]
KINDS = ["tokens", "scales", "offsets", "ids", "id_offsets"]
OF_CODEC = ["codec.centroids", "codec.bucket_cutoffs", "codec.bucket_weights"]
FILES = [("int8", f"shard-00002.{kind}") for kind in KINDS]
FILES += [("residuals", name) for name in (*OF_CODEC, "shard-00000.codes")]
FILES += [("living", "deleted-*"), *([("living", "shard-00000.columns")] if pa else [])]


def add(builder, docs, ids=IDS):
    for i in range(builder.documents, len(docs), 4):
        some = docs[i : i + 4]
        builder.add(some, ids[i : i + len(some)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A corpus of codes with a scale a token, one of residuals, and one with a deletion and columns."""
    root = tmp_path_factory.mktemp("whole")
    for name, options in (("int8", OPTIONS), ("residuals", OF_RESIDUALS)):
        with Corpus.create(root / name, **options) as builder:
            add(builder, documents(100))
    columns = {"n": list(range(20))} if pa else None
    created(root / "living", documents(20), IDS[:20], columns, **OPTIONS).delete(["4"])
    return root


@pytest.fixture
def whole(folders):
    return folders / "int8"


@pytest.fixture
def copy(folders, tmp_path, request):
    return Path(shutil.copytree(folders / getattr(request, "param", "int8"), tmp_path / "copy"))


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def unfinished(path, count, **options):
    """A folder that its writer left behind so many documents."""
    with pytest.raises(KeyError), Corpus.create(path, **(OPTIONS | options)) as builder:
        add(builder, documents(count))
        builder.flush()
        raise KeyError


def finish(path, whole, **options):
    """Go on with a corpus, which has the documents of the whole one then. Return how many it had."""
    with Corpus.create(path, resume=True, **(OPTIONS | options)) as builder:
        kept = builder.documents
        add(builder, documents(100))
    same(path, whole)
    return kept


def same(path, whole):
    """The same documents. (Where a block of documents ends a shard early, shards may differ.)"""
    first, second = Corpus.open(path, verify=True), Corpus.open(whole)
    assert list(first.ids) == list(second.ids)
    assert all(map(torch.equal, first, second))


# ---- killed ----


def test_bytes_that_are_written_keep_their_tensor():
    x = torch.arange(1000)
    tensor, view = weakref.ref(x), _files.bytes_of(x)
    del x
    assert tensor() is not None and bytes(view[8:16]) == (1).to_bytes(8, "little")
    del view
    assert tensor() is None


def test_killed_and_resumed(whole, tmp_path):
    path = tmp_path / "corpus"
    command = [sys.executable, "-m", "tests.support.corpus_worker", "build", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL and run.stdout == "80\n", run.stderr
    with pytest.raises(
        CorpusError, match=r"not finished, with \d+ documents so far: go on with Corpus.create"
    ):
        Corpus.open(path)
    shards = json.loads((path / "metadata.json").read_text())["shards"]
    kept, begun = sum(shard["documents"] for shard in shards), f"shard-{len(shards):05d}.tokens"
    assert 0 < kept < 80 and (path / begun).exists()
    assert finish(path, whole) == kept


def test_a_block_that_raises_keeps_the_finished_shards(whole, tmp_path):
    path = tmp_path / "corpus"
    with pytest.raises(KeyError), Corpus.create(path, **OPTIONS) as builder:
        add(builder, documents(50))
        builder.flush()
        builder.add(documents(1), ["lost"])
        raise KeyError
    assert builder.documents == 50
    with pytest.raises(RuntimeError, match="is closed, as its block raised: it takes no more documents"):
        builder.add(documents(1), ["lost"])
    assert finish(path, whole) == 50


def test_resuming_removes_what_no_finished_shard_names(whole, tmp_path):
    path = tmp_path / "corpus"
    unfinished(path, 50)
    left, own = ("shard-00099.tokens", "deleted-00099", "metadata.new"), "shards of my own"
    for name in (*left, own):
        (path / name).write_text("left")
    with Corpus.create(path, resume=True, **OPTIONS) as builder:
        assert builder.documents == 50 and not any((path / name).exists() for name in left)
        add(builder, documents(100))
    assert (path / own).read_text() == "left"
    same(path, whole)


def test_a_folder_that_is_gone_hides_no_error(tmp_path):
    with pytest.raises(KeyError), Corpus.create(tmp_path / "corpus", **OPTIONS) as builder:
        add(builder, documents(4))
        shutil.rmtree(tmp_path / "corpus")
        raise KeyError


@pytest.mark.parametrize(
    ("what", "error", "said", "state"),
    [
        ((_files.HashedFile, "write"), KeyboardInterrupt(), None, "closed, as writing was interrupted"),
        (
            (_files, "sync_folder"), OSError(errno.EIO, "Input/output error"),
            "Input/output error.* The first 0 documents are kept", "closed, as writing failed",
        ),
    ],
)  # fmt: skip
def test_writing_that_fails_closes_the_builder(what, error, said, state, tmp_path, monkeypatch):
    def fails(*_):
        raise error

    builder = Corpus.create(tmp_path / "corpus", **OPTIONS)
    with monkeypatch.context() as patch, pytest.raises(type(error), match=said):
        patch.setattr(*what, fails)
        add(builder, documents(4))
        builder.flush()
    with pytest.raises(RuntimeError, match=f"is {state}"):
        builder.add(documents(4), IDS[:4])


def test_resuming_what_was_never_begun(whole, tmp_path):
    assert finish(tmp_path / "corpus", whole) == 0 and contents(tmp_path / "corpus") == contents(whole)


@pytest.mark.parametrize("lost", [None, "codec.centroids", "codec.bucket_weights"])
def test_a_codec_whose_writing_was_cut_off_is_written_again(lost, folders, tmp_path):
    unfinished(tmp_path / "corpus", 50, codec=CODEC)
    if lost:
        (tmp_path / "corpus" / lost).write_bytes(b"")
    assert finish(tmp_path / "corpus", folders / "residuals", codec=CODEC) == 50


OTHER_CODEC = li.codecs.Residual(CODEC.centroids, CODEC.bucket_cutoffs, CODEC.bucket_weights + 0.01)


@pytest.mark.parametrize(
    "options, change, message",
    [
        (OPTIONS, {"d": 8}, "d of the corpus to resume is 16, got 8"),
        (OPTIONS, {"codec": None}, "dtype of the corpus to resume is 'int8', got 'float16'"),
        (OPTIONS, {"normalize": False}, "normalized of the corpus to resume is True, got False"),
        (OF_RESIDUALS, {"codec": None}, "dtype of the corpus to resume is 'residuals', got 'float16'"),
        (OF_RESIDUALS, {"codec": OTHER_CODEC}, "codec of the corpus to resume is"),
    ],
)
def test_resuming_otherwise(options, change, message, tmp_path):
    with pytest.raises(KeyError), Corpus.create(tmp_path / "corpus", **options) as builder:
        builder.flush()
        with pytest.raises(RuntimeError, match="is being written by another process or thread"):
            Corpus.create(tmp_path / "corpus", resume=True, **options)
        raise KeyError
    with pytest.raises(ValueError, match=message):
        Corpus.create(tmp_path / "corpus", resume=True, **(options | change))


def test_folders_that_are_taken(copy, tmp_path):
    with pytest.raises(FileExistsError, match="holds a finished corpus"):
        Corpus.create(copy, resume=True, **OPTIONS)
    for name in ("file", "a file"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_text("mine")
        with pytest.raises(FileExistsError, match="must be an empty folder"):
            Corpus.create(tmp_path / "other", **OPTIONS)
        (tmp_path / "other" / name).unlink()
    unfinished(tmp_path / "new", 0)
    with pytest.raises(FileExistsError, match="not finished: go on with resume=True"):
        Corpus.create(tmp_path / "new", **OPTIONS)
    with pytest.raises(FileNotFoundError, match="there is no corpus in"):
        Corpus.open(tmp_path / "other")


def test_a_builder_that_is_dropped_gives_the_folder_back(whole, tmp_path):
    builder = Corpus.create(tmp_path / "corpus", **OPTIONS)
    builder.add(documents(4), IDS[:4])
    del builder
    gc.collect()
    assert finish(tmp_path / "corpus", whole) == 0


def test_a_folder_that_cannot_be_locked(whole, tmp_path, monkeypatch):
    def flock(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    number = errno.ENOLCK
    assert finish(tmp_path / "corpus", whole) == 0
    number = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Corpus.create(tmp_path / "other", **OPTIONS)


def test_a_disk_that_is_full_from_the_beginning(whole, tmp_path):
    path = tmp_path / "corpus"
    path.mkdir()
    os.symlink("/dev/full", path / "metadata.new")
    with pytest.raises(OSError, match="No space left on device"):
        Corpus.create(path, **OPTIONS)
    assert finish(path, whole) == 0


def test_a_cut_shard_is_not_resumed(tmp_path):
    unfinished(tmp_path / "corpus", 50)
    cut(tmp_path / "corpus" / "shard-00001.tokens", 10)
    with pytest.raises(CorpusError, match=r"shard-00001\.tokens must have"):
        Corpus.create(tmp_path / "corpus", resume=True, **OPTIONS)


# ---- a full disk ----


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("name", [*(f"shard-00003.{kind}" for kind in KINDS), "metadata.new"])
def test_a_full_disk(name, whole, tmp_path):
    path = tmp_path / "corpus"
    builder = Corpus.create(path, **OPTIONS)
    os.symlink("/dev/full", path / name)
    message = (
        r"No space left on device: the corpus is not finished. The first (\d+) documents are kept; free some"
        r" space, and go on from them with Corpus.create\(..., resume=True\)"
    )
    with pytest.raises(OSError, match=message) as caught:
        add(builder, documents(100))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path / name.replace(".new", ".json"))
    kept = int(re.search(message, str(caught.value))[1])
    assert kept == builder.documents and (kept > 0) == name.startswith("shard")
    assert not list(path.glob("shard-00003.*"))
    with pytest.raises(RuntimeError, match="closed, as writing failed"):
        builder.add(documents(4), IDS[:4])
    builder.finish()
    with pytest.raises(CorpusError, match="not finished"):
        Corpus.open(path)
    assert finish(path, whole) == kept


def test_a_file_that_may_not_grow(whole, tmp_path):
    """A limit of the system on the size of a file is met within a write."""
    path = tmp_path / "corpus"
    builder = Corpus.create(path, **(OPTIONS | {"shard_bytes": 1 << 20}))
    builder.add(documents(50), IDS[:50])
    builder.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        with pytest.raises(
            OSError, match=r"File too large: the corpus is not finished. The first 50 documents"
        ):
            add(builder, documents(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert finish(path, whole) == 50


# ---- cut short, changed, missing ----


def cut(path, size):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - size])


@pytest.mark.parametrize(("copy", "name"), FILES, indirect=["copy"])
def test_a_file_cut_short_or_grown_or_missing(name, copy):
    (file,) = copy.glob(name)
    data = file.read_bytes()
    cut(file, 1)
    with pytest.raises(
        CorpusError, match=rf"{file} must have {len(data)} bytes, got {len(data) - 1}: it was cut"
    ):
        Corpus.open(copy)
    file.write_bytes(data + b"\0")
    with pytest.raises(CorpusError, match=rf"{file} must have .*: it was changed"):
        Corpus.open(copy)
    file.unlink()
    with pytest.raises(CorpusError, match=rf"{file} is missing"):
        Corpus.open(copy)


@pytest.mark.parametrize(("copy", "name"), FILES, indirect=["copy"])
def test_a_changed_file(name, copy):
    """All tokens hang on a codec, which is read in whole."""
    (file,), of_codec = copy.glob(name), name in OF_CODEC
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorpusError, match=rf"{file} (does not have the checksum|must have offsets)"):
        Corpus.open(copy, verify=not of_codec)
    if name.startswith("shard") and "offsets" not in name:
        corpus = Corpus.open(copy)
        with pytest.raises(CorpusError, match=f"{file} does not have the checksum"):
            corpus.verify()


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_metadata_without_an_end(made, copy):
    """Reading a pipe waits for its writer, and a device has no end."""
    file = copy / "metadata.json"
    file.unlink()
    made(file)
    with pytest.raises(CorpusError, match=f"{file} must be the metadata of a corpus, got no regular file"):
        Corpus.open(copy)


@pytest.mark.parametrize(
    ("place", "change", "shown"),
    [(0, 1, 0), (0, -1, 0), (-1, 1, -1), (-1, -1, -1), (-1, -2, -1), (2, 999, 3)],
)
def test_offsets_that_fall_or_begin_or_end_elsewhere(place, change, shown, copy):
    file = copy / "shard-00001.offsets"
    offsets = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.int64)
    offsets[place] += change
    file.write_bytes(bytes(_files.bytes_of(offsets)))
    words = rf"{file} must have offsets that begin at 0, do not decrease.* got .* with "
    with pytest.raises(CorpusError, match=rf"{words}offsets\[{shown % len(offsets)}\] = {offsets[shown]}"):
        Corpus.open(copy)


@pytest.mark.parametrize("change", [1, -1])
@pytest.mark.parametrize(("of", "kind"), [("tokens", "tokens"), ("documents", "offsets")])
def test_metadata_of_other_numbers(of, kind, change, copy):
    """With a checksum of its own, as a faulty program may write it."""
    entries = _files.read_metadata(copy / "metadata.json")
    entries["shards"][1][of] += change
    _files.write_metadata(copy / "metadata.json", entries)
    with pytest.raises(CorpusError, match=rf"{copy}/shard-00001.{kind} must have \d+ bytes for its"):
        Corpus.open(copy)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text[: len(text) // 2], "must be the metadata of a corpus, but it is cut short"),
        (lambda text: "[1]", "must be the metadata of a corpus"),
        (
            lambda text: text.replace('"d": 16', '"d": 8'),
            "does not have the checksum that it was written with",
        ),
        (lambda text: text.replace('"version": 1', '"version": 2'), "must be of version 1 of the format"),
        (lambda text: text.replace("late_interaction corpus", "index"), "got the format 'index'"),
    ],
)
def test_changed_metadata(change, message, copy):
    file = copy / "metadata.json"
    file.write_text(change(file.read_text()))
    with pytest.raises(CorpusError, match=f"{file} .*{message}|{message}"):
        Corpus.open(copy)


# ---- documents that are refused ----


@pytest.mark.parametrize(
    "dtype, bad, normalize",
    [
        (torch.float32, float("nan"), False),
        (torch.float32, float("inf"), True),
        (torch.float16, 65_536.0, False),  # its largest is 65,504
        (torch.int8, float("-inf"), False),
        (torch.float8_e4m3fn, float("nan"), True),
        ("residuals", float("nan"), False),
    ],
)
def test_tokens_that_cannot_be_stored(dtype, bad, normalize, tmp_path):
    docs = documents(6)
    how = stored_as(dtype, docs)
    name = str(dtype).removeprefix("torch.")
    docs[4] = docs[4].clone()
    docs[4][3, 2] = bad
    with Corpus.create(tmp_path / "corpus", d=16, **how, normalize=normalize) as builder:
        builder.add(docs[:3])
        words = rf"documents\[4\] must have tokens that {name} can hold.* in its token 3"
        with pytest.raises(ValueError, match=words):
            builder.add(docs)
        assert builder.documents == 3
        builder.add(docs[5:])
    corpus = Corpus.open(tmp_path / "corpus")
    assert len(corpus) == 4 and bool(torch.cat(list(corpus)).isfinite().all())


@pytest.mark.parametrize("ids", [None, "ab"])
def test_an_empty_corpus_does_not_settle_whether_documents_have_ids(ids, tmp_path):
    empty = Corpus.from_packed(torch.ones(0, 16), torch.tensor([0]))
    with Corpus.create(tmp_path / "corpus", d=16) as builder:
        builder.extend(empty)
        builder.add([torch.ones(2, 16)], ids and [ids[0]])
        builder.extend(empty)
        builder.add([torch.ones(1, 16)], ids and [ids[1]])
    found = Corpus.open(tmp_path / "corpus")
    assert len(found) == 2 and (found.ids is None if ids is None else list(found.ids) == list(ids))


def test_an_empty_corpus_with_ids_wants_ids_of_the_next_documents(tmp_path):
    named = Corpus.from_packed(torch.ones(0, 16), torch.tensor([0]), ids=[])
    with Corpus.create(tmp_path / "corpus", d=16) as builder:
        builder.extend(named)
        with pytest.raises(ValueError, match="ids must be given for all documents of the corpus or for none"):
            builder.add([torch.ones(2, 16)])
        builder.add([torch.ones(2, 16)], ["a"])
    assert list(Corpus.open(tmp_path / "corpus").ids) == ["a"]


@pytest.mark.parametrize(
    "docs, ids, message",
    [
        ([torch.ones(2, 8)], ["a"], r"documents\[0\] must be \[L, 16\]"),
        ([torch.ones(2, 32)], ["a"], r"documents\[0\] must be \[L, 16\]"),
        ([torch.ones(2, 16), torch.ones(16)], ["a", "b"], r"documents\[1\] must be"),
        (torch.ones(2, 16), ["a"], "documents must be a list"),
        ([torch.ones(2, 16)], None, "ids must be given for all documents of the corpus or for none"),
        ([torch.ones(2, 16)], ["a", "b"], "ids must be as many as the 1 documents, got 2"),
        ([torch.ones(2, 16)], [1], r"ids\[0\] must be a string, got int"),
        ([torch.ones(2, 16)], "a", "ids must be a list of strings"),
        ([torch.ones(2, 16)] * 2, ["a", "\ud800"], r"ids\[1\] must be a string that UTF-8 can hold"),
    ],
)
def test_documents_that_do_not_fit(docs, ids, message, tmp_path):
    with Corpus.create(tmp_path / "corpus", d=16) as builder:
        builder.add(documents(1), ["first"])
        with pytest.raises((TypeError, ValueError), match=message):
            builder.add(docs, ids)
        builder.add(documents(1), ["last"])
    assert list(Corpus.open(tmp_path / "corpus").ids) == ["first", "last"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"d": 0}, "d must be at least 1"),
        ({"dtype": torch.float64, "codec": None}, "dtype must be torch.float32, .* or torch.bfloat16, got"),
        ({"dtype": torch.int8, "codec": None}, "dtype must be"),
        ({"dtype": torch.float16}, r"dtype must be None where a codec is given, got torch\.float16"),
        ({"codec": CODEC, "d": 8}, "codec must be for d = 8, got one for 16"),
        ({"codec": CODEC, "d": 24}, "codec must be for d = 24, got one for 16"),
        ({"codec": 2}, "codec must be Fp8.*, Int8.* or a Residual, got 2"),
        ({"codec": li.codecs.Bits(1)}, "codec must be Fp8.*, Int8.* or a Residual, got Bits"),
        ({"shard_bytes": 0}, "shard_bytes must be at least 1"),
        ({"normalize": None}, "normalize must be True or False"),
        ({"progress": True}, "total must be the number of documents to come"),
    ],
)
def test_bad_options(change, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        Corpus.create(tmp_path / "corpus", **(OPTIONS | change))
    assert not (tmp_path / "corpus").exists()


def test_progress(tmp_path):
    seen = []
    options = OPTIONS | {"progress": lambda *x: seen.append(x), "total": 100}
    unfinished(tmp_path / "corpus", 40, **options)
    assert seen == [(n, 100) for n in range(4, 41, 4)]
    seen.clear()
    with Corpus.create(tmp_path / "corpus", resume=True, **options) as builder:
        add(builder, documents(100))
    assert seen == [(n, 100) for n in range(40, 101, 4)]


# ---- parts of the format ----


def greedy(lengths, row_bytes, shard_bytes):
    """How many documents each shard has: as many as fit with 8 bytes for each document's offset."""
    counts, used = [0], 0
    for length in lengths:
        size = length * row_bytes + 8
        if used and used + size > shard_bytes:
            counts.append(0)
            used = 0
        counts[-1] += 1
        used += size
    return counts


@pytest.mark.parametrize("each", [1, 20])
@pytest.mark.parametrize("shard_bytes", [40, 47, 48, 160])
def test_shards_hold_no_more_bytes_than_they_may(shard_bytes, each, tmp_path):
    lengths = [2, 2, 2, 2, *torch.randint(0, 5, (16,)).tolist()]
    docs = [torch.randn(n, 4, dtype=torch.float16) for n in lengths]
    with Corpus.create(tmp_path / "corpus", d=4, dtype=torch.float16, shard_bytes=shard_bytes) as builder:
        for i in range(0, 20, each):
            builder.add(docs[i : i + each])
    shards = _files.read_metadata(tmp_path / "corpus" / "metadata.json")["shards"]
    assert [shard["documents"] for shard in shards] == greedy(lengths, 8, shard_bytes)


def test_documents_are_encoded_block_by_block(monkeypatch, tmp_path):
    """A token takes 16 bytes and 4 of its scale: a block has up to 5 or 20 of them, or one document."""
    encode, counts = _tokens.encode, []
    monkeypatch.setattr(_tokens, "encode", lambda x, *rest: counts.append(len(x)) or encode(x, *rest))
    docs = documents(100)
    for block, name in ((1 << 20, "whole"), (100, "blocks"), (400, "larger blocks")):
        counts.clear()
        monkeypatch.setattr("late_interaction.corpus._intake._BLOCK_BYTES", block)
        with Corpus.create(tmp_path / name, **OPTIONS) as builder:
            builder.add(docs, IDS)
        assert sum(counts) == sum(map(len, docs)) and (len(counts) == 1) == (name == "whole")
        assert all(n <= block // 20 or n in map(len, docs) for n in counts)
    assert contents(tmp_path / "whole") == contents(tmp_path / "larger blocks")
    assert contents(tmp_path / "whole") == contents(tmp_path / "blocks")


@pytest.mark.parametrize("data", [b"", b"a", b"ab"])
def test_files_are_mapped_however_small(data, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(data)
    x = _files.mapped(file, len(data), torch.uint8)
    assert x.tolist() == list(data) and bytes(_files.bytes_of(x)) == data
    x.add_(1)
    assert file.read_bytes() == data  # the memory is the tensor's own where it is written to


def shard_of(lengths, first=0):
    offsets = torch.tensor([first, *lengths]).cumsum(0)
    return _shards.Shard(torch.zeros(int(offsets[-1]), 2), offsets)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "shards", [[[3, 1, 4], [1, 5]], [[0, 2, 0], [9], [2, 6, 0, 0]], [[1] * 14], [[0, 0]]]
)
def test_documents_go_to_the_part_in_which_their_first_token_lies(shards, count):
    total, done = sum(map(sum, shards)), 0
    wanted = [[] for _ in range(count)]
    for lengths in shards:
        for length in lengths:
            wanted[min(done * count // max(total, 1), count - 1)].append(length)
            done += length
    kind = {"d": 2, "dtype": torch.float32, "normalized": False}
    found = Corpus([shard_of(lengths, first=2) for lengths in shards], kind).parts(count)
    assert [[len(x) for x in part] for part in found] == wanted


def test_a_document_of_a_corpus_that_cannot_be_stored_is_named(tmp_path):
    path = tmp_path / "a" / "folder" / "below"  # folders above it are made
    docs = [torch.ones(3, 16), torch.ones(2, 16), torch.ones(4, 16), torch.ones(1, 16)]
    docs[3][0, 5] = 1e30
    with Corpus.create(path, d=16, dtype=torch.float32, normalize=False, shard_bytes=400) as builder:
        builder.add(docs)
    other = Corpus.open(path)
    assert len(other.shards) == 2
    with Corpus.create(tmp_path / "corpus", d=16, dtype=torch.float16, normalize=False) as builder:
        with pytest.raises(ValueError, match=r"corpus\[3\] must have tokens .* in its token 0"):
            builder.extend(other)
        assert builder.documents == 0


def test_norms_at_the_largest_float32():
    stored, largest = _tokens.Stored(2, torch.float32, None), torch.finfo(torch.float32).max
    rows = torch.tensor([[0.6, 0.6], [0.75, 0.75], [1.0, 0.0]], dtype=torch.float64) * largest
    assert _tokens.find_unusable(rows[:1], stored, True) is None
    assert _tokens.find_unusable(rows[1:], stored, True) == 0
    assert _tokens.find_unusable(rows[2:], stored, True) is None
    assert _tokens.find_unusable(rows, stored, False) is None


def test_tokens_of_zeros_stay_zeros():
    tokens = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3e-9, 4e-9]])
    torch.testing.assert_close(_tokens.unit(tokens), torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.6, 0.8]]))


# ---- ids ----


MADE_OF_IDS = {
    "from_packed": lambda ids: Corpus.from_packed(torch.ones(5, 4), torch.tensor([0, 1, 2, 3, 5]), ids=ids),
    "from_numpy": lambda ids: Corpus.from_numpy(np.ones((5, 4), "f4"), np.array([0, 1, 2, 3, 5]), ids=ids),
}


@pytest.mark.parametrize("made", MADE_OF_IDS)
def test_ids_in_memory_differ(made):
    assert list(MADE_OF_IDS[made](["a", "", "b", "A"]).ids) == ["a", "", "b", "A"]
    with pytest.raises(
        ValueError, match=re.escape("ids must differ, got ids[3] = 'b', which another document")
    ):
        MADE_OF_IDS[made](["a", "c", "b", "b"])


def refuse(builder, call, id_, at=0):
    """An id that is there already: nothing is written."""
    before = builder.documents
    words = f"ids must differ, got ids[{at}] = {id_!r}, which another document has"
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
    assert builder.documents == before


def test_ids_of_a_folder_differ(tmp_path):
    """From those of the same call, of calls and shards before, of another corpus, and of what is resumed."""
    options = {"d": 4, "shard_bytes": 100}
    other = Corpus.from_packed(torch.ones(3, 4), torch.arange(4), ids=["x", "y", "z"]).parts(3)[0]
    with pytest.raises(KeyError), Corpus.create(tmp_path / "corpus", **options) as builder:
        builder.add([torch.ones(2, 4)] * 3, ["a", "b", "c"])
        builder.flush()
        refuse(builder, lambda: builder.add([torch.ones(1, 4)] * 2, ["d", "b"]), "b", at=1)
        builder.add([torch.ones(1, 4)], ["d"])  # which was refused with another one
        refuse(builder, lambda: builder.add([torch.ones(1, 4)] * 3, ["e", "f", "e"]), "e", at=2)
        builder.extend(other)
        refuse(builder, lambda: builder.extend(other), "x")
        builder.flush()
        raise KeyError
    with Corpus.create(tmp_path / "corpus", resume=True, **options) as again:
        for id_ in "abcdx":
            refuse(again, lambda id_=id_: again.add([torch.ones(1, 4)], [id_]), id_)
        again.add([torch.ones(1, 4)], ["e"])
    assert list(Corpus.open(tmp_path / "corpus").ids) == ["a", "b", "c", "d", "x", "e"]


def test_ids_that_repeat_in_the_shards_of_another_corpus(tmp_path):
    parts = [Corpus.from_packed(torch.ones(1, 4), torch.tensor([0, 1]), ids=["same"]) for _ in range(2)]
    both = Corpus([shard for part in parts for shard in part.shards], parts[0]._kind())
    with Corpus.create(tmp_path / "corpus", d=4) as builder:
        with pytest.raises(ValueError, match=r"ids must differ, got ids\[0\] = 'same'"):
            builder.extend(both)
        assert builder.documents == 0


def test_a_flipped_byte_of_ids_names_their_file(copy):
    """Each byte: one that is no UTF-8 where the id is read, and every one by verify."""
    file = copy / "shard-00000.ids"
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(bytes([*whole[:at], whole[at] ^ 0x80, *whole[at + 1 :]]))
        corpus = Corpus.open(copy)
        for read in (lambda corpus=corpus: list(corpus.ids), corpus.verify):
            with pytest.raises(CorpusError, match=f"^{re.escape(str(file))} .*it was changed"):
                read()
        if at == 0:
            words = f"{file} must have ids in UTF-8, and its id 0 is not: it was changed"
            with pytest.raises(CorpusError, match=re.escape(words)):
                corpus.ids[0]
            assert corpus.ids[1] == "1"
