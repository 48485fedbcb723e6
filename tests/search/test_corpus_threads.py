"""Objects of a search that several threads use at the same time: safe, or refused with a clear error."""

import copy
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import late_interaction as li
from late_interaction import Corpus, TopK
from tests.support.corpora import created


@pytest.fixture(autouse=True)
def switching():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def document(i):
    """[1 + i % 3, 8], which says what its number is."""
    return torch.full((1 + i % 3, 8), float(i))


def added_by_threads(path, threads=4, calls=12, shard_bytes=600, finish=False):
    """Documents of several threads, each with its number as its id."""
    numbers = [[[t * 1000 + 3 * c + x for x in range(3)] for c in range(calls)] for t in range(threads)]
    builder = Corpus.create(path, d=8, dtype=torch.float32, normalize=False, shard_bytes=shard_bytes)
    start, refused = threading.Barrier(threads), []

    def add(own):
        start.wait()
        for call in own:
            try:
                builder.add([document(i) for i in call], [str(i) for i in call])
            except RuntimeError as error:
                refused.append(str(error))
            if finish and call == own[calls // 2]:
                builder.finish()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(add, numbers))
    builder.finish()
    return numbers, refused


@pytest.mark.parametrize(("shard_bytes", "attempts"), [(600, 3), (1 << 30, 40)])
def test_documents_that_threads_add_keep_their_ids(shard_bytes, attempts, tmp_path):
    for attempt in range(attempts):
        path = tmp_path / str(attempt)
        numbers, refused = added_by_threads(path, shard_bytes=shard_bytes)
        corpus = Corpus.open(path, verify=True)
        found = [int(x) for x in corpus.ids]
        assert not refused and sorted(found) == sorted(i for own in numbers for call in own for i in call)
        for number, x in zip(found, corpus, strict=True):
            assert torch.equal(x, document(number))
        places = {number: place for place, number in enumerate(found)}
        for call in (call for own in numbers for call in own):  # the documents of one call lie together
            assert [places[i] - places[call[0]] for i in call] == [0, 1, 2]


@pytest.mark.parametrize("attempt", range(2))
def test_a_corpus_is_finished_while_threads_add_to_it(attempt, tmp_path):
    """Each document is in it, or its thread has heard that it is not."""
    _, refused = added_by_threads(tmp_path / "corpus", finish=True)
    corpus = Corpus.open(tmp_path / "corpus", verify=True)
    assert len(corpus) + 3 * len(refused) == 4 * 12 * 3 and len(refused) > 0
    assert all("is finished: it takes no more documents" in words for words in refused)
    assert all(torch.equal(x, document(int(number))) for number, x in zip(corpus.ids, corpus, strict=True))


def test_a_progress_function_may_flush(tmp_path):
    def progress(done, total):
        builder.flush()

    with Corpus.create(tmp_path / "c", d=8, progress=progress, total=6) as builder:
        builder.add([document(i) + 1 for i in range(3)])
        builder.add([document(i) + 1 for i in range(3)])
    assert [shard.documents for shard in Corpus.open(tmp_path / "c").shards] == [3, 3]


def in_another_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("use", ["add", "merge", "merge into", "state_dict", "load_state_dict"])
def test_a_topk_refuses_a_second_thread(use):
    Q, D = torch.randn(2, 3, 8), torch.randn(20, 4, 8)
    best, other = TopK(Q, 3), TopK(Q, 3, first=100)
    empty = best.state_dict()
    uses = {
        "add": lambda: best.add(D),
        "merge": lambda: best.merge(other),
        "merge into": lambda: other.merge(best),
        "state_dict": best.state_dict,
        "load_state_dict": lambda: best.load_state_dict(empty),
    }
    met = []

    def progress(done, total):
        if done == 10:
            assert best.state_dict()["seen"] == 10  # the thread itself may save what it has
            with pytest.raises(RuntimeError, match="this TopK is in use by another thread"):
                in_another_thread(uses[use])
            met.append(done)

    best.add(D, chunk_bytes=5 * D[0].nbytes, progress=progress)
    wanted = li.search(Q, D, 3)
    assert met == [10] and best.seen == 20 and torch.equal(best.indices, wanted.indices)
    in_another_thread(lambda: best.add(D))  # one after the other they may
    assert best.seen == 40


def test_copies_of_a_topk_are_searches_of_their_own():
    Q, D = torch.randn(2, 3, 8), torch.randn(20, 4, 8)
    best = TopK(Q, 3)
    best.add(D[:10])
    for again in (copy.deepcopy(best), pickle.loads(pickle.dumps(best))):
        again.add(D[10:])
        assert torch.equal(again.indices, li.search(Q, D, 3).indices) and best.seen == 10


def test_threads_may_share_what_they_only_read(tmp_path):
    """A corpus, encoders and their codes."""
    generator = torch.Generator().manual_seed(0)
    docs = [torch.randn(n, 16, generator=generator) for n in [3, 0, 5, 2] * 20]
    corpus = created(tmp_path / "corpus", docs, [f"d{i}" for i in range(len(docs))], shard_bytes=2000)
    muvera = li.Muvera(16, k_sim=2)
    D = torch.randn(30, 4, 16, generator=generator)
    encodings = muvera.encode_corpus(D)
    queries = [torch.randn(2, 3, 16, generator=generator) for _ in range(24)]

    def search(Q):
        found = corpus.search(Q, 5), li.search(Q, D, 5), li.search(Q, D, 5, coarse=encodings)
        return [x for pair in found for x in pair] + [muvera.encode_queries(Q)], [
            corpus.ids[3],
            len(corpus[4]),
        ]

    wanted = [search(Q) for Q in queries]
    order = random.Random(0).sample(range(24), 24)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: search(queries[i]), order))
    for i, (tensors, rest) in zip(order, found, strict=True):
        assert all(map(torch.equal, tensors, wanted[i][0])) and rest == wanted[i][1]
