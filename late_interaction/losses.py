"""Losses over pairs of MaxSim scores of a batch, by blocks as :func:`late_interaction.contrastive_loss`:
:func:`pairwise_loss` and :func:`sigmoid_loss`, and a module for each. The work stands in
:mod:`late_interaction._contrastive`.
"""

from typing import Any

from torch import Tensor

from late_interaction._checks.choices import Precision, Reduction
from late_interaction._contrastive import own_options
from late_interaction._contrastive.arguments import OF_CROSS_ENTROPY, read
from late_interaction._contrastive.module import BatchLoss
from late_interaction._contrastive.row_losses.pairwise import Pairwise
from late_interaction._contrastive.row_losses.row_function import row_loss
from late_interaction._contrastive.row_losses.sigmoid import Sigmoid
from late_interaction._scoring.traced import leave_untraced
from late_interaction.tokens import TokensLike

__all__ = ["PairwiseLoss", "SigmoidLoss", "pairwise_loss", "sigmoid_loss"]


def pairwise_loss(
    Q: TokensLike,
    D: TokensLike,
    *,
    labels: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    hard_negatives: TokensLike | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    hard_negatives_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    cu_seqlens_h: Tensor | None = None,
    normalize: bool = False,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
    group: Any = None,
    scale_by_world: bool = False,
) -> Tensor:
    """The cross entropy between each query's document and its hardest negative:
    ``softplus((hardest - positive) / temperature)``, where ``hardest`` is the greatest score of the query
    with any other document. It is colpali-engine's ColbertPairwiseCELoss without the filter of
    negatives. Its ``normalize_scores``, scores divided by the number of a query's tokens, is had by dividing
    ``Q`` by that number.

    Args:
        Q, D, labels, q_mask, d_mask, hard_negatives_mask, cu_seqlens_q, cu_seqlens_d, cu_seqlens_h,
            normalize, precision, reduction, scale_by_world: as in :func:`late_interaction.contrastive_loss`.
        temperature: as in :func:`late_interaction.contrastive_loss`.
        hard_negatives: ``[Nq, K, Lh, d]``, as in :func:`late_interaction.contrastive_loss`: the hardest
            negative is looked for among them, too.
        group: as in :func:`late_interaction.contrastive_loss`: the hardest negative of all processes.

    Returns:
        The loss, float32 (float64 for float64 inputs): 0-dim, or ``[Nq]``. 0 for a query without a negative.
        Of negatives with equal scores the one of the lowest number counts, hard negatives after documents,
        and gets the gradient. NaN in a score makes its query's loss NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`late_interaction.contrastive_loss`.

    Complexity: ``2 * Nq * Nd * Lq * Ld * d`` operations forward. The backward scores ``2 * Nq`` pairs alone,
    of packed tokens: those with masks are copied first, without what a mask leaves out, and the host waits
    for the device. Where scores and winners of all pairs take up to 64 MiB (512 MiB on a CPU), they are
    kept, and nothing is copied or waited for. Memory is as for :func:`late_interaction.contrastive_loss`.
    The result has the same bits on every run.

    Example:
        >>> import torch
        >>> from late_interaction import pairwise_loss
        >>> Q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], requires_grad=True)
        >>> D = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.1]]])
        >>> loss = pairwise_loss(Q, D)
        >>> loss.backward()
        >>> round(loss.item(), 4), Q.grad.shape
        (0.4076, torch.Size([2, 1, 2]))
    """
    given = OF_CROSS_ENTROPY | {
        "labels": labels, "temperature": temperature, "normalize": normalize, "precision": precision,
        "reduction": reduction, "scale_by_world": scale_by_world, "group": group,
    }  # fmt: skip
    tokens, masks = (Q, D, hard_negatives), (q_mask, d_mask, hard_negatives_mask)
    offsets = (cu_seqlens_q, cu_seqlens_d, cu_seqlens_h)
    arguments = read("pairwise_loss", (tokens, masks, offsets), given, listed=True)
    return row_loss("pairwise_loss", arguments, Pairwise(arguments.learns_numbers))


