"""A surrogate of recall@k over the MaxSim scores of a batch: :func:`late_interaction.losses.recall`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import Precision, Reduction
from late_interaction._contrastive import whole
from late_interaction._contrastive.arguments import read
from late_interaction._contrastive.call import Call
from late_interaction._contrastive.mixup import Mixup
from late_interaction._contrastive.row_losses import Panel
from late_interaction._contrastive.row_losses import Recall as OfRows
from late_interaction.losses._module import BatchLoss, LabelsLike
from late_interaction.losses._traced import traceable
from late_interaction.tokens import TokensLike


class MixedRecall(OfRows):
    """The surrogate with a row for each virtual query behind those of the queries.

    A panel is mixed when it comes, as its groups are whole. Virtual queries have no hard negatives.
    """

    def __init__(self, call: Call, sums: dict[str, Tensor]) -> None:
        super().__init__(_with_mixes(call), sums)

    @classmethod
    def of(cls, call: Call, positives: Tensor) -> "MixedRecall":
        call = _with_mixes(call)
        return cls(call, cls.empty(call, _mixup(call).positives(positives)))

    def add(self, panel: Panel) -> None:
        super().add(panel)
        if panel.labels is not None:  # else hard negatives, which are not mixed
            mixed = self._of_mixed_rows(panel)
            for part in (self._of_mixed_columns(panel), mixed, self._of_mixed_columns(mixed)):
                super().add(part)

    def derivatives(self, panel: Panel) -> Tensor:
        if panel.labels is None:
            return super().derivatives(panel)
        found = self._over_columns(panel)
        mixed = self._over_columns(self._of_mixed_rows(panel))
        _mixup(self.call).queries.add_back(found.t(), mixed.t(), panel.rows)
        return found

    def _over_columns(self, panel: Panel) -> Tensor:
        """Return the gradient with respect to a panel's logits, through documents and their mixes."""
        found = super().derivatives(panel)
        mixed = super().derivatives(self._of_mixed_columns(panel))
        _mixup(self.call).documents.add_back(found, mixed, panel.columns)
        return found

    def _of_mixed_rows(self, panel: Panel) -> Panel:
        queries = _mixup(self.call).queries
        logits = queries.mix(panel.logits.t(), panel.rows).t()
        return replace(panel, logits=logits, rows=queries.numbers(panel.rows))

    def _of_mixed_columns(self, panel: Panel) -> Panel:
        documents = _mixup(self.call).documents
        logits = documents.mix(panel.logits, panel.columns)
        return replace(panel, logits=logits, columns=documents.numbers(panel.columns))


def _mixup(call: Call) -> Mixup:
    assert call.mixup is not None
    return call.mixup


def _with_mixes(call: Call) -> Call:
    return replace(call, labels=_mixup(call).labels)


