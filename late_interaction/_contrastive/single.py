"""The cross entropy of batches with one token a side, which is CLIP's loss.

Scores are a matrix product, and pass in panels: some queries with all documents. The operators of
:mod:`late_interaction.ops.softmax` turn a panel into sums, and into weights (the gradient with respect to its
scores) in the dtype of the embeddings. Panels of scores are small, so that a GPU reads them back from its L2
cache; the weights of several are multiplied with the embeddings together. There are two ways:

- Queries among the documents, reduced to one number: a panel has whole rows, so its weights follow from its
  own sums. The forward computes the gradients as well, and the backward multiplies them by the gradient that
  comes in. Scores are computed once.
- Both directions, or a loss for each query: weights need sums of all panels, or a gradient for each row. The
  backward computes the scores again, or reads them where all of them stay within the budget.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from late_interaction._contrastive.blockwise import Gradients, Run, apply_loss
from late_interaction._contrastive.call import KEPT_BYTES, Call, row_factor
from late_interaction._contrastive.cross_entropy import factors, loss_and_counts, temperature_gradient
from late_interaction._contrastive.panels import (
    AllSums,
    Batch,
    Sums,
    add_panels,
    add_product_panels,
    scaled,
    takes_product,
    terms,
    two_passes,
)
from late_interaction._contrastive.sequences import Block
from late_interaction.ops._library import cuda_missing
from late_interaction.ops._library import operators as _ops

_BELOW_ALL = torch.finfo(torch.float32).min  # the maximum of no scores, which the operators replace


def takes(call: Call) -> bool:
    """Tell whether this way computes the loss exactly as it was asked for."""
    plain = call.h is None and call.q.mask is None and call.d.mask is None and not call.tail
    plain = plain and call.labels.most == 1 and call.candidates.are_all
    if not call.column_labels_are_plain:  # documents without a query, or with several whose mean counts
        plain = plain and not call.smoothing and call.multi_positive == "mean"
    alone, values = call.ring.group is None and call.kernels.way == "matrix", call.q.values
    kernels = not values.is_cuda or (cuda_missing is None and values.dtype is not torch.float64)
    return plain and alone and kernels and len(call.q) > 0 and len(call.d) > 0


def loss(call: Call) -> Tensor:
    """Return the cross entropy of ``Q [Nq, 1, d]`` with ``D [Nd, 1, d]``."""
    rows_alone = not call.symmetric and call.reduction != "none"
    if not (call.keeps and rows_alone and any(x.values.requires_grad for x in (call.q, call.d))):
        return two_passes(call, _all_sums, _gradients)
    return apply_loss(call.bare(), _one_pass, *call.tensors)


# ---- gradients in the forward ----


def _one_pass(call: Call, tensors: Sequence[Any], needs: tuple[bool, ...]) -> Run:
    result, found, after = _with_gradients(Batch.of(call.of(tensors)), tensors[0].dtype, needs)

    def gradients(_: Call, tensors: Any, kept: Any, grad: Tensor, needs: Sequence[bool]) -> Gradients:
        (Q, D, *_), (after, *found) = tensors, kept
        scale = grad if after is None else grad * after
        of_temperature = None if found[2] is None else found[2] * grad.to(found[2].dtype)
        return scaled(found[0], scale, Q), scaled(found[1], scale, D), None, of_temperature, None

    return result, [after, *found], gradients


def _with_gradients(
    batch: Batch, dtype: torch.dtype, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
    """Return the loss; the gradients of Q, D and the temperature; and a factor that those of Q and D lack."""
    call, target = batch.call, batch.no_target()
    share = _share(call, target)
    # fp16 holds no small numbers: the weights get a factor of 1, and the gradients the rest.
    after = batch.inverse * share if batch.Q.dtype is torch.float16 else None
    factor = _factor(batch, share, target, after is None)
    if takes_product(batch):
        found, sums = add_product_panels(batch, needs, factor, dtype)
        of_rows, target = found[:4], found[4]
    else:
        of_rows, sums = _panels_of_scores(batch, needs, factor, target, dtype)
    T = call.temperature
    plain = call.labels.index is None and not call.smoothing  # labels may leave rows out, without a target
    if plain and isinstance(share, float) and not isinstance(T, Tensor):
        # With fewer launches than loss_and_counts: the time of a small batch is the host's.
        losses = of_rows[1].log().sub_(target - of_rows[0], alpha=1 / T)
        return losses.sum().mul_(share), [sums.q, sums.d, None], after
    sides = [batch.rows(of_rows, target)]
    result, counts = loss_and_counts(call, sides)
    of_temperature = None
    if needs[3]:
        amounts = factors(call, torch.ones_like(result), sides, counts)
        of_temperature = temperature_gradient(call, sides, amounts)
    return result, [sums.q, sums.d, of_temperature], after


def _panels_of_scores(
    batch: Batch, needs: tuple[bool, ...], factor: Tensor, target: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Sums]:
    """Return the sums of rows, and the gradients of Q and D; write the labels' scores to ``target``."""
    labels, smoothing, of_rows = batch.call.labels, batch.call.smoothing, []

    def weigh(block: Block, scores: Tensor, weights: Tensor) -> None:
        labels.read(target.unsqueeze(1), scores, block, (0, len(batch.D)))
        given = (*batch.labels(block), factor[slice(*block)], smoothing, weights)
        of_rows.append(_ops.softmax_rows_.default(scores, batch.inverse, *given))

    sums = add_panels(batch, needs, dtype, weigh, None)
    return _joined(of_rows), sums


