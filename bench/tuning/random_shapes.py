"""Random shapes for the sweep: log-uniform sizes, within what a peer's call should cost.

The Triton peers compile and tune once for each key of their autotuners: the query length rounded up (to
powers of two, or chunks of 128), the padded embedding dim, and the layout. Embedding dims come from a short
list and, away from the common 64 < d <= 128, query lengths from a few ranges, so keys repeat; within a
range, and in every size that is no key, any number may come up, odd and prime ones too.
"""

from __future__ import annotations

import math
import random

from bench.harness.shape import IN_BATCH, KD, PAIRS, Shape
from bench.peers.triton_tuning import padded_dim, padded_work

MAX_BYTES = 1.5e9  # of bf16 inputs
MAX_SIMILARITIES = 8e9
MAX_WORK = 1e12  # FLOPs with every size padded as tiles pad it: about 10 ms for a peer on an H200

_LAYOUTS = {IN_BATCH: 0.6, KD: 0.25, PAIRS: 0.15}
_DIMS = {
    8: 3, 24: 3, 48: 6, 64: 10, 96: 8, 100: 4, 128: 40, 200: 6, 320: 5, 512: 5, 768: 6, 1024: 4,
}  # fmt: skip
_ALL_LENGTHS = ((1, 1100),)
_FEW_LENGTHS = ((17, 32), (65, 128), (513, 1100))
# Beyond 512 tokens late-interaction-kernels unrolls the query loop of these layouts: minutes of compilation.
_OWN_DOCUMENTS_MAX_LQ = 512
# flash-maxsim tunes a single query for its exact length up to 128 tokens.
_SINGLE_LENGTHS = (7, 19, 32, 61, 128)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _query_length(rng: random.Random, layout: str, Nq: int, d: int) -> int:
    common = padded_dim(d) == 128
    longest = 1100 if layout == IN_BATCH else _OWN_DOCUMENTS_MAX_LQ
    ranges = [r for r in (_ALL_LENGTHS if common else _FEW_LENGTHS) if r[0] <= longest]
    low, high = rng.choice(ranges)
    Lq = _log_uniform(rng, low, min(high, longest))
    if layout == IN_BATCH and Nq == 1 and Lq <= 128:
        known = _SINGLE_LENGTHS if common else (32, 128)
        Lq = min(known, key=lambda length: abs(math.log(length / Lq)))
    return Lq


def _fits(shape: Shape) -> bool:
    return (
        shape.input_bytes(2) <= MAX_BYTES
        and shape.similarities <= MAX_SIMILARITIES
        and padded_work(shape) <= MAX_WORK
    )


def draw_shapes(count: int, seed: int = 0, small: bool = False) -> list[Shape]:
    """The same list for the same seed, whatever the machine. small: for a check of the harness itself."""
    rng = random.Random(seed)
    out: list[Shape] = []
    while len(out) < count:
        layout = rng.choices(list(_LAYOUTS), list(_LAYOUTS.values()))[0]
        d = rng.choices(list(_DIMS), list(_DIMS.values()))[0]
        Nq = _log_uniform(rng, 1, 4 if small else 512)
        Nd = 1 if layout == PAIRS else _log_uniform(rng, 1, 6 if small else 4096)
        Lq = min(_query_length(rng, layout, Nq, d), 9 if small else 1100)
        Ld = _log_uniform(rng, 1, 20 if small else 4100)
        shape = Shape(f"{seed}-{len(out):03d}", Nq, Nd, Lq, Ld, d, layout)
        if _fits(shape):
            out.append(shape)
    return out
