"""Gradients of the gradients of ``maxsim``, which a double backward asks for.

Given winners, scores are sums of products of tokens. So each gradient is linear in the other side and in the
gradient of the scores. What a double backward gives for ``grad_Q`` and ``grad_D`` takes the places of ``Q``
and ``D`` in the same operator, which finds the gradients of ``D`` and ``Q``; in the products of winners it
makes the gradient of ``grad_scores``. Any order of derivatives is of these.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from late_interaction._checks.tensors import scores_dtype
from late_interaction.ops._blocks import slices
from late_interaction.ops._library import operators
from late_interaction.ops._registration import applied, call_in_backward, call_in_function
from late_interaction.ops.winners import widen

_backward_op = operators.maxsim_backward.default
_EPS = 1e-12


class Gradients(Function):
    """Differentiate ``maxsim_backward``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*args[:4])
        ctx.options = args[4:]
        ctx.set_materialize_grads(False)
        return call_in_function(_backward_op, *args)

    @staticmethod
    def backward(ctx: Any, of_Q: Tensor | None, of_D: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_scores, Q, D, winners = ctx.saved_tensors
        normalize, backward, has_Q, has_D, paired = ctx.options
        need_scores, need_Q, need_D = ctx.needs_input_grad[:3]
        q = _Side.of(Q, of_Q if has_Q else None, normalize)  # one without elements has no gradient
        d = _Side.of(D, of_D if has_D else None, normalize)

        def gradients(q: Tensor, d: Tensor, of_q: bool, of_d: bool) -> tuple[Tensor, Tensor]:
            args = (grad_scores, q, d, winners, False, backward, of_q, of_d, paired)
            return call_in_backward(_backward_op, *args)

        first_q, first_d = q.tokens, d.tokens
        if normalize:  # they bend along the norms, in proportion to the first gradients
            first_q, first_d = gradients(q.tokens, d.tokens, q.given is not None, d.given is not None)
        again = q.tokens if q.given is None else q.given, d.tokens if d.given is None else d.given
        grad_Q, grad_D = gradients(*again, need_Q and d.given is not None, need_D and q.given is not None)
        parts = [(q.given, d.tokens), (q.tokens, d.given)]
        sums = [_products(a, b, winners, paired) for a, b in parts if a is not None and b is not None]
        return (
            torch.stack(sums).sum(0) if need_scores and sums else None,
            q.gradient(grad_Q if d.given is not None else None, first_q) if need_Q else None,
            d.gradient(grad_D if q.given is not None else None, first_d) if need_D else None,
            *[None] * 6,
        )


differentiable_gradients: Any = applied(Gradients)


@dataclass
class _Side:
    """Queries or documents, and what a double backward gives for their gradient, as if not normalized."""

    source: Tensor
    tokens: Tensor
    given: Tensor | None
    norms: Tensor | None  # [..., 1]
    along: Tensor | None  # unit rows; 0 below eps, where the norm is a constant
    bent: Tensor | None  # what is given, as it came

    @staticmethod
    def of(x: Tensor, given: Tensor | None, normalize: bool) -> "_Side":
        if not normalize:
            return _Side(x, x, given, None, None, None)
        rows = x.to(scores_dtype(x))
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        tiny, norms = norms <= _EPS, norms.clamp_min(_EPS)
        unit = rows / norms
        side = _Side(x, unit, None, norms, unit.masked_fill(tiny, 0.0), None)
        if given is not None:
            side.bent = given.to(rows.dtype)
            side.given = side._across(side.bent)
        return side

    def _across(self, grad: Tensor) -> Tensor:
        """Return the gradient of tokens before their norm was taken, of one after it."""
        assert self.along is not None and self.norms is not None
        return (grad - _dot(grad, self.along) * self.along) / self.norms

    def gradient(self, grad: Tensor | None, first: Tensor) -> Tensor | None:
        """Return the gradient of the source. first: that of the scores in the tokens."""
        if self.norms is None or self.along is None:
            return grad
        total = None if grad is None else self._across(grad)
        if self.bent is not None:
            unit, a, b = self.along, _dot(self.bent, self.along), _dot(first, self.along)
            both = _dot(self.bent, first) - 3 * a * b
            bend = -(self.bent * b + first * a + unit * both) / self.norms.square()
            bend = torch.where(unit.any(-1, keepdim=True), bend, 0.0)
            total = bend if total is None else total + bend
        return None if total is None else total.to(self.source.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _products(Q: Tensor, D: Tensor, winners: Tensor, paired: bool) -> Tensor:
    """Sum the products of query tokens with their winners: scores."""
    Ld, d, dtype = *D.shape[-2:], scores_dtype(Q)
    places = widen(winners, Ld).long()
    places = places.unsqueeze(1) if paired else places
    N = places.shape[1]
    documents = torch.arange(len(Q) * N if paired or D.dim() == 4 else N, device=D.device).view(-1, N, 1)
    rows, queries, found = D.reshape(-1, d), Q.to(dtype).unsqueeze(1), [Q.new_empty((len(Q), 0), dtype=dtype)]
    for chosen in slices(N, Q.numel() * dtype.itemsize):
        winner = places[:, chosen]
        tokens = rows[winner.clamp_min(0) + documents[:, chosen] * Ld].to(dtype)
        found.append((tokens * queries).sum(-1).masked_fill(winner < 0, 0.0).sum(-1))
    scores = torch.cat(found, 1)
    return scores.squeeze(1) if paired else scores
