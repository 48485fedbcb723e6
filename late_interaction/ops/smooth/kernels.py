"""Tokens and documents as the smooth maximum groups them, and its CUDA kernels.

The kernels serve half precision of up to 128 dims, in eights. Query rows meet the documents of their group,
as in ``driver``. The kernels keep a number for each row and document, the log of its sum; similarities and
weights stay in registers. Weights are rounded to the dtype of the tokens that they multiply, and products
are summed in float32. Tokens that are normalized multiply in float16, which rounds what is at most 1 as TF32
does.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction.ops._library import operators

_EPS = 1e-12  # of a norm


@dataclass(frozen=True)
class Tokens:
    """Tokens ``[..., d]`` in the dtype of products and sums, divided by their norms if they should be."""

    rows: Tensor  # contiguous
    norms: Tensor | None  # [..., 1], at least _EPS

    @staticmethod
    def of(x: Tensor, normalize: bool, dtype: torch.dtype) -> "Tokens":
        x = x.to(dtype).contiguous()
        if not normalize:
            return Tokens(x, None)
        norms = x.norm(dim=-1, keepdim=True).clamp_min_(_EPS)
        return Tokens(x / norms, norms)

    def write_gradient(self, out: Tensor, grad: Tensor, mask: Tensor | None) -> None:
        """Write the gradient of tokens, 0 where they are masked, from the one of ``rows``: overwrites it."""
        if self.norms is not None:
            along = (grad * self.rows).sum(-1, keepdim=True)
            along.masked_fill_(self.norms <= _EPS, 0.0)  # a norm that was raised to _EPS is a constant
            grad.sub_(self.rows * along).div_(self.norms)
        out.copy_(grad if mask is None else grad.masked_fill_(~mask.unsqueeze(-1), 0.0))


@dataclass(frozen=True)
class Documents:
    """Some documents of each group, ``[groups, documents, Ld, d]``.

    A mask costs no pass over similarities: the product adds half of the least finite number to those of
    masked tokens. These hold a token of the same document that counts, so their similarity is not above its
    similarity, whatever it is, and never above the maximum. Tokens of a document without one are zeros.
    """

    tokens: Tokens
    bias: Tensor | None  # [groups, 1, documents * Ld], added to similarities / tau
    some: Tensor | None  # [groups, 1, documents]: whether a token counts

    @staticmethod
    def of(x: Tensor, mask: Tensor | None, normalize: bool, dtype: torch.dtype) -> "Documents":
        if mask is None:
            return Documents(Tokens.of(x, normalize, dtype), None, None)
        some = mask.any(-1, keepdim=True)
        first = mask.to(torch.uint8).argmax(-1, keepdim=True)
        source = torch.arange(mask.shape[-1], device=x.device).where(mask, first)
        x = x.gather(-2, source.unsqueeze(-1).expand(x.shape)).masked_fill_(~some.unsqueeze(-1), 0.0)
        bias = torch.zeros(mask.shape, dtype=dtype, device=x.device)
        bias.masked_fill_(~mask, torch.finfo(dtype).min / 2)
        tokens = Tokens.of(x, normalize, dtype)
        return Documents(tokens, bias.flatten(1).unsqueeze(1), some.squeeze(-1).unsqueeze(1))

    @property
    def columns(self) -> Tensor:
        """View all documents' tokens as ``[groups, documents * Ld, d]``."""
        return self.tokens.rows.flatten(1, 2)


_HALVES, _MOST_DIMS = (torch.bfloat16, torch.float16), 128
_LARGEST_EXPONENT = 14  # of a factor, so that no weight overflows float16


def serve(Q: Tensor) -> bool:
    """Tell whether the kernels take queries ``[groups, rows, d]`` and documents of their dtype and d."""
    return Q.is_cuda and Q.dtype in _HALVES and 0 < Q.shape[-1] <= _MOST_DIMS and Q.shape[-1] % 8 == 0


