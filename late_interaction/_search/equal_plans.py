"""Calls of a search that a GPU plans alike, so that a document's score has the same bits in each of them.

The planner looks at the number of documents: those of a small call may be split over blocks or go to another
kernel, whose sums round differently. A corpus is scored in calls of many sizes, which depend on how it is cut
into chunks and shards. :class:`Alike` gives all of them the plan of one size, that of the whole corpus.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.options import Precision
from late_interaction._scoring.precision import float32_precision

# Documents, and what has a row for each of them, to scores [Nq, documents].
Score = Callable[..., Tensor]

# The planner's rules of capacity look at up to a GiB: a size below them serves calls of any size.
_BYTES = 256 << 20
_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8",
}  # fmt: skip


class Alike:
    """The size of call whose plan all calls of a search get.

    Args:
        Q, D: ``[Nq, Lq, d]`` and ``[Nd, Ld, d]``, or some of the documents. Queries meet them in their dtype.
        documents: of the whole corpus. Where ``D`` has :func:`enough` of them, any number of at least as many
            gives the same plan.
        masked, normalize, precision: what else a plan depends on.
    """

    def __init__(
        self, Q: Tensor, D: Tensor, documents: int, masked: bool, normalize: bool, precision: Precision | None
    ) -> None:
        self._size = max(min(documents, _most(D)), 1)
        self._like = Q, D, (masked, normalize, precision)

    @cached_property
    def _call(self) -> tuple[Any, ...] | None:
        """Return what a plan depends on beside the number of documents; None: all calls are alike."""
        Q, D, (masked, normalize, precision) = self._like
        if not (Q.is_cuda and ops.cuda_missing is None and D.dtype in _NAMES):
            return None
        with nullcontext() if Q.device.index == torch.cuda.current_device() else torch.cuda.device(Q.device):
            device = ops.cuda_capability(), *_multiprocessors(Q.device)
        if precision is None:
            precision = float32_precision("cuda") if D.dtype == torch.float32 else "highest"
        options = (_NAMES[D.dtype], precision, masked, normalize, "forward", "auto")
        return Q.shape[0], (Q.shape[1], *D.shape[1:]), options, device

    def scores(self, score: Score, D: Tensor, *beside: Tensor | None) -> Tensor:
        """Return ``score(D, *beside)``, in calls that are planned alike.

        They are calls of parts, or with documents of zeros behind these.
        """
        count = D.shape[0]
        if self._fits(count):
            return score(D, *beside)
        if count > self._size:
            parts = zip(*(_split(x, count, self._size) for x in (D, *beside)), strict=True)
            return torch.cat([self.scores(score, *part) for part in parts], dim=1)
        wanted = count
        while not self._fits(wanted):
            wanted = min(2 * wanted, self._size)
        return score(*(_padded(x, wanted) for x in (D, *beside)))[:, :count]

    def _fits(self, count: int) -> bool:
        if count in (0, self._size) or self._call is None:
            return True
        return _plan(count, *self._call) == _plan(self._size, *self._call)


def enough(D: Tensor) -> bool:
    """Tell whether the plan of a search is the same however many documents there are beside these."""
    return D.shape[0] >= _most(D)


def _most(D: Tensor) -> int:
    return _BYTES // max(math.prod(D.shape[1:]) * D.element_size(), 1)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> tuple[int, bool]:
    """Return how many a GPU has, and whether they are those of a GeForce."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, "GeForce" in properties.name


@lru_cache(maxsize=1024)
def _plan(N: int, Nq: int, sizes: tuple[int, ...], options: tuple[Any, ...], device: tuple[Any, ...]) -> str:
    """Return the plan of a call without what changes no sum: the grid, and the reason in words."""
    text: str = ops.explain_plan(False, Nq, N, *sizes, *options, *device)
    return "\n".join(line for line in text.splitlines() if not line.startswith(("grid", "why")))


def _split(x: Tensor | None, count: int, size: int) -> Any:
    return [None] * -(-count // size) if x is None else x.split(size)


def _padded(x: Any, count: int) -> Any:
    if x is None or x.dim() == 0:
        return x
    dtype = torch.uint8 if x.itemsize == 1 else x.dtype
    room = torch.zeros((count, *x.shape[1:]), dtype=dtype, device=x.device)
    room[: x.shape[0]] = x.view(room.dtype)
    return room.view(x.dtype)
