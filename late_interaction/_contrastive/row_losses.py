"""Losses of each query that follow from sums over its logits: the hardest negative, SigLIP's and recall's.

Such a loss has two methods for a panel of logits: ``add`` takes it up in the sums of the forward, and
``derivatives`` returns the gradient with respect to it, once the sums are known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from late_interaction._contrastive.backward import Found
from late_interaction._contrastive.blocks import Grid
from late_interaction._contrastive.call import Call, reduced, row_factor, times_number
from late_interaction._contrastive.forward import label_logits
from late_interaction._contrastive.labels import Labels, Targets
from late_interaction._contrastive.sequences import Block


@dataclass(frozen=True)
class Panel:
    """The logits of a block of queries with consecutive documents, or with their hard negatives."""

    logits: Tensor  # [rows, columns], which a loss may overwrite
    rows: Block
    first: int  # the number of the first column among the documents of all processes and hard negatives
    columns: Block = (0, 0)  # the documents' numbers among those that labels speak of
    labels: Labels | None = None  # None: no label lies here

    @property
    def part(self) -> slice:
        return slice(*self.rows)

    def negate_labels(self, x: Tensor) -> Tensor:
        """Change the sign at the labels of ``x [rows, columns]``, in place."""
        if self.labels is not None:
            self.labels.negate(x, self.rows, self.columns)
        return x

    def set_labels(self, x: Tensor, values: Tensor) -> Tensor:
        """Write ``values [queries, P]`` at the labels of each row, in place."""
        if self.labels is not None:
            self.labels.write(x, values, self.rows, self.columns)
        return x


class RowLoss:
    """A loss of each query. ``sums``: over the logits seen so far, by name, each for all queries."""

    lists = False
    needs_positives = False  # the forward must know the logits of labels before it begins

    def __init__(self, call: Call, sums: dict[str, Tensor]) -> None:
        self.call, self.sums = call, sums

    @classmethod
    def start(cls, call: Call) -> "RowLoss":
        positives = call.no_logits()
        if cls.needs_positives:
            positives = label_logits(call, Grid.of(call.kernels, call.q, call.d), positives)
        return cls.of(call, positives)

    @classmethod
    def of(cls, call: Call, positives: Tensor) -> "RowLoss":
        """Make sums over no logits. ``positives [queries, P]``: the labels' logits, or NaN."""
        return cls(call, cls.empty(call, positives))

    # ---- what a loss is ----

    @staticmethod
    def empty(call: Call, positives: Tensor) -> dict[str, Tensor]:
        """Return sums over no logits. ``positives``: as in :meth:`of`."""
        raise NotImplementedError

    def add(self, panel: Panel) -> None:
        raise NotImplementedError

    def losses(self) -> Tensor:
        """Return the loss of each query once all logits have been added.

        What ``derivatives`` needs of it joins the sums. So does ``moment`` if the temperature has a gradient,
        the sum over a query's logits of logit times derivative; and with a bias ``slope``, the sum of the
        derivatives.
        """
        raise NotImplementedError

    def derivatives(self, panel: Panel) -> Tensor:
        """Return the gradient of each query's loss with respect to the logits of a panel."""
        raise NotImplementedError

    def pairs(self, labels: Labels | None, shard: Block) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the only pairs of a shard whose gradients are not 0, if they can be listed, or None."""
        return None

    # ---- forward ----

    def add_own(self, logits: Tensor, rows: Block) -> None:
        self.add(Panel(logits, rows, self.call.classes - self.call.each))

    def begin(self, grid: Grid | None, step: int) -> None:
        self._step = step

    def take(self, logits: Tensor, rows: Block, run: list[Block]) -> None:
        if logits.numel():
            self.add(self._panel(logits, rows, (run[0][0], run[-1][1])))

    def _panel(self, logits: Tensor, rows: Block, columns: Block) -> Panel:
        call, step = self.call, self._step
        first = sum(call.ring.documents[: call.ring.owner(step)])
        return Panel(logits, rows, first + columns[0], columns, call.labels if step == 0 else None)

    def end(self, step: int) -> None:
        pass

    def result(self) -> tuple[Tensor, Tensor]:
        (each,), total, counts = reduced(self.call, [self.losses()])
        return (each if total is None else total) * self.call.scale, counts

    def save(self) -> tuple[list[Tensor | None], Callable[[Call, Sequence[Any]], "RowLoss"]]:
        names, kind = list(self.sums), type(self)
        return [*self.sums.values()], lambda call, saved: kind(call, dict(zip(names, saved, strict=True)))

    # ---- backward ----

    def derive(self, grad: Tensor, counts: Tensor) -> None:
        call, like = self.call, next(iter(self.sums.values()))
        like = like if like.dim() == 1 else like[:, 0]
        grad = grad.to(like.dtype) * call.scale
        each = grad / counts[0] if call.reduction == "mean" else grad
        self._factor = row_factor(each, call.labels.left_out, like)  # with respect to each row's loss
        self._scaled = self._factor / call.temperature

    def begin_gradients(self, step: int, travelled: Tensor | None) -> None:
        self._step = step

    def of_block(self, scores: Tensor, rows: Block, columns: Block) -> Tensor:
        logits = self.call.kept(scores / self.call.temperature, self._step, rows, columns)
        return self._weighed(self._panel(logits, rows, columns))

    def of_own(self, scores: Tensor, rows: Block) -> Tensor:
        logits = self.call.candidates.of_own(scores.div_(self.call.temperature), rows)
        return self._weighed(Panel(logits, rows, self.call.classes - self.call.each))

    def _weighed(self, panel: Panel) -> Tensor:
        factor = self._scaled[panel.part].unsqueeze(1)
        weights = self.derivatives(panel).mul_(factor)
        if self.call.labels.index is not None:
            weights.masked_fill_(factor == 0, 0.0)  # rows that are left out, NaN included
        return weights

    def of_pairs(
        self, rows: Tensor, columns: Tensor, logits: Tensor, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        factor = self._scaled[rows]
        amount = (logits * factor).masked_fill_(factor == 0, 0.0)  # logits: gradients, of RowLoss.pairs
        return amount, None if final else amount != 0

    def listed(self, step: int) -> Found | None:
        ring = self.call.ring
        first, count = sum(ring.documents[: ring.owner(step)]), ring.documents[ring.owner(step)]
        pairs = self.pairs(self.call.labels if step == 0 else None, (first, first + count))
        return None if pairs is None else Found(pairs, set())

    def of_numbers(self, needs_T: bool, needs_bias: bool) -> tuple[Tensor | None, Tensor | None]:
        grad_T, grad_bias = None, None
        T, bias = self.call.temperature, self.call.bias
        if needs_T and isinstance(T, Tensor):
            grad_T = (-times_number(self.sums["moment"], self._factor, self._factor) / T).to(T.dtype)
        if needs_bias and isinstance(bias, Tensor):
            grad_bias = times_number(self.sums["slope"], self._factor, bias)
        return grad_T, grad_bias


# ---- the losses ----


class Pairwise(RowLoss):
    """``softplus(hardest - label)``, where ``hardest`` is the greatest logit of all others.

    Among equals it is that of the lowest number. 0 for a query without a negative. For several labels the
    mean of their losses, or the loss of their log-sum-exp.
    """

    lists = True

    @staticmethod
    def empty(call: Call, positives: Tensor) -> dict[str, Tensor]:
        each = positives[:, 0]
        return {
            "label": torch.full_like(positives, torch.nan),
            "hardest": torch.full_like(each, -torch.inf),
            "place": torch.full_like(each, -1, dtype=torch.int64),
        }

    def add(self, panel: Panel) -> None:
        label, part = self.sums["label"], panel.part
        if panel.labels is not None:
            panel.labels.read(label, panel.logits, panel.rows, panel.columns)
        others = panel.set_labels(panel.logits, torch.full_like(label, -torch.inf))
        found, place = others.max(1)  # the first of equals
        place += panel.first
        hardest, at = self.sums["hardest"][part], self.sums["place"][part]
        # NaN is harder than any number, as torch.max has it.
        harder = (found > hardest) | found.isnan() | ((found == hardest) & (place < at))
        at.copy_(torch.where(harder, place, at))
        hardest.copy_(torch.maximum(hardest, found))

    def losses(self) -> Tensor:
        labels, label, hardest = self.call.labels, self.sums["label"], self.sums["hardest"].unsqueeze(1)
        if self.call.multi_positive == "softmax":
            targets = Targets.of_rows(labels, label, "softmax")
            gap, share = hardest - targets.logit.unsqueeze(1), targets.share
            losses = -logsigmoid(-gap).squeeze(1)
        else:
            gap, share = hardest - label, labels.even(label)
            losses = labels.kept(share * -logsigmoid(-gap)).sum(1)
        pull = self.sums["pull"] = labels.kept(share * gap.sigmoid())
        if self.call.learns:
            self.sums["moment"] = torch.where(pull == 0, 0.0, pull * (hardest - label)).sum(1)
        return losses

    def derivatives(self, panel: Panel) -> Tensor:
        pull, weights = self.sums["pull"][panel.part].sum(1), torch.zeros_like(panel.logits)
        if weights.numel():
            place = self.sums["place"][panel.part] - panel.first
            inside = (place >= 0) & (place < weights.shape[1])
            place = place.clamp(0, weights.shape[1] - 1)
            weights.scatter_(1, place.unsqueeze(1), torch.where(inside, pull, 0.0).unsqueeze(1))
        return panel.set_labels(weights, -self.sums["pull"])

    def pairs(self, labels: Labels | None, shard: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, columns and gradients of each query's pairs with its hardest negative and labels.

        ``shard``: the numbers of its documents among those of all processes. The gradient is 0 if the hardest
        negative lies elsewhere. ``labels``: None if the labels do.
        """
        pull, place = self.sums["pull"], self.sums["place"]
        rows = torch.arange(len(pull), device=pull.device)
        inside = (place >= shard[0]) & (place < shard[1])
        columns, amount = torch.where(inside, place - shard[0], 0), torch.where(inside, pull.sum(1), 0.0)
        if labels is None:
            return rows, columns, amount
        own = rows if labels.index is None else labels.index.clamp_min(0).flatten()
        both = torch.cat((rows, rows.repeat_interleave(labels.most)))
        return both, torch.cat((columns, own)), torch.cat((amount, -pull.flatten()))