def _share(call: Call, like: Tensor) -> Tensor | float:
    """Return the gradient with respect to the cross entropy of a row that has a label.

    It is a Python number, unless the labels on the device decide how many rows have one.
    """
    if call.reduction != "mean":
        return float(call.scale)
    left_out = call.labels.left_out
    if left_out is None:
        return call.scale / len(like)
    return call.scale / (len(like) - left_out.sum(dtype=like.dtype))


def _factor(batch: Batch, share: Tensor | float, like: Tensor, scaled: bool) -> Tensor:
    """Return the gradient with respect to each row's cross entropy, divided by the temperature.

    1 instead if not ``scaled``; 0 where there is no label.
    """
    T, labels = batch.call.temperature, batch.call.labels
    if labels.index is None and isinstance(share, float) and not isinstance(T, Tensor):
        return torch.full_like(like, share / T if scaled else 1.0)
    each = batch.inverse * share if scaled else torch.ones_like(batch.inverse)
    return row_factor(each.reshape(()), labels.left_out, like).contiguous()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


# ---- sums in the forward, gradients in the backward ----


def _all_sums(batch: Batch) -> AllSums:
    call, blocks, target = batch.call, batch.blocks(), batch.no_target()
    columns = None
    if call.symmetric:
        columns = batch.inverse.new_zeros((4, len(batch.D)))
        columns[0] = _BELOW_ALL
    budget = KEPT_BYTES[batch.Q.device.type] if call.kept_bytes is None else call.kept_bytes
    keeps = call.keeps and len(batch.Q) * batch.pitch() * batch.inverse.itemsize <= budget
    buffer = batch.buffer([(0, len(batch.Q))] if keeps else blocks)
    of_rows = []
    for block in blocks:
        scores = batch.score(block, buffer[slice(*block)] if keeps else buffer)
        call.labels.read(target.unsqueeze(1), scores, block, (0, len(batch.D)))
        if columns is None:
            of_rows.append(_ops.softmax_row_sums.default(scores, batch.inverse))
        else:
            of_rows.append(_ops.softmax_sums_.default(scores, batch.inverse, columns))
    return AllSums(_joined(of_rows), target, columns, buffer if keeps else None)


def _gradients(
    batch: Batch, found: AllSums, amounts: list[Tensor], needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    call = batch.call
    if not (needs[0] or needs[1]):
        return None, None
    scale, like = batch.inverse, (call.q.values, call.d.values)
    if batch.Q.dtype is torch.float16:  # which holds no small numbers: the largest factor becomes 1
        peak = torch.stack([x.abs().amax() for x in amounts]).amax().clamp_min(1e-30)
        amounts, scale = [x / peak for x in amounts], scale * peak
    else:
        amounts, scale = [x * scale for x in amounts], torch.ones_like(scale)
    rows = terms(found.rows, amounts[0])
    columns = None
    if found.columns is not None:
        columns = terms(found.columns, amounts[1])
        if not call.column_labels_are_plain:
            # The operator subtracts the factor at each query of a document, whose mean counts.
            counts = call.labels.by_column(torch.ones_like(found.target).unsqueeze(1), len(batch.D))
            columns[2] /= counts.clamp_min(1.0)

    def weigh(block: Block, scores: Tensor, weights: Tensor) -> None:
        of_rows = rows[:, slice(*block)].contiguous()
        given = (of_rows, columns, *batch.labels(block), call.smoothing, weights)
        _ops.softmax_weights_.default(scores, batch.inverse, *given)

    sums = add_panels(batch, needs, like[0].dtype, weigh, found.kept)
    return scaled(sums.q, scale, like[0]), scaled(sums.d, scale, like[1])
