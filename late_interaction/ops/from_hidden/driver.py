"""MaxSim of documents that are hidden states, projected a chunk at a time, never as a whole.

A chunk of projected tokens stays in the L2 cache from the product that writes it to the kernels that read it.
(Without winners, and with few query tokens, one kernel projects and scores.) The backward projects the
winning tokens again. Its chunks may be larger: projected tokens then lie in the memory of their own
gradients, and the gradients of projected tokens in that of the documents behind them. Each token counts
once, however often it won:

    hidden -> D = unit rows of (hidden W^T + b), of the winners alone
           -> grad_Q, and grad_D through the norm
           -> grad_hidden = grad_D W, written once
           -> grad_W += grad_D^T hidden over the winners alone, in float32

Every sum has a fixed order: the same bits in every run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import OPERATOR_PRECISIONS
from late_interaction._checks.tensors import as_dtype
from late_interaction.ops._arguments import check_choice, check_tensor
from late_interaction.ops._library import operators
from late_interaction.ops.from_hidden.chunking import (
    SCORED_ROWS,
    Sizes,
    chunk_size,
    converted_bytes,
    documents_that_alias,
    gpu_of,
    weight_grad_splits,
)
from late_interaction.ops.from_hidden.fallback import project_rows, sum_dtype, wgrad_splitk, working_dtype
from late_interaction.ops.winners import winner_dtype


@dataclass
class _Head:
    """The projection, and the documents it is for, chunk by chunk."""

    H: Tensor
    W: Tensor
    b: Tensor | None
    normalize: bool
    size: int  # documents that the buffer holds
    in_place: bool  # hidden states are read where they lie
    wgrad_kernel: bool  # wgrad_splitk_ takes hidden states like these
    alias_into_grad: bool  # larger chunks lie in the memory of the gradients of the documents behind them
    query_tokens: int
    _project: Any = None

    def _next(self, left: int) -> int:
        """Documents of the next chunk, of those that are left."""
        if not self.alias_into_grad:
            return self.size
        d, d_model = self.W.shape
        aliased = documents_that_alias(left, self.H.shape[1], d, d_model, self.query_tokens)
        return min(left, max(self.size, aliased))

    @property
    def whole(self) -> bool:
        return self.size >= self.H.shape[0]

    def buffer(self) -> Tensor:
        return self.W.new_empty(self.size * self.H.shape[1], self.W.shape[0])

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield documents and their hidden states, ``[tokens, d_model]`` in the dtype of W."""
        Nd, dtype, stop = self.H.shape[0], self.W.dtype, 0
        while stop < Nd:
            documents = slice(stop, min(stop + self._next(Nd - stop), Nd))
            stop = documents.stop
            hidden = (self.H if self.whole else self.H[documents]).flatten(0, 1)
            hidden = as_dtype(hidden, dtype)
            yield documents, hidden if hidden.stride(1) == 1 else hidden.contiguous()

    def project(self, rows: Tensor, hidden: Tensor, active_rows: Tensor | None = None) -> Tensor:
        """Fill rows ``[tokens, d]``; those of tokens that are not active may hold anything.

        Returns the inverse norms that rows had before normalize.
        """
        if self._project is None:  # chunks are alike
            kernel = operators.can_project_rows.default(hidden, self.W, self.b)
            self._project = operators.project_rows_.default if kernel else project_rows
        return self._project(rows, hidden, self.W, self.b, active_rows, self.normalize)


def _head(
    H: Tensor, W: Tensor, b: Tensor | None, Q: Tensor, normalize: bool, dtype: torch.dtype, backward: bool,
    need_grad_H: bool = False,
) -> _Head:  # fmt: skip
    Nd, Ld, d_model = H.shape
    sizes = Sizes(Nd, Ld, W.shape[0], d_model, dtype.itemsize, Q.shape[0] * Q.shape[1])
    in_place = H.dtype == dtype and H.stride(2) == 1 and (Nd < 2 or H.stride(0) == Ld * H.stride(1))
    # The kernel reads aligned vectors of 16 bytes.
    aligned = not in_place or (H.stride(1) % 8 == 0 and H.data_ptr() % 16 == 0)
    wgrad_kernel = H.is_cuda and sizes.fit_wgrad_kernel() and aligned
    itemsize = converted_bytes(in_place, wgrad_kernel, dtype.itemsize, backward)
    size = chunk_size(sizes, itemsize, gpu_of(H.device.index) if H.is_cuda else None, backward)
    alias = need_grad_H and in_place and wgrad_kernel and size < Nd
    W, b = as_dtype(W, dtype), None if b is None else as_dtype(b, dtype)
    return _Head(H, W, b, normalize, size, in_place, wgrad_kernel, alias, sizes.query_tokens)


