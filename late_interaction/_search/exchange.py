"""What the processes of a search tell each other: what each has found, and notes.

A process's payload is a row of int64: what it found, as keys of float32 scores
(:mod:`late_interaction.ops.topk`) or as the bits of float64 scores and indices; at the end its notes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from late_interaction._search.selection import NO_DOCUMENT, Found, has_kernels, select
from late_interaction._torch import _AutoDispatchBelowAutograd
from late_interaction.ops import topk
from late_interaction.ops._library import operators

_pack, _merge = operators.pack_found.default, operators.merge_found.default
_add_checksum = operators.add_checksum_.default


def notes_alone(device: torch.device, size: int, notes: Sequence[int]) -> Tensor:
    """Make a payload without what was found."""
    none = torch.empty(0, 0, dtype=torch.float32, device=device)
    with _AutoDispatchBelowAutograd():
        payload: Tensor = _pack(none, none.to(torch.int64), 0, size, notes, True)
    return payload


def packed(found: Found, width: int, size: int, notes: Sequence[int], largest: bool) -> Tensor:
    """Make a payload with room for so many documents of each row."""
    scores, indices = found
    with _AutoDispatchBelowAutograd():  # there is nothing to differentiate
        if scores.dtype == torch.float64:
            return _packed_float64(scores, indices, width, size, notes)
        payload: Tensor = _pack(scores.contiguous(), indices.contiguous(), width, size, notes, largest)
    return payload


def merged(
    payloads: Tensor, rows: int, width: int, notes: int, k: int, largest: bool, dtype: torch.dtype
) -> tuple[Found, Tensor]:
    """Find the k best of all processes' payloads ``[processes, size]``, and read their notes.

    Indices are among the documents of all. Where there are fewer documents, none stands behind them.
    """
    if dtype == torch.float64:
        return _merged_float64(payloads, rows, width, notes, k, largest)
    k = min(k, width * len(payloads))
    serves = has_kernels(payloads, k) and len(payloads) <= topk.MOST_PROCESSES
    with _AutoDispatchBelowAutograd():
        scores, indices, of_all = (_merge if serves else topk.merge_found)(
            payloads, rows, width, notes, k, largest
        )
    return (scores, indices), of_all


def add_checksum(payload: Tensor, place: int, tensors: Sequence[Tensor | None]) -> None:
    """Add to the number at a place one that is the same for the same bits; waits for nothing.

    It is of each tensor a sum of its bytes by place, times a power of 31.
    """
    factor = 1
    with _AutoDispatchBelowAutograd():
        for x in reversed([x for x in tensors if x is not None and x.numel()]):
            data = x.detach().to(payload.device).contiguous()
            _add_checksum(payload, place, data, factor - (factor >> 63 << 64))  # as a signed integer
            factor = 31 * factor % (1 << 64)


def _packed_float64(scores: Tensor, indices: Tensor, width: int, size: int, notes: Sequence[int]) -> Tensor:
    rows, n = scores.shape
    payload = torch.zeros(size, dtype=torch.int64, device=scores.device)
    room = payload[: 2 * rows * width].view(2, rows, width)
    room[0, :, :n] = scores.view(torch.int64)
    room[1, :, :n] = indices
    payload[size - len(notes) :] = torch.tensor(notes, dtype=torch.int64, device=scores.device)
    return payload


def _merged_float64(
    payloads: Tensor, rows: int, width: int, notes: int, k: int, largest: bool
) -> tuple[Found, Tensor]:
    of_all = payloads[:, payloads.shape[1] - notes :]
    counts: list[int] = of_all[:, 0].tolist()
    scores, indices = payloads[:, : 2 * rows * width].view(len(payloads), 2, rows, width).unbind(1)
    held = [min(width, max(count, 0)) for count in counts]
    every_score = torch.cat([scores[i, :, :n] for i, n in enumerate(held)], dim=-1)
    own = [indices[i, :, :n] for i, n in enumerate(held)]
    every = [torch.where(x < 0, NO_DOCUMENT, x + sum(counts[:i])) for i, x in enumerate(own)]
    best = select(every_score.view(torch.float64), torch.cat(every, dim=-1), k, largest)
    return best, of_all
