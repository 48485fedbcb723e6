"""Winners, the argmax of each query token, as the operators keep them and as users see them.

Operators keep the unsigned 16-bit index in an int16 tensor (the sentinel, all ones, reads as -1) while a
document has at most 65,534 tokens, and int32 above that. Users see int32 with -1.
"""

from typing import Any

import torch
from torch import Tensor

MAX_NARROW_LD = 65534


def winner_dtype(Ld: int) -> torch.dtype:
    """Return the dtype that holds winners among so many document tokens."""
    if not isinstance(Ld, int):
        Ld = _bounded(Ld)
    return torch.int32 if Ld > MAX_NARROW_LD else torch.int16


def _bounded(Ld: torch.SymInt) -> Any:
    """Bound a length that is a symbol.

    If it depends on data, the traced graph asserts that the narrow form holds it.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true  # slow to import

    if guard_or_true(Ld > MAX_NARROW_LD) and not guard_or_false(Ld > MAX_NARROW_LD):
        torch._check(Ld <= MAX_NARROW_LD)
        return 0
    return Ld


def packed_winner_dtype(tokens: int) -> torch.dtype:
    """Return the dtype of winners of documents that are packed in so many tokens.

    If the number depends on data, a traced graph takes the wide form: only operators read these winners, and
    it always holds them.
    """
    if not isinstance(tokens, int):
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return torch.int32 if guard_or_true(tokens > MAX_NARROW_LD) else torch.int16
    return winner_dtype(tokens)


def widen(winners: Tensor, Ld: int) -> Tensor:
    wide = winners.to(torch.int32)
    if Ld <= 32768 or Ld > MAX_NARROW_LD:
        return wide
    # An index above 32767 was read as negative; -1 stays the sentinel.
    return torch.where(wide < -1, wide + 65536, wide)


def narrow(argmax: Tensor, Ld: int) -> Tensor:
    """Convert an argmax of any integer dtype to kept winners. An index of no token becomes -1."""
    inside = (argmax >= 0) & (argmax < Ld)
    return torch.where(inside, argmax, -1).to(winner_dtype(Ld))