class Sigmoid(RowLoss):
    """``softplus(-(logit + bias))`` of a query's labels plus ``softplus(logit + bias)`` of all others.

    It is SigLIP's: https://arxiv.org/abs/2303.15343.
    """

    @staticmethod
    def empty(call: Call, positives: Tensor) -> dict[str, Tensor]:
        names = ("loss", "slope", "moment") if call.learns else ("loss",)
        return {name: torch.zeros_like(positives[:, 0]) for name in names}

    def add(self, panel: Panel) -> None:
        x = panel.negate_labels(panel.logits + self.call.bias)
        self.sums["loss"][panel.part].sub_(logsigmoid(-x).sum(1))
        if self.call.learns:
            weights = panel.negate_labels(x.sigmoid_())
            self.sums["slope"][panel.part].add_(weights.sum(1))
            finite = panel.logits.clamp_min_(torch.finfo(weights.dtype).min)  # 0 times minus infinity is NaN
            self.sums["moment"][panel.part].add_(weights.mul_(finite).sum(1))

    def losses(self) -> Tensor:
        return self.sums["loss"]

    def derivatives(self, panel: Panel) -> Tensor:
        return panel.negate_labels(panel.negate_labels(panel.logits + self.call.bias).sigmoid_())


class Recall(RowLoss):
    """``1 - mean over k of sigmoid((k - 1 - ahead) / rank_temperature)``, the mean over a query's positives.

    ``ahead`` is the sum of ``sigmoid(logit - positive's logit)`` over all other documents, a smooth count of
    those ahead of the positive: https://arxiv.org/abs/2108.11179.
    """

    needs_positives = True

    @staticmethod
    def empty(call: Call, positives: Tensor) -> dict[str, Tensor]:
        names = ("ahead", "slope_of_ahead") if call.keeps else ("ahead",)
        positives = call.labels.kept(positives)  # 0, not NaN, where there is no label
        return {"positive": positives} | {name: torch.zeros_like(positives) for name in names}

    def add(self, panel: Panel) -> None:
        for i in range(self.call.labels.most):
            steps = self._steps(panel, i)
            self.sums["ahead"][panel.part, i].add_(steps.sum(1))
            if self.call.keeps:
                self.sums["slope_of_ahead"][panel.part, i].add_(_slope(steps).sum(1))

    def losses(self) -> Tensor:
        each = [((k - 1 - self.sums["ahead"]) / self.call.rank_temperature).sigmoid() for k in self.call.k]
        recalls, share = torch.stack(each, 2), self.call.labels.even(self.sums["ahead"])
        if self.call.keeps:
            by_ahead = share * _slope(recalls).mean(2) / self.call.rank_temperature
            self.sums["by_ahead"], self.sums["by_positive"] = by_ahead, by_ahead * self.sums["slope_of_ahead"]
        return 1 - (share * recalls.mean(2)).sum(1)

    def derivatives(self, panel: Panel) -> Tensor:
        weights = torch.zeros_like(panel.logits)
        for i in range(self.call.labels.most):
            slope = _slope(self._steps(panel, i))
            weights.add_(slope.mul_(self.sums["by_ahead"][panel.part, i].unsqueeze(1)))
        if panel.labels is not None:
            panel.labels.subtract(weights, self.sums["by_positive"], panel.rows, panel.columns)
        return weights

    def _steps(self, panel: Panel, place: int) -> Tensor:
        """Return sigmoids of logits minus the logit of one positive of each query; 0 at that positive."""
        positive = self.sums["positive"][:, place : place + 1]
        x = panel.logits - positive[panel.part]
        if panel.labels is not None:
            left_out = torch.full_like(positive, -torch.inf)
            panel.labels.at(place).write(x, left_out, panel.rows, panel.columns)
        return x.sigmoid_()


def _slope(sigmoid: Tensor) -> Tensor:
    return sigmoid * (1 - sigmoid)
