"""The operators on listed pairs of packed tokens, and on spans of a buffer.

``maxsim_pairs_packed(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, max_seqlen_q=None,
precision="highest") -> scores``
    Tokens and offsets as those of ``maxsim_varlen``; pair ``p`` is query ``pair_q[p]`` with document
    ``pair_d[p]``, int32. ``scores`` is ``[pairs]``. Differentiable; the backward finds the winners again, and
    needs ``max_seqlen_q`` for it.
``maxsim_pairs_packed_winners(Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, max_seqlen_q,
precision="highest") -> (scores, winners)``
    ``winners`` is ``[pairs, max_seqlen_q]``, counted from the beginning of each document.
``maxsim_pairs_packed_backward(grad_scores, Q, D, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, winners,
need_grad_Q=True, need_grad_D=True) -> (grad_Q, grad_D)``
    Deterministic. Not differentiable again.
``maxsim_pairs_packed_weighted(Q, D, q_weights, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d, max_seqlen_q=None,
precision="highest") -> scores``
    ``q_weights`` is ``[tokens of Q]``: what the maximum of each query token counts (``maxsim_weighted``).
``maxsim_pairs_packed_weighted_winners(Q, D, q_weights, cu_seqlens_q, cu_seqlens_d, pair_q, pair_d,
max_seqlen_q, precision="highest") -> (scores, winners)``
    Its winners do not depend on the weights.
``maxsim_pairs_packed_weighted_backward(grad_scores, Q, D, q_weights, cu_seqlens_q, cu_seqlens_d, pair_q,
pair_d, winners, need_grad_Q=True, need_grad_D=True) -> (grad_Q, grad_D, grad_weights)``
    ``grad_weights`` comes with ``grad_Q``.
``maxsim_spans(Q, D, starts, lengths, precision="highest") -> scores``
    One query, ``Q``, with documents that lie anywhere in ``D``: document ``j`` is the ``lengths[j]`` tokens
    from ``starts[j]`` on. Not differentiable.
"""

from typing import Any

from torch import Tensor

from late_interaction._checks.tensors import scores_dtype
from late_interaction.ops._arguments import check_packed
from late_interaction.ops._functions import register_packed
from late_interaction.ops._registration import autocast_pair, register_without_gradients
from late_interaction.ops.winners import packed_winner_dtype


def _fake(Q: Tensor, D: Tensor, pair_q: Tensor, **_: Any) -> Tensor:
    check_packed(Q, D)
    return Q.new_empty((pair_q.shape[0],), dtype=scores_dtype(Q))


def _fake_winners(Q: Tensor, D: Tensor, pair_q: Tensor, max_seqlen_q: int, **_: Any) -> tuple[Tensor, Tensor]:
    winners = Q.new_empty((pair_q.shape[0], max_seqlen_q), dtype=packed_winner_dtype(D.shape[0]))
    return _fake(Q, D, pair_q), winners


def _fake_spans(Q: Tensor, D: Tensor, starts: Tensor, **_: Any) -> Tensor:
    return _fake(Q, D, starts)


def _winners_options(Q: Tensor, max_seqlen_q: int | None, precision: str) -> tuple[int, str]:
    return Q.shape[0] if max_seqlen_q is None else max_seqlen_q, precision


register_packed("maxsim_pairs_packed", _fake, _fake_winners, 6, _winners_options)
_weighted = "maxsim_pairs_packed_weighted"
register_packed(_weighted, _fake, _fake_winners, 7, _winners_options, weighted=True)
register_without_gradients("maxsim_spans", _fake_spans, autocast_pair, packed=True)
