"""Blocks of the sequences of :class:`~late_interaction.Tokens`.

Packed Tokens have int32 offsets here, and know their bounds: the same numbers on the host (a ``range`` if all
sequences have one length).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.packed import check_cover
from late_interaction._checks.tensors import as_dtype
from late_interaction.tokens import Tokens

Block = tuple[int, int]  # sequences from the first up to the second


def with_bounds(name: str, x: Tokens) -> Tokens:
    """Return packed sequences with bounds: the one wait for a device. ``name``: for messages."""
    assert x.offsets is not None
    if x._bounds is not None:
        return x
    on_host = x.offsets.cpu()
    if x.offsets.is_cuda:  # those of a CPU were checked when the Tokens were made
        check_cover(f"{name}.offsets", on_host, x.values.shape[0])
    offsets = as_dtype(x.offsets, torch.int32).contiguous()
    return Tokens._made(x.values, None, offsets, x._room, tuple(on_host.tolist()))


def with_values(x: Tokens, values: Any) -> Tokens:
    """Return the same sequences with other values; None: with no values, for :meth:`Call.bare`."""
    return Tokens._made(values, x.mask, x.offsets, x._room, x._bounds)


def zeroed(x: Tokens, sequences: Tensor) -> Tokens:
    """Zero the tokens of some sequences, bool ``[N]``."""
    if x.offsets is None or len(x) == 0:
        rows = sequences.view(-1, *[1] * (x.values.dim() - 1))
    else:
        token = torch.arange(x.values.shape[0], dtype=x.offsets.dtype, device=x.device)
        of_token = torch.bucketize(token, x.offsets[1:].contiguous(), right=True).clamp_max(len(x) - 1)
        rows = sequences[of_token].unsqueeze(1)
    return with_values(x, x.values.masked_fill(rows, 0.0))


def longest(x: Tokens) -> int:
    if x.offsets is None:
        return x.values.shape[1]
    if isinstance(x._bounds, range):
        return x._bounds.step if len(x) else 0
    return max((b - a for a, b in pairwise(x._bounds)), default=0)


def is_single(x: Tokens) -> bool:
    """Tell whether the sequences are padded to one token each."""
    return x.offsets is None and x.values.shape[1] == 1


def mean_bytes(x: Tokens) -> float:
    return x.values.numel() * x.values.itemsize / max(len(x), 1)


def rows(x: Tokens, block: Block) -> slice:
    return slice(*block) if x.offsets is None else slice(x._bounds[block[0]], x._bounds[block[1]])


def part(x: Tokens, block: Block) -> Tokens:
    """View the sequences of a block. The offsets of packed ones begin at 0 again."""
    begin, end = block
    if block == (0, len(x)):
        return x
    at = rows(x, block)
    if x.offsets is None:
        return Tokens._made(x.values[at], None if x.mask is None else x.mask[at])
    bounds = _moved(x._bounds[begin : end + 1], at.start)
    return Tokens._made(x.values[at], None, x.offsets[begin : end + 1] - at.start, None, bounds)


def _moved(bounds: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(bounds, range):
        return range(bounds.start - by, bounds.stop - by, bounds.step)
    return tuple(x - by for x in bounds)


def as_packed(x: Tokens) -> Tokens:
    """Return padded sequences without a mask as packed ones, without a copy if they are contiguous."""
    if x.offsets is not None:
        return x
    n, L, d = x.values.shape
    offsets = torch.arange(n + 1, dtype=torch.int32, device=x.values.device) * L
    bounds = range(0, (n + 1) * L, L) if L else (0,) * (n + 1)
    return Tokens._made(x.values.reshape(n * L, d), None, offsets, None, bounds)


def blocks_of(x: Tokens, most: int) -> list[Block]:
    """Split the sequences into blocks of about equal size, each of up to ``most`` of mean length."""
    n = len(x)
    if x.offsets is None:
        return even_blocks(n, most)
    bounds, found, begin = x._bounds, [], 0
    limit = max(1.0, most * bounds[-1] / max(n, 1))
    for end in range(1, n + 1):
        full = end < n and (bounds[end + 1] - bounds[begin] > limit or end - begin >= 4 * most)
        if full or end == n:
            found.append((begin, end))
            begin = end
    return found


def even_blocks(n: int, most: int) -> list[Block]:
    """Split ``n`` sequences into blocks of about equal size and at most ``most`` (at least 1)."""
    most = max(1, most)
    size = -(-n // -(-n // most)) if n else 1
    if size >= 64:
        size = min(most, -(-size // 32) * 32)  # whole tiles of query rows
    return [(begin, min(begin + size, n)) for begin in range(0, n, size)]
