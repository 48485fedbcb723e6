"""The operators of cross entropy over a matrix of scores, or of a product: sums, and weights.

Scores are float32 ``[rows, columns]`` of contiguous rows, on the CPU float64 too; logits are scores times
``inverse_temperature``, a tensor of one number. Sums are ``[4, n]``: for each row (or column) the maximum
``m`` of its scores ``s``, the sums of ``e = exp((s - m) * inverse_temperature)`` and of ``e * (s - m)``, and
the sum of ``s``. None of the operators is differentiable; all are deterministic.

``softmax_row_sums(scores, inverse_temperature) -> sums``
    Of rows.
``softmax_rows_(scores, inverse_temperature, labels, first, factor, smoothing, weights) -> sums``
    The same, and into ``weights`` the derivatives of ``(factor * cross_entropy).sum()`` in the logits. Row
    ``i`` has the label ``labels[i]`` or, where that is None, ``first + i``; one that is no column is none. A
    row whose ``factor`` is 0 has weights of 0, whatever its scores are. ``weights`` has the shape of the
    scores, in float32, bfloat16 or float16 (float64 for such scores).
``softmax_sums_(scores, inverse_temperature, column_sums) -> row_sums``
    The sums of rows, and those of columns, which are merged into ``column_sums``. These start with maxima of
    ``torch.finfo(torch.float32).min`` and sums of 0.
``softmax_weights_(scores, inverse_temperature, row_terms, column_terms, labels, first, smoothing, weights)``
    The weights where sums are known. Terms are ``[3, n]``: the maximum, ``factor`` divided by the sum of
    ``e``, and ``factor``. With ``column_terms`` those of the cross entropy of columns are added, whose labels
    are the rows that have them as their label. Both directions have as many classes as there are columns.

``softmax_product_rows_(Q, D, inverse_temperature, labels, first, factor, weights, scaled_Q) -> sums``
    What ``softmax_rows_`` does without smoothing, of the scores ``Q @ D.T``, which are never in memory. ``Q
    [rows, d]`` and ``D [columns, d]`` are bfloat16 that ``can_softmax_product_rows(Q, D)`` takes. The
    weights, bfloat16 of rows that begin at multiples of 16 bytes, lack a scale of each row. ``scaled_Q``,
    bfloat16 ``[rows, d]``, becomes ``Q`` times it; None: it is not wanted. Sums are ``[6, rows]``: a score
    ``m`` of the row or one near it, the sums of ``e`` and of ``e * (s - m)``, 0, the score of the label (NaN:
    there is none), and the scale.
``scale_rows_(x, scale, out)``
    ``out`` becomes ``x`` times ``scale``, one float32 or one for each ``x[i]``, rounded once to its dtype.

Here are the CPU's kernels, in plain PyTorch.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction._torch import register_fake
from late_interaction.ops._arguments import check_tensor
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import fake_nothing, register_helper

_SCALED = (torch.bfloat16, torch.float16, torch.float32)


def row_sums(scores: Tensor, inverse_temperature: Tensor) -> Tensor:
    _check_scores(scores, inverse_temperature)
    return _sums(scores, inverse_temperature)[0]


def rows(
    scores: Tensor,
    inverse_temperature: Tensor,
    labels: Tensor | None,
    first: int,
    factor: Tensor,
    smoothing: float,
    weights: Tensor,
) -> Tensor:
    _check_scores(scores, inverse_temperature)
    check_tensor("factor", factor, scores.shape[:1], (scores.dtype,), scores)
    _check_labels_and_weights(labels, weights, scores)
    sums, exponentials = _sums(scores, inverse_temperature)
    found = _scaled(exponentials, factor / sums[1], factor, smoothing / scores.shape[1])
    _subtract_labels(found, factor * (1 - smoothing), _label_columns(labels, first, scores))
    weights.copy_(found)
    return sums


def sums(scores: Tensor, inverse_temperature: Tensor, column_sums: Tensor) -> Tensor:
    _check_scores(scores, inverse_temperature)
    check_tensor("column_sums", column_sums, (4, scores.shape[1]), (scores.dtype,), scores)
    if scores.shape[0] == 0:
        return scores.new_empty(4, 0)
    of_columns, _ = _sums(scores.t(), inverse_temperature)
    maximum, weight, moment, total = torch.stack((column_sums, of_columns), 1).unbind(0)
    nothing = weight == 0  # a sum over no scores moves nowhere: infinity times zero is NaN
    both = maximum.masked_fill(nothing, torch.finfo(maximum.dtype).min).amax(0)
    moved = (maximum - both).masked_fill_(nothing, 0.0)
    keep = (moved * inverse_temperature).exp_()
    moment = torch.addcmul(moment, moved, weight).mul_(keep)
    column_sums[0] = both
    column_sums[1:] = torch.stack((weight * keep, moment, total)).sum(1)
    return _sums(scores, inverse_temperature)[0]


def weights(
    scores: Tensor,
    inverse_temperature: Tensor,
    row_terms: Tensor,
    column_terms: Tensor | None,
    labels: Tensor | None,
    first: int,
    smoothing: float,
    weights: Tensor,
) -> None:
    _check_scores(scores, inverse_temperature)
    check_tensor("row_terms", row_terms, (3, scores.shape[0]), (scores.dtype,), scores)
    check_tensor("column_terms", column_terms, (3, scores.shape[1]), (scores.dtype,), scores)
    _check_labels_and_weights(labels, weights, scores)
    columns = _label_columns(labels, first, scores)
    share = smoothing / scores.shape[1]  # in both directions, which have as many classes
    found = _of_terms(scores, inverse_temperature, row_terms, share)
    amount = row_terms[2] * (1 - smoothing)
    if column_terms is not None:
        found += _of_terms(scores.t(), inverse_temperature, column_terms, share).t()
        amount = amount + column_terms[2][columns.clamp_min(0)] * (1 - smoothing)
    _subtract_labels(found, amount, columns)
    weights.copy_(found)


def scale_rows(x: Tensor, scale: Tensor, out: Tensor) -> None:
    check_tensor("x", x, None, _SCALED)
    check_tensor("out", out, None, _SCALED, x)
    check_tensor("scale", scale, None, (torch.float32,), x)
    if x.dim() < 1 or out.numel() != x.numel() or scale.numel() not in (1, x.shape[0]):
        raise RuntimeError(
            "late_interaction: scale must have one number or one for each row of x, and out as many elements"
            f" as x, got scale {list(scale.shape)}, out {list(out.shape)} and x {list(x.shape)}"
        )
    each = scale.reshape(-1, *[1] * (x.dim() - 1))
    out.copy_((x * each).view_as(out))


def can_product_rows(Q: Tensor, D: Tensor) -> bool:
    return Q.dtype is D.dtype is torch.bfloat16 and Q.dim() == D.dim() == 2 and Q.shape[1] == D.shape[1]


def product_rows(
    Q: Tensor,
    D: Tensor,
    inverse_temperature: Tensor,
    labels: Tensor | None,
    first: int,
    factor: Tensor,
    weights: Tensor,
    scaled_Q: Tensor | None,
) -> Tensor:
    """Compute :func:`rows` of the products of single tokens."""
    if not can_product_rows(Q, D):
        raise RuntimeError("late_interaction: can_softmax_product_rows says no to these Q and D")
    _check_number(inverse_temperature, torch.float32, Q)
    check_tensor("labels", labels, Q.shape[:1], (torch.int64,), Q)
    check_tensor("factor", factor, Q.shape[:1], (torch.float32,), Q)
    check_tensor("weights", weights, (Q.shape[0], D.shape[0]), (torch.bfloat16,), Q)
    check_tensor("scaled_Q", scaled_Q, Q.shape, (torch.bfloat16,), Q)
    scores = Q.float() @ D.float().t()
    columns = _label_columns(labels, first, scores)
    sums, exponentials = _sums(scores, inverse_temperature)
    _subtract_labels(exponentials, sums[1], columns)
    weights.copy_(exponentials.masked_fill_((factor == 0).unsqueeze(1), 0.0))
    target = scores.gather(1, columns.clamp_min(0).unsqueeze(1)).squeeze(1)
    scale = torch.where(factor == 0, 0.0, factor / sums[1])
    if scaled_Q is not None:
        scaled_Q.copy_(torch.where((factor == 0).unsqueeze(1), 0.0, Q * scale.unsqueeze(1)))
    rest = torch.zeros_like(scale), target.masked_fill(columns < 0, torch.nan), scale
    return torch.stack((*sums[:3], *rest))


# ---- checks: what the CUDA kernels ask for, but for contiguous rows ----


def _check_scores(scores: Tensor, inverse_temperature: Tensor) -> None:
    check_tensor("scores", scores, (None, None), (torch.float32, torch.float64))
    if scores.shape[1] == 0:
        raise RuntimeError(f"late_interaction: scores must have a column, got {list(scores.shape)}")
    _check_number(inverse_temperature, scores.dtype, scores)


def _check_number(inverse_temperature: Tensor, dtype: torch.dtype, beside: Tensor) -> None:
    one = inverse_temperature.shape if inverse_temperature.numel() == 1 else ()
    check_tensor("inverse_temperature", inverse_temperature, one, (dtype,), beside)


def _check_labels_and_weights(labels: Tensor | None, weights: Tensor, scores: Tensor) -> None:
    check_tensor("labels", labels, scores.shape[:1], (torch.int64,), scores)
    dtypes = (torch.float64,) if scores.dtype == torch.float64 else _SCALED
    check_tensor("weights", weights, scores.shape, dtypes, scores)


# ---- steps ----


def _sums(scores: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Sum rows, and return the exponentials of the scores relative to the maxima."""
    maximum = scores.amax(1).clamp_min_(torch.finfo(scores.dtype).min)  # finite, if all are -inf too
    relative = scores - maximum.unsqueeze(1)
    exponentials = (relative * inverse_temperature).exp_()
    moment = relative.mul_(exponentials).sum(1)
    return torch.stack((maximum, exponentials.sum(1), moment, scores.sum(1))), exponentials


