"""Random shapes for `sweep` and `plans`: log-uniform sizes, within what a peer's call should cost.

The Triton peers compile and tune once for each key of their autotuners: the query length rounded up (to
powers of two, or chunks of 128), the padded embedding dim, and the layout. Embedding dims come from a short
list and, away from the common 64 < d <= 128, query lengths from a few ranges, so keys repeat; within a
range, and in every size that is no key, any number may come up, odd and prime ones too.
"""

import math
import random
import sys
from pathlib import Path

import torch

from bench.harness import results, run_header
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


def _log_uniform(rng, low, high):
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _query_length(rng, layout, Nq, d):
    common = padded_dim(d) == 128
    longest = 1100 if layout == IN_BATCH else _OWN_DOCUMENTS_MAX_LQ
    ranges = [r for r in (_ALL_LENGTHS if common else _FEW_LENGTHS) if r[0] <= longest]
    low, high = rng.choice(ranges)
    Lq = _log_uniform(rng, low, min(high, longest))
    if layout == IN_BATCH and Nq == 1 and Lq <= 128:
        known = _SINGLE_LENGTHS if common else (32, 128)
        Lq = min(known, key=lambda length: abs(math.log(length / Lq)))
    return Lq


def _fits(shape):
    return (
        shape.input_bytes(2) <= MAX_BYTES
        and shape.similarities <= MAX_SIMILARITIES
        and padded_work(shape) <= MAX_WORK
    )


def draw_shapes(count, seed=0, small=False):
    """The same list for the same seed, whatever the machine. small: for a check of the harness itself."""
    rng = random.Random(seed)
    out = []
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


# ---- the commands that measure them ----


def add_arguments(p, suite):
    p.add_argument("--count", type=int, default=300, help="shapes; default: 300")
    p.add_argument("--seed", type=int, default=0, help="of the shapes; default: 0")
    p.add_argument("--seconds", type=float, default=1e9, help="stop in time; --merge goes on later")
    p.add_argument("--out", type=Path, help=f"default: bench/results/{suite}-<device>.json")
    p.add_argument("--merge", action="store_true", help="keep what --out holds and measure what it lacks")
    p.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    run_header.add_capability(p)


def begin(args, suite):
    """The device, with its random numbers seeded, and the file of the record, which is `args.out` from then
    on."""
    device, name = torch.device("cpu"), "dry-run"
    if not args.dry_run:
        if not torch.cuda.is_available():
            print(f"{suite} needs a GPU; --dry-run checks the harness", file=sys.stderr)
            raise SystemExit(2)
        device = torch.device("cuda")
        name = results.slug(run_header.gpu_name(device))
    torch.manual_seed(args.seed)
    args.out = args.out or results.DIRECTORY / f"{suite}-{name}.json"
    return device, args.out