def sigmoid_loss(
    Q: TokensLike,
    D: TokensLike,
    *,
    labels: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    bias: float | Tensor = 0.0,
    hard_negatives: TokensLike | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    hard_negatives_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    cu_seqlens_h: Tensor | None = None,
    normalize: bool = False,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
    group: Any = None,
    scale_by_world: bool = False,
) -> Tensor:
    """The sigmoid loss over all pairs, of SigLIP (https://arxiv.org/abs/2303.15343):
    ``sum_j softplus(-z_ij * (score_ij / temperature + bias))`` for query ``i``, with ``z_ij`` 1 for its own
    document and -1 for every other.

    With ``reduction="mean"`` that is the mean over queries of sums over documents, as in SigLIP. Divided by
    the number of documents (hard negatives included) and without bias it is colpali-engine's
    ColbertSigmoidLoss, the mean over pairs. Its ``normalize_scores``, scores divided by the number of a
    query's tokens, is had by dividing ``Q`` by that number.

    Args:
        Q, D, labels, q_mask, d_mask, hard_negatives_mask, cu_seqlens_q, cu_seqlens_d, cu_seqlens_h,
            normalize, precision, reduction, scale_by_world: as in :func:`late_interaction.contrastive_loss`.
        temperature: as in :func:`late_interaction.contrastive_loss`.
        bias: added to every score once divided: a finite number, or a tensor of one element, which gets a
            gradient if it requires one. A large negative one outweighs the many negatives of a new model.
        hard_negatives: ``[Nq, K, Lh, d]``, as in :func:`late_interaction.contrastive_loss`: ``K`` further
            pairs of each query, all negative.
        group: as in :func:`late_interaction.contrastive_loss`: pairs of every query with all processes'
            documents.

    Returns:
        The loss, float32 (float64 for float64 inputs): 0-dim, or ``[Nq]``. NaN in a score makes its query's
        loss NaN. An empty document scores 0.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`late_interaction.contrastive_loss`.

    Complexity: as :func:`late_interaction.contrastive_loss` without ``tail``.

    Example:
        >>> import torch
        >>> from late_interaction import sigmoid_loss
        >>> Q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], requires_grad=True)
        >>> D = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.1]]])
        >>> loss = sigmoid_loss(Q, D, bias=-1.0)
        >>> loss.backward()
        >>> round(loss.item(), 4), Q.grad.shape
        (1.1008, torch.Size([2, 1, 2]))
    """
    given = OF_CROSS_ENTROPY | {
        "labels": labels, "temperature": temperature, "normalize": normalize, "precision": precision,
        "reduction": reduction, "scale_by_world": scale_by_world, "group": group, "bias": bias,
    }  # fmt: skip
    tokens, masks = (Q, D, hard_negatives), (q_mask, d_mask, hard_negatives_mask)
    offsets = (cu_seqlens_q, cu_seqlens_d, cu_seqlens_h)
    arguments = read("sigmoid_loss", (tokens, masks, offsets), given)
    own = arguments.options.own or own_options.OwnOptions()
    return row_loss("sigmoid_loss", arguments, Sigmoid(own.bias, arguments.learns_numbers))


leave_untraced(pairwise_loss)
leave_untraced(sigmoid_loss)


class PairwiseLoss(BatchLoss):
    """:func:`pairwise_loss` as a module.

    Args:
        temperature: at the start; a number above 0.
        learnable: whether ``log_temperature`` is a parameter; else it is a buffer.
        normalize, precision, reduction, group, scale_by_world: as in :func:`pairwise_loss`.

    Raises:
        TypeError, ValueError: a temperature that is no number above 0; the others when the module is called.

    Example:
        >>> import torch
        >>> from late_interaction import PairwiseLoss
        >>> loss_fn = PairwiseLoss(normalize=True)
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
        normalize: bool = False,
        precision: Precision | None = None,
        reduction: Reduction = "mean",
        group: Any = None,
        scale_by_world: bool = False,
    ) -> None:
        options = {
            "normalize": normalize, "precision": precision, "reduction": reduction, "group": group,
            "scale_by_world": scale_by_world,
        }  # fmt: skip
        super().__init__(pairwise_loss, temperature, learnable, options)


class SigmoidLoss(BatchLoss):
    """:func:`sigmoid_loss` as a module, with a temperature and a bias that are learned if wanted.

    Args:
        temperature: at the start; a number above 0. SigLIP starts from 0.1, for single vectors.
        bias: at the start; a finite number. SigLIP starts from -10.
        learnable: whether ``log_temperature`` and ``bias`` are parameters; else they are buffers.
        normalize, precision, reduction, group, scale_by_world: as in :func:`sigmoid_loss`.

    Raises:
        TypeError, ValueError: a temperature that is no number above 0, a bias that is no finite number; the
        others when the module is called.

    Example:
        >>> import torch
        >>> from late_interaction import SigmoidLoss
        >>> loss_fn = SigmoidLoss(bias=-10.0, learnable=True, normalize=True)
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
        normalize: bool = False,
        precision: Precision | None = None,
        reduction: Reduction = "mean",
        group: Any = None,
        scale_by_world: bool = False,
    ) -> None:
        options = {
            "normalize": normalize, "precision": precision, "reduction": reduction, "group": group,
            "scale_by_world": scale_by_world,
        }  # fmt: skip
        super().__init__(sigmoid_loss, temperature, learnable, options)
        self._learn("bias", own_options.number("bias", bias), learnable)

    def numbers(self) -> dict[str, Tensor]:
        return super().numbers() | {"bias": self.bias}
