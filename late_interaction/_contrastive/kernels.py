"""Calls of the operators that score and differentiate a block, in one of three ways.

``padded``   ``maxsim`` and ``maxsim_backward``, with masks and normalization
``packed``   ``maxsim_varlen`` and its backward
``matrix``   a matrix product, where queries and documents have one token each

``product`` and ``add_product`` multiply as that last one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._contrastive.sequences import longest
from late_interaction._scoring.precision import float32_precision, product_dtype
from late_interaction._scoring.sequences import own_pairs
from late_interaction.ops import _oom
from late_interaction.ops._library import operators as _ops
from late_interaction.tokens import Tokens

# ---- matrix products of embeddings, whose results are float32 (float64 for float64 inputs) ----


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    if a.dtype.itemsize >= 4:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def add_product(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype.itemsize >= 4:
        return torch.addmm(sums, a, b, out=sums)
    if a.is_cuda:
        return torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    return torch.addmm(sums, a.float(), b.float(), out=sums)


@dataclass(frozen=True)
class Kernels:
    """One of the three ways to score blocks, and the options of the operators."""

    way: str
    normalize: bool
    precision: str

    # ---- every query with every document ----

    def scores(self, q: Tokens, d: Tokens) -> Tensor:
        """Return scores ``[queries, documents]``, float32 (float64 for float64 inputs)."""
        scores: Tensor = self._scored(q, d, False)
        return scores

    def scores_and_winners(self, q: Tokens, d: Tokens) -> tuple[Tensor, Tensor]:
        """Return scores, and winners as the operator keeps them (empty for single tokens)."""
        scores, winners = self._scored(q, d, True)
        return scores, winners

    def _scored(self, q: Tokens, d: Tokens, winners: bool) -> Any:
        if self.way == "matrix":
            scores = _without_masked(product(self.rows(q), self.rows(d).t()), q, d)
            return (scores, q.values.new_empty(0)) if winners else scores
        try:
            if self.way == "padded":
                args = (q.values, d.values, q.mask, d.mask, self.normalize, self.precision)
                return _ops.maxsim_winners.default(*args, "lowmem") if winners else _ops.maxsim.default(*args)
            op = _ops.maxsim_varlen_winners if winners else _ops.maxsim_varlen
            return op.default(q.values, d.values, q.offsets, d.offsets, self.precision)
        except RuntimeError as error:  # the allocator's own exception, if memory ran out
            if q.offsets is not None and d.offsets is not None:
                _oom.varlen_failed(error, q.values, d.values, q.offsets, d.offsets, winners)
            else:
                _oom.forward_failed(error, q.values, d.values, winners)
            raise

    def add_gradients(
        self,
        grad: Tensor,
        q: Tokens,
        d: Tokens,
        winners: Tensor,
        q_sums: Tensor | None,
        d_sums: Tensor | None,
        d_result: Tensor | None,
    ) -> None:
        """Add a block's gradients to sums of the shapes of its values; None: not needed.

        ``d_result``: where the documents' gradient is written instead.
        """
        if self.way == "matrix":
            d_to = d_sums if d_result is None else d_result
            return self._add_products(grad, q, d, q_sums, d_to, d_result is not None)
        # On the CPU these operators add parts in the dtype of the inputs, whose range fp16 may leave.
        adds = q.values.is_cuda or q.values.dtype is not torch.float16
        if self.way == "padded" and not self.normalize and adds:
            values = (q.values.contiguous(), d.values.contiguous())
            none = q.values.new_empty(0)
            grad_q = none if q_sums is None else torch.empty_like(values[0])
            grad_d = none if d_result is None else d_result
            targets = (grad_q, grad_d, q_sums, False, False, d_sums)
            _ops.maxsim_backward_into_.default(grad, *values, None, winners, *targets)
            return None
        if self.way == "packed" and d_result is None and adds:
            args = (q.values, d.values, q.offsets, d.offsets, winners, q_sums, d_sums)
            _ops.maxsim_varlen_backward_into_.default(grad, *args)
            return None
        needs = q_sums is not None, d_sums is not None or d_result is not None
        grad, peak = _within_range(grad, q.values.dtype)
        if self.way == "padded":
            options = (self.normalize, "lowmem", *needs)
            grads = _ops.maxsim_backward.default(grad, q.values, d.values, winners, *options)
        else:
            packed = (q.values, d.values, q.offsets, d.offsets, winners, *needs)
            grads = _ops.maxsim_varlen_backward.default(grad, *packed)
        for sums, part in zip((q_sums, d_sums), grads, strict=True):
            if sums is not None:
                _add(sums, part, peak)
        if d_result is not None:
            _write(d_result, grads[1], peak)
        return None

    def listed_gradients(
        self,
        grad: Tensor,
        inputs: Sequence[Any],
        winners: Tensor,
        needs: Sequence[bool],
        begun: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Return the gradients of listed pairs, and add them to the sums that have begun.

        ``inputs``: those of ``maxsim_pairs_packed``.
        """
        grad, peak = _within_range(grad, inputs[0].dtype)
        parts = list(_ops.maxsim_pairs_packed_backward.default(grad, *inputs, winners, *needs))
        for i, (found, sums) in enumerate(zip(parts, begun, strict=True)):
            if sums is not None:
                _add(sums.view(found.shape), found, peak)
            elif peak is not None:
                parts[i] = found.to(peak.dtype).mul_(peak).to(found.dtype)
        return parts

    # ---- one token a sequence ----

    def _add_products(
        self, grad: Tensor, q: Tokens, d: Tokens, q_sums: Tensor | None, d_to: Tensor | None, writes: bool
    ) -> None:
        Q, D = self.rows(q), self.rows(d)
        grad, peak = _within_range(grad, Q.dtype)
        grad = _without_masked(grad, q, d).to(Q.dtype)
        if q_sums is not None:
            _add(q_sums.squeeze(1), product(grad, D), peak)
        if d_to is not None:
            (_write if writes else _add)(d_to.squeeze(1), product(grad.t(), Q), peak)

    def rows(self, x: Tokens) -> Tensor:
        """Return ``[sequences, d]`` of single tokens, in the dtype in which they multiply."""
        rows = x.values.squeeze(1)
        if x.mask is not None:  # a masked token may hold anything, NaN included
            rows = rows.masked_fill(~x.mask, 0.0)
        return rows.to(product_dtype(self.precision, rows.dtype))

    # ---- each query with documents of its own ----

    def own_scores(self, q: Tokens, h: Tokens, each: int) -> tuple[Tensor, Tensor]:
        """Return the scores ``[queries, each]`` of queries with their own hard negatives, and the winners."""
        if h.is_packed:
            pairs = own_pairs(len(h), each, h.device)
            inputs = (q.values, h.values, q.offsets, h.offsets, *pairs, longest(q), self.precision)
            scores, winners = _ops.maxsim_pairs_packed_winners.default(*inputs)
            return scores.view(len(q), each), winners
        D, mask = _own_documents(h, len(q), each)
        args = (q.values, D, q.mask, mask, self.normalize, self.precision, "lowmem")
        return _ops.maxsim_winners.default(*args)

    def own_gradients(
        self, grad: Tensor, q: Tokens, h: Tokens, winners: Tensor, q_sums: Tensor | None, need_h: bool
    ) -> Tensor:
        """Return the gradient of the hard negatives, and add that of the queries to their sums."""
        needs = q_sums is not None, need_h
        grad, peak = _within_range(grad, q.values.dtype)
        if h.is_packed:
            pairs = own_pairs(len(h), grad.shape[1], h.device)
            args = (q.values, h.values, q.offsets, h.offsets, *pairs, winners, *needs)
            grad_q, grad_h = _ops.maxsim_pairs_packed_backward.default(grad.flatten(), *args)
        else:
            D, _ = _own_documents(h, *grad.shape)
            options = (self.normalize, "lowmem", *needs)
            grad_q, grad_h = _ops.maxsim_backward.default(grad, q.values, D, winners, *options)
        if q_sums is not None:
            _add(q_sums, grad_q, peak)
        if need_h and peak is not None:
            grad_h = grad_h.float().mul_(peak).to(grad_h.dtype)
        return grad_h.view(h.values.shape) if need_h else grad_h


