"""The operators that choose the best documents of a search, and those for what its processes exchange.

``select_best(scores, indices, first, found_scores, found_indices, k, largest) -> (scores, indices)``
    The best of each row of float32 ``scores`` ``[rows, columns]``, whose documents are ``indices``, or those
    from ``first`` on where that is None, and of ``found_scores`` and ``found_indices`` ``[rows, found]``,
    where they are given. Sorted; of equal scores the lower index comes first. A score of NaN or an index
    below 0 is no document: it comes behind all others, as the worst score (-inf, or inf) and -1.
``pack_found(scores, indices, width, size, notes, largest) -> packed``
    A process's payload, int64 ``[size]``: for each row the keys of the documents that it found, then keys of
    no document up to ``width``; then zeros; at the end the notes.
``add_checksum_(packed, place, x, factor)``
    Adds ``factor`` times the sum of all bytes of ``x``, each times its place from 1 to 8191 and from 1 again,
    to ``packed[place]``.
``merge_found(packed, rows, width, notes, k, largest) -> (scores, indices, notes)``
    The best of each row of what all processes packed, ``[processes, size]``, and their notes. A process's
    first note is how many documents it has: indices are those among the documents of all processes. Behind
    the last document stand the worst score and -1.

A key is an int64 of a float32 score and an index: the better document has the larger one. Here are the CPU's
kernels. On CUDA ``k`` is at most :data:`MOST_BEST`; the functions here serve more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from late_interaction.ops._arguments import check_tensor
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import fake_nothing, register_helper

# An index is part of a key of 64 bits.
MOST_DOCUMENTS = 1 << 32
# The kernels on CUDA choose at most so many, from so many processes (csrc/cuda/topk/kernels.h).
MOST_BEST = 1024
MOST_PROCESSES = 1024

_LOW = MOST_DOCUMENTS - 1
_NO_DOCUMENT = -(1 << 63)
_WEIGHTS = 8191
_SCORES, _KEYS = (torch.float32,), (torch.int64,)
_Found = tuple[Tensor, Tensor]


# ---- keys ----


def keys_of(scores: Tensor, indices: Tensor, largest: bool) -> Tensor:
    """Make integers of scores and indices that order as the scores do, best first."""
    rising = _by_magnitude((scores + 0.0).view(torch.int32)).to(torch.int64)  # one zero
    keys = ((rising if largest else ~rising) << 32) | (_LOW - indices)
    return keys.masked_fill_(scores.isnan() | (indices < 0), _NO_DOCUMENT)


def found_in(keys: Tensor, largest: bool) -> _Found:
    upper = (keys >> 32).to(torch.int32)
    scores = _by_magnitude(upper if largest else ~upper).view(torch.float32)
    missing = keys == _NO_DOCUMENT
    worst = -torch.inf if largest else torch.inf
    return scores.masked_fill_(missing, worst), (_LOW - (keys & _LOW)).masked_fill_(missing, -1)


def _by_magnitude(bits: Tensor) -> Tensor:
    """Turn the bits of a float32 to an integer that compares as the float does; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# ---- the CPU's kernels, which serve any device ----


def select_best(
    scores: Tensor, indices: Tensor | None, first: int, found_scores: Tensor | None,
    found_indices: Tensor | None, k: int, largest: bool,
) -> _Found:  # fmt: skip
    check_tensor("scores", scores, (None, None), _SCORES)
    check_tensor("indices", indices, scores.shape, _KEYS, scores)
    if k < 1:
        raise RuntimeError(f"late_interaction: k must be at least 1, got {k}")
    if (found_scores is None) != (found_indices is None):
        raise RuntimeError("late_interaction: found_scores and found_indices must come together")
    if found_scores is not None:
        check_tensor("found_scores", found_scores, (len(scores), None), _SCORES, scores)
        check_tensor("found_indices", found_indices, found_scores.shape, _KEYS, scores)
    if indices is None:
        indices = torch.arange(first, first + scores.shape[1], device=scores.device)
    keys = keys_of(scores, indices, largest)
    if found_scores is not None and found_indices is not None:
        keys = torch.cat((keys_of(found_scores, found_indices, largest), keys), dim=1)
    return found_in(keys.topk(min(k, keys.shape[1]), dim=1).values, largest)


