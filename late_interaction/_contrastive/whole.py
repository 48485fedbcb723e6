"""The losses of a batch small enough to keep all scores and winners, which the operators differentiate.

Over a process group every process gathers the documents of all, if these, and the scores and winners of its
queries with them, stay within the budget of one process: one exchange and one call take less time than a ring
(:mod:`late_interaction._contrastive.ring`), which takes as many steps as there are processes. Gradients of
documents are sent home in the documents' dtype, and added in the order of ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import cross_entropy as of_rows

from late_interaction._checks.losses import IGNORED
from late_interaction._contrastive import blockwise
from late_interaction._contrastive.backward import Loss
from late_interaction._contrastive.blockwise import Gradients, Run, apply_loss, outside_autocast
from late_interaction._contrastive.call import Call, default_budget, pair_bytes
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.ring import Ring, mask_bytes
from late_interaction._group import exchange_failed
from late_interaction.tokens import Tokens


def _all_scores(call: Call) -> tuple[Tensor, Tensor | None]:
    """Score all pairs of queries and documents, and queries with their hard negatives.

    Hard negatives of which no query has any are part of the graph, with a gradient of zeros.
    """
    kernels, q, d, h = call.kernels, call.q, call.d, call.h
    scores = kernels.scores_and_winners(q, d)[0] if call.keeps else kernels.scores(q, d)
    if h is None:
        return scores, None
    if not call.each:
        return scores + h.values[:0].sum(dtype=scores.dtype), None
    return scores, kernels.own_scores(q, h, call.each)[0]


# ---- the cross entropy ----


def cross_entropy(call: Call, reduction: str) -> Tensor:
    """Compute PyTorch's cross entropy of the queries and all documents of a call that is plain."""
    with outside_autocast(call.q.values):
        scores, own = _all_scores(call)
        every = scores if own is None else torch.cat((scores, own), 1)
        index, left_out = call.labels.index, call.labels.left_out
        if left_out is not None:  # a gradient of 0 times NaN is NaN
            every = every.masked_fill(left_out.unsqueeze(1), 0.0)
        every = every / call.temperature
        if call.candidates.own is not None:
            of_own = every[:, scores.shape[1] :].masked_fill(~call.candidates.own, -torch.inf)
            every = torch.cat((every[:, : scores.shape[1]], of_own), 1)
        labels = torch.arange(len(call.q), device=scores.device) if index is None else index[:, 0]
        rows = of_rows(every, labels, label_smoothing=call.smoothing, reduction=reduction)
        if not call.symmetric:
            return rows
        logits = every[:, : scores.shape[1]]
        return (rows + of_rows(logits.t(), labels, label_smoothing=call.smoothing, reduction=reduction)) / 2


# ---- any loss ----


def _of_scores(kind: Any, call: Call, tensors: Sequence[Any], needs: Sequence[bool]) -> Run:
    """Compute a loss from the scores of all pairs, and of the queries with their hard negatives."""
    scores, own, *numbers = tensors
    call = call.of((None, None, None, *numbers))
    rows, columns = (0, scores.shape[0]), (0, scores.shape[1])
    logits = call.kept(scores / call.temperature, 0, rows, columns)
    positives = scores.new_full((len(scores), call.labels.most), torch.nan)
    if logits.numel():
        call.labels.read(positives, logits, rows, columns)
    loss: Loss = kind.of(call, positives)
    if own is not None and own.numel():
        loss.add_own(call.candidates.of_own(own / call.temperature, rows), rows)
    loss.begin(None, 0)
    if logits.numel():
        loss.take(logits, rows, [columns])
    loss.end(0)
    result, counts = loss.result()
    of_sums, rebuild = loss.save()

    def gradients(call: Call, tensors: Any, kept: Any, grad: Tensor, needs: Sequence[bool]) -> Gradients:
        (scores, own, *numbers), (counts, *of_sums) = tensors, kept
        loss: Loss = rebuild(call.of((None, None, None, *numbers)), of_sums)
        travels, rows = loss.derive(grad, counts), (0, scores.shape[0])
        loss.begin_gradients(0, travels)
        of_scores = loss.of_block(scores, rows, (0, scores.shape[1]))
        of_own = None if own is None else loss.of_own(own.clone(), rows)
        return of_scores, of_own, *loss.of_numbers(*needs[2:])

    return result, [counts, *of_sums], gradients


def loss(call: Call, kind: Any) -> Tensor:
    """Compute a loss of class ``kind``: from all scores if they are kept, without a tail, else by blocks."""
    if not call.whole:
        return blockwise.loss(call, kind.start)
    with outside_autocast(call.q.values):
        tensors = (*_all_scores(call), *call.tensors[3:])
        return apply_loss(replace(call.bare(), tail=0.0), partial(_of_scores, kind), *tensors)


# ---- the cross entropy over a process group ----


_MOST_BYTES = 512 << 20  # of the documents of all processes


def gathers(call: Call) -> bool:
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
    return pairs <= default_budget(values.device.type, False) and documents <= _MOST_BYTES


def gathered(call: Call) -> Tensor:
    """Gather the documents of all processes, and return the loss."""
    ring, d = call.ring, _documents(call.d, call.ring)
    first = sum(ring.documents[: ring.rank])
    index = call.labels.index
    if index is None:
        index = torch.arange(len(call.q), device=d.device).unsqueeze(1) + first
    else:
        index = torch.where(index == IGNORED, IGNORED, index + first)
    labels = Labels(index)
    rows = cross_entropy(replace(call, d=d, labels=labels), "none")
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