def _scaled(exponentials: Tensor, scale: Tensor, factor: Tensor, share: float) -> Tensor:
    """Compute in place what rows add to the weights, but for their labels."""
    found = exponentials.mul_(scale.unsqueeze(1))
    if share:
        found -= (factor * share).unsqueeze(1)
    return found.masked_fill_((factor == 0).unsqueeze(1), 0.0)


def _of_terms(scores: Tensor, inverse_temperature: Tensor, terms: Tensor, share: float) -> Tensor:
    maximum, scale, factor = terms.unbind(0)
    exponentials = (scores - maximum.unsqueeze(1)).mul_(inverse_temperature).exp_()
    return _scaled(exponentials, scale, factor, share)


def _label_columns(labels: Tensor | None, first: int, scores: Tensor) -> Tensor:
    """Return the column of each row's label, or -1."""
    n, columns = scores.shape
    found = torch.arange(first, first + n, device=scores.device) if labels is None else labels
    return torch.where((found >= 0) & (found < columns), found, -1)


def _subtract_labels(weights: Tensor, amount: Tensor, columns: Tensor) -> None:
    """Subtracts ``amount[row]`` at the column of each row, in place."""
    places = columns.clamp_min(0).unsqueeze(1)
    amount = torch.where(columns < 0, 0.0, amount)
    weights.scatter_add_(1, places, -amount.unsqueeze(1))


# ---- registration ----


def _fake_sums(scores: Tensor, **_: Any) -> Tensor:
    return scores.new_empty((4, scores.shape[0]))


def _fake_product_sums(Q: Tensor, **_: Any) -> Tensor:
    return Q.new_empty((6, Q.shape[0]), dtype=torch.float32)


for _op, _kernel, _fake in (
    (operators.softmax_row_sums.default, row_sums, _fake_sums),
    (operators.softmax_rows_.default, rows, _fake_sums),
    (operators.softmax_sums_.default, sums, _fake_sums),
    (operators.softmax_weights_.default, weights, fake_nothing),
    (operators.scale_rows_.default, scale_rows, fake_nothing),
    (operators.softmax_product_rows_.default, product_rows, _fake_product_sums),
):
    register_helper(_op, _fake)
    library.impl(_op, _kernel, "CPU")
_can = operators.can_softmax_product_rows.default
library.impl(_can, can_product_rows, "CPU")
register_fake(library, _can.name(), lambda Q, D: False)
