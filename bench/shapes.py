"""What is measured: the named shapes, and the least time each one could take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

IN_BATCH = "in-batch"  # D [Nd, Ld, d]: every query meets every document
KD = "kd"  # D [Nq, K, Ld, d]: each query meets its own K documents; Nd holds K
PAIRS = "pairs"  # D [Nq, Ld, d]: query i meets document i; Nd is 1


@dataclass(frozen=True)
class Shape:
    """One problem size. Nd is the number of documents that each query meets (K for kd, 1 for pairs)."""

    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    d: int = 128
    layout: str = IN_BATCH
    compiled: bool = False  # torch.compile costs seconds a shape: the default run takes it on these alone

    @property
    def documents(self) -> int:
        """Distinct documents in D."""
        return self.Nd if self.layout == IN_BATCH else self.Nq * self.Nd

    @property
    def q_shape(self) -> tuple[int, ...]:
        return (self.Nq, self.Lq, self.d)

    @property
    def d_shape(self) -> tuple[int, ...]:
        if self.layout == KD:
            return (self.Nq, self.Nd, self.Ld, self.d)
        return (self.documents, self.Ld, self.d)

    @property
    def scores_shape(self) -> tuple[int, ...]:
        return (self.Nq,) if self.layout == PAIRS else (self.Nq, self.Nd)

    @property
    def winners_shape(self) -> tuple[int, int, int]:
        return (self.Nq, self.Nd, self.Lq)

    @property
    def similarities(self) -> int:
        """Elements of the similarity tensor that PyTorch would build."""
        return self.Nq * self.Nd * self.Lq * self.Ld

    @property
    def flops(self) -> int:
        """Multiply-adds of the similarities, counted as two operations each."""
        return 2 * self.similarities * self.d

    def input_bytes(self, itemsize: int) -> int:
        return (self.Nq * self.Lq + self.documents * self.Ld) * self.d * itemsize

    def bytes_moved(self, op: str, itemsize: int) -> int:
        """The fewest bytes of device memory: every input read once, every output written once."""
        tokens = self.input_bytes(itemsize)
        scores = 4 * self.Nq * self.Nd
        if op == "fwd":
            return tokens + scores
        if op == "fwd+bwd":  # scores out, grad_scores in, both gradients out
            return 2 * tokens + 2 * scores
        # Backward alone reads each winning row of D once at most, and the winners in 2 bytes.
        winners = self.Nq * self.Nd * self.Lq
        rows_read = min(winners, self.documents * self.Ld)
        read = (self.Nq * self.Lq + rows_read) * self.d * itemsize + 2 * winners + scores
        return read + tokens

    def arithmetic(self, op: str) -> int:
        """Operations that no implementation avoids. A backward only touches winners."""
        backward = 4 * self.Nq * self.Nd * self.Lq * self.d
        return {"fwd": self.flops, "fwd+bwd": self.flops + backward, "bwd": backward}[op]

    def floor_us(self, op: str, itemsize: int, flops_per_s: float, bytes_per_s: float) -> float:
        """The larger of the two times that the hardware needs."""
        compute = self.arithmetic(op) / flops_per_s
        memory = self.bytes_moved(op, itemsize) / bytes_per_s
        return 1e6 * max(compute, memory)


@dataclass(frozen=True)
class HiddenShape(Shape):
    """Documents are hidden states [Nd, Ld, d_model], projected to d."""

    d_model: int = 768

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        return (self.Nd, self.Ld, self.d_model)

    @property
    def flops(self) -> int:
        return super().flops + 2 * self.Nd * self.Ld * self.d * self.d_model

    def input_bytes(self, itemsize: int) -> int:
        return (self.Nq * self.Lq * self.d + (self.Nd * self.Ld + self.d) * self.d_model) * itemsize


@dataclass(frozen=True)
class PairShape(Shape):
    """Packed queries and documents of up to Lq and Ld tokens, and how many pairs of them are listed."""

    pairs: int = 0
    even: bool = False  # all of Lq and Ld tokens


# What a batch never holds: documents of a million tokens, a query of 32k, rows of 4096. Forward and step.
LONG = (
    Shape("million-1x1", 1, 1, 32, 1_000_000),
    Shape("million-64x4", 64, 4, 32, 1_000_000),
    Shape("query-32k", 1, 64, 32768, 1024),
    Shape("d4096", 64, 64, 32, 300, d=4096),
)

FORWARD = (
    Shape("text-short", 1, 1000, 32, 300, compiled=True),
    Shape("text-long", 1, 1000, 32, 1024),
    Shape("colpali-rerank", 1, 1000, 128, 1024),
    Shape("corpus-10k", 1, 10000, 32, 300),
    Shape("very-long", 1, 500, 32, 4096),
    Shape("rerank-lq1024", 1, 1000, 1024, 1024),
    Shape("train-32", 32, 32, 32, 300),
    Shape("train-128", 128, 128, 32, 300, compiled=True),
    Shape("train-256", 256, 256, 32, 300),
    Shape("colpali-128", 128, 128, 32, 1030),
    Shape("colpali-lq128", 128, 128, 128, 1024, compiled=True),
    Shape("longq-64", 64, 64, 1030, 1030),
    Shape("edge-d48", 1, 4000, 32, 2048, d=48),
    Shape("edge-d64", 1, 10000, 32, 300, d=64),
    Shape("large-d512", 1, 1000, 32, 300, d=512),
    Shape("d768", 64, 64, 32, 300, d=768),
    Shape("kd-256x16", 256, 16, 32, 1030, layout=KD),
    *LONG,
)

# What bounds a forward of scores alone; the suites beside the plain forward take some of these.
COMPUTE_BOUND = (
    "train-128", "train-256", "colpali-128", "colpali-lq128", "longq-64", "rerank-lq1024", "d768",
)  # fmt: skip
READ_BOUND = (
    "text-long", "corpus-10k", "very-long", "edge-d48", "edge-d64", "large-d512", "kd-256x16",
)  # fmt: skip
VARIANTS = (*COMPUTE_BOUND, "text-long", "corpus-10k")
FP32 = ("train-256", "colpali-128", "colpali-lq128", "longq-64", "d768", "text-long")
QUANTIZED = ("train-256", "colpali-128", "colpali-lq128", "longq-64", "text-long", "corpus-10k")

# Packed: Lq and Ld are those of the longest. Where each query has its own documents they are padded as well.
VARLEN = (
    Shape("varlen-128", 128, 128, 32, 1024),
    Shape("varlen-rerank-10k", 1, 10000, 32, 512),
    Shape("varlen-own-128x32", 128, 32, 32, 512, layout=KD),
)
# Listed pairs: each document with a query of 100; all there are of a dense batch, and a tenth of those; and
# one query with documents that lie anywhere.
PAIR_LISTS = (
    PairShape("pairs-10k", 100, 10000, 32, 512, pairs=10000),
    PairShape("pairs-grid", 128, 128, 32, 300, pairs=128 * 128, even=True),
    PairShape("pairs-tenth", 128, 128, 32, 300, pairs=1638, even=True),
    PairShape("direct-10k", 1, 10000, 32, 512, pairs=10000),
)

TRAINING = (
    Shape("train-32", 32, 32, 32, 300, compiled=True),
    Shape("pylate-256", 256, 256, 32, 300, compiled=True),
    Shape("pylate-512", 512, 512, 32, 300),
    Shape("colpali-128", 128, 128, 32, 1030),
    Shape("colpali-lq128", 128, 128, 128, 1024),
    Shape("longq-64", 64, 64, 1030, 1030),
    Shape("kd-128x8", 128, 8, 32, 1030, layout=KD, compiled=True),
    Shape("kd-256x16", 256, 16, 32, 1030, layout=KD),
    Shape("pairs-256", 256, 1, 32, 1030, layout=PAIRS),
)
COMPILED_STEPS = ("train-32", "kd-128x8", "pairs-256", "tiny-pairs")  # of ours, one of each layout

# Residual-compressed documents, of so many bits a bucket.
PLAID = (
    Shape("plaid-2", 1, 10000, 32, 300),
    Shape("plaid-4", 1, 10000, 32, 512),
    Shape("plaid-million-2", 1, 1_000_000, 32, 128),
)
FUSED_HEAD = (
    HiddenShape("head-32x128", 32, 128, 32, 1024),
    HiddenShape("head-32x512", 32, 512, 32, 2048),
    HiddenShape("head-128x128", 128, 128, 32, 512),
    HiddenShape("head-rerank", 1, 1000, 32, 300),
)
RETRIEVE = (
    Shape("retrieve-100k", 16, 100_000, 32, 128),
    Shape("retrieve-one-100k", 1, 100_000, 32, 128),  # bound by reading
    Shape("retrieve-host-40k", 16, 40_000, 32, 128),
    Shape("retrieve-fp8-million", 16, 1_000_000, 32, 128),
)
# Whole losses: a head with explicit negatives, and a contrastive one taken in chunks.
_CHUNKED = (
    (64, 2048), (64, 4096), (64, 8192), (128, 2048), (128, 4096), (128, 8192), (256, 2048), (256, 4096),
    (256, 8192),
)  # fmt: skip
HEADS = (
    Shape("negatives-64x4", 64, 4, 32, 1030, layout=KD),
    Shape("negatives-128x4", 128, 4, 32, 1030, layout=KD),
    Shape("negatives-128x8", 128, 8, 32, 1030, layout=KD),
    Shape("negatives-256x8", 256, 8, 32, 1030, layout=KD),
    Shape("negatives-256x16", 256, 16, 32, 1030, layout=KD),
    *(Shape(f"chunked-{batch}x{Ld}", batch, batch, 128, Ld) for batch, Ld in _CHUNKED),
)

CPU = (
    Shape("cpu-text", 1, 1000, 32, 300),
    Shape("cpu-long", 1, 200, 32, 1024),
    Shape("cpu-lq128", 1, 200, 128, 1024),
)

CPU_TRAINING = (Shape("cpu-train", 32, 32, 32, 300),)

# The same code paths in milliseconds, for a check of the harness itself.
TINY_FORWARD = (Shape("tiny-rerank", 1, 6, 5, 7, d=16, compiled=True), Shape("tiny-batch", 3, 4, 5, 7, d=16))
TINY_TRAINING = (
    Shape("tiny-steps", 24, 20, 5, 17, d=16),
    Shape("tiny-kd", 24, 20, 5, 17, d=16, layout=KD),
    Shape("tiny-pairs", 480, 1, 5, 17, d=16, layout=PAIRS),
)
# Too long for winners of two bytes, and for documents of a skew.
TINY_LONG = Shape("tiny-long", 12, 1, 5, 70_000, d=16)
TINY_VARLEN = (*TINY_FORWARD, Shape("tiny-own", 3, 4, 5, 7, d=16, layout=KD))
TINY_PLAID = (Shape("tiny-plaid-2", 1, 6, 5, 7, d=16), Shape("tiny-plaid-4", 1, 6, 5, 7, d=16))
TINY_FUSED_HEAD = (HiddenShape("tiny-head", 16, 12, 5, 17, d=16, d_model=24),)
TINY_PAIR_LISTS = (
    PairShape("tiny-list", 3, 4, 5, 7, d=16, pairs=9),
    PairShape("tiny-grid", 3, 4, 5, 7, d=16, pairs=12, even=True),
    PairShape("tiny-direct", 1, 6, 5, 7, d=16, pairs=6),
)
TINY_RETRIEVE = (
    Shape("tiny-retrieve", 3, 40, 5, 7, d=16),
    Shape("tiny-retrieve-fp8", 3, 40, 5, 7, d=16),
)
TINY_HEADS = (
    Shape("tiny-negatives", 3, 2, 5, 7, d=16, layout=KD),
    Shape("tiny-chunked", 33, 33, 5, 7, d=16),
)


def select(shapes: Iterable[Shape], names: Iterable[str]) -> list[Shape]:
    """The shapes whose name holds one of `names`; all of them when there are none."""
    wanted = list(names)
    return [s for s in shapes if not wanted or any(w in s.name for w in wanted)]


def named(names: Iterable[str]) -> list[Shape]:
    """The forward shapes of exactly these names."""
    by_name = {s.name: s for s in FORWARD}
    return [by_name[name] for name in names]


def itemsize(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()
