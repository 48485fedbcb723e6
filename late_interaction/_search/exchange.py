"""What the processes of a search tell each other: what each has found, and a checksum of its queries.

A process's payload is one row of int64: what it found, as keys of float32 scores
(:mod:`late_interaction.ops.topk`) or as the bits of float64 scores and indices; then two notes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd

from late_interaction._group import Table
from late_interaction._search.selection import Found, has_kernels, select
from late_interaction.ops import topk
from late_interaction.ops._library import operators
from late_interaction.ops.topk import NOTES

# The notes of a process: the checksum of its queries, and whether its search has failed.
CHECKSUM, FAILED = 0, 1

_MODULUS = 1 << 50  # numbers below it are exact in float64


def packed(found: Found, first: int, width: int, largest: bool, tensors: Sequence[Tensor | None]) -> Tensor:
    """The payload of a process. first: what its indices become larger by. width: how many of each row it has
    room for. tensors: the queries, and what comes with them."""
    scores, indices = found
    with _AutoDispatchBelowAutograd():  # there is nothing to differentiate
        if scores.dtype == torch.float64:
            payload = _packed_float64(scores, indices + first, width)
        else:
            op = operators.pack_found.default if has_kernels(scores, 1) else topk.pack_found
            payload = op(scores.contiguous(), indices.contiguous(), first, width, largest)
        _add_checksum(payload[-NOTES:][CHECKSUM : CHECKSUM + 1], tensors)
    return payload


def failed(queries: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The payload of a process whose search has failed."""
    rows = 2 * queries if dtype == torch.float64 else queries
    payload = torch.zeros(rows * width + NOTES, dtype=torch.int64, device=device)
    payload[FAILED - NOTES] = 1
    return payload


def merged(
    rows: Tensor, queries: int, held: Sequence[int], k: int, largest: bool, dtype: torch.dtype
) -> tuple[Found, Tensor]:
    """The k best of the payloads of all processes, and their notes, [processes, 2]. held: how many documents
    of each row each process has found."""
    if dtype == torch.float64:
        return _merged_float64(rows, queries, held, k, largest), rows[:, -NOTES:]
    op = operators.merge_found.default if has_kernels(rows, min(k, sum(held))) else topk.merge_found
    with _AutoDispatchBelowAutograd():
        scores, indices, notes = op(rows, queries, min(k, sum(held)), largest)
    return (scores, indices), notes


def checksums(table: Sequence[Sequence[int]]) -> Table:
    """The checksums in the notes of all processes."""
    return [[float(row[CHECKSUM] % _MODULUS)] for row in table]


def _add_checksum(sum: Tensor, tensors: Sequence[Tensor | None]) -> None:
    """Adds a number that is the same for the same bits, for which nothing waits: of each tensor a sum of its
    bytes by place, times a power of 31."""
    kept = [x for x in tensors if x is not None and x.numel()]
    factor = 1
    for x in reversed(kept):
        data = x.detach().to(sum.device).contiguous()
        op = operators.add_checksum_.default if has_kernels(data, 1) else topk.add_checksum_
        op(sum, data, factor - (factor >> 63 << 64))  # as a signed integer of 64 bits
        factor = 31 * factor % (1 << 64)


def _packed_float64(scores: Tensor, indices: Tensor, width: int) -> Tensor:
    queries, n = scores.shape
    payload = torch.zeros(2 * queries * width + NOTES, dtype=torch.int64, device=scores.device)
    room = payload[:-NOTES].view(2, queries, width)
    room[0, :, :n] = scores.view(torch.int64)
    room[1, :, :n] = indices
    return payload


def _merged_float64(rows: Tensor, queries: int, held: Sequence[int], k: int, largest: bool) -> Found:
    scores, indices = rows[:, :-NOTES].view(len(rows), 2, queries, -1).unbind(1)
    every = [torch.cat([x[i, :, :n] for i, n in enumerate(held)], dim=-1) for x in (scores, indices)]
    return select(every[0].view(torch.float64), every[1], k, largest)
