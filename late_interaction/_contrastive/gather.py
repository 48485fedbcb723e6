"""The loss of a small batch over a process group: every process gathers the documents of all.

A ring (:mod:`late_interaction._contrastive.ring`) takes as many steps as there are processes. If the
documents of all processes, and the scores and winners of a process's queries with them, stay within the
budget of one process, one exchange and one call take less time. Gradients of documents are sent home in the
documents' dtype, and added in the order of ranks.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from late_interaction._checks.losses import IGNORED
from late_interaction._contrastive import call as calls
from late_interaction._contrastive import whole
from late_interaction._contrastive.call import Call, pair_bytes
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.ring import Ring, mask_bytes
from late_interaction._group import exchange_failed
from late_interaction.tokens import Tokens

_MOST_BYTES = 512 << 20  # of the documents of all processes


def takes(call: Call) -> bool:
    """Tell whether the processes gather: the answer is the same on each of them."""
    ring, values = call.ring, call.d.values
    if ring.group is None or call.symmetric or call.tail or call.kernels.way == "matrix" or not ring.plain:
        return False
    if any(ring.wants) != all(ring.wants):  # every process takes part in a backward, or none
        return False
    if not call.d.is_packed and len({shape[1:] for shape in ring.shapes}) > 1:
        return False
    pairs = max(ring.queries) * sum(ring.documents) * pair_bytes(call.d, ring.longest_query)
    documents = ring.world * ring.largest_shard * values.itemsize
    return pairs <= calls.default_budget(values.device.type, False) and documents <= _MOST_BYTES


def loss(call: Call) -> Tensor:
    """Gather the documents of all processes, and return the loss."""
    ring, d = call.ring, _documents(call.d, call.ring)
    first = sum(ring.documents[: ring.rank])
    index = call.labels.index
    if index is None:
        index = torch.arange(len(call.q), device=d.device).unsqueeze(1) + first
    else:
        index = torch.where(index == IGNORED, IGNORED, index + first)
    labels = Labels(index)
    rows = whole.cross_entropy(replace(call, d=d, labels=labels), "none")
    if call.reduction == "none":
        return rows * call.scale
    own, left_out = rows.sum(), labels.left_out
    assert left_out is not None
    count = (len(index) - left_out.sum()).to(own.dtype)
    total, counts = ring.sums(torch.stack((own.detach(), count))).unbind(0)
    share = call.scale / counts if call.reduction == "mean" else call.scale
    found: Tensor = _OfAll.apply(own, total) * share  # type: ignore[no-untyped-call]
    return found


class _OfAll(Function):
    """The sum over all processes, whose gradient goes to this process's term."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _documents(own: Tokens, ring: Ring) -> Tokens:
    """Gather the documents of all processes, in the order of ranks."""
    values: Tensor = _Gathered.apply(own.values, ring)  # type: ignore[no-untyped-call]
    if own.is_packed:
        bounds = [0]
        for _, shard in ring.packed:
            bounds += [bounds[-1] + x for x in shard[1:]]
        offsets = torch.tensor(bounds, dtype=torch.int32, device="cpu").to(values.device, non_blocking=True)
        return Tokens._made(values, None, offsets, None, tuple(bounds))
    if not ring.masked:
        return Tokens._made(values)
    shapes = [shape[:2] for shape in ring.shapes]
    return Tokens._made(values, _gathered(mask_bytes(own), shapes, ring).bool())


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return _gathered(values, ring.shapes, ring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sent_home(grad, ctx.ring), None


def _gathered(own: Tensor, shapes: list[tuple[int, ...]], ring: Ring) -> Tensor:
    """Gather a tensor of every process, end to end. Shorter ones are padded to one size on the way."""
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
    """Return the gradient of this process's documents, summed over all processes."""
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
