"""Draw random numbers that are the same everywhere.

SplitMix64 (https://doi.org/10.1145/2714064.2660195) of a counter, in integers that wrap, and nothing that
rounds.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def _signed(word: int) -> int:
    word &= 2**64 - 1
    return word - 2**64 if word >> 63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    return x >> bits & (1 << 64 - bits) - 1


def _mixed(x: Tensor) -> Tensor:
    for bits, factor in _MIX:
        x = (x ^ _shifted(x, bits)) * _signed(factor)
    return x ^ _shifted(x, 31)


def words(seed: int, stream: int, count: int) -> Tensor:
    """Draw int64 ``[count]``, all 64 bits random. A stream's state is one word of ``seed``'s own."""
    start = _mixed(torch.tensor([_signed(seed + (stream + 1) * _GOLDEN)], device="cpu"))
    return _mixed(start + torch.arange(1, count + 1, device="cpu") * _signed(_GOLDEN))


def signs(seed: int, stream: int, count: int) -> Tensor:
    """Draw float32 ``[count]`` of +1 and -1: the highest bit of a word."""
    return (words(seed, stream, count) < 0).to(torch.float32) * -2 + 1


def below(seed: int, stream: int, count: int, limit: int) -> Tensor:
    """Draw int32 ``[count]`` in ``[0, limit)`` by the highest 31 bits of words; limit is below 2**31."""
    return (_shifted(words(seed, stream, count), 33) * limit >> 31).to(torch.int32)


def bell(seed: int, stream: int, count: int) -> Tensor:
    """Draw float32 ``[count]``, of mean 0 and variance 1 and nearly normal.

    Each is the sum of twelve uniform integers of 16 bits, which are those of three words.
    """
    fields = (
        words(seed, stream, 3 * count).view(count, 3).unsqueeze(-1) >> torch.arange(0, 64, 16, device="cpu")
        & 0xFFFF
    )
    return (fields.sum((1, 2)) - 6 * 0xFFFF).to(torch.float32) / 0x10000
