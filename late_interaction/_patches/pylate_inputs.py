"""PyLate's way with masks and lists."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def masked(
    score: Callable[..., Tensor], Q: Tensor, D: Tensor, queries_mask: Any, documents_mask: Any
) -> Tensor:
    """Return the scores of tokens that are multiplied by their masks."""
    Q, q_mask = _multiplied(Q, queries_mask)
    D, d_mask = _multiplied(D, documents_mask)
    return score(Q, D, q_mask, d_mask)


def _multiplied(tokens: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
    """Tokens whose similarities are as if multiplied by the mask, which is PyLate's way, and what to visit.

    Masked tokens are all 0 now. One of a sequence is visited: it wins if all others are negative.
    """
    if mask is None:
        return tokens, None
    mask = torch.broadcast_to(tensor(mask), tokens.shape[:-1])
    live = mask != 0
    visited = live.scatter(-1, live.to(torch.uint8).argmin(-1, keepdim=True), True)
    return tokens * mask.to(tokens.dtype).unsqueeze(-1), visited


def tensor(x: Any) -> Tensor:
    """Make a tensor of what PyLate makes one of."""
    convert: Callable[[Any], Tensor] = importlib.import_module("pylate.utils.tensor").convert_to_tensor
    return convert(x)


def tensors(Q: Any, D: Any) -> tuple[Tensor, Tensor] | None:
    """Make tensors of queries and documents; return None where lengths differ."""
    try:
        return tensor(Q), tensor(D)
    except (RuntimeError, ValueError):  # unequal lengths, which PyLate's own function takes one by one
        return None
