"""Shards of documents that travel round a process group while each process keeps its queries.

In step ``s`` process ``r`` has the documents of process ``r - s``; those of the next step are on their way
meanwhile. What it finds for their gradient is sent home at once, to process ``r - s``, in the documents'
dtype, and added there in the order of steps. Memory does not grow with the group. Of two processes each keeps
the other's documents for the backward, if they are not large: it begins with them, so that their gradient is
on its way while that of its own documents is found.
(DisCo-CLIP, https://arxiv.org/abs/2304.08480, splits the gradient in the same way over gathered batches;
Inf-CL, https://arxiv.org/abs/2410.17243, passes shards round a ring.)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.sequences import is_single, longest
from late_interaction._group import (
    REFUSED,
    Agreed,
    check_alike,
    check_refused,
    exchange_failed,
    exchanged_facts,
    gathered,
    position,
)
from late_interaction.tokens import Tokens

# A process's facts, before the numbers that stand for its options.
_FACTS = ("queries", "documents", "rows", "columns", "d", "masked", "each", "longest", "wants", "any_mask",
          "single", "plain", "reach", "width")  # fmt: skip


@dataclass
class Exchange:
    """Transfers under way. ``wait`` returns what arrives; what leaves is held until then."""

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
    packed: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)  # offsets and bounds of each
    masked: bool = False  # any process has a mask of its documents
    any_mask: bool = False  # any process has a mask of anything
    wants: list[bool] = field(default_factory=list)  # whether each wants a gradient of its documents
    longest_query: int = 0  # tokens, over all processes
    single: bool = False  # all queries and documents of all processes have one token
    plain: bool = True  # :attr:`Call.plain` on all processes
    caller: str = ""  # the function that messages name

    @staticmethod
    def alone(q: Tokens, d: Tokens, h: Tokens | None) -> "Ring":
        """Make the ring of one process from what it has."""
        facts: dict[str, Any] = {"wants": [d.values.requires_grad], "single": is_single(q) and is_single(d)}
        facts["any_mask"] = any(x is not None and x.mask is not None for x in (q, d, h))
        return Ring(None, 0, 1, [len(q)], [len(d)], **facts)

    def with_packed(self, own: Tokens) -> "Ring":
        """Exchange the offsets of packed documents, and return the ring that knows all of them."""
        told = [*own._bounds, *[0] * (max(self.documents) - len(own))]
        every = exchanged_facts(self.caller, self.group, told, own.device)
        bounds = [tuple(int(x) for x in row[: n + 1]) for row, n in zip(every, self.documents, strict=True)]
        # One copy for all, which the host does not wait for.
        offsets = torch.tensor([x for shard in bounds for x in shard], dtype=torch.int32, device="cpu")
        offsets = offsets.to(own.device, non_blocking=True)
        parts = offsets.split([len(shard) for shard in bounds])
        shapes: list[tuple[int, ...]] = [(shard[-1], own.values.shape[-1]) for shard in bounds]
        return replace(self, packed=list(zip(parts, bounds, strict=True)), shapes=shapes, masked=False)

    @property
    def largest_shard(self) -> int:
        """Return the element count of the largest shard's values."""
        return max(torch.Size(shape).numel() for shape in self.shapes)

    def owner(self, step: int) -> int:
        return (self.rank - step) % self.world

    def shards(self, own: Tokens, extra: Tensor | None = None) -> Iterator[tuple[int, Tokens, Tensor | None]]:
        """Yield the owner, documents and ``extra [k, documents]`` of every shard, this process's first."""
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
            leaving.append(mask_bytes(tokens))
            arriving.append(values.new_empty(self.shapes[coming][:2], dtype=torch.uint8))
        if extra is not None:
            leaving.append(extra.contiguous())
            arriving.append(extra.new_empty(extra.shape[0], self.documents[coming]))
        return self.exchange(leaving, arriving, "documents")

    def _tokens(self, owner: int, arrived: list[Tensor]) -> Tokens:
        if self.packed:
            offsets, bounds = self.packed[owner]
            return Tokens._made(arrived[0], None, offsets, None, bounds)
        return Tokens._made(arrived[0], arrived[1].bool() if self.masked else None)

    def exchange(
        self, leaving: Sequence[Tensor], arriving: list[Tensor], what: str, ahead: int = 1
    ) -> Exchange:
        """Send tensors to the process so many ranks ahead, and receive others from the one as far behind."""
        to, source = (
            dist.get_global_rank(self.group, (self.rank + move) % self.world) for move in (ahead, -ahead)
        )
        operations = []
        for tag, (out, into) in enumerate(zip(leaving, arriving, strict=True)):
            if out.numel():
                operations.append(dist.P2POp(dist.isend, out, to, self.group, tag))
            if into.numel():
                operations.append(dist.P2POp(dist.irecv, into, source, self.group, tag))
        try:
            work = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise exchange_failed(self.caller, what, error) from error
        return Exchange(work, leaving, arriving, self.caller, what)

    def sums(self, values: Tensor) -> Tensor:
        """Sum a few numbers over all processes, in the order of ranks."""
        if self.group is None:
            return values
        return gathered(self.caller, self.group, values, "losses").sum(0)


