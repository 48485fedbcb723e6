"""First passes of a corpus: which candidates they choose, what is kept of them, and in which files."""

import errno
import os
import pickle

import pytest
import torch
from torch.nn.functional import normalize as unit

import late_interaction as li
from late_interaction import Corpus, codecs
from late_interaction._search.prepare import Options, prepare
from late_interaction.corpus import CorpusError, _files, _first_pass
from tests.lancedb_environment import pa
from tests.support import corpora

D = 24
SIGNS = codecs.Bits(1, scales=False)
PASSES = ["bits", "muvera", "centroids"]


def documents(count=60, seed=0):
    """Documents of 0 to 9 unit tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [unit(torch.randn(i * 7 % 10, D, generator=generator), dim=-1) for i in range(count)]


def names(count, prefix="a"):
    return [f"{prefix}{i}" for i in range(count)]


CODEC = codecs.Residual.train(torch.cat(documents()), 16)
STORED = {
    "float16": {"dtype": torch.float16},
    "int8": {"codec": codecs.Int8(), "normalize": True},
    "residual": {"codec": CODEC},
}
CASES = [
    (coarse, kind) for kind in STORED for coarse in PASSES if coarse != "centroids" or kind == "residual"
]


def created(path, kind="residual", docs=None, **options):
    """A corpus of several shards."""
    docs = documents() if docs is None else docs
    columns = {"n": list(range(len(docs)))} if pa else None
    options = {"d": D, "shard_bytes": 1500} | STORED[kind] | options
    return corpora.created(path, docs, names(len(docs)), columns, **options)


def queries(device="cpu"):
    docs = documents()
    return [unit(docs[i] + 0.1 * torch.randn(len(docs[i]), D), dim=-1).to(device) for i in (9, 25, 40, 57)]


def made(folder):
    """The files that first passes have made."""
    return {
        x.name for x in folder.iterdir() if x.name.partition(".")[2].startswith(("bits", "muvera", "lists"))
    }


@pytest.mark.parametrize("options", [{}, {"normalize": True}, {"largest": False, "keep_empty": True}])
@pytest.mark.parametrize("memory", [None, "cpu", "the queries'"])
@pytest.mark.parametrize(("coarse", "kind"), CASES)
def test_all_documents_as_candidates_are_the_exact_search(coarse, kind, memory, options, tmp_path, device):
    corpus, Q = created(tmp_path / "c", kind), queries(device)
    if memory:
        corpus = Corpus(corpus.shards, corpus._kind()).to("cpu" if memory == "cpu" else device)
    for change in (
        lambda: None,
        lambda: corpus.delete(names(60)[3:50:4]),
        lambda: corpus.add(documents(7, 1), names(7, "b"), {"n": list(range(7))} if pa else None),
        lambda: corpus.compact(),
    ):
        change()
        given = (
            options
            | {"subset": list(corpus.ids)[5:40:2]}
            | ({"filter": pa.compute.field("n") < 30} if pa else {})
        )
        for own, k in ((options, 5), (given, len(corpus) + 9)):
            exact = corpus.search(Q, k, **own)
            found = corpus.search(Q, k, coarse=coarse, candidates=max(k, len(corpus)), **own)
            rounded = 0 if Q[0].is_cpu else 1e-5
            torch.testing.assert_close(found.scores, exact.scores, rtol=rounded, atol=rounded)
            assert found.ids == exact.ids and torch.equal(found.indices, exact.indices)


@pytest.mark.parametrize("coarse", PASSES)
def test_the_candidates_are_the_best_by_the_first_pass(coarse, tmp_path, device):
    corpus, Q = created(tmp_path / "c"), queries(device)
    corpus.delete(names(60)[3:50:4])
    stored = list(corpus)
    if coarse == "bits":
        rough = li.maxsim([x.cpu() for x in Q], SIGNS.encode(stored))
    elif coarse == "centroids":
        codes = CODEC.encode(documents())
        rough = torch.stack([CODEC.centroid_scores(x.cpu(), codes) for x in Q])
        rough = rough[:, [int(x[1:]) for x in corpus.ids]]
    else:
        muvera = li.Muvera(D, k_sim=2, repetitions=20, d_proj=16)
        int8 = codecs.Int8().encode(muvera.encode_documents(stored).unsqueeze(1))
        rough = li.maxsim([muvera.encode_queries(x.cpu())[None] for x in Q], int8)
    rough[:, [len(x) == 0 for x in stored]] = -torch.inf
    wanted = rough.sort(dim=1, descending=True, stable=True).indices[:, :8]
    found = corpus.search(Q, 8, coarse=coarse, candidates=8).indices
    assert torch.equal(found.cpu().sort(dim=1).values, wanted.sort(dim=1).values)
    some, exact = corpus.search(Q, 3, coarse=coarse, candidates=8), corpus.search(Q, len(corpus))
    for i, own in enumerate(wanted.to(some.indices.device)):
        among = torch.isin(exact.indices[i], own)
        assert torch.equal(some.indices[i], exact.indices[i][among][:3])
        torch.testing.assert_close(some.scores[i], exact.scores[i][among][:3], rtol=1e-5, atol=1e-5)


def test_centroids_beyond_the_probes_count_as_the_last_of_them(tmp_path, device):
    docs = documents()
    codec = codecs.Residual.train(torch.cat(docs), 64)
    corpus, Q = created(tmp_path / "c", docs=docs, codec=codec), queries(device)
    corpus.delete(names(60)[3:50:4])
    (codes,) = [codec.encode([docs[int(x[1:])] for x in corpus.ids])]
    for i, query in enumerate(Q):
        products = query.cpu() @ codec.centroids.T
        least = products.sort(dim=1, descending=True).values[:, 15:16]
        gains = (products - least).clamp_min(0)[:, codes.centroids.long()]
        parts = gains.split(codes.lengths.tolist(), dim=1)
        rough = torch.tensor([float(x.amax(1).sum()) if x.shape[1] else -1.0 for x in parts])
        wanted = rough.sort(descending=True, stable=True).indices[:8]
        found = corpus.search(Q, 8, coarse="centroids", candidates=8).indices[i]
        assert found.sort().values.tolist() == wanted.sort().values.tolist()


def test_one_query_and_parts(tmp_path):
    corpus, (Q, *_) = created(tmp_path / "c"), queries()
    whole = corpus.search([Q], 5, coarse="muvera", candidates=20)
    alone = corpus.search(Q, 5, coarse="muvera", candidates=20)
    assert alone.indices.tolist() == whole.indices[0].tolist() and alone.ids == whole.ids[0]
    begin = 0
    for part in corpus.parts(3):
        exact, found = part.search(Q, 4), part.search(Q, 4, coarse="bits", candidates=len(part))
        assert (
            torch.equal(found.indices, exact.indices) and found.ids[0] in names(60)[begin : begin + len(part)]
        )
        begin += len(part)


@pytest.mark.parametrize("coarse", PASSES)
def test_progress_counts_documents_once(coarse, tmp_path):
    corpus, seen = created(tmp_path / "c"), []
    corpus.search(queries(), 3, coarse=coarse, progress=lambda *x: seen.append(x))
    assert seen[-1] == (60, 60) and seen == sorted(set(seen))


def test_what_there_is_not(tmp_path):
    corpus, Q = created(tmp_path / "c"), queries()
    for coarse in PASSES:
        options = {"coarse": coarse, "candidates": 100}
        assert corpus.search(torch.zeros(0, 3, D), 3, **options).indices.shape == (0, 3)
        empty = corpus.search(Q, 3, subset=[], **options)
        assert empty.scores.eq(-torch.inf).all() and empty.indices.eq(-1).all() and empty.ids[0] == [None] * 3
        found = corpus.search([Q[0], torch.zeros(0, D), Q[1] * torch.nan], 3, **options)
        exact = corpus.search([Q[0], torch.zeros(0, D), Q[1] * torch.nan], 3)
        assert torch.equal(found.indices, exact.indices) and torch.equal(found.scores, exact.scores)
    for emptied in (created(tmp_path / "e", docs=[]), created(tmp_path / "d", docs=documents(2))):
        emptied.delete(list(emptied.ids or ()))
        assert emptied.search(Q, 3, coarse="bits").indices.shape == (4, 0)


def test_documents_whose_score_is_nan_take_no_rank():
    docs = documents(20)
    docs[7] = docs[7] * torch.nan
    corpus = corpora.in_memory(docs)
    for coarse in ("bits", "muvera"):
        found = corpus.search(docs[9], 20, coarse=coarse, candidates=20)
        assert torch.equal(found.indices, corpus.search(docs[9], 20).indices) and 7 not in found.indices


# ---- what is kept ----


@pytest.fixture
def encoded(monkeypatch):
    """The shards whose codes were made, in order: the kind, and how many bytes."""
    seen, make = [], _first_pass._kept

    def watched(block, kind, size, encode):
        return make(block, kind, size, lambda out: seen.append((kind, len(out))) or encode(out))

    monkeypatch.setattr(_first_pass, "_kept", watched)
    return seen


@pytest.mark.parametrize("coarse", PASSES)
def test_codes_are_made_once_for_each_shard(coarse, tmp_path, encoded):
    folder, Q, kind = tmp_path / "c", queries(), "lists" if coarse == "centroids" else coarse
    corpus, options = created(folder), {"k": 4, "coarse": coarse, "candidates": 20}
    first = corpus.search(Q, **options)
    shards = len(corpus.shards)
    assert shards > 2 and len(encoded) == shards
    assert made(folder) == {f"shard-{i:05d}.{kind}" for i in range(shards)}
    again = Corpus.open(folder, verify=True).search(Q, **options)
    assert torch.equal(again.indices, first.indices) and len(encoded) == shards
    corpus.delete(["a9", "a10"])
    assert all("a9" not in own for own in corpus.search(Q, **options).ids) and len(encoded) == shards
    corpus.add(documents(3, 1), names(3, "b"), {"n": [1, 2, 3]} if pa else None)
    corpus.search(Q, **options)
    assert len(encoded) == shards + 1 == len(made(folder))
    corpus.compact()
    live = {f"shard-{x['number']:05d}.{kind}" for x in corpus._generation.entries["shards"]}
    assert made(folder) < live  # those of shards that are no more are gone
    corpus.search(Q, **options)
    assert made(folder) == live and Corpus.open(folder, verify=True)


@pytest.mark.parametrize("coarse", ["bits", "muvera"])
def test_codes_in_memory_are_made_once_for_each_shard(coarse, encoded):
    docs = documents(20)
    corpus = corpora.in_memory(docs, ids=names(20))
    for change in (lambda: None, lambda: corpus.delete(["a3"]), lambda: corpus.add(docs[:3], names(3, "b"))):
        change()
        corpus.search(docs[9], 3, coarse=coarse)
    assert [kind for kind, _ in encoded] == [coarse] * 2
    assert len(pickle.dumps(corpus)) < 2 * torch.cat(docs).nbytes + 5000  # without what can be made again
    corpus.compact()
    found = corpus.search(docs[9], 3, coarse=coarse)
    assert len(encoded) == 3 and len(pickle.loads(pickle.dumps(corpus))) == 22
    assert torch.equal(corpus.search(docs[9], 3, coarse=coarse).indices, found.indices)
    assert len(encoded) == 3  # it is pickled, and keeps what it has made


def test_encodings_of_unit_tokens_are_others(tmp_path, encoded):
    corpus, Q = created(tmp_path / "c", "float16", [3 * x for x in documents()]), queries()
    for normalize in (False, True, False, True):
        corpus.search(Q, 3, coarse="muvera", normalize=normalize)
    assert {kind for kind, _ in encoded} == {"muvera", "muvera_unit"} and len(encoded) == 2 * len(
        corpus.shards
    )


@pytest.mark.parametrize("fault", ["cut", "empty", "long", "of other files", "left behind"])
def test_a_file_that_is_not_whole_is_made_again(fault, tmp_path, encoded):
    corpus, Q = created(tmp_path / "c"), queries()
    wanted = corpus.search(Q, 5, coarse="bits", candidates=9)
    path, other = tmp_path / "c" / "shard-00000.bits", tmp_path / "c" / "shard-00001.bits"
    whole, count = path.read_bytes(), len(encoded)
    stray = path.with_name("shard-00000.bits.17-4")  # of a process that was killed
    if fault == "left behind":
        path.rename(stray)
    else:
        body = bytes(len(whole) - 32) + other.read_bytes()[-32:]
        path.write_bytes(
            {"cut": whole[:-1], "empty": b"", "long": whole + b"1", "of other files": body}[fault]
        )
    again = Corpus.open(tmp_path / "c")
    found = again.search(Q, 5, coarse="bits", candidates=9)
    assert torch.equal(found.indices, wanted.indices) and len(encoded) == count + 1
    assert path.read_bytes() == whole
    again.delete(["a1"])
    assert not stray.exists() and path.exists()


@pytest.mark.parametrize("call", ["write", "replace"])
def test_without_room_on_the_disk_codes_stay_in_memory(call, tmp_path, monkeypatch, encoded):
    corpus, Q = created(tmp_path / "c"), queries()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((_files.HashedFile, "write", full) if call == "write" else (os, "replace", full)))
        exact, found = corpus.search(Q, 5), corpus.search(Q, 5, coarse="bits", candidates=60)
        assert torch.equal(found.indices, exact.indices) and made(tmp_path / "c") == set()
        corpus.search(Q, 5, coarse="bits")
        assert len(encoded) == len(corpus.shards)


def test_verify_finds_a_changed_byte(tmp_path):
    corpus = created(tmp_path / "c")
    for coarse in PASSES:
        corpus.search(queries(), 3, coarse=coarse)
    corpus.verify()
    assert len(made(tmp_path / "c")) == 3 * len(corpus.shards)
    for name in sorted(made(tmp_path / "c")):
        path = tmp_path / "c" / name
        whole = path.read_bytes()
        path.write_bytes(bytes([*whole[:5], whole[5] ^ 4, *whole[6:]]))
        with pytest.raises(CorpusError, match=f"{name} does not have the checksum .* makes it again"):
            Corpus.open(tmp_path / "c", verify=True)
        path.unlink()
    corpus.verify()


def test_an_open_corpus_keeps_its_documents_while_another_changes(tmp_path):
    corpus, Q = created(tmp_path / "c"), queries()
    reader = Corpus.open(tmp_path / "c")
    exact = reader.search(Q, 5)
    corpus.delete(names(60)[::3])
    corpus.compact()
    for coarse in PASSES:  # made of files that are gone, but mapped
        found = reader.search(Q, 5, coarse=coarse, candidates=60)
        assert found.ids == exact.ids and torch.equal(found.scores, exact.scores)
    reader.refresh()
    assert reader.search(Q, 5, coarse="bits", candidates=60).ids == corpus.search(Q, 5).ids
    corpus.delete(["a1"])  # a writer removes what no shard has
    kept = {f"shard-{x['number']:05d}" for x in corpus._generation.entries["shards"]}
    assert {name.partition(".")[0] for name in made(tmp_path / "c")} <= kept
    corpus.verify()


# ---- MUVERA ----


def clustered(count):
    """Documents of 20 to 40 tokens, each about two of a hundred topics, and queries made of some of them."""
    generator = torch.Generator().manual_seed(3)
    topics = torch.randn(100, 1, 64, generator=generator) + torch.randn(100, 32, 64, generator=generator)
    docs = []
    for _ in range(count):
        length = int(torch.randint(20, 41, (1,), generator=generator))
        topic = torch.randint(100, (2,), generator=generator)[
            torch.randint(2, (length,), generator=generator)
        ]
        tokens = topics[topic, torch.randint(32, (length,), generator=generator)]
        docs.append(unit(tokens + 0.5 * torch.randn(length, 64, generator=generator), dim=-1))
    chosen = torch.randint(count, (32,), generator=generator).tolist()
    noise = torch.randn(32, 12, 64, generator=generator)
    return docs, [unit(docs[i][:12] + 0.05 * x, dim=-1) for i, x in zip(chosen, noise, strict=True)]


def test_encodings_in_int8_find_what_float32_finds(tmp_path):
    docs, Q = clustered(1500)
    corpus = corpora.in_memory(docs, normalized=True)
    exact = corpus.search(Q, 120)
    encodings = li.Muvera(64, k_sim=2, repetitions=20, d_proj=16).encode_corpus(docs)
    padded = li.Tokens.from_list(docs).to_padded()
    recalls = []
    for candidates in (100, 200):
        floats = li.search(Q, padded, 100, coarse=encodings, candidates=candidates)
        int8 = corpus.search(Q, 100, coarse="muvera", candidates=candidates)
        recalls.append([li.evaluate_recall(x, exact, 100)[100] for x in (floats, int8)])
        assert abs(recalls[-1][0] - recalls[-1][1]) < 0.01
    assert 0.5 < recalls[0][1] < recalls[1][1] < 1
    (kept,) = (shard.kept["muvera"] for shard in corpus.shards)
    assert len(kept) / len(docs) <= 1300


# ---- tuning ----


def test_tune_finds_the_cheapest_first_pass_with_the_recall(tmp_path, capsys, monkeypatch):
    docs, Q = clustered(600)
    codec = codecs.Residual.train(torch.cat(docs), 64)
    corpus = corpora.created(tmp_path / "c", docs, codec=codec, normalize=True)
    clock = {"now": 0.0}  # a search takes as long as it has candidates, and a first pass more or less
    search, costs = Corpus.search, {"bits": 100, "muvera": 1, "centroids": 50, None: 600}

    def timed(self, *args, coarse=None, candidates=None, **options):
        clock["now"] += costs[coarse] + (candidates or 0)
        return search(self, *args, coarse=coarse, candidates=candidates, **options)

    monkeypatch.setattr(Corpus, "search", timed)
    monkeypatch.setattr("late_interaction.corpus._tune.time.perf_counter", lambda: clock["now"])
    chosen = corpus.tune(Q, 10, recall=0.95, normalize=True)
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.split() == ["coarse", "candidates", "recall@10", "ms", "a", "query"]
    assert all(len(row) == len(title) for row in rows)
    found = [(name, int(count), float(recall), float(ms)) for name, count, recall, ms in map(str.split, rows)]
    assert found[0] == ("none", 600, 1.0, 600_000.0) and {x[0] for x in found} == {"none", *PASSES}
    good = [x for x in found if x[2] >= 0.95]
    name, count, recall, _ = min(good, key=lambda x: x[3])
    assert chosen == {"coarse": name, "candidates": count}
    result, exact = (corpus.search(Q, 10, normalize=True, **how) for how in (chosen, {}))
    assert abs(li.evaluate_recall(result, exact)[10] - recall) < 0.002
    costs.update(dict.fromkeys(PASSES, 1000))  # each is given up at once
    assert corpus.tune(Q[:2], 10) == {"coarse": None, "candidates": None}
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert corpus.search(Q, 10, coarse=None, candidates=None).indices.shape == (32, 10)


def test_tune_of_few_documents():
    corpus = Corpus.from_packed(torch.eye(4), torch.tensor([0, 1, 4]))
    assert corpus.tune(torch.ones(1, 4), 5) == {"coarse": None, "candidates": None}


def test_no_first_pass_in_a_group(tmp_path):
    options = Options(5, coarse="bits", group=object())
    with pytest.raises(ValueError, match=r"^group must be None with coarse, got <object"):
        prepare(created(tmp_path / "c"), queries(), options)
