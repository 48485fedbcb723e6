"""The problem sizes that suites measure, by name."""

from bench.harness.shape import KD, PAIRS, BatchShape, HiddenShape, PairShape, Shape

# Longer than any batch: documents of a million tokens, a query of 32k, rows of 4096.
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

# Documents of up to 64 tokens: titles, products, questions. The lengths from 1 to 64 lie on both sides of
# whole eights, which tiles of the kernels are cut to.
SHORT_TRAINING = (
    Shape("short-train-24", 256, 256, 16, 24),
    Shape("short-64x4096", 64, 4096, 16, 24),
    Shape("short-256x1024", 256, 1024, 32, 48),
    Shape("short-d96", 64, 2000, 32, 17, d=96),
    Shape("short-long-queries", 17, 2000, 513, 17, d=96),
    Shape("short-one-24", 1, 20000, 16, 24),
    Shape("short-one-64", 1, 20000, 32, 64),
)
SHORT = (
    *SHORT_TRAINING,
    *(Shape(f"short-{Ld}", 128, 1024, 32, Ld) for Ld in (1, 4, 8, 9, 16, 17, 24, 32, 33, 40, 48, 56, 57, 64)),
)

# Shapes of FORWARD of other suites.
VARIANTS = (
    *("train-128", "train-256", "colpali-128", "colpali-lq128", "longq-64", "rerank-lq1024", "d768"),
    *("text-long", "corpus-10k"),
)
FP32 = ("train-256", "colpali-128", "colpali-lq128", "longq-64", "d768", "text-long")
QUANTIZED = ("train-256", "colpali-128", "colpali-lq128", "longq-64", "text-long", "corpus-10k")

# Packed batches: Lq and Ld are the longest lengths. The kd layout and a single query are padded as well.
VARLEN = (
    Shape("varlen-128", 128, 128, 32, 1024),
    Shape("varlen-rerank-10k", 1, 10000, 32, 512),
    Shape("varlen-own-128x32", 128, 32, 32, 512, layout=KD),
)
# Listed pairs: each of 10,000 documents with one of 100 queries; every pair of a dense batch, and a tenth of
# them; and one query with documents in no order.
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
COMPILED_STEPS = ("train-32", "kd-128x8", "pairs-256", "tiny-pairs")  # our training step, for each layout

# Batches whose steps wait for the host, and one that does not.
HOST = tuple(Shape(f"host-{n}", n, n, 32, 300) for n in (32, 64, 128, 256))

# Residual-compressed documents; the name ends in the bits of a bucket.
RAGGED = (Shape("ragged-60k", 1, 60_000, 32, 128), Shape("ragged-60k-16", 16, 60_000, 32, 128))
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
    Shape("retrieve-one-100k", 1, 100_000, 32, 128),  # memory-bound
    Shape("retrieve-host-40k", 16, 40_000, 32, 128),
    Shape("retrieve-fp8-million", 16, 1_000_000, 32, 128),
)
# Whole losses: a head with explicit negatives, and a contrastive loss in chunks.
_NEGATIVES = ((64, 4), (128, 4), (128, 8), (256, 8), (256, 16))
HEADS = (
    *(Shape(f"negatives-{B}x{n}", B, n, 32, 1030, layout=KD) for B, n in _NEGATIVES),
    *(Shape(f"chunked-{B}x{Ld}", B, B, 128, Ld) for B in (64, 128, 256) for Ld in (2048, 4096, 8192)),
)

# Contrastive losses of whole batches; those in LARGE_BATCHES take minutes.
BATCHES = (
    BatchShape("batch-512", 512, 512, 32, 180),
    BatchShape("batch-2048", 2048, 2048, 32, 180),
    BatchShape("packed-2048", 2048, 2048, 32, 180, packed=True),
    BatchShape("batch-8192", 8192, 8192, 32, 180),
    BatchShape("batch-16384", 16384, 16384, 32, 180),
    BatchShape("single-2048", 2048, 2048, 1, 1, d=512),
    BatchShape("single-16384", 16384, 16384, 1, 1, d=512),
)
LARGE_BATCHES = (
    BatchShape("batch-65536", 65536, 65536, 32, 180),
    BatchShape("single-65536", 65536, 65536, 1, 1, d=512),
)

