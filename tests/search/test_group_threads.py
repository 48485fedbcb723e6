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
    options = {"count": 2, "normalize": True, "precision": None, "keep_empty": False} | others
    options |= {"query_dtype": dtype, "dtype": dtype}
    return Query((Q, None), k=k, largest=largest, documents=documents, **options)


def best(scores, q, first=0):
    """The documents with the best scores; of equal scores, the first."""
    sign = -1 if q.largest else 1
    order = (sign * scores).sort(dim=1, stable=True).indices[:, : min(q.k, scores.shape[1])]
    return scores.gather(1, order).to(q.dtype), order + first


# How a process begins its search: once it has heard of the others; before that, because any number of
# documents gives the same bits; and before that, by the number of documents of the last search, right or
# wrong.
WAITS, ANY, EXPECTS = {}, {"runs_ahead": True, "needs_total": False}, {"runs_ahead": True}


def searches(monkeypatch, prepared, local=None, timeout=5, expected=None, totals=None):
    """What each thread's search returns, or raises. prepared: a Query or an error of each. expected: the
    number of documents at the last search. totals: gets the numbers that each rank's search is told."""
    world, own = len(prepared), threading.local()
    rows, barrier = [None] * world, threading.Barrier(world)

    def gathered(caller, group, values, what):
        assert (caller, group) == ("search", "a group") and what in ("arguments", "results")
        rows[own.rank] = values.clone()
        barrier.wait(timeout)
        found = torch.stack(rows)
        barrier.wait(timeout)
        return found

    def gathering(caller, group, values, what):
        assert what == "arguments"
        return lambda: gathered(caller, group, values, what)

    monkeypatch.setattr(group_search, "position", lambda group: (own.rank, world))
    monkeypatch.setattr(group_search, "gathered", gathered)
    monkeypatch.setattr(group_search, "gathering", gathering)
    last = {} if expected is None else {"a group": expected}
    monkeypatch.setattr(group_search, "_expected", last)
    counts = [q.documents if isinstance(q, Query) else 0 for q in prepared]

    def search(rank):
        own.rank, q = rank, prepared[rank]

        def prepare():
            if isinstance(q, Exception):
                raise q
            return q

        def of_own(total):
            if totals is not None:
                totals[rank].append(total)
            if local is not None:
                return local(rank)
            first = sum(counts[:rank])
            return best(SCORES[:, first : first + q.documents], q)

        try:
            return group_search.search("a group", torch.device("cpu"), prepare, of_own)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(search, range(world)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 4, 20])
@pytest.mark.parametrize(
    "begins, expected",
    [
        ([WAITS], None),
        ([ANY], None),
        ([EXPECTS], None),
        ([EXPECTS], 10),
        ([EXPECTS], 9),
        ([ANY, EXPECTS, WAITS], 10),
        ([ANY, EXPECTS], 11),
    ],
)
@pytest.mark.parametrize("counts", [(10,), (3, 0, 7), (1, 2, 4, 3), (0, 10)])
def test_the_best_of_all_on_every_process(counts, begins, expected, k, largest, dtype, monkeypatch):
    q = query(0, k, largest, dtype)
    scores, indices = best(SCORES, q)
    totals = [[] for _ in counts]
    prepared = [replace(q, documents=count, **begins[i % len(begins)]) for i, count in enumerate(counts)]
    for found in searches(monkeypatch, prepared, expected=expected, totals=totals):
        assert torch.equal(found[0], scores) and found[0].dtype is dtype
        assert torch.equal(found[1], indices)
    for told, one in zip(totals, prepared, strict=True):
        early = expected if dtype is torch.float32 and one.runs_ahead else None
        if one.needs_total:
            assert told == ([10] if early in (None, 10) else [early, 10])
        else:
            assert told == [one.documents]


@pytest.mark.parametrize("begins, rounds", [(ANY, 1), (EXPECTS, 1), (WAITS, 2)])
def test_how_often_processes_exchange(begins, rounds, monkeypatch):
    sizes = []
    packed, alone = exchange.packed, exchange.notes_alone
    monkeypatch.setattr(exchange, "packed", lambda *given: sizes.append(given[2]) or packed(*given))
    monkeypatch.setattr(exchange, "notes_alone", lambda *given: sizes.append(given[1]) or alone(*given))
    for k in (4, 4000):  # more than the first exchange has room for
        sizes.clear()
        found = searches(monkeypatch, [query(5, k, **begins)] * 2, expected=10)
        assert all(isinstance(x, tuple) for x in found)
        assert sizes.count(group_search._SIZE) == 2 and len(sizes) == 2 * (rounds if k == 4 else 2)


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
        ("keep_empty", {"keep_empty": True}),
        ("precision, got None on rank 0, high on rank 1", {"precision": "high"}),
        ("dtype, got float32 on rank 0, int8 on rank 1", {"query_dtype": torch.int8}),
        (r"queries, got checksum -?\d+ on rank 0, checksum -?\d+ on rank 1", {"tensors": (Q + 1, None)}),
    ],
)
@pytest.mark.parametrize("one", [WAITS, ANY, EXPECTS])
@pytest.mark.parametrize("another", [WAITS, ANY, EXPECTS])
def test_processes_that_disagree_are_told_where(name, other, one, another, monkeypatch):
    q = query(5)
    for error in searches(monkeypatch, [replace(q, **one), replace(q, **other, **another)], expected=10):
        with pytest.raises(ValueError, match=f"search: .* the same {name}"):
            raise error


@pytest.mark.parametrize("begins", [WAITS, ANY, EXPECTS])
@pytest.mark.parametrize("refuses", [0, 1, 2])
def test_a_process_that_refuses_its_arguments(refuses, begins, monkeypatch):
    prepared = [query(2, **begins), query(3, **begins), query(5)]
    prepared[refuses] = TypeError("Q must be a tensor")
    for rank, error in enumerate(searches(monkeypatch, prepared, expected=10)):
        wanted = (TypeError, "Q must be") if rank == refuses else (RuntimeError, f"{refuses}.* refused")
        with pytest.raises(wanted[0], match=wanted[1]):
            raise error


@pytest.mark.parametrize("begins", [[WAITS], [ANY], [EXPECTS], [ANY, ANY, WAITS], [EXPECTS, WAITS, EXPECTS]])
@pytest.mark.parametrize("fail, named", [((0,), "0"), ((1,), "1"), ((0, 2), "0, 2"), ((0, 1, 2), "0, 1, 2")])
def test_processes_whose_search_fails(fail, named, begins, monkeypatch):
    def local(rank):
        if rank in fail:
            raise MemoryError(f"of rank {rank}")
        return best(SCORES[:, :3], query(3))

    prepared = [query(3, **begins[rank % len(begins)]) for rank in range(3)]
    # Those that wait hear of an error before they search.
    early = [rank for rank in fail if prepared[rank].runs_ahead]
    named = ", ".join(map(str, early)) if early else named
    for rank, error in enumerate(searches(monkeypatch, prepared, local, expected=9)):
        wanted = (MemoryError, f"of rank {rank}")
        if rank not in (early or fail):
            wanted = RuntimeError, f"search: rank {named} of the group failed"
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
    found = torch.zeros(3, dtype=torch.int64)
    exchange.add_checksum(found, 1, tensors)
    assert found[1].item() % (1 << 50) == total and not found[::2].any()
