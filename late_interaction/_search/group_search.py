"""A search by all processes of a group, each among documents of its own: the best of each are exchanged, and
every process chooses the best of all."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import PRECISIONS
from late_interaction._group import (
    REFUSED,
    Table,
    check_alike,
    check_refused,
    exchanging_facts,
    gathered,
    position,
)
from late_interaction._search import exchange
from late_interaction._search.selection import MOST_DOCUMENTS, Found

_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Query:
    """What all processes must pass alike, and how many documents this one has."""

    tensors: Sequence[Tensor | None]  # the queries, and what comes with them
    count: int
    k: int
    largest: bool
    normalize: bool
    precision: str | None
    dtype: torch.dtype  # of scores
    documents: int

    def facts(self) -> dict[str, float]:
        """What a message may show, without the checksum of the queries."""
        return {
            "k": self.k,
            "number of queries": self.count,
            "largest": self.largest,
            "normalize": self.normalize,
            "precision (by number)": (None, *PRECISIONS).index(self.precision),
            "dtype of scores (by number)": _DTYPES.index(self.dtype),
        }


def search(
    caller: str,
    group: Any,
    device: torch.device,
    prepare: Callable[[], Query],
    local: Callable[[Callable[[], int]], Found],
) -> Found:
    """The best of the documents of all processes, which are numbered in the order of ranks: the same on every
    process.

    Two exchanges: of what must be alike and of the numbers of documents, which goes on while a GPU begins to
    search; and of what was found, with a checksum of the queries.

    prepare: checks the arguments of this process. What it raises, and what ``local`` raises, this process
    raises after all others have learnt of it. local: scores and indices of the best of its own documents. It
    is given a function that waits for the number of all documents, and raises where the processes differ.
    """
    rank, _ = position(group)
    try:
        query = prepare()
        own = [query.documents, *query.facts().values()]
    except Exception:
        with suppress(RuntimeError):  # which says that this process refused
            refused = [float(REFUSED)] * _FACTS
            check_refused(caller, exchanging_facts(caller, group, refused, device, _ARGUMENTS)())
        raise
    facts = _Facts(caller, query, exchanging_facts(caller, group, own, device, _ARGUMENTS))
    found, failure = None, None
    try:
        found = local(facts.documents)
    except Exception as error:
        failure = error
    facts.documents()
    held = [min(query.k, count) for count in facts.counts]
    width, first = max(held), sum(facts.counts[:rank])
    try:
        if found is not None:
            payload = exchange.packed(found, first, width, query.largest, query.tensors)
    except Exception as error:
        found, failure = None, error
    if found is None:
        payload = exchange.failed(query.count, width, query.dtype, device)
    rows = gathered(caller, group, payload, "results")
    if failure is not None:
        raise failure
    best, notes = exchange.merged(rows, query.count, held, query.k, query.largest, query.dtype)
    # The host waits for the device here at the earliest, when all of it has been launched.
    table = notes.tolist()
    failed = [str(i) for i, row in enumerate(table) if row[exchange.FAILED]]
    if failed:
        raise RuntimeError(f"{caller}: rank {', '.join(failed)} of the group failed; see its error")
    check_alike(caller, exchange.checksums(table), {"queries (by a checksum)": 0})
    return best


# What each process tells the others first: its number of documents, and facts.
_FACTS, _ARGUMENTS = 7, "arguments"


class _Facts:
    """What the processes tell each other first, once it is here."""

    def __init__(self, caller: str, query: Query, table: Callable[[], Table]) -> None:
        self._caller, self._query, self._table = caller, query, table
        self.counts: list[int] = []  # documents of each process
        self._error: Exception | None = None

    def documents(self) -> int:
        """Waits for the number of all documents. Raises an error on every process where they differ in what
        must be alike, or one has refused its arguments."""
        if self._error is None and not self.counts:
            try:
                self.counts = self._checked(self._table())
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return sum(self.counts)

    def _checked(self, table: Table) -> list[int]:
        check_refused(self._caller, table)
        check_alike(self._caller, table, {name: 1 + i for i, name in enumerate(self._query.facts())})
        counts = [int(row[0]) for row in table]
        if sum(counts) > MOST_DOCUMENTS:
            raise ValueError(
                f"{self._caller}: the ranks must have at most 2**32 documents together, got {sum(counts)}"
            )
        return counts
