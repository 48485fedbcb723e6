"""Reranking from padded tensors with lengths, by :mod:`late_interaction._maxsim`: :func:`maxsim_padded`."""

from torch import Tensor

from late_interaction._checks.padded import check_padded
from late_interaction._maxsim import maxsim
from late_interaction._scoring.norm_warning import look, unwatched

__all__ = ["maxsim_padded"]


def maxsim_padded(
    queries: Tensor,
    documents: Tensor,
    query_lengths: Tensor,
    doc_lengths: Tensor,
    *,
    validate: bool = False,
    q_weights: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """Scores of each query with its own candidates, of whose tokens the first ones count. Differentiable.

    Args:
        queries: ``[B, Lq, d]``; bfloat16, float16, float32 or float64.
        documents: ``[B, C, Ld, d]``, of the same dtype and device.
        query_lengths: ``[B]``, int32 or int64: the first so many tokens of a query count.
        doc_lengths: ``[B, C]``, likewise. On a CPU lengths below 0 or beyond the padding are a ValueError; a
            GPU's are not waited for, and one beyond the padding counts the padded tokens there are.
        validate: wait for the lengths on a GPU too, and refuse those of 0.
        q_weights: ``[B, Lq]``: what the maximum of each query token counts, as in
            :func:`late_interaction.maxsim`. Differentiable.
        mean: divide each score by the number of its query's tokens that count, as there.

    Returns:
        ``[B, C]`` scores, float32 (float64 for float64 inputs). An empty query or document scores 0.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value.

    This is :func:`late_interaction.maxsim` with masks of the lengths: nothing is copied, and the host waits
    for nothing unless asked to ``validate``.

    Example:
        >>> import torch
        >>> from late_interaction import maxsim_padded
        >>> queries = torch.tensor([[[1.0], [9.0]]])
        >>> documents = torch.tensor([[[[2.0], [3.0]], [[4.0], [5.0]]]])
        >>> maxsim_padded(queries, documents, torch.tensor([1]), torch.tensor([[2, 1]]))
        tensor([[3., 4.]])
    """
    q_mask, d_mask = check_padded(queries, documents, query_lengths, doc_lengths, validate)
    scores: Tensor = unwatched(maxsim, queries, documents, q_mask, d_mask, q_weights=q_weights, mean=mean)
    look("maxsim_padded", queries, q_mask, option=False)
    return scores
