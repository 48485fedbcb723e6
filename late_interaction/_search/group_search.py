"""Search by all processes of a group, each among documents of its own.

The best of each are exchanged, and every process chooses the best of all.

The first exchange has one size, whatever a process passes, so that no two processes wait for different ones.
It holds notes: what must be alike, and how many documents a process has. A process adds what it found where
that fits and where it may begin before it has heard of the others: on a GPU, if the plan of its search is
known to it. If all have done so and were right, that was all. Else a second exchange follows, of what each
has found knowing the number of all documents.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from late_interaction._checks.options import PRECISIONS, Precision
from late_interaction._checks.tensors import CODES, FLOATS
from late_interaction._group import (
    REFUSED,
    check_alike,
    check_refused,
    gathered,
    gathering,
    on_stream_of_facts,
    position,
)
from late_interaction._search import exchange
from late_interaction._search.selection import Found
from late_interaction.ops.topk import MOST_DOCUMENTS

_DTYPES = (*FLOATS, *CODES, torch.uint8)
_PRECISIONS = (None, *PRECISIONS)
# What facts stand for, where they are no numbers.
_SHOWN: dict[str, Callable[[int], Any]] = {
    "largest": bool,
    "normalize": bool,
    "keep_empty": bool,
    "precision": lambda i: _PRECISIONS[i] or "None",
    "dtype": lambda i: str(_DTYPES[i]).removeprefix("torch."),
}
_CALLER = "search"  # in messages
Table = list[list[int]]  # the notes of all processes
# The size of the first exchange in int64: it has room for the 100 best documents of 20 queries.
_SIZE = 2048
# Stands for a number of all documents on which nothing depends.
_ANY = -1

# A process's notes; the facts follow. The first one is read on the device.
_DOCUMENTS, _CHECKSUM, _FAILED, _SEARCHED, _ASSUMED = range(5)
_FACTS = 5
_NOTES = _FACTS + 7


@dataclass(frozen=True)
class Query:
    """Hold what all processes must pass alike, and the search of this one.

    runs_ahead: a GPU searches the documents of this process, and the host is soon done. needs_total: which
    bits the scores have depends on how many documents all processes have.
    """

    tensors: Sequence[Tensor | None]  # the queries, and what comes with them
    count: int
    k: int
    largest: bool
    normalize: bool
    precision: Precision | None
    keep_empty: bool
    query_dtype: torch.dtype
    dtype: torch.dtype  # of scores
    documents: int
    runs_ahead: bool = False
    needs_total: bool = True

    def facts(self) -> dict[str, int]:
        """Return what a message may show, without the checksum of the queries."""
        return {
            "k": min(int(self.k), 1 << 62),
            "number of queries": self.count,
            "largest": int(self.largest),
            "normalize": int(self.normalize),
            "keep_empty": int(self.keep_empty),
            "precision": _PRECISIONS.index(self.precision),
            "dtype": _DTYPES.index(self.query_dtype),
        }


Local = Callable[[int], Found]


def search(group: Any, device: torch.device, prepare: Callable[[], Query], local: Local) -> Found:
    """Find the best of the documents of all processes, numbered in the order of ranks.

    The result is the same on every process.

    prepare: checks the arguments of this process. What it raises, and what ``local`` raises, this process
    raises after all others have learnt of it. local: scores and indices of the best of its own documents,
    called with the number of all documents, as far as that is known.
    """
    position(group)
    try:
        query = prepare()
        process = _Exchange(group, device, query)
    except Exception:
        with suppress(RuntimeError):  # which says that this process refused
            _Exchange(group, device, None).tell()()
        raise
    expected = _ANY if not query.needs_total else _expected.get(group)
    own = None
    if query.runs_ahead and expected is not None and process.fits:
        own = _Own(local, query.documents if expected == _ANY else expected, expected)
        table = process.tell_results(own, query.k, _SIZE)
    else:
        answer = process.tell()
        if query.runs_ahead and not query.needs_total:
            own = _Own(local, query.documents, _ANY)
        table = answer()
    total = _expected[group] = sum(row[_DOCUMENTS] for row in table)
    if not all(row[_SEARCHED] and row[_ASSUMED] in (_ANY, total) for row in table):
        if own is None or own.assumed not in (_ANY, total):
            own = _Own(local, total, total)
        width = min(query.k, max(row[_DOCUMENTS] for row in table))
        keys = query.count * width * (2 if query.dtype == torch.float64 else 1)
        process.tell_results(own, width, keys + _NOTES)
    scores, indices = process.best
    k = min(query.k, total)
    if scores.shape[1] > k:
        scores, indices = scores[:, :k].contiguous(), indices[:, :k].contiguous()
    return scores, indices


# How many documents all processes of a group had at its last search.
_expected: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


class _Own:
    """Hold what this process has found, or the error of its search."""

    def __init__(self, local: Local, total: int, assumed: int) -> None:
        """assumed: the number of all documents that this holds for."""
        self.assumed = assumed
        self.found: Found | None = None
        self.error: Exception | None = None
        try:
            self.found = local(total)
        except Exception as error:
            self.error = error


class _Exchange:
    """Hold what this process tells the others, and hears from them."""

    def __init__(self, group: Any, device: torch.device, query: Query | None) -> None:
        self._group, self._device, self._query = group, device, query
        self._facts = {} if query is None else query.facts()
        self.best: Found

    @property
    def fits(self) -> bool:
        """Tell whether what this process finds has room in the first exchange."""
        query = self._query
        assert query is not None
        return query.dtype != torch.float64 and query.count * query.k + _NOTES <= _SIZE

    def tell(self) -> Callable[[], Table]:
        """Begins the first exchange, with notes alone. What it returns waits for those of all processes."""
        with on_stream_of_facts(self._device):
            payload = exchange.notes_alone(self._device, _SIZE, self._notes(None))
            wait = gathering(_CALLER, self._group, payload, "arguments")

        def table() -> Table:
            with on_stream_of_facts(self._device):
                found: Table = wait()[:, _SIZE - _NOTES :].tolist()
            return self._checked(found)

        return table

    def tell_results(self, own: _Own, width: int, size: int) -> Table:
        """Exchange what was found, and return the notes of all processes; the best of all go to ``best``."""
        query = self._query
        assert query is not None
        options = query.largest, query.dtype
        if own.found is not None:
            try:
                payload = exchange.packed(own.found, width, size, self._notes(own), query.largest)
                exchange.add_checksum(payload, size - _NOTES + _CHECKSUM, query.tensors)
            except Exception as error:
                own.error, own.found = error, None
        if own.found is None:
            payload = exchange.notes_alone(self._device, size, self._notes(own))
        rows = gathered(_CALLER, self._group, payload, "results")
        if own.error is not None:
            raise own.error
        self.best, notes = exchange.merged(rows, query.count, width, _NOTES, query.k, *options)
        # The host waits for the device here at the earliest, when all of it has been launched.
        return self._checked(notes.tolist())

    def _notes(self, own: _Own | None) -> list[int]:
        if self._query is None:
            return [REFUSED] * _NOTES
        notes = [self._query.documents, 0, 0, 0, 0, *self._facts.values()]
        if own is not None:
            notes[_FAILED], notes[_SEARCHED], notes[_ASSUMED] = own.error is not None, 1, own.assumed
        return [int(x) for x in notes]

    def _checked(self, table: Table) -> Table:
        """Raise on every process where one has refused its arguments or failed, or they differ."""
        check_refused(_CALLER, table)
        if self._query is None:
            return table
        places = enumerate(self._facts, _FACTS)
        alike = {name: [_SHOWN.get(name, int)(row[i]) for row in table] for i, name in places}
        check_alike(_CALLER, alike)
        counts = [row[_DOCUMENTS] for row in table]
        if sum(counts) > MOST_DOCUMENTS:
            raise ValueError(
                f"{_CALLER}: the ranks must have at most 2**32 documents together, got {sum(counts)}"
            )
        failed = [str(i) for i, row in enumerate(table) if row[_FAILED]]
        if failed:
            raise RuntimeError(f"{_CALLER}: rank {', '.join(failed)} of the group failed; see its error")
        sums = [f"checksum {row[_CHECKSUM]}" if row[_SEARCHED] else None for row in table]
        check_alike(_CALLER, {"queries": sums})
        return table
