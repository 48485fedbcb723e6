"""XTR scores, by :mod:`late_interaction.ops.xtr`: :func:`xtr_scores`.

XTR (https://arxiv.org/abs/2304.01982) trains for retrieval by tokens: a document's score is made of those of its
tokens alone that are among the ``k`` nearest of a query token in the whole batch.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.options import check_backward, check_precision
from late_interaction._checks.tensors import check_no_forward_ad, is_autocasting
from late_interaction._checks.xtr import check_xtr
from late_interaction._precision import float32_precision

__all__ = ["xtr_scores"]


def xtr_scores(
    Q: Tensor,
    D: Tensor,
    k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    rule: str = "paper",
    q_weights: Tensor | None = None,
    precision: str | None = None,
    backward: str | None = None,
) -> Tensor:
    """Scores for training as XTR (https://arxiv.org/abs/2304.01982), differentiable in ``Q`` and ``D``.

    Each query token selects the ``k`` largest of its similarities with all document tokens of the batch. A
    document's score is the sum over query tokens of its largest selected similarity, divided by how many query
    tokens have one. The grid of all similarities is never stored: beside the inputs, their gradients and two
    bytes for each (query token, document) a call takes some panels of at most 128 MiB (16 MiB on a CPU).

    Of equal similarities at the threshold those of the lower document, then of the lower token are selected, so
    that there are ``k``. Gradients go through the selected maxima; selection and divisor are constants.

    Args:
        Q: queries, ``[Nq, Lq, d]`` or ``[Lq, d]``; bfloat16, float16, float32 or float64.
        D: documents, of the dtype and device of ``Q``: ``[Nd, Ld, d]`` or ``[Ld, d]`` (every query meets every
            document), or ``[Nq, K, Ld, d]``: each query is scored with its own ``K``, for distillation, and its
            tokens select from all ``Nq * K``.
        k: how many similarities a query token selects, at least 1. More than there are: all.
        q_mask: ``[Nq, Lq]``, bool (or integer, nonzero = True), True = keep. A masked query token does not count.
        d_mask: ``D``'s shape without ``d``, likewise. A masked document token is selected after all others, and
            never counts.
        rule: ``"paper"``: a document that a query token did not select adds 0, and the divisor is the number of
            query tokens that selected it, at least 1 (eq. 5; Sentence Transformers 6). ``"pylate"``: every
            similarity that was not selected is 0, so that a maximum below 0 counts in a document alone whose
            tokens were all selected, and the divisor is the number of positive maxima, at least 0.001 (PyLate
            1.5 and 1.6; PrimeQA).
        q_weights: ``[Nq, Lq]``, floating point: numbers that multiply the maxima, differentiable. A query token
            of weight 0 does not count for the divisor.
        precision: as in :func:`late_interaction.maxsim`; the products are PyTorch's, so that of a float32 one
            the bits are those of ``torch.matmul``.
        backward: as in :func:`late_interaction.maxsim`.

    Returns:
        float32 scores (float64 for float64 inputs): ``[Nq, Nd]`` or ``[Nq, K]``; a 2-D ``Q`` drops the first
        dim, a 2-D ``D`` the second. 0 for a document without a token that counts, or without one selected.

    Raises:
        TypeError: an argument that is no tensor, or of a wrong dtype.
        ValueError: shapes, devices or options that do not fit.

    Complexity: one product of ``2 * Nq * Lq * Nd * Ld * d`` operations and one selection, whatever ``k`` up to
    about 3000; a row's similarities are read five times more above that.

    Example:
        >>> import torch
        >>> from late_interaction import xtr_scores
        >>> Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> D = torch.tensor([[[4.0, 1.0], [3.0, 0.0]], [[2.0, 1.0], [0.0, 5.0]], [[1.0, 3.0], [0.0, 2.0]]])
        >>> xtr_scores(Q, D, k=2)  # the first query token selects 4 and 3, the second 5 and 3
        tensor([[4., 5., 3.]])
        >>> xtr_scores(Q, D, k=3)  # and now 2, and 2
        tensor([[4.0000, 3.5000, 3.0000]])
    """
    Q3, DN, q_mask, d_mask = check_xtr(Q, D, k, q_mask, d_mask, q_weights, rule)
    strategy = check_backward(backward)
    check_no_forward_ad("xtr_scores", Q, D, q_weights)
    groups = DN.shape[:2] if DN.dim() == 4 else None
    if groups is not None:
        DN = DN.flatten(0, 1)
        d_mask = None if d_mask is None else d_mask.flatten(0, 1)
    weights = _weights(q_mask, q_weights, Q3)
    scores = _call(Q3, DN, weights, d_mask, (k, rule), precision, strategy)
    if groups is not None:
        return scores.unflatten(1, groups).diagonal(dim1=0, dim2=1).t()
    if D.dim() == 2:
        scores = scores.squeeze(1)
    return scores.squeeze(0) if Q.dim() == 2 else scores


def _weights(q_mask: Tensor | None, q_weights: Tensor | None, Q: Tensor) -> Tensor | None:
    """A mask, or numbers of the scores' dtype, which are 0 where a mask says so."""
    if q_weights is None:
        return q_mask
    dtype = torch.float64 if Q.dtype == torch.float64 else torch.float32
    numbers = q_weights.to(dtype).view(Q.shape[:2])
    return numbers if q_mask is None else numbers.masked_fill(~q_mask, 0.0)


def _call(
    Q: Tensor,
    D: Tensor,
    weights: Tensor | None,
    d_mask: Tensor | None,
    selection: tuple[int, str],
    precision: str | None,
    strategy: str,
) -> Tensor:
    if precision is None:
        precision = float32_precision(Q.device.type) if Q.dtype is torch.float32 else "highest"
    else:
        check_precision(precision)
        if is_autocasting(Q) and Q.dtype is D.dtype:
            with torch.autocast(Q.device.type, enabled=False):  # what the caller says beats autocast
                return _run(Q, D, weights, d_mask, *selection, precision, strategy)
    return _run(Q, D, weights, d_mask, *selection, precision, strategy)


def _run(*args: Any) -> Tensor:
    scores: Tensor = ops.xtr_winners(*args)[0]
    return scores