# XTR scores, which select from all document tokens of a batch.
XTR = (
    Shape("xtr-32", 32, 32, 32, 300),
    Shape("xtr-64", 64, 64, 32, 180),
    Shape("xtr-256", 256, 256, 32, 300),
    Shape("xtr-128x1024", 128, 1024, 32, 300),
)

SMOOTH = (
    Shape("smooth-64", 64, 64, 32, 180),
    Shape("smooth-256", 256, 256, 32, 300),
    Shape("smooth-128", 128, 128, 32, 1030),
)

CPU = (
    Shape("cpu-text", 1, 1000, 32, 300),
    Shape("cpu-long", 1, 200, 32, 1024),
    Shape("cpu-lq128", 1, 200, 128, 1024),
    Shape("cpu-passage", 1, 2000, 32, 100),
    Shape("cpu-title", 1, 5000, 32, 24),
)

CPU_TRAINING = (Shape("cpu-train", 32, 32, 32, 300),)
# Weaviate reports its time a candidate for one core in this shape (its pull request 12443).
CPU_CORPUS = (Shape("cpu-corpus", 1, 2000, 32, 100),)
CPU_THREADS = tuple(s for s in CPU if s.name in ("cpu-text", "cpu-lq128"))
CPU_SMALL = tuple(Shape(f"cpu-small-{n}", 1, n, 32, 100) for n in (1, 10, 100, 1000))
CPU_ISA = tuple(s for s in CPU if s.name in ("cpu-text", "cpu-lq128", "cpu-title"))

# For a dry run: the same code paths in milliseconds.
TINY_FORWARD = (Shape("tiny-rerank", 1, 6, 5, 7, d=16, compiled=True), Shape("tiny-batch", 3, 4, 5, 7, d=16))
TINY_TRAINING = (
    Shape("tiny-steps", 24, 20, 5, 17, d=16),
    Shape("tiny-kd", 24, 20, 5, 17, d=16, layout=KD),
    Shape("tiny-pairs", 480, 1, 5, 17, d=16, layout=PAIRS),
)
# Too long for winners of two bytes, and for skewed inputs.
TINY_LONG = Shape("tiny-long", 12, 1, 5, 70_000, d=16)
TINY_SHORT = (Shape("tiny-short", 48, 40, 9, 9, d=32),)
TINY_VARLEN = (*TINY_FORWARD, Shape("tiny-own", 3, 4, 5, 7, d=16, layout=KD))
TINY_PLAID = (Shape("tiny-plaid-2", 1, 6, 5, 7, d=16), Shape("tiny-plaid-4", 1, 6, 5, 7, d=16))
TINY_FUSED_HEAD = (HiddenShape("tiny-head", 16, 12, 5, 17, d=16, d_model=24),)
TINY_PAIR_LISTS = (
    PairShape("tiny-list", 3, 4, 5, 7, d=16, pairs=9),
    PairShape("tiny-grid", 3, 4, 5, 7, d=16, pairs=12, even=True),
    PairShape("tiny-direct", 1, 6, 5, 7, d=16, pairs=6),
)
TINY_RETRIEVE = (Shape("tiny-retrieve", 3, 40, 5, 7, d=16), Shape("tiny-retrieve-fp8", 3, 40, 5, 7, d=16))
TINY_HEADS = (Shape("tiny-negatives", 3, 2, 5, 7, d=16, layout=KD), Shape("tiny-chunked", 33, 33, 5, 7, d=16))
TINY_BATCHES = (
    BatchShape("tiny-batch-12", 12, 12, 5, 17, d=16),
    BatchShape("tiny-packed", 12, 12, 5, 17, d=16, packed=True),
    BatchShape("tiny-single", 12, 12, 1, 1, d=16),
)
TINY_HOST = (Shape("tiny-host", 12, 12, 5, 17, d=16),)
TINY_XTR = (Shape("tiny-xtr", 12, 40, 5, 17, d=16),)
TINY_SMOOTH = (Shape("tiny-smooth", 12, 40, 5, 17, d=16),)


def select(shapes, names):
    """The shapes whose name holds one of `names`; all of them when there are none."""
    wanted = list(names)
    return [s for s in shapes if not wanted or any(w in s.name for w in wanted)]


def named(names):
    """The forward shapes of exactly these names."""
    by_name = {s.name: s for s in FORWARD}
    return [by_name[name] for name in names]
