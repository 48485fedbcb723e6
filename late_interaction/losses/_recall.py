"""A surrogate of recall@k over the MaxSim scores of a batch: :func:`late_interaction.losses.recall`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from late_interaction._checks.choices import Precision, Reduction
from late_interaction._contrastive import blockwise, row_losses, whole
from late_interaction._contrastive.arguments import read
from late_interaction._scoring.traced import leave_untraced
from late_interaction.losses._module import BatchLoss, LabelsLike
from late_interaction.tokens import TokensLike


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
    normalize: bool = False,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
    group: Any = None,
    scale_by_world: bool = False,
) -> Tensor:
    """A surrogate of ``1 - recall@k`` that has gradients: Patel, Tolias and Matas, "Recall@k Surrogate Loss
    with Large Batches and Similarity Mixup" (https://arxiv.org/abs/2108.11179), without the mixup. Step
    functions become sigmoids, in the rank of each query's own document and in its comparison with ``k``::

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
        hard_negatives: ``[Nq, K, Lh, d]``, as in :func:`late_interaction.losses.contrastive`: documents that
            may rank before the query's own.
        group: as in :func:`late_interaction.losses.contrastive`: the rank among the documents of all
            processes.

    Returns:
        The loss, float32 (float64 for float64 inputs), between 0 and 1: 0-dim, or ``[Nq]``. NaN in a score
        makes its query's loss NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`late_interaction.losses.contrastive`; a temperature
        that requires a gradient.

    Complexity: as :func:`late_interaction.losses.contrastive` without ``tail``, and the scores of ``Nq``
    pairs first.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> Q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], requires_grad=True)
        >>> D = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.1]]])
        >>> loss = losses.recall(Q, D, k=(1, 2), temperature=0.5)
        >>> loss.backward()
        >>> round(loss.item(), 4), Q.grad.shape
        (0.4312, torch.Size([2, 1, 2]))
    """
    call = read("losses.recall", locals())
    if call.whole:
        return whole.loss(call, row_losses.Recall)
    return blockwise.loss(call, row_losses.Recall.start)


leave_untraced(recall)


class Recall(BatchLoss):
    """:func:`recall` as a module. Nothing of it is learned.

    Args:
        k, temperature, rank_temperature, exclude_above, normalize, precision, reduction, group,
            scale_by_world: as in :func:`recall`.

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
        exclude_above: float | None = None,
        normalize: bool = False,
        precision: Precision | None = None,
        reduction: Reduction = "mean",
        group: Any = None,
        scale_by_world: bool = False,
    ) -> None:
        super().__init__(recall, locals())