def pack_found(
    scores: Tensor, indices: Tensor, width: int, size: int, notes: Sequence[int], largest: bool
) -> Tensor:
    check_tensor("scores", scores, (None, None), _SCORES)
    check_tensor("indices", indices, scores.shape, _KEYS, scores)
    rows, found = scores.shape
    if width < found:
        raise RuntimeError(f"late_interaction: width must be at least {found}, got {width}")
    if size < rows * width + len(notes):
        raise RuntimeError(f"late_interaction: size must be at least that of keys and notes, got {size}")
    packed = torch.zeros(size, dtype=torch.int64, device=scores.device)
    keys = packed[: rows * width].view(rows, width)
    keys[:, :found] = keys_of(scores, indices, largest)
    keys[:, found:] = _NO_DOCUMENT
    packed[size - len(notes) :] = torch.tensor(notes, dtype=torch.int64, device=scores.device)
    return packed


def add_checksum_(packed: Tensor, place: int, x: Tensor, factor: int) -> None:
    check_tensor("packed", packed, (None,), _KEYS, x, contiguous=True)
    check_tensor("x", x, None, (x.dtype,))
    if not 0 <= place < len(packed):
        raise RuntimeError(f"late_interaction: place must lie in packed, got {place}")
    if x.numel():
        data = x.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
        weights = torch.arange(data.numel(), device=data.device) % _WEIGHTS + 1
        packed[place] += (data * weights).sum() * factor


def merge_found(
    packed: Tensor, rows: int, width: int, notes: int, k: int, largest: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_tensor("packed", packed, (None, None), _KEYS)
    processes, size = packed.shape
    if processes < 1 or min(rows, width) < 0 or notes < 1 or size < rows * width + notes:
        raise RuntimeError(
            f"late_interaction: packed must hold {width} keys of each of {rows} rows, and {notes} notes"
        )
    if not 0 <= k <= processes * width:
        raise RuntimeError(f"late_interaction: k must be at most {processes * width}, got {k}")
    of_all = packed[:, size - notes :].contiguous()
    first = (of_all[:, 0].cumsum(0) - of_all[:, 0]).view(-1, 1, 1)
    keys = packed[:, : rows * width].view(processes, rows, width)
    keys = torch.where(keys == _NO_DOCUMENT, keys, keys - first)  # which hold the complement of the index
    every = keys.transpose(0, 1).reshape(rows, processes * width)
    return *found_in(every.topk(k, dim=1).values, largest), of_all


# ---- shapes ----


def _fake_select(scores: Tensor, found_scores: Tensor | None, k: int, **_: Any) -> _Found:
    found = 0 if found_scores is None else found_scores.shape[1]
    return _fake_best(scores, scores.shape[0], torch.sym_min(k, scores.shape[1] + found))


def _fake_best(like: Tensor, rows: int, k: int) -> _Found:
    shape = (rows, k)
    return like.new_empty(shape, dtype=torch.float32), like.new_empty(shape, dtype=torch.int64)


def _fake_pack(indices: Tensor, size: int, **_: Any) -> Tensor:
    return indices.new_empty(size)


def _fake_merge(packed: Tensor, rows: int, notes: int, k: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_best(packed, rows, k), packed.new_empty(packed.shape[0], notes)


for _op, _kernel, _fake in (
    (operators.select_best.default, select_best, _fake_select),
    (operators.pack_found.default, pack_found, _fake_pack),
    (operators.add_checksum_.default, add_checksum_, fake_nothing),
    (operators.merge_found.default, merge_found, _fake_merge),
):
    register_helper(_op, _fake)
    library.impl(_op, _kernel, "CPU")
