"""Cross entropy with each query's hardest negative: :func:`late_interaction.losses.pairwise`."""

from typing import Any

from torch import Tensor

from late_interaction._checks.options import MultiPositive, Precision, Reduction
from late_interaction._contrastive import row_losses, whole
from late_interaction._contrastive.arguments import read
from late_interaction.losses._module import BatchLoss, LabelsLike
from late_interaction.losses._traced import traceable
from late_interaction.tokens import TokensLike


@traceable
def pairwise(
    Q: TokensLike,
    D: TokensLike,
    labels: LabelsLike | None = None,
    *,
    multi_positive: MultiPositive = "mean",
    hard_negatives: TokensLike | None = None,
    candidate_mask: Tensor | None = None,
    exclude: LabelsLike | None = None,
    exclude_above: float | None = None,
    temperature: float | Tensor = 1.0,
    normalize: bool = False,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
    group: Any = None,
    scale_by_world: bool = False,
) -> Tensor:
    """Compute the cross entropy between each query's document and its hardest negative.

    It is ``softplus((hardest - positive) / temperature)``, where ``hardest`` is the greatest score of the
    query with any other document: colpali-engine's ColbertPairwiseCELoss without the filter of negatives. For
    its ``normalize_scores``, scores divided by the number of a query's tokens, divide ``Q`` by that number.

    Args:
        Q, D, labels, candidate_mask, exclude, exclude_above, normalize, precision, reduction, scale_by_world:
            as in :func:`late_interaction.losses.contrastive`.
        multi_positive: how several documents of a query count: ``"mean"``, the mean of their losses, or
            ``"softmax"``, the loss of the log-sum-exp of their scores. None of them is a negative.
        temperature: as in :func:`late_interaction.losses.contrastive`.
        hard_negatives: ``[Nq, K, Lh, d]``, as in :func:`late_interaction.losses.contrastive`: the hardest
            negative is looked for among them, too.
        group: as in :func:`late_interaction.losses.contrastive`: the hardest negative of all processes.

    Returns:
        The loss, float32 (float64 for float64 inputs): 0-dim, or ``[Nq]``. 0 for a query without a negative.
        Of negatives with equal scores the one of the lowest number counts, hard negatives after documents,
        and gets the gradient. NaN in a score makes its query's loss NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`late_interaction.losses.contrastive`.

    Complexity: ``2 * Nq * Nd * Lq * Ld * d`` operations forward. The backward scores ``2 * Nq`` pairs alone,
    of packed tokens: those with masks are copied first, without what a mask leaves out, and the host waits
    for the device. Where scores and winners of all pairs take up to 64 MiB (512 MiB on a CPU), they are
    kept, and nothing is copied or waited for. Memory is as for :func:`late_interaction.losses.contrastive`.
    The result has the same bits on every run.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> Q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], requires_grad=True)
        >>> D = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.1]]])
        >>> loss = losses.pairwise(Q, D)
        >>> loss.backward()
        >>> round(loss.item(), 4), Q.grad.shape
        (0.4076, torch.Size([2, 1, 2]))
    """
    return whole.loss(read("losses.pairwise", locals(), listed=True), row_losses.Pairwise)


class Pairwise(BatchLoss):
    """:func:`pairwise` as a module.

    Args:
        temperature: its initial value, a number above 0.
        learnable: whether ``log_temperature`` is a parameter; else it is a buffer.
        multi_positive, exclude_above, normalize, precision, reduction, group, scale_by_world: as in
            :func:`pairwise`.

    Raises:
        TypeError, ValueError: a temperature that is no number above 0; the others when the module is called.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> loss_fn = losses.Pairwise(normalize=True)
        >>> Q, D = torch.randn(4, 8, 16, requires_grad=True), torch.randn(4, 20, 16, requires_grad=True)
        >>> loss_fn(Q, D).backward()
        >>> Q.grad.shape
        torch.Size([4, 8, 16])
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        learnable: bool = False,
        multi_positive: MultiPositive = "mean",
        exclude_above: float | None = None,
        normalize: bool = False,
        precision: Precision | None = None,
        reduction: Reduction = "mean",
        group: Any = None,
        scale_by_world: bool = False,
    ) -> None:
        super().__init__(pairwise, locals())
