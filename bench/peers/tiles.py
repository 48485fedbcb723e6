"""How the Triton peers pad a problem: what decides how long one of their calls takes."""

from __future__ import annotations

import math

from bench.harness.shape import Shape


def padded_dim(d: int) -> int:
    return 1 << (d - 1).bit_length()


def padded_work(shape: Shape) -> float:
    """FLOPs of the tiles that cover a shape, as the peers cut it."""
    Lq = 128 * math.ceil(shape.Lq / 128) if shape.Lq > 512 else max(32, 1 << (shape.Lq - 1).bit_length())
    Ld = 64 * math.ceil(shape.Ld / 64)
    return 2.0 * shape.Nq * shape.Nd * Lq * Ld * max(64, padded_dim(shape.d))
