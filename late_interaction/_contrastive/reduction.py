"""From running sums of rows and columns: the loss, the derivatives in each row's and column's cross entropy,
and the gradient of the temperature."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._contrastive.kept import KeptBlocks
from late_interaction._contrastive.problem import Problem
from late_interaction._contrastive.shards import Call, reduced, row_factor
from late_interaction._contrastive.softmax import RunningSoftmax
from late_interaction._contrastive.tail import PairList
from late_interaction._contrastive.tokens import Tokens


@dataclass
class Kept:
    """What the forward keeps for the backward beside its inputs."""

    rows: RunningSoftmax
    columns: RunningSoftmax | None
    lists: list[PairList]
    counts: Tensor  # of queries, and of documents, that the loss is the mean over
    blocks: KeptBlocks | None = None
    last: Tokens | None = None  # the documents of the last step


def loss_and_counts(
    p: Problem, call: Call, rows: RunningSoftmax, columns: RunningSoftmax | None
) -> tuple[Tensor, Tensor]:
    """The loss, and how many rows and columns it is the mean over."""
    found = [(rows.losses(p.smoothing, p.classes), p.labels.index)]
    if columns is not None and p.column_labels is not None:
        found.append((columns.losses(p.smoothing, p.column_classes), p.column_labels.index))
    losses, total, counts = reduced(call, found)
    share = call.scale / len(losses)
    if total is None:
        result = losses[0]
        if columns is not None:
            result = result + _by_rows(p, losses[1])
        return result * share, counts
    return total * share, counts


def _by_rows(p: Problem, values: Tensor) -> Tensor:
    """Values of columns, at the rows whose labels they are."""
    index = p.labels.index
    return values if index is None else values[index.clamp_min(0)].masked_fill(index < 0, 0.0)


def by_columns(p: Problem, values: Tensor, otherwise: float = 0.0) -> Tensor:
    """Values of rows, at the columns that are their labels."""
    assert p.column_labels is not None
    index = p.column_labels.index
    return values if index is None else values[index.clamp_min(0)].masked_fill(index < 0, otherwise)


def factors(grad: Tensor, p: Problem, call: Call, kept: Kept) -> list[Tensor]:
    """The derivatives of the loss in the cross entropies of rows, and of columns."""
    sides = [(kept.rows, p.labels)]
    if kept.columns is not None and p.column_labels is not None:
        sides.append((kept.columns, p.column_labels))
    grad, found = grad.to(kept.rows.weight.dtype) * (call.scale / len(sides)), []
    for i, (sums, labels) in enumerate(sides):
        each = grad if call.reduction != "mean" else grad / kept.counts[i]
        if call.reduction == "none" and i == 1:
            each = by_columns(p, grad)
        found.append(row_factor(each, labels.index, sums.weight))
    return found


def temperature_gradient(p: Problem, temperature: Tensor | float, kept: Kept, found: list[Tensor]) -> Tensor:
    """``found``: what :func:`factors` returned."""
    assert isinstance(temperature, Tensor)
    products = [kept.rows.logit_products(p.smoothing, p.classes)]
    if kept.columns is not None:
        products.append(kept.columns.logit_products(p.smoothing, p.column_classes))
    total = torch.zeros_like(products[0][:0].sum())
    for product, factor in zip(products, found, strict=True):
        total = total + torch.where(factor == 0, 0.0, product * factor).sum()
    return (-total / temperature).to(temperature.dtype)
