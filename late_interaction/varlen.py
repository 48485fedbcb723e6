"""MaxSim of sequences packed end to end, by :mod:`late_interaction.ops.varlen`: :func:`maxsim_varlen`.

The layout is FlashAttention's: tokens ``[total, d]`` and offsets ``cu_seqlens``, sequence ``i`` being
``tokens[cu_seqlens[i] : cu_seqlens[i + 1]]``. No token is padding, so none is read, multiplied or kept.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.choices import Precision
from late_interaction._checks.options import check_flag
from late_interaction._checks.packed import check_packed, check_sequences
from late_interaction._checks.tensors import check_no_forward_ad
from late_interaction._checks.weights import check_weights
from late_interaction._scoring.mean import packed_counts
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.packed_call import call_packed
from late_interaction.ops import _oom

__all__ = ["maxsim_varlen", "pack_sequences"]


def pack_sequences(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Packs sequences of different lengths for :func:`maxsim_varlen`.

    Args:
        sequences: at least one tensor, each ``[L_i, d]``, of one dtype and device. Differentiable.

    Returns:
        ``(tokens, cu_seqlens)``: ``[sum(L_i), d]``, one copy, and int32 ``[len(sequences) + 1]``, on the same
        device.

    Raises:
        TypeError, ValueError: no sequence, or one of another kind, dtype, device or ``d``.

    Example:
        >>> import torch
        >>> from late_interaction.varlen import pack_sequences
        >>> tokens, cu_seqlens = pack_sequences([torch.ones(2, 4), torch.ones(0, 4), torch.ones(3, 4)])
        >>> tokens.shape, cu_seqlens
        (torch.Size([5, 4]), tensor([0, 2, 2, 5], dtype=torch.int32))
    """
    check_sequences("sequences", sequences)
    offsets = list(accumulate((len(x) for x in sequences), initial=0))
    tokens = torch.cat(tuple(sequences))
    return tokens, torch.tensor(offsets, dtype=torch.int32, device=tokens.device)


def maxsim_varlen(
    Q_packed: Tensor,
    D_packed: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_d: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_d: int | None = None,
    *,
    precision: Precision | None = None,
    q_weights: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """Scores of every packed query with every packed document, differentiable in both, deterministic.

    Args:
        Q_packed: the tokens of all queries, ``[sum(Lq_i), d]``; bfloat16, float16, float32 or float64.
        D_packed: the tokens of all documents, ``[sum(Ld_j), d]``, of the same dtype and device.
        cu_seqlens_q: ``[Nq + 1]``, int32 (or int64): query ``i`` has the tokens from ``cu_seqlens_q[i]`` up
            to ``cu_seqlens_q[i + 1]``. Offsets do not decrease and stay within the tokens. On a CPU that is
            checked; a GPU's are not waited for, and offsets that lead elsewhere give scores without meaning,
            though never another tensor's memory.
        cu_seqlens_d: ``[Nd + 1]``, likewise.
        max_seqlen_q, max_seqlen_d: accepted and not needed: every token counts whatever they say. On a CPU
            one that is smaller than the longest sequence is a ValueError.
        precision: how float32 inputs multiply, as in :func:`late_interaction.maxsim`.
        q_weights: ``[sum(Lq_i)]``: what the maximum of each query token counts, as in
            :func:`late_interaction.maxsim`. Differentiable.
        mean: divide each score by the number of its query's tokens whose weight is not 0 (by 1 if there is
            none).

    Returns:
        ``[Nq, Nd]`` scores, float32 (float64 for float64 inputs). An empty query or document scores 0 and
        gets no gradient.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value.

    Complexity: ``2 * sum(Lq_i) * sum(Ld_j) * d`` operations, of which padding would have been part. With
    gradients the winners are kept, ``Nd * sum(Lq_i)`` of 2 bytes (4 if ``D_packed`` has more than 65,534
    tokens). The host waits for nothing but the look at norms of the process's
    first call (:func:`late_interaction.maxsim` says when).

    Example:
        >>> import torch
        >>> from late_interaction.varlen import maxsim_varlen
        >>> Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> D = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
        >>> maxsim_varlen(Q, D, torch.tensor([0, 2, 3]), torch.tensor([0, 2, 3]))
        tensor([[5., 2.],
                [3., 2.]])
    """
    cu_q, cu_d = check_packed(Q_packed, D_packed, cu_seqlens_q, cu_seqlens_d, max_seqlen_q, max_seqlen_d)
    check_flag("mean", mean)
    q_weights = check_weights(q_weights, "Q_packed", Q_packed)
    check_no_forward_ad("maxsim_varlen", Q_packed, D_packed, q_weights)
    inputs: tuple[Tensor, ...] = (Q_packed, D_packed)
    op: Any
    if q_weights is None:
        op, winners_op = ops.maxsim_varlen, ops.maxsim_varlen_winners
    else:
        op, winners_op = ops.maxsim_varlen_weighted, ops.maxsim_varlen_weighted_winners
        inputs += (q_weights,)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    try:
        result = call_packed(winners_op if learns else op, (*inputs, cu_q, cu_d), precision, learns)
    except RuntimeError as error:
        _oom.varlen_failed(error, Q_packed, D_packed, cu_q, cu_d, learns)
        raise
    look("maxsim_varlen", Q_packed, option=False)
    scores: Tensor = result[0] if learns else result
    return scores / packed_counts(cu_q, q_weights).to(scores.dtype).unsqueeze(1) if mean else scores
