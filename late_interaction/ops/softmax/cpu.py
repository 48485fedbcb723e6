"""The softmax operators in plain PyTorch: the CPU's kernels."""

import torch
from torch import Tensor

_BELOW_ALL = -1e30  # finite, so that the first rescaling multiplies no infinity by zero


def row_sums(scores: Tensor, inverse_temperature: Tensor) -> Tensor:
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
    sums, exponentials = _sums(scores, inverse_temperature)
    found = _scaled(exponentials, factor / sums[1], factor, smoothing / scores.shape[1])
    _subtract_labels(found, factor * (1 - smoothing), _label_columns(labels, first, scores))
    weights.copy_(found)
    return sums


def sums(scores: Tensor, inverse_temperature: Tensor, column_sums: Tensor) -> Tensor:
    if scores.shape[0] == 0:
        return scores.new_empty(4, 0)
    of_columns, _ = _sums(scores.t(), inverse_temperature)
    maximum, weight, moment, total = torch.stack((column_sums, of_columns), 1).unbind(0)
    both = maximum.amax(0)
    moved = maximum - both
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


def _sums(scores: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of rows, and the exponentials of the scores relative to the maxima."""
    maximum = scores.amax(1).clamp_min_(_BELOW_ALL)
    relative = scores - maximum.unsqueeze(1)
    exponentials = (relative * inverse_temperature).exp_()
    moment = relative.mul_(exponentials).sum(1)
    return torch.stack((maximum, exponentials.sum(1), moment, scores.sum(1))), exponentials


def _scaled(exponentials: Tensor, scale: Tensor, factor: Tensor, share: float) -> Tensor:
    """What rows add to the weights, but for their labels. In place."""
    found = exponentials.mul_(scale.unsqueeze(1))
    if share:
        found -= (factor * share).unsqueeze(1)
    return found.masked_fill_((factor == 0).unsqueeze(1), 0.0)


def _of_terms(scores: Tensor, inverse_temperature: Tensor, terms: Tensor, share: float) -> Tensor:
    maximum, scale, factor = terms.unbind(0)
    exponentials = (scores - maximum.unsqueeze(1)).mul_(inverse_temperature).exp_()
    return _scaled(exponentials, scale, factor, share)


def _label_columns(labels: Tensor | None, first: int, scores: Tensor) -> Tensor:
    """The column of each row's label, or -1."""
    n, columns = scores.shape
    found = torch.arange(first, first + n, device=scores.device) if labels is None else labels
    return torch.where((found >= 0) & (found < columns), found, -1)


def _subtract_labels(weights: Tensor, amount: Tensor, columns: Tensor) -> None:
    """Subtracts ``amount[row]`` at the column of each row, in place."""
    places = columns.clamp_min(0).unsqueeze(1)
    amount = torch.where(columns < 0, 0.0, amount)
    weights.scatter_add_(1, places, -amount.unsqueeze(1))