def check(Q: Tensor, H: Tensor, W: Tensor, b: Tensor | None) -> None:
    _require(
        Q.dim() == 3 and H.dim() == 3 and W.dim() == 2,
        lambda: "Q must be [Nq, Lq, d], H [Nd, Ld, d_model] and W [d, d_model]",
    )
    _require(
        W.shape[0] == Q.shape[2] and W.shape[1] == H.shape[2],
        lambda: f"W must be [{Q.shape[2]}, {H.shape[2]}], got {list(W.shape)}",
    )
    _require(b is None or (b.dim() == 1 and b.shape[0] == W.shape[0]), lambda: f"b must be [{W.shape[0]}]")
    _require(
        Q.device == H.device == W.device and (b is None or b.device == Q.device),
        lambda: "Q, H, W and b must be on one device",
    )


def _require(holds: Any, message: Callable[[], str]) -> None:
    if holds is not True:  # false, or of sizes that are symbols
        torch._check(holds, lambda: f"late_interaction: {message()}")


def _forward(
    Q: Tensor, H: Tensor, W: Tensor, b: Tensor | None, q_mask: Tensor | None, d_mask: Tensor | None,
    normalize: bool = True, precision: str = "highest", *, winners: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (scores, winners), or (scores,)."""
    check(Q, H, W, b)
    check_choice("precision", precision, OPERATOR_PRECISIONS)
    dtype = working_dtype(precision, Q, H, W, b)
    check_tensor("q_mask", q_mask, Q.shape[:2], (torch.bool,), Q)
    check_tensor("d_mask", d_mask, H.shape[:2], (torch.bool,), Q)
    head = _head(H, W, b, Q, normalize, dtype, False)
    Q = as_dtype(Q, dtype)
    Nd, Ld, _ = H.shape
    if not winners and head.in_place and dtype.itemsize == 2 and 0 < Q.shape[0] * Q.shape[1] <= SCORED_ROWS:
        hidden = H.flatten(0, 1)
        if hidden.shape[0] and operators.can_project_rows.default(hidden, head.W, head.b):
            args = (Q, hidden, head.W, head.b, q_mask, d_mask, Ld, normalize)
            return (operators.project_scores.default(*args),)
    op = operators.maxsim_winners.default if winners else operators.maxsim.default
    options = () if precision == "highest" else (False, precision)  # defaults that are passed take time
    results: tuple[Tensor, ...] = ()
    buffer = head.buffer()
    for documents, hidden in head.chunks():
        rows = buffer[: hidden.shape[0]]
        head.project(rows, hidden)
        D = rows.view(documents.stop - documents.start, Ld, W.shape[0])
        part = op(Q, D, q_mask, None if d_mask is None else d_mask[documents], *options)
        parts = part if winners else (part,)
        if head.whole:
            return parts
        results = results or _empty_results(Q, Nd, Ld, winners)
        for result, piece in zip(results, parts, strict=True):
            result[:, documents] = piece
    return results or _empty_results(Q, Nd, Ld, winners)


def _empty_results(Q: Tensor, Nd: int, Ld: int, winners: bool) -> tuple[Tensor, ...]:
    scores = Q.new_empty((Q.shape[0], Nd), dtype=sum_dtype(Q.dtype))
    if not winners:
        return (scores,)
    return scores, Q.new_empty((Q.shape[0], Nd, Q.shape[1]), dtype=winner_dtype(Ld))


def maxsim_from_hidden(*args: Any) -> Tensor:
    return _forward(*args)[0]


def maxsim_from_hidden_winners(*args: Any) -> tuple[Tensor, ...]:
    return _forward(*args, winners=True)


def maxsim_from_hidden_backward(
    grad_scores: Tensor, Q: Tensor, H: Tensor, W: Tensor, b: Tensor | None, winners: Tensor,
    normalize: bool = True, precision: str = "highest", need_grad_Q: bool = True, need_grad_H: bool = True,
    need_grad_W: bool = True, need_grad_b: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    check(Q, H, W, b)
    check_choice("precision", precision, OPERATOR_PRECISIONS)
    dtype = working_dtype(precision, Q, H, W, b)
    (Nd, Ld, d_model), d, sum_type = H.shape, W.shape[0], sum_dtype(dtype)
    check_tensor("grad_scores", grad_scores, (len(Q), Nd), (sum_type,), Q)
    check_tensor("winners", winners, (len(Q), Nd, Q.shape[1]), (winner_dtype(Ld),), Q)
    need_grad_D = need_grad_H or need_grad_W or need_grad_b
    head = _head(H, W, b, Q, normalize, dtype, True, need_grad_H)
    queries = as_dtype(Q, dtype)
    make = queries.new_empty if Nd else queries.new_zeros
    grad_Q = make(Q.shape if need_grad_Q else 0)
    sums = None if head.whole or not need_grad_Q else make(Q.shape, dtype=sum_type)
    grad_H = H.new_empty(H.shape if need_grad_H else 0)
    parts = _parts(head, need_grad_W, sum_type)
    grad_b = W.new_zeros(d, dtype=sum_type) if need_grad_b else W.new_empty(0)
    buffer = head.buffer()
    # One launch computes both gradients if projected tokens lie apart from their gradients: in grad_H.
    # (Other chunks just fit L2: they would not stay there beside their gradients.)
    fits = d * dtype.itemsize <= d_model * H.itemsize
    apart = (head.whole or head.alias_into_grad) and need_grad_H and fits
    for documents, hidden in head.chunks():
        size, tokens = (documents.stop - documents.start, Ld, d), hidden.shape[0]
        kept = winners if head.whole else winners[:, documents]
        kept = kept.contiguous()
        won = operators.argmax_mask.default(kept, Ld)
        aliased = tokens > buffer.shape[0]
        rows = _alias(grad_H[documents.stop :], dtype, tokens, d) if aliased else buffer[:tokens]
        part_H = grad_H if head.whole or not need_grad_H else grad_H[documents]
        unit = _alias(part_H, dtype, tokens, d) if apart else rows
        inverse = head.project(unit, hidden, won)
        grads = grad_scores if head.whole else grad_scores[:, documents]
        grad_D = rows.view(size) if need_grad_D else rows[:0]
        order = sums, documents.start == 0, documents.stop == Nd
        args = (unit.view(size), inverse if normalize else None, kept, grad_Q, grad_D, *order)
        operators.maxsim_backward_into_.default(grads, queries, *args)
        # `rows` hold the gradient of the projected tokens from here on.
        if not need_grad_D:
            continue
        if need_grad_H:
            out = part_H.flatten(0, 1)
            if out.dtype == head.W.dtype:
                torch.mm(rows, head.W, out=out)
            else:
                out.copy_(rows @ head.W)
        if need_grad_W:
            add_wgrad = operators.wgrad_splitk_.default if head.wgrad_kernel else wgrad_splitk
            add_wgrad(parts, rows, hidden, won, documents.start == 0)
        if need_grad_b:  # in two steps: one sum over a long column is slow
            grad_b += rows.view(size).sum(1, dtype=sum_type).sum(0)
    grad_W = parts.sum(0) if need_grad_W else parts
    grad_b = as_dtype(grad_b, W.dtype if b is None else b.dtype)
    return as_dtype(grad_Q, Q.dtype), grad_H, as_dtype(grad_W, W.dtype), grad_b


def _alias(grad_H: Tensor, dtype: torch.dtype, tokens: int, d: int) -> Tensor:
    """Lay [tokens, d] in the memory of grad_H."""
    return grad_H.view(dtype).flatten()[: tokens * d].view(tokens, d)


def _parts(head: _Head, needed: bool, dtype: torch.dtype) -> Tensor:
    (Nd, Ld, d_model), d = head.H.shape, head.W.shape[0]
    if not needed:
        return head.W.new_empty(0, dtype=dtype)
    splits = 1
    if head.wgrad_kernel:
        sm_count = gpu_of(head.H.device.index).sm_count
        splits = weight_grad_splits(d, d_model, min(head.size, Nd) * Ld, sm_count)
    make = torch.empty if Nd else torch.zeros
    return make(splits, d, d_model, dtype=dtype, device=head.W.device)


KERNELS = (maxsim_from_hidden, maxsim_from_hidden_winners, maxsim_from_hidden_backward)
