"""A search by a group whose processes are threads of this one: what they exchange, and the errors of each."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from late_interaction._search import exchange, group_search
from late_interaction._search.group_search import Query

SCORES = torch.tensor([[4.0, 7, 1, 9, 9, 2, 8, 3, 6, 5], [0.5, 3, 2, 1, 9, 4, 9, 8, 7, 6]])
Q = torch.arange(24.0).view(2, 3, 4)


def query(documents, k=4, largest=True, dtype=torch.float32, **others):
    options = {"count": 2, "normalize": True, "precision": None} | others
    return Query((Q, None), k=k, largest=largest, dtype=dtype, documents=documents, **options)


def best(scores, q, first=0):
    """The documents with the best scores; of equal scores, the first."""
    sign = -1 if q.largest else 1
    order = (sign * scores).sort(dim=1, stable=True).indices[:, : min(q.k, scores.shape[1])]
    return scores.gather(1, order).to(q.dtype), order + first


def searches(monkeypatch, prepared, local=None, timeout=5, asks=True):
    """What each thread's search returns, or raises. prepared: a Query or an error of each. asks: whether the
    search of its own documents asks how many there are in all."""
    world, own = len(prepared), threading.local()
    rows, barrier = [None] * world, threading.Barrier(world)

    def exchanged(values):
        rows[own.rank] = values
        barrier.wait(timeout)
        found = list(rows)
        barrier.wait(timeout)
        return found

    def gathered(caller, group, values, what):
        assert (caller, group, what) == ("retrieve", "a group", "results")
        return torch.stack(exchanged(values.clone()))

    def exchanging_facts(caller, group, facts, device, what):
        assert (caller, group, what) == ("retrieve", "a group", "arguments") and device.type == "cpu"
        return lambda: exchanged([float(x) for x in facts])

    monkeypatch.setattr(group_search, "position", lambda group: (own.rank, world))
    monkeypatch.setattr(group_search, "gathered", gathered)
    monkeypatch.setattr(group_search, "exchanging_facts", exchanging_facts)
    counts = [q.documents if isinstance(q, Query) else 0 for q in prepared]

    def search(rank):
        own.rank, q = rank, prepared[rank]

        def prepare():
            if isinstance(q, Exception):
                raise q
            return q

        def of_own(documents):
            if asks:
                assert documents() == documents() == sum(counts)
            if local is not None:
                return local(rank)
            first = sum(counts[:rank])
            return best(SCORES[:, first : first + q.documents], q)

        try:
            return group_search.search("retrieve", "a group", torch.device("cpu"), prepare, of_own)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(search, range(world)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 4, 20])
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("counts", [(10,), (3, 0, 7), (1, 2, 4, 3), (0, 10)])
def test_the_best_of_all_on_every_process(counts, asks, k, largest, dtype, monkeypatch):
    q = query(0, k, largest, dtype)
    scores, indices = best(SCORES, q)
    for found in searches(monkeypatch, [replace(q, documents=count) for count in counts], asks=asks):
        assert torch.equal(found[0], scores) and found[0].dtype is dtype
        assert torch.equal(found[1], indices)


def test_no_documents_at_all(monkeypatch):
    nothing = torch.empty(2, 0), torch.empty(2, 0, dtype=torch.int64)
    for scores, indices in searches(monkeypatch, [query(0)] * 2, lambda rank: nothing):
        assert scores.shape == indices.shape == (2, 0)


@pytest.mark.parametrize(
    "name, other",
    [
        ("k", {"k": 5}),
        ("number of queries", {"count": 3}),
        ("largest", {"largest": False}),
        ("normalize", {"normalize": False}),
        (r"precision \(by number\)", {"precision": "high"}),
        (r"dtype of scores \(by number\)", {"dtype": torch.float64}),
        (r"queries \(by a checksum\)", {"tensors": (Q + 1, None)}),
    ],
)
@pytest.mark.parametrize("asks", [True, False])
def test_processes_that_disagree_are_told_where(name, other, asks, monkeypatch):
    q = query(5)
    for error in searches(monkeypatch, [q, replace(q, **other)], asks=asks):
        with pytest.raises(ValueError, match=f"retrieve: .*{name}"):
            raise error


@pytest.mark.parametrize("refuses", [0, 1, 2])
def test_a_process_that_refuses_its_arguments(refuses, monkeypatch):
    prepared = [query(2), query(3), query(5)]
    prepared[refuses] = TypeError("Q must be a tensor")
    for rank, error in enumerate(searches(monkeypatch, prepared)):
        wanted = (TypeError, "Q must be") if rank == refuses else (RuntimeError, f"{refuses}.* refused")
        with pytest.raises(wanted[0], match=wanted[1]):
            raise error


@pytest.mark.parametrize("fail, named", [((0,), "0"), ((1,), "1"), ((0, 2), "0, 2"), ((0, 1, 2), "0, 1, 2")])
def test_processes_whose_search_fails(fail, named, monkeypatch):
    def local(rank):
        if rank in fail:
            raise MemoryError(f"of rank {rank}")
        return best(SCORES[:, :3], query(3))

    for rank, error in enumerate(searches(monkeypatch, [query(3)] * 3, local)):
        wanted = (MemoryError, f"of rank {rank}")
        if rank not in fail:
            wanted = RuntimeError, f"retrieve: rank {named} of the group failed"
        with pytest.raises(wanted[0], match=wanted[1]):
            raise error


def test_more_documents_than_indices_tell_apart(monkeypatch):
    monkeypatch.setattr(group_search, "MOST_DOCUMENTS", 10)
    assert all(isinstance(found, tuple) for found in searches(monkeypatch, [query(3), query(7)]))
    for error in searches(monkeypatch, [query(4), query(7)], lambda rank: best(SCORES, query(10))):
        with pytest.raises(ValueError, match=r"at most .* documents together, got 11"):
            raise error


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        (None, torch.empty(0, 4)),
        (Q, None, Q.half()),
        (torch.full((5, 1000), -1.5), Q.mT),
        *((torch.full((40_000,), 255, dtype=torch.uint8),) * n for n in range(4, 12)),  # beyond 2**50
    ],
)
def test_the_checksum_counts_every_byte_and_its_place(tensors):
    total = 0
    for x in tensors:
        if x is not None and x.numel():
            data = x.contiguous().flatten().view(torch.uint8).tolist()
            total = (31 * total + sum(byte * (i % 8191 + 1) for i, byte in enumerate(data))) % 2**50
    payload = exchange.packed((SCORES[:, :1], torch.zeros(2, 1, dtype=torch.int64)), 0, 1, True, tensors)
    assert exchange.checksums([payload[-exchange.NOTES :].tolist()]) == [[total]]
