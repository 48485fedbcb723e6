"""Distillation of a teacher's scores of each query's own documents into MaxSim.

:func:`late_interaction.losses.distill_kl_div` and :func:`late_interaction.losses.margin_mse`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, mse_loss

from late_interaction._checks.losses import check_above_0
from late_interaction._checks.messages import no_tensor
from late_interaction._checks.options import REDUCTIONS, Precision, Reduction, check_flag, check_one_of
from late_interaction._checks.tensors import check_device
from late_interaction._scoring.normalized import min_max
from late_interaction.losses._module import options_of
from late_interaction.losses._own_scores import own_scores
from late_interaction.tokens import TokensLike


def distill_kl_div(
    Q: TokensLike,
    D: TokensLike,
    teacher: Tensor,
    *,
    candidate_mask: Tensor | None = None,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    normalize_scores: bool = False,
    normalize: bool = False,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the KL divergence of the MaxSim scores of each query's own documents from a teacher's.

    ``KL(softmax(teacher / teacher_temperature) || softmax(scores / temperature)) * temperature ** 2``

    If all documents have tokens, it equals Sentence Transformers' MultiVectorDistillKLDivLoss. There a
    document without tokens scores -1e9 and keeps its share of the teacher's softmax, so that the loss is 1e9
    times that share; here it is left out of both. With ``normalize_scores=True`` it equals PyLate's
    Distillation, which has that on by default and no temperature. ColBERTv2
    (https://arxiv.org/abs/2112.01488) trains like this.

    Args:
        Q: queries, ``[B, Lq, d]``; bfloat16, float16, float32 or float64. Or a list of ``[L, d]`` tensors,
            or :class:`~late_interaction.Tokens`, padded with a mask or packed.
        D: the ``K`` documents of each query, ``[B, K, Ld, d]``, of the dtype and device of ``Q``; at least 2.
            As Tokens or a list ``B * K`` sequences, document ``i * K + k`` belonging to query ``i``.
        teacher: ``[B, K]``, floating point, on the device of ``Q``: scores of the same documents, on any
            scale. They get no gradient. A score of minus infinity has no share of the teacher's softmax;
            those of documents that are left out are ignored.
        candidate_mask: ``[B, K]``, bool (or integer, nonzero = True), True = keep: the documents that each
            query has. The loss is that of the shorter list, 0 where it has fewer than 2. Documents without
            tokens are left out, too.
        temperature: what scores are divided by, a number above 0. The loss is multiplied by its square, so
            that gradients stay of one size (https://arxiv.org/abs/1503.02531).
        teacher_temperature: what ``teacher`` is divided by. None: as ``temperature``.
        normalize_scores: map each query's scores to [0, 1] first: ``(score - least) / (greatest - least +
            1e-8)``, with the gradient of that. Scores that differ by no more than rounding become 0, without
            a gradient. The teacher's scores stay as they are. Needs 3 documents of each query: of 2 the
            scores become 0 and 1, whatever they are.
        normalize: divide every token by its L2 norm first (eps 1e-12), with the exact gradient. Packed tokens
            are copied for it.
        precision: how float32 inputs multiply, as in :func:`late_interaction.maxsim`.
        reduction: ``"mean"`` over the queries, ``"sum"``, or ``"none"``: ``[B]``.

    Returns:
        The loss, float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value, by name.

    Complexity: that of :func:`late_interaction.maxsim` with ``B * K`` pairs, and of operations on ``[B, K]``.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> Q = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
        >>> D = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
        >>> loss = losses.distill_kl_div(Q, D, torch.tensor([[3.0, 1.0]]))
        >>> loss.backward()
        >>> round(loss.item(), 4), Q.grad.shape
        (0.0671, torch.Size([1, 1, 2]))
    """
    temperature = check_above_0("temperature", temperature)
    if teacher_temperature is None:
        teacher_temperature = temperature
    teacher_temperature = check_above_0("teacher_temperature", teacher_temperature)
    check_flag("normalize_scores", normalize_scores)
    check_one_of("reduction", reduction, REDUCTIONS)
    scores, kept = own_scores("losses.distill_kl_div", Q, D, candidate_mask, normalize, precision)
    _check_teacher(teacher, scores, ("[B, K]",), [scores.shape])
    if scores.shape[1] < 2:
        raise ValueError(
            "D must hold at least 2 documents of each query: the softmax over one is constant, got"
            f" {scores.shape[1]}"
        )
    if normalize_scores:
        if scores.shape[1] == 2:
            raise ValueError(
                "normalize_scores must be False with 2 documents of each query: their scores become 0 and 1"
            )
        scores = min_max(scores, kept)
    wanted = teacher.detach().to(scores.dtype)
    if kept is not None:
        scores, wanted = (x.masked_fill(~kept, float("-inf")) for x in (scores, wanted))
    # Without a document to divide between there is nothing to learn.
    none = (wanted == float("-inf")).all(1, keepdim=True)
    scores, wanted = scores.masked_fill(none, 0.0), wanted.masked_fill(none, 0.0)
    target = log_softmax(wanted / teacher_temperature, 1)
    student = log_softmax(scores / temperature, 1)
    # A document without a share of the teacher's softmax adds 0, not the NaN of 0 times minus infinity.
    terms = kl_div(student, target, reduction="none", log_target=True)
    each = terms.masked_fill(target == float("-inf"), 0.0).sum(1) * temperature**2
    return _reduced(each, reduction)


