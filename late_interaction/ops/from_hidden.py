"""MaxSim of documents that are hidden states still: projected a chunk at a time, never as a whole.

A chunk is what stays in the L2 cache from the product that projects it to the kernels that read it. (Where
only scores of a few query tokens are asked for, one kernel projects and scores.) The backward projects those
tokens again that won, and takes larger chunks where it can: what is projected lies in the place of their
own gradients then, and its gradient in that of the documents behind them. Each token counts once, however
often it won:

    hidden -> D = unit rows of (hidden W^T + b), of the winners alone
           -> grad_Q, and grad_D through the norm
           -> grad_hidden = grad_D W, written once
           -> grad_W += grad_D^T hidden over the winners alone, in float32

Everything is summed in a fixed order: the same bits in every run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from late_interaction.ops.winners import widen, winner_dtype

_library = torch.library.Library("late_interaction", "IMPL")
_ops = torch.ops.late_interaction
_HALF = {"medium": torch.bfloat16, "fp16": torch.float16}

# Of the L2 cache, what a chunk of projected tokens may fill; of memory, what it may, what converted hidden
# states may, and what a chunk on loan may beside: flags and norms of tokens, and winners.
_FORWARD_SHARE, _BACKWARD_SHARE = 0.9, 0.7
_CPU_CACHE = 8 << 20
_ROOM, _COPIED, _BESIDE = 56 << 20, 24 << 20, 7 << 20
# The tile that a block of wgrad_splitk_ owns.
_TILE_ROWS, _TILE_COLUMNS = 128, 256
# The rows of a tile of project_rows_, the query tokens of one of MaxSim's kernel; and what both could
# multiply while they start and end.
_PROJECTED_TILE, _SCORED_TILE, _WORK_OF_LAUNCHES = 384, 256, 1 << 18
_SPLIT_TOKENS = 256
# Query tokens, in all, that project_scores takes.
SCORED_ROWS = 64


@cache
def _gpu(index: int | None) -> tuple[int, int]:
    """Bytes of L2, and multiprocessors."""
    properties = torch.cuda.get_device_properties(index)
    return properties.L2_cache_size, properties.multi_processor_count


def multiplied_in(precision: str, dtype: torch.dtype) -> torch.dtype:
    """What tensors that are all of one dtype multiply in."""
    return _HALF.get(precision, dtype) if dtype == torch.float32 else dtype


def working_dtype(precision: str, *tensors: Tensor | None) -> torch.dtype:
    """The dtype that everything multiplies in: that of the tensors where they agree, else (or where precision
    asks float32 for it) the half precision among them."""
    found = {x.dtype for x in tensors if x is not None}
    if len(found) > 1 and torch.float64 in found:
        pass
    elif torch.float32 in found and precision in _HALF:
        return _HALF[precision]
    elif len(halves := found - {torch.float32}) == 1:
        return halves.pop()
    elif not halves:
        return torch.float32
    names = ", ".join(sorted(str(dtype) for dtype in found))
    raise TypeError(
        f"Q, H_d, W and b must share a dtype, or mix float32 with one half precision, got {names}"
    )


def documents_that_fit(Nd: int, token_bytes: int, Ld: int, room: float) -> int:
    """One at least."""
    return max(1, min(Nd, int(room / max(1, Ld * token_bytes))))


def documents_at_a_time(Nd: int, token_bytes: int, Ld: int, room: float) -> int:
    """As many documents as fit, in chunks of equal size."""
    most = documents_that_fit(Nd, token_bytes, Ld, room)
    return -(-Nd // -(-Nd // most)) if Nd else 1


def chunk_size(
    Nd: int, Ld: int, d: int, d_model: int, each: int, copied: int, cache_bytes: int, backward: bool
) -> int:
    """Documents of a chunk. An element has `each` bytes; one of copied hidden states, `copied`."""
    size = documents_at_a_time(Nd, d * each, Ld, _room_of_chunk(cache_bytes, backward))
    return min(size, documents_at_a_time(Nd, d_model * copied, Ld, _COPIED)) if copied else size


def _room_of_chunk(cache_bytes: int, backward: bool) -> float:
    return min(_ROOM, cache_bytes * (_BACKWARD_SHARE if backward else _FORWARD_SHARE))


def forward_size(
    Nd: int, Ld: int, d: int, d_model: int, each: int, copied: int, gpu: tuple[int, int], query_tokens: int
) -> int:
    """As chunk_size, of a forward on a GPU: where hidden states are read in place, in whole turns."""
    cache_bytes, sm_count = gpu
    if copied or each != 2 or not Nd:
        return chunk_size(Nd, Ld, d, d_model, each, copied, cache_bytes, False)
    most = documents_that_fit(Nd, d * each, Ld, _room_of_chunk(cache_bytes, False))
    return documents_in_turn(Nd, Ld, d_model, query_tokens, most, sm_count)


@lru_cache
def documents_in_turn(Nd: int, Ld: int, d_model: int, query_tokens: int, most: int, sm_count: int) -> int:
    """Documents of a forward's chunk, `most` at most. The kernels that project and score share tiles out to
    the multiprocessors: a chunk takes as long as those that got one more."""

    def work(documents: int) -> int:  # products for each dim of an embedding
        if documents == 0:
            return 0
        projected = -(-documents * Ld // (sm_count * _PROJECTED_TILE)) * _PROJECTED_TILE * d_model
        tiles = -(-query_tokens // _SCORED_TILE)
        scored = -(-documents * tiles // sm_count) * min(query_tokens, _SCORED_TILE) * Ld
        return projected + scored + _WORK_OF_LAUNCHES

    if most >= Nd:
        return Nd
    return min(range(most, most // 2, -max(1, most // 64)), key=lambda n: Nd // n * work(n) + work(Nd % n))


def documents_on_loan(left: int, Ld: int, d: int, d_model: int, query_tokens: int) -> int:
    """Of the documents that are left, as many as find room for their projected tokens where the gradients of
    the others will be, and take little room beside."""
    return min(left * d_model // (d + d_model), _BESIDE // max(1, 5 * Ld + 4 * query_tokens))


def copied_bytes(in_place: bool, wgrad_kernel: bool, each: int, backward: bool) -> int:
    if in_place and (wgrad_kernel or not backward):
        return 0
    return max(each, 4) if backward else each


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
    lent: bool  # larger chunks work where the gradients of the documents behind them will be
    query_tokens: int
    _project: Any = None

    @property
    def largest(self) -> int:
        """Documents of the largest chunk."""
        return self._next(self.H.shape[0])

    def _next(self, left: int) -> int:
        """Documents of the chunk that begins where so many are left."""
        if not self.lent:
            return self.size
        d, d_model = self.W.shape
        on_loan = documents_on_loan(left, self.H.shape[1], d, d_model, self.query_tokens)
        return min(left, max(self.size, on_loan))

    @property
    def whole(self) -> bool:
        """One chunk has all documents."""
        return self.size >= self.H.shape[0]

    def buffer(self) -> Tensor:
        """Room for the projected tokens of a chunk."""
        return self.W.new_empty(self.size * self.H.shape[1], self.W.shape[0])

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """(which documents, their hidden states as [tokens, d_model] in the dtype of W)"""
        Nd, dtype, stop = self.H.shape[0], self.W.dtype, 0
        while stop < Nd:
            documents = slice(stop, min(stop + self._next(Nd - stop), Nd))
            stop = documents.stop
            hidden = (self.H if self.whole else self.H[documents]).flatten(0, 1)
            hidden = _in(dtype, hidden)
            yield documents, hidden if hidden.stride(1) == 1 else hidden.contiguous()

    def project(self, rows: Tensor, hidden: Tensor, active_rows: Tensor | None = None) -> Tensor:
        """Fills rows [tokens, d]; a token that is not active may hold anything. Returns the inverses of the
        norms that they had, with normalize."""
        if self._project is None:  # chunks are alike
            kernel = _ops.can_project_rows.default(hidden, self.W, self.b)
            self._project = _ops.project_rows_.default if kernel else project_rows
        inverse: Tensor = self._project(rows, hidden, self.W, self.b, active_rows, self.normalize)
        return inverse


def _head(
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    normalize: bool,
    dtype: torch.dtype,
    backward: bool,
    query_tokens: int,
    need_grad_H: bool = False,
) -> _Head:
    Nd, Ld, d_model = H.shape
    d, each = W.shape[0], dtype.itemsize
    in_place = H.dtype == dtype and H.stride(2) == 1 and (Nd < 2 or H.stride(0) == Ld * H.stride(1))
    # Half precision in whole, aligned 16-byte pieces.
    aligned = not in_place or (H.stride(1) % 8 == 0 and H.data_ptr() % 16 == 0)
    wgrad_kernel = H.is_cuda and each == 2 and d % 8 == 0 and d_model % 8 == 0 and aligned
    copied = copied_bytes(in_place, wgrad_kernel, each, backward)
    sizes = Nd, Ld, d, d_model, each, copied
    if H.is_cuda and not backward:
        size = forward_size(*sizes, _gpu(H.device.index), query_tokens)
    else:
        size = chunk_size(*sizes, _gpu(H.device.index)[0] if H.is_cuda else _CPU_CACHE, backward)
    lent = need_grad_H and in_place and wgrad_kernel and size < Nd
    b = None if b is None else _in(dtype, b)
    return _Head(H, _in(dtype, W), b, normalize, size, in_place, wgrad_kernel, lent, query_tokens)


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # even a call that changes nothing takes microseconds


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
    Q: Tensor,
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool,
    precision: str,
    winners: bool,
) -> tuple[Tensor, ...]:
    """(scores, winners), or (scores,)"""
    check(Q, H, W, b)
    dtype = working_dtype(precision, Q, H, W, b)
    head = _head(H, W, b, normalize, dtype, False, Q.shape[0] * Q.shape[1])
    Q = _in(dtype, Q)
    Nd, Ld, _ = H.shape
    if not winners and head.in_place and dtype.itemsize == 2 and 0 < Q.shape[0] * Q.shape[1] <= SCORED_ROWS:
        hidden = H.flatten(0, 1)
        if hidden.shape[0] and _ops.can_project_rows.default(hidden, head.W, head.b):
            args = (Q, hidden, head.W, head.b, q_mask, d_mask, Ld, normalize)
            return (_ops.project_scores.default(*args),)
    op = _ops.maxsim_winners.default if winners else _ops.maxsim.default
    options = () if precision == "highest" else (False, precision)  # a default that is said takes time
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


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def maxsim_from_hidden(
    Q: Tensor,
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool = True,
    precision: str = "highest",
) -> Tensor:
    return _forward(Q, H, W, b, q_mask, d_mask, normalize, precision, False)[0]


def maxsim_from_hidden_winners(
    Q: Tensor,
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: bool = True,
    precision: str = "highest",
) -> tuple[Tensor, ...]:
    return _forward(Q, H, W, b, q_mask, d_mask, normalize, precision, True)


def maxsim_from_hidden_backward(
    grad_scores: Tensor,
    Q: Tensor,
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    winners: Tensor,
    normalize: bool = True,
    precision: str = "highest",
    need_grad_Q: bool = True,
    need_grad_H: bool = True,
    need_grad_W: bool = True,
    need_grad_b: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check(Q, H, W, b)
    dtype = working_dtype(precision, Q, H, W, b)
    (Nd, Ld, d_model), d, sum_type = H.shape, W.shape[0], sum_dtype(dtype)
    need_grad_D = need_grad_H or need_grad_W or need_grad_b
    head = _head(H, W, b, normalize, dtype, True, Q.shape[0] * Q.shape[1], need_grad_H)
    queries = _in(dtype, Q)
    make = queries.new_empty if Nd else queries.new_zeros
    grad_Q = make(Q.shape if need_grad_Q else 0)
    sums = None if head.whole or not need_grad_Q else make(Q.shape, dtype=sum_type)
    grad_H = H.new_empty(H.shape if need_grad_H else 0)
    parts = _parts(head, need_grad_W, sum_type)
    grad_b = W.new_zeros(d, dtype=sum_type) if need_grad_b else W.new_empty(0)
    buffer = head.buffer()
    # One launch takes both gradients where documents lie apart from theirs: in the place of grad_H. (Of other
    # chunks, which just fit L2, they would not stay there beside their gradients.)
    apart = (head.whole or head.lent) and need_grad_H and d * dtype.itemsize <= d_model * H.itemsize
    for documents, hidden in head.chunks():
        size, tokens = (documents.stop - documents.start, Ld, d), hidden.shape[0]
        kept = winners if head.whole else winners[:, documents]
        kept = kept.contiguous()
        won = _ops.argmax_mask.default(kept, Ld)
        on_loan = tokens > buffer.shape[0]
        rows = _room(grad_H[documents.stop :], dtype, tokens, d) if on_loan else buffer[:tokens]
        part_H = grad_H if head.whole or not need_grad_H else grad_H[documents]
        unit = _room(part_H, dtype, tokens, d) if apart else rows
        inverse = head.project(unit, hidden, won)
        grads = grad_scores if head.whole else grad_scores[:, documents]
        grad_D = rows.view(size) if need_grad_D else rows[:0]
        order = sums, documents.start == 0, documents.stop == Nd
        args = (unit.view(size), inverse if normalize else None, kept, grad_Q, grad_D, *order)
        _ops.maxsim_backward_into_.default(grads, queries, *args)
        # `rows` hold the gradient of the projected tokens from here on.
        if not need_grad_D:
            continue
        if need_grad_H:
            _multiply_into(part_H.flatten(0, 1), rows, head.W)
        if need_grad_W:
            add_wgrad = _ops.wgrad_splitk_.default if head.wgrad_kernel else wgrad_splitk
            add_wgrad(parts, rows, hidden, won, documents.start == 0)
        if need_grad_b:  # in two steps, for a long column is slow to add up
            grad_b += rows.view(size).sum(1, dtype=sum_type).sum(0)
    grad_W = parts.sum(0) if need_grad_W else parts
    return _in(Q.dtype, grad_Q), grad_H, _in(W.dtype, grad_W), _in(W.dtype if b is None else b.dtype, grad_b)


def _room(grad_H: Tensor, dtype: torch.dtype, tokens: int, d: int) -> Tensor:
    """[tokens, d] where the gradients of as many hidden states will be."""
    return grad_H.view(dtype).flatten()[: tokens * d].view(tokens, d)


def _multiply_into(out: Tensor, grad: Tensor, W: Tensor) -> None:
    if out.dtype == W.dtype:
        torch.mm(grad, W, out=out)
    else:
        out.copy_(grad @ W)


def _parts(head: _Head, needed: bool, dtype: torch.dtype) -> Tensor:
    """As many splits as it takes to give every multiprocessor a tile, of a few hundred tokens at least."""
    (Nd, Ld, d_model), d = head.H.shape, head.W.shape[0]
    if not needed:
        return head.W.new_empty(0, dtype=dtype)
    splits = 1
    if head.wgrad_kernel:
        tiles = -(-d // _TILE_ROWS) * -(-d_model // _TILE_COLUMNS)
        most = max(1, min(head.size, Nd) * Ld // _SPLIT_TOKENS)
        splits = max(1, min(_gpu(head.H.device.index)[1] // tiles, most))
    make = torch.empty if Nd else torch.zeros
    return make(splits, d, d_model, dtype=dtype, device=head.W.device)


# ---- the steps where there is no kernel for them ----


def can_project_rows(hidden: Tensor, W: Tensor, b: Tensor | None) -> bool:
    return False


def project_rows(
    rows: Tensor, hidden: Tensor, W: Tensor, b: Tensor | None, active_rows: Tensor | None, normalize: bool
) -> Tensor:
    if b is None:
        torch.mm(hidden, W.t(), out=rows)
    else:
        torch.addmm(b, hidden, W.t(), out=rows)
    return (
        _ops.l2_normalize_rows_.default(rows) if normalize else rows.new_empty(0, dtype=sum_dtype(rows.dtype))
    )


def argmax_mask(winners: Tensor, Ld: int) -> Tensor:
    Nd = winners.shape[1]
    places = widen(winners, Ld).long()
    places = torch.where(places < 0, Ld, places)  # a column for those that met nothing
    won = places.new_zeros(Nd, Ld + 1, dtype=torch.bool)
    return won.scatter_(1, places.transpose(0, 1).flatten(1), True)[:, :Ld].flatten()


def l2_normalize_rows(x: Tensor) -> Tensor:
    inverse: Tensor = (
        torch.linalg.vector_norm(x, dim=-1, dtype=sum_dtype(x.dtype)).clamp_min_(1e-12).reciprocal_()
    )
    x.mul_(inverse.unsqueeze(-1))
    return inverse


def maxsim_backward_into(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    inverse: Tensor | None,
    winners: Tensor,
    grad_Q: Tensor,
    grad_D: Tensor,
    sums: Tensor | None,
    first: bool,
    last: bool,
) -> None:
    needs = grad_Q.numel() > 0, grad_D.numel() > 0
    part_Q, grad = _ops.maxsim_backward.default(grad_scores, Q, D, winners, False, "lowmem", *needs)
    if needs[0]:
        if sums is not None:
            part_Q = sums.copy_(part_Q) if first else sums.add_(part_Q)
        if last:
            grad_Q.copy_(part_Q)
    if not needs[1]:
        return
    if inverse is not None:
        won = (grad != 0).any(-1)
        inverse = inverse.view_as(won)
        g, u = grad.to(inverse.dtype), D.to(inverse.dtype)
        along = (g * u).sum(-1)
        along.masked_fill_(inverse >= 1e12, 0.0)  # where eps rules, nothing is projected out
        grad = (g - along.unsqueeze(-1) * u) * inverse.unsqueeze(-1)
        grad = grad.masked_fill_(~won.unsqueeze(-1), 0.0)  # even for a token that holds NaN
    grad_D.copy_(grad)


def wgrad_splitk(
    partials: Tensor, grad: Tensor, hidden: Tensor, active_rows: Tensor, overwrite: bool
) -> None:
    rows = hidden.masked_fill(~active_rows.unsqueeze(-1), 0.0).to(partials.dtype)
    first = partials[0]
    torch.addmm(first, grad.t().to(partials.dtype), rows, beta=0 if overwrite else 1, out=first)
    if overwrite:
        partials[1:].zero_()


def register() -> None:
    for op in (maxsim_from_hidden, maxsim_from_hidden_winners, maxsim_from_hidden_backward):
        _library.impl(op.__name__, op, "CompositeExplicitAutograd")
    _library.impl("can_project_rows", can_project_rows, "CPU")
    _library.impl("argmax_mask", argmax_mask, "CPU")
    for step in (project_rows, l2_normalize_rows, maxsim_backward_into, wgrad_splitk):
        _library.impl(step.__name__ + "_", step, "CPU")
