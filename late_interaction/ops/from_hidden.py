"""MaxSim of documents that are hidden states still: projected a chunk at a time, never as a whole.

A chunk is what stays in the L2 cache from the product that projects it to the kernels that read it. The
backward projects those tokens of a chunk again that won; each counts once, however often it won:

    hidden -> D = unit rows of (hidden W^T + b), of the winners alone
           -> grad_Q, and in the place of D its gradient, through the norm
           -> grad_hidden = grad_D W, written once
           -> grad_W += grad_D^T hidden over the winners alone, in float32

Everything is summed in a fixed order: the same bits in every run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from late_interaction.ops.winners import widen, winner_dtype

_library = torch.library.Library("late_interaction", "IMPL")
_ops = torch.ops.late_interaction
_HALF = {"medium": torch.bfloat16, "fp16": torch.float16}

# Of the L2 cache, what a chunk of projected tokens may fill; of memory, what converted hidden states may.
_FORWARD_SHARE, _BACKWARD_SHARE = 0.75, 0.7
_CPU_CACHE = 8 << 20
_COPIED = 24 << 20
# The tile that a block of outer_rows_ owns.
_TILE_ROWS, _TILE_COLUMNS = 128, 256
_SPLIT_TOKENS = 256


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


def documents_at_a_time(Nd: int, token_bytes: int, Ld: int, room: float) -> int:
    """As many documents as fit, one at least, in chunks of equal size."""
    most = max(1, min(Nd, int(room / max(1, Ld * token_bytes))))
    return -(-Nd // -(-Nd // most)) if Nd else 1


def chunk_size(
    Nd: int, Ld: int, d: int, d_model: int, each: int, copied: int, cache_bytes: int, backward: bool
) -> int:
    """Documents of a chunk. An element has `each` bytes; one of copied hidden states, `copied`."""
    room = cache_bytes * (_BACKWARD_SHARE if backward else _FORWARD_SHARE)
    size = documents_at_a_time(Nd, d * each, Ld, room)
    return min(size, documents_at_a_time(Nd, d_model * copied, Ld, _COPIED)) if copied else size


def copied_bytes(in_place: bool, outer_kernel: bool, each: int, backward: bool) -> int:
    if in_place and (outer_kernel or not backward):
        return 0
    return max(each, 4) if backward else each


@dataclass
class _Head:
    """The projection, and the documents it is for, chunk by chunk."""

    H: Tensor
    W: Tensor
    b: Tensor | None
    normalize: bool
    size: int  # documents of a chunk
    outer_kernel: bool  # outer_rows_ takes hidden states like these

    def __post_init__(self) -> None:
        self.rows = self.W.new_empty(self.size * self.H.shape[1], self.W.shape[0])

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """(which documents, their hidden states as [tokens, d_model] in the dtype of W)"""
        for start in range(0, self.H.shape[0], self.size):
            documents = slice(start, min(start + self.size, self.H.shape[0]))
            hidden = self.H[documents].flatten(0, 1).to(self.W.dtype)
            yield documents, hidden if hidden.stride(1) == 1 else hidden.contiguous()

    def project(self, hidden: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(projected tokens [tokens, d], valid until the next call; the inverses of their norms)

        A token that is not wanted may hold anything."""
        rows = self.rows[: hidden.shape[0]]
        kernel = _ops.can_project_rows.default(hidden, self.W, self.b)
        project = _ops.project_rows_.default if kernel else project_rows
        inverse = project(rows, hidden, self.W, self.b, wanted, self.normalize)
        return rows, inverse if self.normalize else None