def margin_mse(
    Q: TokensLike,
    D: TokensLike,
    teacher: Tensor,
    *,
    candidate_mask: Tensor | None = None,
    normalize: bool = False,
    precision: Precision | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the squared error of the margins between each query's positive and its other documents.

    ``((score_0 - score_k) - (teacher_0 - teacher_k)) ** 2`` for ``k`` from 1 on: the first document is the
    positive. Scores are compared as they are, without a softmax: the teacher's must be on the scale of
    MaxSim.

    It equals Sentence Transformers' MultiVectorMarginMSELoss, and follows Hofstätter et al.
    (https://arxiv.org/abs/2010.02666).

    Args:
        Q, D, candidate_mask, normalize, precision: as in :func:`distill_kl_div`. The first of each query's
            ``K`` documents is the positive: a query whose positive is left out has no margins.
        teacher: floating point, on the device of ``Q``: scores of the documents, ``[B, K]``, or margins
            between the first and each other, ``[B, K - 1]`` (with ``K = 2``, also ``[B]``). They get no
            gradient.
        reduction: ``"mean"`` over all margins of all queries, ``"sum"``, or ``"none"``: ``[B, K - 1]``, with
            0 for those that are left out.

    Returns:
        The loss, float32 (float64 for float64 inputs); 0 without any margin.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value, by name.

    Complexity: as :func:`distill_kl_div`.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> Q = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
        >>> D = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
        >>> loss = losses.margin_mse(Q, D, torch.tensor([[3.0, 1.0]]))
        >>> loss.backward()
        >>> loss.item(), Q.grad.shape
        (1.0, torch.Size([1, 1, 2]))
    """
    check_one_of("reduction", reduction, REDUCTIONS)
    scores, kept = own_scores("losses.margin_mse", Q, D, candidate_mask, normalize, precision)
    if scores.shape[1] < 2:
        raise ValueError(
            f"D must hold a positive and at least 1 negative of each query, got {scores.shape[1]} documents"
        )
    B, others = scores.shape[0], scores.shape[1] - 1
    shapes = [scores.shape, torch.Size((B, others))]
    if others == 1:
        shapes.append(torch.Size((B,)))
    _check_teacher(teacher, scores, ("[B, K]", "[B, K - 1]", "[B]"), shapes)
    wanted = teacher.detach().to(scores.dtype)
    if wanted.shape == scores.shape:
        wanted = wanted[:, :1] - wanted[:, 1:]
    margins = scores[:, :1] - scores[:, 1:]
    wanted = wanted.view(margins.shape)
    if kept is None:
        return mse_loss(margins, wanted, reduction=reduction)
    counts = kept[:, :1] & kept[:, 1:]
    margins, wanted = margins.masked_fill(~counts, 0.0), wanted.masked_fill(~counts, 0.0)
    each = mse_loss(margins, wanted, reduction="none")
    return each.sum() / counts.sum().clamp_min(1) if reduction == "mean" else _reduced(each, reduction)


# ---- what both share ----


def _check_teacher(teacher: Any, scores: Tensor, forms: tuple[str, ...], shapes: list[torch.Size]) -> None:
    if not isinstance(teacher, Tensor):
        raise TypeError(f"teacher must be a torch.Tensor, got {no_tensor('teacher', teacher)}")
    if not teacher.is_floating_point():
        raise TypeError(f"teacher must be floating point, got {teacher.dtype}")
    if teacher.layout != torch.strided:
        raise TypeError(f"teacher must be a dense tensor, got {teacher.layout}")
    check_device("teacher", teacher, "Q", scores.device)
    if teacher.shape not in shapes:
        wanted = " or ".join(f"{form} = {list(shape)}" for form, shape in zip(forms, shapes, strict=False))
        raise ValueError(f"teacher must be {wanted}, got {list(teacher.shape)}")


def _reduced(each: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return each
    return each.mean() if reduction == "mean" else each.sum()


# ---- modules ----


class _Distillation(torch.nn.Module):
    """Apply a function of queries, their documents and a teacher's scores, with its options."""

    def __init__(self, function: Any, given: dict[str, Any]) -> None:
        """Keep the function and its options. ``given``: the ``locals()`` of the module's own __init__."""
        super().__init__()
        self._function = function
        self.options = options_of(given)

    def forward(
        self, Q: TokensLike, D: TokensLike, teacher: Tensor, *, candidate_mask: Tensor | None = None
    ) -> Tensor:
        return self._function(Q, D, teacher, candidate_mask=candidate_mask, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class DistillKLDiv(_Distillation):
    """:func:`distill_kl_div` as a module.

    Args:
        temperature, teacher_temperature, normalize_scores, normalize, precision, reduction: as in
            :func:`distill_kl_div`.

    Raises:
        TypeError, ValueError: when the module is called.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> Q, D = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 4, 20, 16)
        >>> losses.DistillKLDiv(temperature=0.5, normalize=True)(Q, D, torch.randn(2, 4)).backward()
        >>> Q.grad.shape
        torch.Size([2, 8, 16])
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        teacher_temperature: float | None = None,
        normalize_scores: bool = False,
        normalize: bool = False,
        precision: Precision | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(distill_kl_div, locals())


class MarginMSE(_Distillation):
    """:func:`margin_mse` as a module.

    Args:
        normalize, precision, reduction: as in :func:`margin_mse`.

    Raises:
        TypeError, ValueError: when the module is called.

    Example:
        >>> import torch
        >>> from late_interaction import losses
        >>> Q, D = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 4, 20, 16)
        >>> losses.MarginMSE(normalize=True)(Q, D, torch.randn(2, 4)).backward()
        >>> Q.grad.shape
        torch.Size([2, 8, 16])
    """

    def __init__(
        self, *, normalize: bool = False, precision: Precision | None = None, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(margin_mse, locals())