def mask_bytes(x: Tokens) -> Tensor:
    """Return the mask of padded tokens as processes exchange it: uint8, of ones where there is none."""
    if x.mask is None:
        return torch.ones(x.values.shape[:2], dtype=torch.uint8, device=x.device)
    return x.mask.to(torch.uint8).contiguous()


def reach_of(excluded: Any) -> tuple[int, int]:
    """Return how many documents ``exclude`` needs, by its numbers and by its mask's width; 0: any.

    A GPU's numbers are not waited for.
    """
    if isinstance(excluded, Labels) and excluded.index is not None:
        index = excluded.index
        return int(index.max()) + 1 if index.device.type == "cpu" and index.numel() else 0, 0
    return 0, 0 if excluded is None else excluded.shape[1]


def check_reach(caller: str, reach: Sequence[float], width: Sequence[float], documents: int) -> None:
    """Require that ``exclude`` speak of the documents of all processes."""
    for rank, (most, columns) in enumerate(zip(reach, width, strict=True)):
        if most > documents or columns not in (0, documents):
            got = f"{int(most) - 1}" if most > documents else f"a mask of {int(columns)} documents"
            raise ValueError(
                f"{caller}: exclude must speak of the {documents} documents of all ranks, got {got} on rank"
                f" {rank}"
            )


def join(caller: str, group: Any, own: Any, options: Mapping[str, Any], device: torch.device) -> Ring:
    """Tell all processes of the group what each one has, and check that their calls fit, in one exchange.

    ``own``: the call; None if this process refused its arguments, which all others then learn. ``options``:
    those in which the processes must agree, by the names that messages use. :meth:`Ring.with_packed`
    exchanges the offsets and shapes of packed documents.
    """
    rank, world = position(group)
    facts, agreed = [float(REFUSED)] * (len(_FACTS) + Agreed.numbers), Agreed({})
    if own is not None:
        d = own.d
        agreed = Agreed(
            {
                "loss": options["loss"],
                "form of documents": "packed" if d.is_packed else "padded",
                "dtype": str(d.values.dtype).removeprefix("torch."),
                "d": d.values.shape[-1],
                **options,
            }
        )
        each = own.each if len(own.q) else math.nan  # unknown of packed ones without a query
        alone = own.ring
        sizes = len(own.q), len(d), *[*d.values.shape, 0][:3], d.mask is not None, each
        of_any = longest(own.q), alone.wants[0], alone.any_mask, alone.single, own.plain
        facts = [*map(float, (*sizes, *of_any, *reach_of(own.candidates.excluded))), *agreed.facts()]
    rows = exchanged_facts(caller, group, facts, device)
    check_refused(caller, rows)
    agreed.check(caller, group, [row[len(_FACTS) :] for row in rows], device)
    table = dict(zip(_FACTS, zip(*rows, strict=True), strict=False))
    check_reach(caller, table["reach"], table["width"], int(sum(table["documents"])))
    negatives = [None if math.isnan(x) else int(x) for x in table["each"]]
    check_alike(caller, {"number of hard negatives": negatives})
    queries, documents, *shapes = (
        [int(x) for x in table[name]] for name in ("queries", "documents", "rows", "columns", "d")
    )
    return Ring(
        group, rank, world, queries, documents, list(zip(*shapes, strict=True)), masked=any(table["masked"]),
        any_mask=any(table["any_mask"]), wants=[bool(x) for x in table["wants"]], caller=caller,
        longest_query=int(max(table["longest"])), single=all(table["single"]), plain=all(table["plain"]),
    )  # fmt: skip