def _head(
    H: Tensor, W: Tensor, b: Tensor | None, normalize: bool, dtype: torch.dtype, backward: bool
) -> _Head:
    Nd, Ld, d_model = H.shape
    d, each = W.shape[0], dtype.itemsize
    cache_bytes = _gpu(H.device.index)[0] if H.is_cuda else _CPU_CACHE
    in_place = H.dtype == dtype and H.stride(2) == 1 and (Nd < 2 or H.stride(0) == Ld * H.stride(1))
    # Half precision in whole, aligned 16-byte pieces.
    aligned = not in_place or (H.stride(1) % 8 == 0 and H.data_ptr() % 16 == 0)
    outer_kernel = H.is_cuda and each == 2 and d % 8 == 0 and d_model % 8 == 0 and aligned
    copied = copied_bytes(in_place, outer_kernel, each, backward)
    size = chunk_size(Nd, Ld, d, d_model, each, copied, cache_bytes, backward)
    return _Head(H, W.to(dtype), None if b is None else b.to(dtype), normalize, size, outer_kernel)


def check(Q: Tensor, H: Tensor, W: Tensor, b: Tensor | None) -> None:
    torch._check(
        Q.dim() == 3 and H.dim() == 3 and W.dim() == 2,
        lambda: "late_interaction: Q must be [Nq, Lq, d], H [Nd, Ld, d_model] and W [d, d_model]",
    )
    torch._check(
        W.shape[0] == Q.shape[2] and W.shape[1] == H.shape[2],
        lambda: f"late_interaction: W must be [{Q.shape[2]}, {H.shape[2]}], got {list(W.shape)}",
    )
    torch._check(
        b is None or (b.dim() == 1 and b.shape[0] == W.shape[0]),
        lambda: f"late_interaction: b must be [{W.shape[0]}]",
    )
    others = (H, W) if b is None else (H, W, b)
    torch._check(
        all(x.device == Q.device for x in others),
        lambda: "late_interaction: Q, H, W and b must be on one device",
    )


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
    head = _head(H, W, b, normalize, dtype, False)
    Q = Q.to(dtype)
    Nd, Ld, _ = H.shape
    op = _ops.maxsim_winners.default if winners else _ops.maxsim.default
    results: tuple[Tensor, ...] = ()
    for documents, hidden in head.chunks():
        D = head.project(hidden)[0].view(documents.stop - documents.start, Ld, W.shape[0])
        part = op(Q, D, q_mask, None if d_mask is None else d_mask[documents], False, precision)
        parts = part if winners else (part,)
        if head.size >= Nd:
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
    head = _head(H, W, b, normalize, dtype, True)
    d, Ld, sums = W.shape[0], H.shape[1], sum_dtype(dtype)
    need_grad_D = need_grad_H or need_grad_W or need_grad_b
    queries = Q.to(dtype)
    grad_Q = Q.new_zeros(Q.shape if need_grad_Q else 0, dtype=sums)
    grad_H = H.new_empty(H.shape if need_grad_H else 0)
    parts = _parts(head, need_grad_W, sums)
    grad_b = W.new_zeros(d if need_grad_b else 0, dtype=sums)
    for documents, hidden in head.chunks():
        kept = winners[:, documents].contiguous()
        won = _ops.won_rows.default(kept, Ld)
        rows, inverse = head.project(hidden, won)
        D = rows.view(documents.stop - documents.start, Ld, d)
        part_Q, _ = _ops.maxsim_backward_unit_.default(
            grad_scores[:, documents], queries, D, inverse, kept, need_grad_Q, need_grad_D
        )
        # `rows` and `D` hold the gradient of the projected tokens from here on.
        if need_grad_Q:
            grad_Q = part_Q if head.size >= H.shape[0] else grad_Q.add_(part_Q)
        if need_grad_H:
            _multiply_into(grad_H[documents].flatten(0, 1), rows, head.W)
        if need_grad_W:
            add_outer = _ops.outer_rows_.default if head.outer_kernel else outer_rows
            add_outer(parts, rows, hidden, won, documents.start == 0)
        if need_grad_b:
            grad_b += D.sum(1, dtype=sums).sum(0)  # in two steps, for a long column is slow to add up
    grad_W = parts.sum(0) if need_grad_W else parts
    return grad_Q.to(Q.dtype), grad_H, grad_W.to(W.dtype), grad_b.to(W.dtype if b is None else b.dtype)


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
    if head.outer_kernel:
        tiles = -(-d // _TILE_ROWS) * -(-d_model // _TILE_COLUMNS)
        most = max(1, min(head.size, Nd) * Ld // _SPLIT_TOKENS)
        splits = max(1, min(_gpu(head.H.device.index)[1] // tiles, most))
    make = torch.empty if Nd else torch.zeros
    return make(splits, d, d_model, dtype=dtype, device=head.W.device)


# ---- the steps where there is no kernel for them ----


def can_project_rows(hidden: Tensor, W: Tensor, b: Tensor | None) -> bool:
    return False


def project_rows(
    rows: Tensor, hidden: Tensor, W: Tensor, b: Tensor | None, wanted: Tensor | None, normalize: bool
) -> Tensor:
    if b is None:
        torch.mm(hidden, W.t(), out=rows)
    else:
        torch.addmm(b, hidden, W.t(), out=rows)
    return _ops.unit_rows_.default(rows) if normalize else rows.new_empty(0, dtype=sum_dtype(rows.dtype))


def won_rows(winners: Tensor, Ld: int) -> Tensor:
    Nd = winners.shape[1]
    places = widen(winners, Ld).long()
    places = torch.where(places < 0, Ld, places)  # a column for those that met nothing
    won = places.new_zeros(Nd, Ld + 1, dtype=torch.bool)
    return won.scatter_(1, places.transpose(0, 1).flatten(1), True)[:, :Ld].flatten()


def unit_rows(x: Tensor) -> Tensor:
    inverse: Tensor = (
        torch.linalg.vector_norm(x, dim=-1, dtype=sum_dtype(x.dtype)).clamp_min_(1e-12).reciprocal_()
    )
    x.mul_(inverse.unsqueeze(-1))
    return inverse


def maxsim_backward_unit(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    inverse: Tensor | None,
    winners: Tensor,
    need_grad_Q: bool = True,
    need_grad_D: bool = True,
) -> tuple[Tensor, Tensor]:
    grad_Q, grad = _ops.maxsim_backward.default(
        grad_scores, Q, D, winners, False, "lowmem", need_grad_Q, need_grad_D
    )
    if not need_grad_D:
        return grad_Q, grad.to(torch.bool)
    won = (grad != 0).any(-1)
    if inverse is not None:
        inverse = inverse.view_as(won)
        g, u = grad.to(inverse.dtype), D.to(inverse.dtype)
        along = (g * u).sum(-1)
        along.masked_fill_(inverse >= 1e12, 0.0)  # where eps rules, nothing is projected out
        grad = (g - along.unsqueeze(-1) * u) * inverse.unsqueeze(-1)
        grad = grad.masked_fill_(~won.unsqueeze(-1), 0.0)  # even for a token that holds NaN
    D.copy_(grad)
    return grad_Q, won.flatten()


def outer_rows(parts: Tensor, grad: Tensor, hidden: Tensor, wanted: Tensor, fresh: bool) -> None:
    rows = hidden.masked_fill(~wanted.unsqueeze(-1), 0.0).to(parts.dtype)
    first = parts[0]
    torch.addmm(first, grad.t().to(parts.dtype), rows, beta=0 if fresh else 1, out=first)
    if fresh:
        parts[1:].zero_()


def register() -> None:
    for op in (maxsim_from_hidden, maxsim_from_hidden_winners, maxsim_from_hidden_backward):
        _library.impl(op.__name__, op, "CompositeExplicitAutograd")
    _library.impl("can_project_rows", can_project_rows, "CPU")
    _library.impl("won_rows", won_rows, "CPU")
    for step in (project_rows, unit_rows, maxsim_backward_unit, outer_rows):
        _library.impl(step.__name__ + "_", step, "CPU")