@dataclass(frozen=True)
class _Operand:
    rows: Tensor  # contiguous, zeros where masked
    mask: Tensor | None
    normalized: Tokens | None

    @staticmethod
    def of(x: Tensor, mask: Tensor | None, normalize: bool) -> "_Operand":
        x = x.contiguous() if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)
        if normalize:
            tokens = Tokens.of(x, True, torch.float32)
            return _Operand(tokens.rows.half(), mask, tokens)
        return _Operand(x if x.data_ptr() % 16 == 0 else x.clone(), mask, None)

    def write_gradient(self, out: Tensor, grad: Tensor, factor: Tensor) -> None:
        """Write the gradient of the tokens, from the one of ``rows``, ``[groups, rows, d]``.

        factor: ``[groups, owners]``, of what rows belong to.
        """
        of_owner = (factor.shape[1], -1)
        total, factor = grad.unflatten(1, of_owner), factor[..., None, None]
        if self.normalized is not None:
            self.normalized.write_gradient(out, total.mul_(factor).view(out.shape), self.mask)
            return
        torch.mul(total, factor, out=out.flatten(1, -2).unflatten(1, of_owner))
        if self.mask is not None:
            out.masked_fill_(~self.mask.unsqueeze(-1), 0.0)


class Call:
    """Inputs as the kernels take them: ``[groups, rows, d]`` and ``[groups, documents, Ld, d]``."""

    def __init__(
        self, Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, tau: float, normalize: bool
    ) -> None:
        d_mask = None if d_mask is None else d_mask.contiguous()
        self.Q, self.D, self.tau = _Operand.of(Q, q_mask, normalize), _Operand.of(D, d_mask, normalize), tau
        self._empty = None if d_mask is None else ~d_mask.any(-1).unsqueeze(-1)  # documents

    def _logs(self, of_nothing: float) -> Tensor:
        """Return ``[groups, documents, rows]``. of_nothing: the log where no token counts."""
        logs: Tensor = operators.smooth_logs.default(self.Q.rows, self.D.rows, self.D.mask, self.tau)
        return logs if self._empty is None else logs.masked_fill_(self._empty, of_nothing)

    def scores(self, Lq: int) -> Tensor:
        """Return ``[groups, queries, documents]``."""
        logs = self._logs(0.0)
        if self.Q.mask is not None:
            logs.masked_fill_(~self.Q.mask.unsqueeze(1), 0.0)
        sums: Tensor = logs.unflatten(2, (-1, Lq)).sum(3).mul_(self.tau * math.log(2.0))
        return sums.transpose(1, 2)

    def write_gradients(self, grads: Tensor, Lq: int, grad_Q: Tensor | None, grad_D: Tensor | None) -> None:
        """Write gradients of the shapes of the inputs.

        grads: ``[groups, queries, documents]``, those of the scores.
        """
        logs = self._logs(math.inf)
        for out, operand, of_documents in ((grad_Q, self.Q, False), (grad_D, self.D, True)):
            if out is None:
                continue
            unit = _units(grads, 1 if of_documents else 2)
            factors = (grads / unit).transpose(1, 2).repeat_interleave(Lq, 2)
            if self.Q.mask is not None:
                factors.masked_fill_(~self.Q.mask.unsqueeze(1), 0.0)
            grad: Tensor = operators.smooth_gradient.default(
                self.Q.rows, self.D.rows, self.D.mask, logs, factors, self.tau, of_documents
            )
            operand.write_gradient(out, grad, unit.flatten(1))


def _units(grads: Tensor, dim: int) -> Tensor:
    """Return powers of two that bring factors up to 2^14, each for all of ``dim``.

    Weights then have the precision of float16 down to 2^-28 of the largest.
    """
    largest = grads.abs().amax(dim, keepdim=True)
    exponents = torch.frexp(largest)[1].clamp_(-100, 100)
    return torch.ldexp(torch.ones_like(largest), exponents - _LARGEST_EXPONENT)
