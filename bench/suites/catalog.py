"""Every suite of `python -m bench run`: its shapes and variants, and the function that measures a shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.harness import named_shapes as shapes
from bench.harness.measuring import Measure
from bench.harness.shape import Shape
from bench.peers import losses as methods
from bench.suites import codes, cpu, cpu_corpus, dense, first_call, hidden, losses, packed, soft, steps

Variants = tuple[str | None, ...]


@dataclass(frozen=True)
class Suite:
    about: str
    shapes: Sequence[Shape]
    measure: Measure
    tiny: Sequence[Shape] = ()  # for a dry run
    variants: Variants = (None,)
    op: str | None = None  # of a suite that measures every implementation: what --warm compiles for
    large: Sequence[Shape] = ()  # with --large
    peers: tuple[str, ...] = ()  # implementations beside those of --impl, which this suite alone measures


def _dense(about, op, of, tiny):
    winners = (None,) if op == "fwd" else dense.WINNER_KINDS
    return Suite(about, of, partial(dense.measure, op=op, winners=winners), tiny, op=op)


_TRAINING = (*shapes.TRAINING, *shapes.LONG)
_TINY_TRAINING = (*shapes.TINY_TRAINING, shapes.TINY_LONG)

SUITES = {
    "forward": _dense(
        "scores of dense batches, every library", "fwd", shapes.FORWARD, (*shapes.TINY_FORWARD,
        shapes.TINY_LONG)
    ),
    "short": _dense(
        "scores of documents of 1 to 64 tokens, every library", "fwd", shapes.SHORT, shapes.TINY_SHORT
    ),
    "short-steps": _dense(
        "forward and both gradients of documents of up to 64 tokens, every library", "fwd+bwd",
        shapes.SHORT_TRAINING, shapes.TINY_SHORT,
    ),
    "variants": Suite(
        "what each option of our forward costs: masks, winners, normalize, fp16",
        shapes.named(shapes.VARIANTS), dense.measure_variants, shapes.TINY_FORWARD, dense.VARIANTS,
    ),
    "fp32": Suite(
        "float32 inputs at each precision, and PyTorch's einsum",
        shapes.named(shapes.FP32), dense.measure_fp32, shapes.TINY_FORWARD, (dense.HIGH, dense.HIGHEST),
    ),
    "quantized": Suite(
        "fp8 and int8 inputs",
        shapes.named(shapes.QUANTIZED), codes.measure_quantized, shapes.TINY_FORWARD, codes.QUANTIZED,
    ),
    "ragged-codes": Suite(
        "packed documents of different lengths and of one, in bf16 and as codes",
        shapes.RAGGED, codes.measure_ragged, shapes.TINY_FORWARD, codes.RAGGED,
    ),
    "plaid": Suite(
        "residual-compressed documents",
        shapes.PLAID, codes.measure_plaid, shapes.TINY_PLAID, codes.PLAID,
    ),
    "fused-head": Suite(
        "scores from hidden states: projection, normalization and MaxSim in one call",
        shapes.FUSED_HEAD, hidden.measure, shapes.TINY_FUSED_HEAD, hidden.VARIANTS,
    ),
    "retrieve": Suite(
        "the best 100 documents of a corpus on the GPU or in the host's memory",
        shapes.RETRIEVE, codes.measure_retrieval, shapes.TINY_RETRIEVE, codes.RETRIEVE,
    ),
    "varlen": Suite(
        "packed and padded sequences of different lengths",
        shapes.VARLEN, packed.measure_varlen, shapes.TINY_VARLEN, packed.VARLEN,
    ),
    "pairs-packed": Suite(
        "listed pairs of packed queries and documents",
        shapes.PAIR_LISTS, packed.measure_pairs, shapes.TINY_PAIR_LISTS, packed.PAIRS,
    ),
    "training": _dense("forward and both gradients, every library", "fwd+bwd", _TRAINING, _TINY_TRAINING),
    "steps": Suite(
        "what each option of our training step costs, and what the host adds",
        shapes.TRAINING, steps.measure_steps, shapes.TINY_TRAINING, steps.STEPS,
    ),
    "host": Suite(
        "what the host's time makes of small calls, eager and compiled, beside a product of PyTorch's",
        shapes.HOST, steps.measure_host, shapes.TINY_HOST, steps.HOST, peers=steps.HOST_PEERS,
    ),
    "backward": _dense("both gradients alone, from given winners", "bwd", _TRAINING, _TINY_TRAINING),
    "heads": Suite(
        "whole losses of colpali-engine and PyLate",
        shapes.HEADS, losses.measure_heads, shapes.TINY_HEADS, losses.HEADS,
    ),
    "contrastive": Suite(
        "contrastive losses of batches of up to 16,384, with their memory",
        shapes.BATCHES, losses.measure_contrastive, shapes.TINY_BATCHES, methods.ALL,
        large=shapes.LARGE_BATCHES, peers=losses.CONTRASTIVE_PEERS,
    ),
    "xtr": Suite(
        "training steps of XTR scores beside maxsim's, and beside Sentence Transformers' grid",
        shapes.XTR, soft.measure_xtr, shapes.TINY_XTR, soft.XTR, peers=soft.XTR_PEERS,
    ),
    "smooth": Suite(
        "training steps of smooth_maxsim beside maxsim's, and beside PyTorch's logsumexp",
        shapes.SMOOTH, soft.measure_smooth, shapes.TINY_SMOOTH, soft.SMOOTH,
    ),
    "first-call": Suite(
        "import and first call in a fresh process",
        tuple(first_call.OPS.values()), first_call.measure, tuple(first_call.TINY.values()),
    ),
}  # fmt: skip

# These measure a machine without a GPU.
ON_CPU = {
    "cpu": Suite("forward and training step on a CPU", (*shapes.CPU, *shapes.CPU_TRAINING), cpu.measure),
    "cpu-isa": Suite(
        "our forward on a CPU with each of its instruction sets", shapes.CPU_ISA, cpu.measure_isa,
        variants=cpu.ISAS,
    ),
    "cpu-threads": Suite(
        "our forward on a CPU by threads, from memory and from the caches, and small calls",
        (*shapes.CPU_THREADS, *shapes.CPU_SMALL), cpu.measure_threads, variants=cpu.THREADS,
        peers=(cpu.READER,),
    ),
    "cpu-corpus": Suite(
        "the ten best documents of a corpus, beside engines that run in this process", shapes.CPU_CORPUS,
        cpu_corpus.measure, variants=cpu_corpus.VARIANTS, peers=cpu_corpus.PEERS,
    ),
}  # fmt: skip