def _without_masked(x: Tensor, q: Tokens, d: Tokens) -> Tensor:
    """Zero the pairs ``[queries, documents]`` of single tokens one of which is masked."""
    for mask, dim in ((q.mask, 1), (d.mask, 0)):
        if mask is not None:
            x = x.masked_fill(~mask.flatten().unsqueeze(dim), 0.0)
    return x


def _own_documents(h: Tokens, queries: int, each: int) -> tuple[Tensor, Tensor | None]:
    shape = (queries, each)
    return h.values.unflatten(0, shape), None if h.mask is None else h.mask.unflatten(0, shape)


def _within_range(grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale a gradient that becomes fp16, which holds no small numbers, to a maximum of 1."""
    if dtype is not torch.float16 or grad.numel() == 0:
        return grad, None
    peak = grad.abs().amax().clamp_min(torch.finfo(grad.dtype).tiny)
    return grad / peak, peak


def _add(sums: Tensor, part: Tensor, peak: Tensor | None) -> None:
    if peak is None:
        sums.add_(part)
    else:
        sums.addcmul_(part.to(sums.dtype), peak)


def _write(to: Tensor, part: Tensor, peak: Tensor | None) -> None:
    to.copy_(part if peak is None else part.to(peak.dtype).mul_(peak))


# ---- which way ----


def choose(q: Tokens, single: bool, normalize: bool, precision: str) -> Kernels:
    """Choose the way to score these queries.

    ``single``: they and all documents have one token each. ``normalize``: the operators are to do it; packed
    tokens have been normalized already.
    """
    if q.is_packed:
        return Kernels("packed", False, precision)
    if single and not normalize and _product_obeys(q.values, precision):
        return Kernels("matrix", False, precision)
    return Kernels("padded", normalize, precision)


def _product_obeys(x: Tensor, precision: str) -> bool:
    """Tell whether PyTorch's own matrix product is as precise as was asked for."""
    if x.dtype is not torch.float32 or precision in ("medium", "fp16"):
        return True
    return precision != "highest" or float32_precision(x.device.type) == "highest"
