"""SigLIP's loss over all pairs of a batch: :func:`late_interaction.losses.sigmoid`."""

from typing import Any

from torch import Tensor

from late_interaction._checks.losses import check_number
from late_interaction._checks.options import Precision, Reduction
from late_interaction._contrastive import row_losses, whole
from late_interaction._contrastive.arguments import read
from late_interaction.losses._module import BatchLoss, LabelsLike
from late_interaction.losses._traced import traceable
from late_interaction.tokens import TokensLike


@traceable
def sigmoid(
    Q: TokensLike,
    D: TokensLike,
    labels: LabelsLike | None = None,
    *,
    hard_negatives: TokensLike | None = None,
    candidate_mask: Tensor | None = None,
    exclude: LabelsLike | None = None,
    exclude_above: float | None = None,
    temperature: float | Tensor = 1.0,
    bias: float | Tensor = 0.0,
    normalize: bool = False,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
    group: Any = None,
    scale_by_world: bool = False,
) -> Tensor:
    """Compute SigLIP's sigmoid loss over all pairs (https://arxiv.org/abs/2303.15343).

    It is ``sum_j softplus(-z_ij * (score_ij / temperature + bias))`` for query ``i``, with ``z_ij`` 1 for its
    own document (or each of them) and -1 for every other.

    With ``reduction="mean"`` that is the mean over queries of sums over documents, as in SigLIP. Divided by
    the number of documents (hard negatives included) and without bias it is colpali-engine's
    ColbertSigmoidLoss, the mean over pairs. For its ``normalize_scores``, scores divided by the number of a
    query's tokens, divide ``Q`` by that number.

    Args:
        Q, D, labels, candidate_mask, exclude, exclude_above, normalize, precision, reduction, scale_by_world:
            as in :func:`late_interaction.losses.contrastive`.
        temperature: as in :func:`late_interaction.losses.contrastive`.
        bias: added to every score once divided: a finite number, or a tensor of one element, which gets a
            gradient if it requires one. A large negative one outweighs the many negatives of a new model.
        hard_negatives: ``[Nq, K, Lh, d]``, as in :func:`late_interaction.losses.contrastive`: ``K`` further
            pairs of each query, all negative.
        group: as in :func:`late_interaction.losses.contrastive`: pairs of every query with all processes'
            documents.

    Returns:
        The loss, float32 (float64 for float64 inputs): 0-dim, or ``[Nq]``. NaN in a score makes its query's
        loss NaN. An empty document scores 0.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`late_interaction.losses.contrastive`.

    Complexity: as :func:`late_interaction.losses.contrastive` without ``tail``.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> Q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], requires_grad=True)
        >>> D = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.1]]])
        >>> loss = losses.sigmoid(Q, D, bias=-1.0)
        >>> loss.backward()
        >>> round(loss.item(), 4), Q.grad.shape
        (1.1008, torch.Size([2, 1, 2]))
    """
    return whole.loss(read("losses.sigmoid", locals()), row_losses.Sigmoid)


class Sigmoid(BatchLoss):
    """:func:`sigmoid` as a module, whose temperature and bias may be learned.

    Args:
        temperature: its initial value, a number above 0. SigLIP starts from 0.1, for single vectors.
        bias: its initial value, a finite number. SigLIP starts from -10.
        learnable: whether ``log_temperature`` and ``bias`` are parameters; else they are buffers.
        exclude_above, normalize, precision, reduction, group, scale_by_world: as in :func:`sigmoid`.

    Raises:
        TypeError, ValueError: a temperature that is no number above 0, a bias that is no finite number; the
        others when the module is called.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> loss_fn = losses.Sigmoid(bias=-10.0, learnable=True, normalize=True)
        >>> Q, D = torch.randn(4, 8, 16, requires_grad=True), torch.randn(4, 20, 16, requires_grad=True)
        >>> loss_fn(Q, D).backward()
        >>> loss_fn.bias.grad.shape
        torch.Size([1])
    """

    bias: Tensor

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        bias: float = 0.0,
        learnable: bool = False,
        exclude_above: float | None = None,
        normalize: bool = False,
        precision: Precision | None = None,
        reduction: Reduction = "mean",
        group: Any = None,
        scale_by_world: bool = False,
    ) -> None:
        super().__init__(sigmoid, locals())
        self._learn("bias", check_number("bias", bias), learnable)

    def numbers(self) -> dict[str, Tensor]:
        return super().numbers() | {"bias": self.bias}
