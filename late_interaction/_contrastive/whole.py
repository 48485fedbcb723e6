"""The losses of a batch small enough to keep all scores and winners, which the operators differentiate.

Over a process group every process gathers the documents of all, if these, and the scores and winners of its
queries with them, stay within the budget of one process: one exchange and one call take less time than a ring
(:mod:`late_interaction._contrastive.ring`), which takes as many steps as there are processes. Gradients of
documents are sent home in the documents' dtype, and added in the order of ranks.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import cross_entropy as of_rows

from late_interaction._checks.losses import IGNORED
from late_interaction._contrastive import blockwise
from late_interaction._contrastive.blockwise import Gradients, Loss, applied, once
from late_interaction._contrastive.call import Call, default_budget, pair_bytes, split
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.ring import Ring, mask_bytes
from late_interaction._group import exchange_failed
from late_interaction._scoring.precision import without_autocast
from late_interaction._torch import _is_any_autocast_enabled
from late_interaction.tokens import Tokens


def _outside_autocast(call: Call) -> Any:
    return without_autocast(call.q.device.type) if _is_any_autocast_enabled() else nullcontext()


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
    with _outside_autocast(call):
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


class ScoresFunction(Function):
    """A loss from the scores of all pairs, and of the queries with their hard negatives."""

    @staticmethod
    def forward(ctx: Any, call: Call, kind: Any, *tensors: Any) -> Tensor:
        scores, own, *numbers = tensors
        bare, call = call, call.of((None, None, None, *numbers))
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
        if call.keeps:
            of_sums, ctx.rebuild = loss.save()
            inputs = [x if isinstance(x, Tensor) else None for x in tensors]
            ctx.save_for_backward(*inputs, counts, *of_sums)
            ctx.call, ctx.numbers = bare, [None if isinstance(x, Tensor) else x for x in numbers]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        saved = ctx.saved_tensors
        (scores, own), numbers, (counts,), of_sums = split(saved, [2, 2, 1, len(saved) - 5])
        numbers = [x if given is None else given for x, given in zip(numbers, ctx.numbers, strict=True)]
        call = ctx.call.of((None, None, None, *numbers))

        def gradients() -> Gradients:
            loss: Loss = ctx.rebuild(call, of_sums)
            travels, rows = loss.derive(grad, counts), (0, scores.shape[0])
            of_scores = loss.weights(0, travels).of_block(scores, rows, (0, scores.shape[1]))
            of_own = None if own is None else loss.weights(-1, None).of_own(own.clone(), rows)
            return of_scores, of_own, *loss.of_numbers(*ctx.needs_input_grad[4:])

        return None, None, *once(call.name, gradients, (grad, scores, own, *numbers))


_of_scores = applied(ScoresFunction)


def loss(call: Call, kind: Any) -> Tensor:
    """Compute a loss of class ``kind``: from all scores if they are kept, without a tail, else by blocks."""
    if not call.whole:
        return blockwise.loss(call, kind.start)
    with _outside_autocast(call):
        loss: Tensor = _of_scores(replace(call.bare(), tail=0.0), kind, *_all_scores(call), *call.numbers)
    return loss


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