@traceable
def recall(
    Q: TokensLike,
    D: TokensLike,
    labels: LabelsLike | None = None,
    *,
    hard_negatives: TokensLike | None = None,
    candidate_mask: Tensor | None = None,
    exclude: LabelsLike | None = None,
    exclude_above: float | None = None,
    temperature: float | Tensor = 1.0,
    k: int | Sequence[int] = (1, 2, 4, 8, 16),
    rank_temperature: float = 1.0,
    mixup: int | None = None,
    generator: torch.Generator | None = None,
    normalize: bool = False,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
    group: Any = None,
    scale_by_world: bool = False,
) -> Tensor:
    """Compute a surrogate of ``1 - recall@k`` that has gradients.

    It is that of Patel, Tolias and Matas, "Recall@k Surrogate Loss with Large Batches and Similarity Mixup"
    (https://arxiv.org/abs/2108.11179). Step functions become sigmoids, in the rank of each query's own
    document and in its comparison with ``k``::

        rank_i = 1 + sum over j other than positive of sigmoid((score_ij - score_i,positive) / temperature)
        loss_i = 1 - mean over k of sigmoid((k - rank_i) / rank_temperature)

    The mean over queries is the loss; that of a query with several documents is the mean over these. A larger
    batch makes the estimate of the rank better.

    Args:
        Q, D, labels, candidate_mask, exclude, exclude_above, normalize, precision, reduction, scale_by_world:
            as in :func:`late_interaction.losses.contrastive`.
        k: one rank, or several over which the mean is taken, each at least 1. The default is the paper's.
        temperature: of the sigmoid over differences of scores: a number above 0, or a tensor of one element,
            which gets no gradient. It is the width of a step, no scale of a softmax: the narrower, the nearer
            the rank is to the true one, and the fewer pairs have a gradient. The paper takes 0.01 for
            cosines; a MaxSim score is a sum over the tokens of a query, so that 0.01 times their number,
            about 0.3 for 32, is the same for a late-interaction model.
        rank_temperature: of the sigmoid over differences of ranks; the paper's default of 1.
        mixup: how many examples of a class follow one another, at least 2, for the paper's similarity mixup.
            Queries with the same documents are of one class, and documents with the same queries. Every
            ``mixup`` queries are a group, and so are every ``mixup`` documents, from the first ones on; every
            two of a group that are of one class make one more, virtual query or document of that class. A
            score is no product, so scores are mixed, not tokens: ``share * score_i + (1 - share) * score_j``,
            between two virtual ones of all four scores. What is left out for one of two is left out for
            their mix; virtual queries meet no hard negatives. The mean is over virtual queries, too. None,
            or examples that are alone in their class: nothing. Not with ``group`` or ``reduction="none"``.
        generator: from which each call draws the shares, in (0, 1); None: PyTorch's own.
        hard_negatives: ``[Nq, K, Lh, d]``, as in :func:`late_interaction.losses.contrastive`: documents that
            may rank before the query's own.
        group: as in :func:`late_interaction.losses.contrastive`: the rank among the documents of all
            processes.

    Returns:
        The loss, float32 (float64 for float64 inputs), between 0 and 1: 0-dim, or ``[Nq]``. NaN in a score
        makes its query's loss NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`late_interaction.losses.contrastive`; a temperature
        that requires a gradient; ``mixup`` below 2, a generator without it.

    Complexity: as :func:`late_interaction.losses.contrastive` without ``tail``, and the scores of ``Nq``
    pairs first. Mixes cost no scores of tokens: those of a block of scores, up to ``((mixup + 1) / 2) ** 2``
    times as many, pass with it, and no more of them are stored.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> Q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], requires_grad=True)
        >>> D = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.1]]])
        >>> loss = losses.recall(Q, D, k=(1, 2), temperature=0.5)
        >>> loss.backward()
        >>> round(loss.item(), 4), Q.grad.shape
        (0.4312, torch.Size([2, 1, 2]))
        >>> mixed = losses.recall(Q, D, [[0], [0]], k=(1, 2), mixup=2)  # a third query, of the class of both
    """
    call = read("losses.recall", locals())
    return whole.loss(call, OfRows if call.mixup is None else MixedRecall)


class Recall(BatchLoss):
    """:func:`recall` as a module, which learns nothing.

    Args:
        k, temperature, rank_temperature, mixup, generator, exclude_above, normalize, precision, reduction,
            group, scale_by_world: as in :func:`recall`.

    Raises:
        TypeError, ValueError: a temperature that is no number above 0; the others when the module is called.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> loss_fn = losses.Recall(temperature=0.08, normalize=True)
        >>> Q, D = torch.randn(4, 8, 16, requires_grad=True), torch.randn(4, 20, 16, requires_grad=True)
        >>> loss_fn(Q, D).backward()
        >>> Q.grad.shape
        torch.Size([4, 8, 16])
    """

    def __init__(
        self,
        *,
        k: int | Sequence[int] = (1, 2, 4, 8, 16),
        temperature: float = 1.0,
        rank_temperature: float = 1.0,
        mixup: int | None = None,
        generator: torch.Generator | None = None,
        exclude_above: float | None = None,
        normalize: bool = False,
        precision: Precision | None = None,
        reduction: Reduction = "mean",
        group: Any = None,
        scale_by_world: bool = False,
    ) -> None:
        super().__init__(recall, locals())
