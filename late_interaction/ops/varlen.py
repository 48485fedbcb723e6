"""The operators on packed tokens.

``maxsim_varlen(Q, D, cu_seqlens_q, cu_seqlens_d, precision="highest") -> scores``
    ``Q`` and ``D`` are ``[tokens, d]``, sequences end to end; offsets are int32 and read on the device.
    ``scores`` is ``[Nq, Nd]``. Differentiable; the backward finds the winners again.
``maxsim_varlen_winners(...the same...) -> (scores, winners)``
    ``winners`` is ``[Nd, tokens of Q]``, counted from the beginning of each document.
``maxsim_varlen_backward(grad_scores, Q, D, cu_seqlens_q, cu_seqlens_d, winners, need_grad_Q=True,
need_grad_D=True) -> (grad_Q, grad_D)``
    Deterministic. Not differentiable again.
``maxsim_varlen_backward_into_(grad_scores, Q, D, cu_seqlens_q, cu_seqlens_d, winners, q_sums, d_sums)``
    The same, added to ``q_sums`` and ``d_sums``, contiguous ``[tokens, d]`` in float32 (float64 for float64
    inputs). None: that gradient is not needed.
``maxsim_varlen_weighted(Q, D, q_weights, cu_seqlens_q, cu_seqlens_d, precision="highest") -> scores``
    ``q_weights`` is ``[tokens of Q]``: what the maximum of each query token counts (``maxsim_weighted``).
``maxsim_varlen_weighted_winners(...the same...) -> (scores, winners)``
    Its winners do not depend on the weights.
``maxsim_varlen_weighted_backward(grad_scores, Q, D, q_weights, cu_seqlens_q, cu_seqlens_d, winners,
need_grad_Q=True, need_grad_D=True) -> (grad_Q, grad_D, grad_weights)``
    ``grad_weights`` comes with ``grad_Q``.
"""

from typing import Any

from torch import Tensor

from late_interaction._checks.tensors import scores_dtype
from late_interaction.ops._arguments import check_packed, check_sums
from late_interaction.ops._functions import register_packed
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import count_sequences, fake_nothing, register_helper
from late_interaction.ops.winners import packed_winner_dtype


def _fake(Q: Tensor, D: Tensor, cu_seqlens_q: Tensor, cu_seqlens_d: Tensor, **_: Any) -> Tensor:
    check_packed(Q, D)
    queries = count_sequences("cu_seqlens_q", cu_seqlens_q)
    documents = count_sequences("cu_seqlens_d", cu_seqlens_d)
    return Q.new_empty((queries, documents), dtype=scores_dtype(Q))


def _fake_winners(Q: Tensor, D: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    scores = _fake(Q, D, **given)
    return scores, Q.new_empty((scores.shape[1], Q.shape[0]), dtype=packed_winner_dtype(D.shape[0]))


def _backward_into(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_d: Tensor,
    winners: Tensor,
    q_sums: Tensor | None,
    d_sums: Tensor | None,
) -> None:
    """On the CPU. Parts are rounded to the dtype of the inputs before they are added."""
    check_sums("q_sums", q_sums, Q)
    check_sums("d_sums", d_sums, D)
    args = (grad_scores, Q, D, cu_seqlens_q, cu_seqlens_d, winners, q_sums is not None, d_sums is not None)
    parts = operators.maxsim_varlen_backward.default(*args)
    for sums, part in zip((q_sums, d_sums), parts, strict=True):
        if sums is not None:
            sums.add_(part.view_as(sums))


register_helper(operators.maxsim_varlen_backward_into_.default, fake_nothing)
library.impl("maxsim_varlen_backward_into_", _backward_into, "CPU")
register_packed("maxsim_varlen", _fake, _fake_winners, 4)
register_packed("maxsim_varlen_weighted", _fake, _fake_winners, 5, weighted=True)
