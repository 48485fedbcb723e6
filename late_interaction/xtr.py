"""XTR scores, by :mod:`late_interaction.ops.xtr`: :func:`xtr_scores`.

XTR (https://arxiv.org/abs/2304.01982) trains for retrieval by tokens: of a document's tokens those alone make
its score that are among the ``k`` nearest of a query token in the whole batch.
"""

from typing import Any

from torch import Tensor

from late_interaction import ops
from late_interaction._checks.dense import as_given, check_xtr
from late_interaction._checks.options import Backward, Precision, Rule, check_backward
from late_interaction._checks.tensors import check_no_forward_ad, scores_dtype
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.precision import asked
from late_interaction._scoring.sequences import score
from late_interaction.tokens import TokensLike

__all__ = ["xtr_scores"]

_MOST_SELECTED = (1 << 63) - 1  # the operator takes int64


def xtr_scores(
    Q: TokensLike,
    D: TokensLike,
    k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    rule: Rule = "paper",
    q_weights: Tensor | None = None,
    precision: Precision | None = None,
    backward: Backward | None = None,
) -> Tensor:
    """Scores for training as XTR (https://arxiv.org/abs/2304.01982), differentiable in ``Q`` and ``D``.

    Each query token selects the ``k`` largest of its similarities with all document tokens of the batch. A
    document's score is the sum over query tokens of its largest selected similarity, divided by how many
    query tokens have one. The grid of all similarities is never stored: beside the inputs, their gradients
    and two bytes for each (query token, document), a call takes a few hundred MiB, whatever the batch.

    Of equal similarities at the threshold those of lower documents are selected, and in a document those of
    lower tokens, so that there are ``k``. Gradients go through the selected maxima, in a document through
    the lowest of equals; selection and divisor are constants.

    Args:
        Q: queries, ``[Nq, Lq, d]`` or ``[Lq, d]``; bfloat16, float16, float32 or float64. Or
            :class:`~late_interaction.Tokens`, or a list of ``[L, d]`` tensors; packed ones are padded.
        D: documents, of the dtype and device of ``Q``: ``[Nd, Ld, d]``, ``[Ld, d]``, Tokens or a list (every
            query meets every document), or ``[Nq, K, Ld, d]``: each query is scored with its own ``K``, as
            for distillation, and its tokens select from all ``Nq * K``.
        k: how many similarities a query token selects, at least 1. More than there are: all.
        q_mask: ``[Nq, Lq]``, bool (or integer, nonzero = True), True = keep. A masked query token does not
            count.
        d_mask: ``D``'s shape without ``d``, likewise. A masked document token never counts, and is selected
            after all others.
        rule: ``"paper"``: a document that a query token did not select adds 0, and the divisor is the number
            of query tokens that selected the document, at least 1 (equation 5; Sentence Transformers 6).
            ``"pylate"``: every similarity that was not selected is 0, so a maximum below 0 counts only in a
            document whose tokens were all selected, and the divisor is the number of query tokens whose
            maximum times weight is above 0, at least 0.001 (PyLate 1.5 and 1.6, PrimeQA).
        q_weights: ``[Nq, Lq]`` (of packed queries ``[tokens]``), floating point: numbers of any sign that
            multiply the maxima, differentiable. A query token of weight 0 does not count for the divisor. The
            weight of a masked token has no effect.
        precision: as in :func:`late_interaction.maxsim`; products are PyTorch's own matrix products.
        backward: as in :func:`late_interaction.maxsim`.

    Returns:
        float32 scores (float64 for float64 inputs): ``[Nq, Nd]`` or ``[Nq, K]``; a 2-D ``Q`` drops the first
        dim, a 2-D ``D`` the second. 0 for a document of which nothing was selected. Where ``k`` selects all
        tokens of the batch, masked ones too, ``"pylate"`` gives a document without any other ``-inf``, as
        PyLate does.

    Raises:
        TypeError: an argument that is no tensor, or of a wrong dtype.
        ValueError: shapes, devices or options that do not fit.

    Complexity: ``2 * Nq * Lq * Nd * Ld * d`` operations, in matrix products whose results, at most 256 MiB at
    a time on a GPU and 16 MiB on a CPU, are read once for ``k`` up to 3000 (2000 in float64) and about five
    times for more.

    Example:
        >>> import torch
        >>> from late_interaction import xtr_scores
        >>> Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> D = torch.tensor([[[4.0, 1.0], [3.0, 0.0]], [[2.0, 1.0], [0.0, 5.0]], [[1.0, 3.0], [0.0, 2.0]]])
        >>> xtr_scores(Q, D, k=2)  # the first query token selects 4 and 3, the second 5 and 3
        tensor([[4., 5., 3.]])
        >>> xtr_scores(Q, D, k=3)  # and now 2, and 2
        tensor([[4.0000, 3.5000, 3.0000]])
        >>> weights = torch.tensor([[1.0, -1.0]])
        >>> xtr_scores(Q, D, k=2, q_weights=weights)  # selected maxima that are weighted: 4, -5, -3
        tensor([[ 4., -5., -3.]])
        >>> xtr_scores(Q, D, k=2, q_weights=weights, rule="pylate")  # no positive one: divided by 0.001
        tensor([[ 4.0000e+00, -5.0000e+03, -3.0000e+03]])
    """
    if not (isinstance(Q, Tensor) and isinstance(D, Tensor)):
        options = {"k": k, "rule": rule, "q_weights": q_weights, "precision": precision, "backward": backward}
        return score(xtr_scores, Q, D, q_mask, d_mask, options, padded=True)
    Q3, DN, q_mask, d_mask = check_xtr(Q, D, k, q_mask, d_mask, q_weights, rule)
    strategy = check_backward(backward)
    check_no_forward_ad("xtr_scores", Q, D, q_weights)
    groups = DN.shape[:2] if DN.dim() == 4 else None
    if groups is not None:
        DN = DN.flatten(0, 1)
        d_mask = None if d_mask is None else d_mask.flatten(0, 1)
    weights = _weights(q_mask, q_weights, Q3)
    if q_weights is not None and q_mask is not None:  # whatever a masked token holds: 0 * NaN is NaN
        Q3 = Q3.masked_fill(~q_mask.unsqueeze(-1), 0.0)
    operator: Any = ops.xtr_winners
    selection = min(k, _MOST_SELECTED), rule
    precision, context = asked(Q3, DN, precision)
    with context:
        scores: Tensor = operator(Q3, DN, weights, d_mask, *selection, precision, strategy)[0]
    look("xtr_scores", Q3, q_mask, option=False)
    if groups is not None:
        own: Tensor = scores.unflatten(1, groups).diagonal(dim1=0, dim2=1)
        return own.t()
    return as_given(scores, Q, D)


def _weights(q_mask: Tensor | None, q_weights: Tensor | None, Q: Tensor) -> Tensor | None:
    """Make a mask, or numbers of the scores' dtype, which are 0 where a mask says so."""
    if q_weights is None:
        return q_mask
    numbers = q_weights.to(scores_dtype(Q)).view(Q.shape[:2])
    return numbers if q_mask is None else numbers.masked_fill(~q_mask, 0.0)
