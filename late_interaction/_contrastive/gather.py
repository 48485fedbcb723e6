"""The loss of a small batch over a process group: every process gathers the documents of all.

A ring (:mod:`late_interaction._contrastive.ring`) takes as many steps as there are processes. Where the
documents of all processes, and the scores and winners of a process's queries with them, stay within the
budget of one process, one exchange and one call take less time. Gradients of documents go home as they came,
in the documents' dtype, and are added in the order of ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from late_interaction._contrastive import whole
from late_interaction._contrastive.arguments import Arguments
from late_interaction._contrastive.labels import IGNORED, Labels, ignored
from late_interaction._contrastive.problem import Problem
from late_interaction._contrastive.ring import Ring
from late_interaction._contrastive.tokens import Tokens
from late_interaction._group import exchange_failed

_MOST_BYTES = 512 << 20  # of the documents of all processes


def takes(given: Arguments) -> bool:
    """Whether the processes gather: the same answer on each of them."""
    options, ring = given.options, given.ring
    if ring.group is None or options.symmetric or options.tail or given.kernels.way == "matrix":
        return False
    if any(ring.wants) != all(ring.wants):  # every process takes part in a backward, or none
        return False
    packed = given.sides.d.packed
    if not packed and len({shape[1:] for shape in ring.shapes}) > 1:
        return False
    pair = 4 + (4 if packed else 2) * ring.longest_query
    values = given.sides.d.values
    documents = ring.world * ring.largest_shard * values.itemsize
    pairs = max(ring.queries) * sum(ring.documents)
    return pairs * pair <= whole.default_budget(values.device.type, False) and documents <= _MOST_BYTES


def loss(p: Problem, given: Arguments) -> Tensor:
    """Differentiable; ``p`` is of the whole batch."""
    sides, ring, reduction = given.sides, given.ring, given.options.reduction
    documents = _documents(sides.d, ring)
    first = sum(ring.documents[: ring.rank])
    index = p.labels.index
    if index is None:
        index = torch.arange(len(sides.q), device=documents.values.device) + first
    else:
        index = torch.where(index == IGNORED, IGNORED, index + first)
    problem = p.with_labels(Labels(index))
    rows = whole.loss(problem, sides.q, documents, sides.h, "none", given.keeps)
    if reduction == "none":
        return rows * given.scale
    own = rows.sum()
    left_out = ignored(index)
    assert left_out is not None
    count = (len(index) - left_out.sum()).to(own.dtype)
    total, counts = ring.sums(torch.stack((own.detach(), count))).unbind(0)
    share = given.scale / counts if reduction == "mean" else given.scale
    found: Tensor = _OfAll.apply(own, total) * share  # type: ignore[no-untyped-call]
    return found


class _OfAll(Function):
    """The sum over all processes, with the gradient of this process's part of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _documents(own: Tokens, ring: Ring) -> Tokens:
    """Those of all processes, in the order of ranks."""
    values: Tensor = _Gathered.apply(own.values, ring)  # type: ignore[no-untyped-call]
    if own.packed:
        bounds = [0]
        for _, shard in ring.packed:
            bounds += [bounds[-1] + x for x in shard[1:]]
        offsets = torch.tensor(bounds, dtype=torch.int32, device="cpu").to(values.device, non_blocking=True)
        return Tokens(values, None, offsets, tuple(bounds))
    if not ring.masked:
        return Tokens(values)
    mask = own.mask
    if mask is None:
        mask = torch.ones(own.values.shape[:2], dtype=torch.bool, device=values.device)
    shapes = [shape[:2] for shape in ring.shapes]
    return Tokens(values, _gathered(mask.to(torch.uint8), shapes, ring).bool())


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return _gathered(values, ring.shapes, ring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sent_home(grad, ctx.ring), None


def _gathered(own: Tensor, shapes: list[tuple[int, ...]], ring: Ring) -> Tensor:
    """Tensors of every process, end to end. Those on the way have one size: shorter ones are filled up."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    most = max(sizes)
    together = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    leaving = own.contiguous().flatten()
    if len(leaving) < most:
        leaving = torch.cat((leaving, leaving.new_zeros(most - len(leaving))))
    arriving = leaving.new_empty(ring.world * most)
    try:
        if most:
            dist.all_gather_into_tensor(arriving, leaving, group=ring.group, async_op=True).wait()
    except RuntimeError as error:
        raise exchange_failed(ring.caller, "documents", error) from error
    if min(sizes) == most:
        return arriving.view(together)
    parts = zip(arriving.split(most), sizes, strict=True)
    return torch.cat([part[:size] for part, size in parts]).view(together)


def _sent_home(grad: Tensor, ring: Ring) -> Tensor:
    """The sum of what all processes have for the own documents."""
    sizes = [torch.Size(shape).numel() for shape in ring.shapes]
    own = sizes[ring.rank]
    arriving = grad.new_empty(ring.world, own)
    try:
        leaving = grad.contiguous().flatten()
        dist.all_to_all_single(arriving.flatten(), leaving, [own] * ring.world, sizes, ring.group)
    except RuntimeError as error:
        raise exchange_failed(ring.caller, "gradients", error) from error
    dtype = torch.float64 if grad.dtype is torch.float64 else torch.float32
    return arriving.sum(0, dtype=dtype).to(grad.dtype).view(ring.shapes[ring.rank])
