"""The losses of a batch small enough to keep all scores and winners, which the operators differentiate."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import cross_entropy as of_rows

from late_interaction._contrastive import blockwise
from late_interaction._contrastive.blockwise import Gradients, Loss, once
from late_interaction._contrastive.call import Call, split
from late_interaction._scoring.precision import without_autocast
from late_interaction._scoring.untransformed import applied
from late_interaction._torch import _is_any_autocast_enabled


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
        bare, call = call, _with_numbers(call, numbers)
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
        call = _with_numbers(ctx.call, numbers)

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


def _with_numbers(call: Call, numbers: Sequence[Any]) -> Call:
    return call.of((None, None, None, *numbers))
