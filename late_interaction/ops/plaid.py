"""The operators on residual-compressed documents, as PLAID and ColBERTv2 indexes hold them.

``maxsim_residual(Q, codes, residuals, extents, centroids, bucket_weights, nbits, normalize=True,
precision="highest") -> scores``
    ``Q`` against documents stored as centroids and residuals (:class:`late_interaction.codecs.Residual`).
    ``codes`` (int32) and ``residuals`` (uint8) are ``[Nd, Ld]`` and ``[Nd, Ld, bytes]`` with ``extents``
    ``[Nd]``, the documents' lengths, or ``[tokens]`` and ``[tokens, bytes]`` with ``extents`` ``[Nd + 1]``,
    their offsets.
    ``bucket_weights`` is float32, ``[2**nbits]``. Differentiable in ``Q``.
``maxsim_residual_winners(...the same...) -> (scores, winners)``
    ``winners`` as those of ``maxsim_winners``, int32 where documents have offsets. Differentiable in
    ``scores``, with respect to ``Q``.
``maxsim_residual_backward(grad_scores, Q, codes, residuals, extents, centroids, bucket_weights, winners,
nbits, normalize=True) -> grad_Q``
    Not differentiable again.
``maxsim_residual_normed(Q, codes, residuals, inverse_norms, extents, centroids, bucket_weights) -> scores``
    On CUDA alone: ``maxsim_residual`` of 128 dims of 2 bits, float32 ``[Nq, Nd]``, where the norms of tokens
    are known. ``inverse_norms`` is float16, as many as ``codes``: 1 / norm of each token; None: nothing
    is normalized. No token is decompressed; residuals multiply in int8. Not differentiable.
``plaid_approx_score(query_centroid_scores, codes, doc_lengths) -> scores``
    float32 or float64 ``[n_centroids, Lq]`` gathered by int32 codes ``[B, Ld]``. Not differentiable.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import scores_dtype
from late_interaction._torch import _AutoDispatchBelowAutograd
from late_interaction.ops._arguments import check_form
from late_interaction.ops._functions import keeping_winners
from late_interaction.ops._library import operators
from late_interaction.ops._registration import (
    count_sequences,
    register_backward,
    register_forward,
    register_without_gradients,
)
from late_interaction.ops.winners import winner_dtype

_scores_op, _winners_op = operators.maxsim_residual.default, operators.maxsim_residual_winners.default
_backward_op = operators.maxsim_residual_backward.default


# ---- shapes ----


def _fake(Q: Tensor, codes: Tensor, extents: Tensor, **_: Any) -> Tensor:
    check_form("Q", Q, "[Nq, Lq, d]")
    check_form("codes", codes, "[tokens]", "[Nd, Ld]")
    N = codes.shape[0] if codes.dim() == 2 else count_sequences("extents", extents)
    return Q.new_empty((Q.shape[0], N), dtype=scores_dtype(Q))


def _fake_winners(Q: Tensor, codes: Tensor, extents: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    scores = _fake(Q, codes, extents)
    dtype = torch.int32 if codes.dim() == 1 else winner_dtype(codes.shape[1])
    return scores, Q.new_empty((*scores.shape, Q.shape[1]), dtype=dtype)


def _fake_backward(Q: Tensor, **_: Any) -> Tensor:
    return Q.new_empty(Q.shape)


def _fake_normed(**given: Any) -> Tensor:
    return _fake(**given).to(torch.float32)


def _fake_approx_score(query_centroid_scores: Tensor, codes: Tensor, **_: Any) -> Tensor:
    return query_centroid_scores.new_empty((codes.shape[0],))


# ---- gradients ----


def _gradients(ctx: Any, grad_scores: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate in Q alone: centroids and bucket weights are an index, which is frozen."""
    nbits, normalize, _ = ctx.options
    return _backward_op(grad_scores, *saved, nbits, normalize), *[None] * 8


_apply = keeping_winners(_winners_op, 6, 6, _gradients)


def _residual_winners(Q: Tensor, *args: Any) -> Any:
    if Q.requires_grad and torch.is_grad_enabled():
        return _apply(Q, *args, *(True, "highest")[len(args) - 6 :])  # the dispatcher leaves defaults out
    with _AutoDispatchBelowAutograd():
        return _winners_op(Q, *args)


def _residual(Q: Tensor, *args: Any) -> Any:
    if Q.requires_grad and torch.is_grad_enabled():
        return _residual_winners(Q, *args)[0]
    with _AutoDispatchBelowAutograd():
        return _scores_op(Q, *args)


register_forward(_scores_op, _fake, _residual)
register_forward(_winners_op, _fake_winners, _residual_winners)
register_backward(_backward_op, _fake_backward)
register_without_gradients("maxsim_residual_normed", _fake_normed)
register_without_gradients("plaid_approx_score", _fake_approx_score)
