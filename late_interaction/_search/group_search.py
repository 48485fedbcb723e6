"""A search by all processes of a group, each among documents of its own: the best of each are exchanged, and
every process chooses the best of all."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import PRECISIONS
from late_interaction._group import REFUSED, check_alike, check_refused, gathered, position
from late_interaction._search.selection import MOST_DOCUMENTS, select

Found = tuple[Tensor, Tensor]  # scores and indices, [Nq, n]

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


def _checksum(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """A number that is the same for the same bits, of one element on the device, for which nothing waits."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for x in tensors:
        if x is not None and x.numel():
            bits = x.detach().contiguous().flatten().view(torch.uint8)
            weights = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
            total = (31 * total + (bits * weights).sum().to(device)) % (1 << 50)
    return total.double()


def search(
    caller: str, group: Any, device: torch.device, prepare: Callable[[], Query], local: Callable[[int], Found]
) -> Found:
    """The best of the documents of all processes, which are numbered in the order of ranks: the same on every
    process.

    prepare: checks the arguments of this process. What it raises, and what ``local`` raises, this process
    raises after all others have learnt of it. local: scores and indices of the best of its own documents,
    called with the number of all documents.
    """
    rank, world = position(group)
    try:
        query = prepare()
        facts = query.facts()
        own = torch.tensor([query.documents, *facts.values()], dtype=torch.float64, device="cpu").to(device)
        own = torch.cat((own, _checksum(query.tensors, device)))
    except Exception:
        with suppress(RuntimeError):  # which says that this process refused
            refused = torch.full((_FACTS,), float(REFUSED), dtype=torch.float64, device=device)
            check_refused(caller, gathered(caller, group, refused, "arguments").tolist())
        raise
    table = gathered(caller, group, own, "arguments").tolist()
    check_refused(caller, table)
    check_alike(caller, table, {name: 1 + i for i, name in enumerate((*facts, _QUERIES))})
    counts = [int(row[0]) for row in table]
    if sum(counts) > MOST_DOCUMENTS:
        raise ValueError(f"{caller}: the ranks must have at most 2**32 documents together, got {sum(counts)}")
    most = min(query.k, max(counts))
    payload = torch.zeros(2 * query.count * most + 1, dtype=torch.int64, device=device)
    failure = None
    try:
        _fill(payload, local(sum(counts)), sum(counts[:rank]), query.count, most)
    except Exception as error:
        failure, payload[-1] = error, 1
    rows = gathered(caller, group, payload, "results")
    if failure is not None:
        raise failure
    scores, indices = rows[:, :-1].view(world, 2, query.count, most).unbind(1)
    columns = [slice(0, min(query.k, count)) for count in counts]
    every = [torch.cat([x[i][:, own] for i, own in enumerate(columns)], dim=-1) for x in (scores, indices)]
    best = select(every[0].view(torch.float64).to(query.dtype), every[1], query.k, query.largest)
    # The host waits for the device here at the earliest, when all of it has been launched.
    failed = [str(i) for i, flag in enumerate(rows[:, -1].tolist()) if flag]
    if failed:
        raise RuntimeError(f"{caller}: rank {', '.join(failed)} of the group failed; see its error")
    return best


# What each process tells the others first: its number of documents, facts, and the checksum of its queries.
_FACTS, _QUERIES = 8, "queries (by a checksum)"


def _fill(payload: Tensor, found: Found, first: int, queries: int, most: int) -> None:
    """Scores, as the bits of float64, and indices among the documents of all processes."""
    room = payload[:-1].view(2, queries, most)
    scores, indices = found
    n = scores.shape[-1]
    room[0, :, :n] = scores.to(torch.float64).view(torch.int64)
    room[1, :, :n] = indices + first
