"""MaxSim of documents that are hidden states still: projected a chunk at a time, never as a whole.

A chunk is what stays in the L2 cache from the product that projects it to the kernels that read it. The
backward projects each chunk again and visits the tokens that won, each once however often it won:

    hidden -> D = unit rows of (hidden W^T + b)
           -> grad_Q, and in the place of D its gradient, through the norm
           -> grad_hidden = grad_D W, written once
           -> grad_W += grad_D^T hidden over the winners alone, in float32

Where few tokens of a document can have won, those alone are gathered and take these steps. Everything is
summed in a fixed order: the same bits in every run.
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
# Where at most one token in so many can have won, the others are not even projected again; finding them takes
# so many bytes a token.
_FEW, _LISTED = 4, 24
# The tile that a block of outer_rows_ owns.
_TILE_ROWS, _TILE_COLUMNS = 128, 256
_SPLIT_TOKENS = 256


@cache
def _gpu(index: int | None) -> tuple[int, int]:
    """Bytes of L2, and multiprocessors."""
    properties = torch.cuda.get_device_properties(index)
    return properties.L2_cache_size, properties.multi_processor_count


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


@dataclass
class _Head:
    """The projection, and the documents it is for, chunk by chunk."""

    H: Tensor
    W: Tensor
    b: Tensor | None
    normalize: bool
    tokens: int  # of a document that are projected
    size: int  # documents of a chunk
    outer_kernel: bool  # outer_rows_ takes hidden states like these

    def __post_init__(self) -> None:
        self.rows = self.W.new_empty(self.size * self.tokens, self.W.shape[0])

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.H.shape[0], self.size):
            yield slice(start, min(start + self.size, self.H.shape[0]))

    def hidden(self, documents: slice, rows: Tensor | None = None) -> Tensor:
        """Hidden states of these documents (of these rows of theirs), [tokens, d_model] in the dtype of W."""
        states = self.H[documents].flatten(0, 1)
        if rows is not None:
            states = states.index_select(0, rows)
        states = states.to(self.W.dtype)
        return states if states.stride(1) == 1 else states.contiguous()

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """(projected tokens [tokens, d], valid until the next call; the inverses of their norms)"""
        rows = self.rows[: hidden.shape[0]]
        if self.b is None:
            torch.mm(hidden, self.W.t(), out=rows)
        else:
            torch.addmm(self.b, hidden, self.W.t(), out=rows)
        return rows, _ops.unit_rows_.default(rows) if self.normalize else None


def _head(
    H: Tensor,
    W: Tensor,
    b: Tensor | None,
    normalize: bool,
    dtype: torch.dtype,
    backward: bool = False,
    winners: int | None = None,
) -> _Head:
    """winners: how many tokens of a document can have won, where only those are projected."""
    (Nd, Ld, d_model), d, each = H.shape, W.shape[0], dtype.itemsize
    cache_bytes = _gpu(H.device.index)[0] if H.is_cuda else _CPU_CACHE
    room = cache_bytes * (_BACKWARD_SHARE if backward else _FORWARD_SHARE)
    copied = winners is not None or H.dtype != dtype or H.stride(2) != 1 or not _flat(H)
    # Half precision in whole, aligned 16-byte pieces.
    aligned = copied or (H.stride(1) % 8 == 0 and H.data_ptr() % 16 == 0)
    outer_kernel = H.is_cuda and each == 2 and d % 8 == 0 and d_model % 8 == 0 and aligned
    tokens = Ld if winners is None else winners
    size = documents_at_a_time(Nd, d * each, tokens, room)
    if copied or (backward and not outer_kernel):  # outer_rows copies too
        token_bytes = d_model * (4 if backward and not outer_kernel else each) + _LISTED * Ld // max(
            1, tokens
        )
        size = min(size, documents_at_a_time(Nd, token_bytes, tokens, _COPIED))
    b = None if b is None else b.to(dtype)
    return _Head(H, W.to(dtype), b, normalize, tokens, size, outer_kernel)


def _flat(H: Tensor) -> bool:
    """Whether tokens lie evenly behind each other, from the first document's to the last one's."""
    return H.shape[0] < 2 or H.stride(0) == H.shape[1] * H.stride(1)


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
    head = _head(H, W, b, normalize, dtype)
    Q = Q.to(dtype)
    Nd, Ld, _ = H.shape
    op = _ops.maxsim_winners.default if winners else _ops.maxsim.default
    results: tuple[Tensor, ...] = ()
    for documents in head.chunks():
        D = head.project(head.hidden(documents))[0].view(documents.stop - documents.start, Ld, W.shape[0])
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
    (Nd, Ld, _), d, sums = H.shape, W.shape[0], sum_dtype(dtype)
    most = Q.shape[0] * Q.shape[1]  # tokens of a document that can have won
    few = 0 < _FEW * most <= Ld and _flat(H)
    head = _head(H, W, b, normalize, dtype, True, most if few else None)
    need_grad_D = need_grad_H or need_grad_W or need_grad_b
    queries = Q.to(dtype)
    grad_Q = Q.new_zeros(Q.shape if need_grad_Q else 0, dtype=sums)
    grad_H = (torch.zeros if few else torch.empty)(
        H.shape if need_grad_H else 0, dtype=H.dtype, device=H.device
    )
    parts = _parts(head, need_grad_W, sums)
    grad_b = W.new_zeros(d if need_grad_b else 0, dtype=sums)
    for documents in head.chunks():
        kept, places = winners[:, documents].contiguous(), None
        if few:
            kept, places = _winning_tokens(kept, Ld, most)
        hidden = head.hidden(documents, places)
        rows, inverse = head.project(hidden)
        D = rows.view(documents.stop - documents.start, head.tokens, d)
        part_Q, won = _ops.maxsim_backward_unit_.default(
            grad_scores[:, documents], queries, D, inverse, kept, need_grad_Q, need_grad_D
        )
        # `rows` and `D` hold the gradient of the projected tokens from here on.
        if need_grad_Q:
            grad_Q = part_Q if head.size >= Nd else grad_Q.add_(part_Q)
        if need_grad_H:
            _multiply_into(grad_H[documents].flatten(0, 1), rows, head.W, places)
        if need_grad_W:
            add_outer = _ops.outer_rows_.default if head.outer_kernel else outer_rows
            add_outer(parts, rows, hidden, won, documents.start == 0)
        if need_grad_b:
            grad_b += D.sum(1, dtype=sums).sum(0)  # in two steps, for a long column is slow to add up
    grad_W = parts.sum(0) if need_grad_W else parts
    return grad_Q.to(Q.dtype), grad_H, grad_W.to(W.dtype), grad_b.to(W.dtype if b is None else b.dtype)


def _winning_tokens(winners: Tensor, Ld: int, most: int) -> tuple[Tensor, Tensor]:
    """(winners among `most` tokens of each document that hold all that won, in order; the rows of
    [documents * Ld] that these tokens are, no two the same)"""
    Nq, documents, Lq = winners.shape
    token = widen(winners, Ld).transpose(0, 1).flatten(1).long()  # [documents, Nq * Lq]
    matched = token >= 0
    token = torch.where(matched, token, Ld)
    won = torch.zeros(documents, Ld + 1, dtype=torch.bool, device=winners.device)
    won = won.scatter_(1, token, True)[:, :Ld]
    count = won.cumsum(1)
    every = torch.arange(Ld, device=winners.device).expand(documents, Ld)
    place = torch.where(won, count - 1, count[:, -1:] + every - count)  # those that lost come after
    order = torch.empty_like(place).scatter_(1, place, every)
    first = Ld * torch.arange(documents, device=winners.device).unsqueeze(1)
    kept = torch.where(matched, place.gather(1, token.clamp_(max=Ld - 1)), -1).to(winner_dtype(most))
    kept = kept.view(documents, Nq, Lq).transpose(0, 1).contiguous()
    return kept, (order[:, :most] + first).flatten()


def _multiply_into(out: Tensor, grad: Tensor, W: Tensor, places: Tensor | None) -> None:
    """Row i of the product to row i of `out`, or to row places[i]."""
    if places is not None:
        out.index_copy_(0, places, (grad @ W).to(out.dtype))
    elif out.dtype == W.dtype:
        torch.mm(grad, W, out=out)
    else:
        out.copy_(grad @ W)


def _parts(head: _Head, needed: bool, dtype: torch.dtype) -> Tensor:
    """As many splits as it takes to give every multiprocessor a tile, of a few hundred tokens at least."""
    (d, d_model), Nd = head.W.shape, head.H.shape[0]
    if not needed:
        return head.W.new_empty(0, dtype=dtype)
    splits = 1
    if head.outer_kernel:
        tiles = -(-d // _TILE_ROWS) * -(-d_model // _TILE_COLUMNS)
        most = max(1, head.rows.shape[0] // _SPLIT_TOKENS)
        splits = max(1, min(_gpu(head.H.device.index)[1] // tiles, most))
    make = torch.empty if Nd else torch.zeros
    return make(splits, d, d_model, dtype=dtype, device=head.W.device)


# ---- the steps where there is no kernel for them ----


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
    for step in (unit_rows, maxsim_backward_unit, outer_rows):
        _library.impl(step.__name__ + "_", step, "CPU")
