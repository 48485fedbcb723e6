"""Shards of documents that travel round a process group while each process keeps its queries.

In step ``s`` process ``r`` has the documents of process ``r - s``; those of the next step are on their way
meanwhile. Sums of gradients go with their documents: a process adds its own to what arrives, always in the
same order, and sends the sum on; after the last step they are home. (Of two processes each keeps what it
found for its own documents, and adds what comes home.) Memory does not grow with the group.
(DisCo-CLIP, https://arxiv.org/abs/2304.08480, splits the gradient in the same way over gathered batches;
Inf-CL, https://arxiv.org/abs/2410.17243, passes shards round a ring.)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from late_interaction._contrastive.tokens import Tokens
from late_interaction._group import (
    REFUSED,
    check_alike,
    check_refused,
    exchange_failed,
    gathered,
    position,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Facts of a process that every loss has, by their places, and how many options may follow them.
_ALIKE = {"form of documents (0: padded, 1: packed)": 5, "dtype (by number)": 7, "d": 8}
_OPTIONS, _MOST_OPTIONS = 9, 12


@dataclass
class Exchange:
    """Transfers under way: what arrives, once they are waited for. What leaves is held until then."""

    work: list[Any]
    leaving: Sequence[Tensor]
    arriving: list[Tensor]
    caller: str
    what: str

    def wait(self) -> list[Tensor]:
        try:
            for work in self.work:
                work.wait()
        except RuntimeError as error:
            raise exchange_failed(self.caller, self.what, error) from error
        return self.arriving


@dataclass(frozen=True)
class Ring:
    """The processes of a group, and the sizes of each one's shard. ``group`` is None for one process."""

    group: Any
    rank: int
    world: int
    queries: list[int]
    documents: list[int]
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of each shard's values
    offsets: list[Tensor] = field(default_factory=list)  # of each packed shard
    masked: bool = False
    needs_gradient: bool = False  # any process wants a gradient of its documents
    all_need_gradient: bool = False  # every process does
    longest_query: int = 0  # tokens, over all processes
    caller: str = ""  # the function that messages name

    @staticmethod
    def alone(queries: int, documents: int, needs_gradient: bool) -> "Ring":
        return Ring(None, 0, 1, [queries], [documents], needs_gradient=needs_gradient)

    def owner(self, step: int) -> int:
        return (self.rank - step) % self.world

    def shards(self, own: Tokens, extra: Tensor | None = None) -> Iterator[tuple[int, Tokens, Tensor | None]]:
        """(owner, its documents, its extra) of every process, one's own first. ``extra [k, documents]`` goes
        with the documents."""
        tokens = own
        for step in range(self.world):
            under_way = None
            if step + 1 < self.world:
                under_way = self._send_on(tokens, extra, self.owner(step + 1))
            yield self.owner(step), tokens, extra
            if under_way is not None:
                arrived = under_way.wait()
                tokens = self._tokens(self.owner(step + 1), arrived)
                extra = arrived[-1] if extra is not None else None

    def _send_on(self, tokens: Tokens, extra: Tensor | None, coming: int) -> Exchange:
        values = tokens.values.contiguous()
        leaving, arriving = [values], [values.new_empty(self.shapes[coming])]
        if self.masked:
            mask = tokens.mask
            if mask is None:
                mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
            leaving.append(mask.to(torch.uint8).contiguous())
            arriving.append(values.new_empty(self.shapes[coming][:2], dtype=torch.uint8))
        if extra is not None:
            leaving.append(extra.contiguous())
            arriving.append(extra.new_empty(extra.shape[0], self.documents[coming]))
        return self.exchange(leaving, arriving, "documents")

    def _tokens(self, owner: int, arrived: list[Tensor]) -> Tokens:
        if self.offsets:
            offsets = self.offsets[owner]
            return Tokens(arrived[0], None, offsets.to(arrived[0].device), tuple(offsets.tolist()))
        return Tokens(arrived[0], arrived[1].bool() if self.masked else None)

    def exchange(self, leaving: Sequence[Tensor], arriving: list[Tensor], what: str) -> Exchange:
        """Sends tensors to the next process and receives others from the one before."""
        ahead, behind = (
            dist.get_global_rank(self.group, (self.rank + move) % self.world) for move in (1, -1)
        )
        operations = []
        for tag, (out, into) in enumerate(zip(leaving, arriving, strict=True)):
            if out.numel():
                operations.append(dist.P2POp(dist.isend, out, ahead, self.group, tag))
            if into.numel():
                operations.append(dist.P2POp(dist.irecv, into, behind, self.group, tag))
        try:
            work = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise exchange_failed(self.caller, what, error) from error
        return Exchange(work, leaving, arriving, self.caller, what)

    def sums(self, values: Tensor) -> Tensor:
        """The sums of a few numbers over all processes, added in the order of ranks."""
        if self.group is None:
            return values
        return gathered(self.caller, self.group, values, "losses").sum(0)


def join(
    caller: str,
    group: Any,
    own: tuple[Tokens, Tokens] | None,
    options: Mapping[str, float],
    needs_gradient: bool,
    device: torch.device,
) -> Ring:
    """Tells every process of the group what each one has, and that their calls fit together. ``own``: the
    queries and documents; None where this process refused its arguments, which all others
    then learn. ``options``: numbers in which the processes must agree, at most 12, by what messages call
    them."""
    rank, world = position(group)
    facts = [float(REFUSED)] * (_OPTIONS + _MOST_OPTIONS)
    if own is not None:
        q, d = own
        shape = [*d.values.shape, 0][:3]
        kind = [float(d.packed), float(d.mask is not None), float(_DTYPES.index(d.values.dtype))]
        d_dim = float(d.values.shape[-1])
        facts = [float(len(q)), float(len(d)), *map(float, shape), *kind, d_dim, *options.values()]
        facts += [0.0] * (_OPTIONS + _MOST_OPTIONS - len(facts))
    longest = 0 if own is None else own[0].longest
    facts += [float(longest), float(needs_gradient)]
    own_facts = torch.tensor(facts, dtype=torch.float64, device=device)
    table = gathered(caller, group, own_facts, "sizes").tolist()
    check_refused(caller, table)
    # The loss comes first: numbers of two losses do not mean the same.
    check_alike(caller, table, {name: _OPTIONS + i for i, name in enumerate(options)} | _ALIKE)
    queries, documents = ([int(row[i]) for row in table] for i in (0, 1))
    packed = table[0][5] == 1
    shapes = [tuple(int(x) for x in row[2 : 4 if packed else 5]) for row in table]
    offsets: list[Tensor] = []
    if packed:
        assert own is not None and own[1].offsets is not None
        room = own[1].offsets.new_zeros(max(documents) + 1)
        room[: documents[rank] + 1] = own[1].offsets
        all_offsets = gathered(caller, group, room, "sizes").cpu()
        offsets = [all_offsets[i, : n + 1].clone() for i, n in enumerate(documents)]
    masked = any(row[6] for row in table)
    wants, longest = [bool(row[-1]) for row in table], int(max(row[-2] for row in table))
    return Ring(
        group,
        rank,
        world,
        queries,
        documents,
        shapes,
        offsets,
        masked,
        any(wants),
        all(wants),
        longest,
        caller,
    )
