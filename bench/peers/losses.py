"""Contrastive losses as users write them, by each library: `cross_entropy(scores / temperature)`."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.harness.batches import TEMPERATURE, Loss
from bench.harness.library import EINSUM, INF_CL, LIK, OURS, UnsupportedError
from bench.harness.parity import GRADIENTS, SCORES
from bench.harness.shape import IN_BATCH, BatchShape, itemsize
from bench.peers.implementations import einsum_maxsim

TAIL = 2.0**-10
EXACT, WITH_TAIL = "contrastive_loss", "contrastive_loss, tail 2^-10"
LEAST = "contrastive_loss, kept_bytes=0"
SAVED, RECOMPUTED = "maxsim, winners saved", "maxsim, winners recomputed"
SCORED, MATMUL, INFINITE = "scores + cross_entropy", "matmul + cross_entropy", "cal_flash_loss"
ALL = (EXACT, LEAST, WITH_TAIL, SAVED, RECOMPUTED, SCORED, MATMUL, INFINITE)
KEPT_BY_DEFAULT = 512 << 20
MAX_SIMILARITY_BYTES = 40e9  # PyTorch keeps several tensors of that size
_32_BITS = 2**31


@dataclass(frozen=True)
class Method:
    """One way to the loss. `make` imports what it needs, and raises UnsupportedError for a batch that it
    cannot do."""

    impl: str
    variant: str
    make: Callable[[BatchShape], Loss]
    kept_bytes: Callable[[BatchShape], float]  # of the largest thing that stays for the backward
    limits: tuple[float, float] = (SCORES, GRADIENTS)  # of the errors of loss and gradients


def scores_to_loss(scores):
    labels = torch.arange(len(scores), device=scores.device)
    return F.cross_entropy(scores / TEMPERATURE, labels).float()


def _ours(shape, **options):
    li = importlib.import_module("late_interaction")

    def run(x):
        packs = x.cu_q is not None
        q, d = (li.Tokens.packed(x.Q, x.cu_q), li.Tokens.packed(x.D, x.cu_d)) if packs else (x.Q, x.D)
        return li.losses.contrastive(q, d, temperature=TEMPERATURE, **options)

    return run


def _least(shape):
    each = (4 if shape.packed else 2) * shape.Lq + 4
    if shape.Nq * shape.Nd * each > KEPT_BY_DEFAULT:
        raise UnsupportedError("contrastive_loss keeps nothing of this batch")
    return _ours(shape, kept_bytes=0)


def _maxsim(package, shape, **options):
    module = importlib.import_module(package)
    if not shape.packed:
        return lambda x: scores_to_loss(module.maxsim(x.Q, x.D, **options))
    if options:
        raise UnsupportedError("maxsim_varlen always saves its winners")
    own = ".lik" if package == "late_interaction" else ""
    varlen = importlib.import_module(f"{package}{own}.varlen").maxsim_varlen
    longest = {"max_seqlen_q": shape.Lq, "max_seqlen_d": shape.Ld}
    return lambda x: scores_to_loss(varlen(x.Q, x.D, x.cu_q, x.cu_d, **longest))


def _lik(shape):
    if shape.Nq * shape.Nd * shape.Lq >= _32_BITS:
        raise UnsupportedError("its kernels address winners with 32 bits")
    return _maxsim("late_interaction_kernels", shape)


def _einsum(shape):
    if shape.packed:
        raise UnsupportedError("no einsum of packed tokens")
    return lambda x: scores_to_loss(einsum_maxsim(x.Q, x.D, IN_BATCH))


def _matmul(shape):
    return lambda x: scores_to_loss(x.Q.squeeze(1) @ x.D.squeeze(1).T)


def _inf_cl(shape):
    loss = importlib.import_module("inf_cl").cal_flash_loss

    def run(x):
        rows = loss(x.Q.squeeze(1), x.D.squeeze(1), scale=1 / TEMPERATURE, head_dim=min(256, shape.d))
        return rows.mean()

    return run


def _winners(width):
    return lambda shape: width * shape.Nq * shape.Nd * shape.Lq


def _similarities(shape):
    size = shape.similarities * itemsize(torch.bfloat16)
    if size > MAX_SIMILARITY_BYTES:
        raise UnsupportedError(f"the similarity tensor alone takes {size / 1e9:.0f} GB")
    return size


def _nothing(shape):
    return 0.0


# Limits of errors. Rounding to bfloat16 moves logits by up to 0.1, Inf-CL's products are in TF32, a tail
# leaves out some of the gradient, and of single tokens the weights of pairs are rounded to bfloat16 as well.
_ROUNDED, _TF32, _TAILED, _WEIGHTS = (5e-2, 0.2), (SCORES, 2e-2), (SCORES, 2e-2), (SCORES, 6e-3)
_OURS = "late_interaction"
_METHODS = (
    Method(OURS, EXACT, _ours, _nothing),
    Method(OURS, LEAST, _least, _nothing),
    Method(OURS, WITH_TAIL, partial(_ours, tail=TAIL), _nothing, _TAILED),
    Method(OURS, SAVED, partial(_maxsim, _OURS), _winners(2)),
    Method(OURS, RECOMPUTED, partial(_maxsim, _OURS, winners="recompute"), _nothing),
    Method(LIK, SCORED, _lik, _winners(4)),
    Method(EINSUM, SCORED, _einsum, _similarities, _ROUNDED),
)
_SINGLE = (
    Method(OURS, EXACT, _ours, _nothing, _WEIGHTS),
    Method(OURS, SAVED, partial(_maxsim, _OURS), _winners(2)),
    Method(EINSUM, MATMUL, _matmul, _nothing, _ROUNDED),
    Method(INF_CL, INFINITE, _inf_cl, _nothing, _TF32),
)


def methods(shape):
    """The ways to the loss of this batch."""
    return _SINGLE if shape.Lq == shape.Ld == 1 else _METHODS
