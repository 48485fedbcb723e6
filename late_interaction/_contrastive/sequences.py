"""Tokens and lists as the losses over a batch take them: tensors with masks, or packed with offsets."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.tensors import check_has_d, check_mask
from late_interaction._scoring.sequences import as_tokens, is_sequences
from late_interaction.tokens import Tokens

NAMES = ("Q", "D", "hard_negatives")
_MASKS = {"Q": "q_mask", "D": "d_mask", "hard_negatives": "hard_negatives_mask"}
_OFFSETS = {"Q": "cu_seqlens_q", "D": "cu_seqlens_d", "hard_negatives": "cu_seqlens_h"}
Three = tuple[Any, Any, Any]


def as_tensors(
    tokens: Three, masks: Three, offsets: Three, names: tuple[str, str, str] = NAMES
) -> tuple[Three, Three, Three]:
    """Open Tokens and lists: all padded, unless one side is packed; then the others are packed, too.

    The third are documents of each query's own: as Tokens or a list ``Nq * K`` sequences, ``i * K + k``
    belonging to query ``i``.
    """
    for name, value in zip(names, offsets, strict=True):
        if value is not None:
            raise ValueError(
                f"{_OFFSETS[name]} must be None where others are Tokens or lists, got {abbreviate(value)}"
            )
    sides: list[Any] = []
    for name, x, mask in zip(names, tokens, masks, strict=True):
        beside = {_MASKS[name]: mask} if is_sequences(x) else {}
        sides.append(None if x is None and name not in ("Q", "D") else as_tokens(name, x, **beside))
    if isinstance(sides[2], Tokens):
        _check_each(names[2], len(sides[2]), len(sides[0]))
    if not any(isinstance(x, Tokens) and x.is_packed for x in sides):
        return _padded(sides, masks)
    packed = [None if x is None else _packed(names[i], x, masks[i], i == 2) for i, x in enumerate(sides)]
    values = [None if x is None else x.values for x in packed]
    found = [None if x is None else x.offsets for x in packed]
    return (values[0], values[1], values[2]), (None, None, None), (found[0], found[1], found[2])


def _padded(sides: list[Any], masks: Three) -> tuple[Three, Three, Three]:
    found = [
        (x.values, x.mask) if isinstance(x, Tokens) else (x, m) for x, m in zip(sides, masks, strict=True)
    ]
    H, h_mask = found[2]
    if isinstance(sides[2], Tokens):
        of_each = len(sides[0]), len(H) // max(len(sides[0]), 1)
        H, h_mask = (x if x is None else x.unflatten(0, of_each) for x in (H, h_mask))
    return (found[0][0], found[1][0], H), (found[0][1], found[1][1], h_mask), (None, None, None)


def _check_each(name: str, documents: int, queries: int) -> None:
    if documents != documents // max(queries, 1) * queries:
        raise ValueError(
            f"{name} must hold as many documents for each of the {queries} queries, got {documents} in all"
        )


def _packed(name: str, x: Any, mask: Any, own: bool) -> Tokens:
    """One side packed. The host waits for a mask on a GPU, as the losses do for offsets."""
    if isinstance(x, Tokens):
        return x.pack()
    if x.dim() != 3 + own:
        wanted = "[Nq, K, L, d]" if own else "[B, L, d]"
        raise ValueError(f"{name} must be {wanted}, Tokens or a list, got {shape_of(x)}")
    check_has_d(name, x)
    mask = check_mask(_MASKS[name], mask, name, x)
    return Tokens._made(x.flatten(0, -3), None if mask is None else mask.flatten(0, -2)).pack()


def device_of(tokens: Three) -> torch.device:
    """The device of what came, of whatever kind it is."""
    for x in tokens:
        first = x[0] if is_sequences(x) and not isinstance(x, Tokens) else x
        if isinstance(first, (Tensor, Tokens)):
            return first.device
    return torch.device("cpu")
