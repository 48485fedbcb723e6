"""Winners, the argmax of each query token, as the operators keep them and as users see them.

Operators keep the unsigned 16-bit index in an int16 tensor (the sentinel, all ones, reads as -1) while a
document has at most 65,534 tokens, and int32 above that. Users see int32 with -1.
"""

import torch
from torch import Tensor

MAX_NARROW_LD = 65534


def winner_dtype(Ld: int) -> torch.dtype:
    return torch.int32 if Ld > MAX_NARROW_LD else torch.int16


def widen(winners: Tensor, Ld: int) -> Tensor:
    """Kept winners -> int32."""
    wide = winners.to(torch.int32)
    if Ld <= 32768 or Ld > MAX_NARROW_LD:
        return wide
    # An index above 32767 was read as negative; -1 stays the sentinel.
    return torch.where(wide < -1, wide + 65536, wide)


def narrow(argmax: Tensor, Ld: int) -> Tensor:
    """int32 (or any integer) argmax -> kept winners. Whatever is no token of the document becomes -1."""
    inside = (argmax >= 0) & (argmax < Ld)
    return torch.where(inside, argmax, -1).to(winner_dtype(Ld))
