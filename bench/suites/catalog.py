"""Every suite of `python -m bench run`: what it measures, its shapes and variants, and who measures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.harness import named_shapes
from bench.harness.results import Row
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.peers import losses
from bench.suites import (
    contrastive,
    first_call,
    fp32,
    from_hidden,
    heads,
    host,
    pairs,
    plaid,
    quantized,
    retrieval,
    smooth,
    steps,
    variants,
    varlen,
    xtr,
)
from bench.suites.cpu import calls as cpu
from bench.suites.cpu import corpus_search, instruction_sets
from bench.suites.cpu import threads as cpu_threads
from bench.suites.side_by_side import WINNER_KINDS

MeasureShape = Callable[[Settings, Shape], list[Row]]


@dataclass(frozen=True)
class Suite:
    about: str
    shapes: Sequence[Shape]
    tiny: Sequence[Shape] = ()  # for a dry run
    variants: tuple[str | None, ...] = (None,)
    # A suite that measures every implementation, one after the other, has an op.
    op: str | None = None
    winners: tuple[str | None, ...] = (None,)
    # A suite of our own variants, timed interleaved, has a function and the key of its rows' ratio.
    measure_shape: MeasureShape | None = None
    ratio: str = ""
    large: Sequence[Shape] = ()  # with --large
    peers: tuple[str, ...] = ()  # implementations beside those of --impl, which this suite alone measures


_TRAINING = (*named_shapes.TRAINING, *named_shapes.LONG)
_TINY_TRAINING = (*named_shapes.TINY_TRAINING, named_shapes.TINY_LONG)

SUITES: dict[str, Suite] = {
    "forward": Suite(
        "scores of dense batches, every library",
        named_shapes.FORWARD, (*named_shapes.TINY_FORWARD, named_shapes.TINY_LONG), op="fwd",
    ),
    "short": Suite(
        "scores of documents of 1 to 64 tokens, every library",
        named_shapes.SHORT, named_shapes.TINY_SHORT, op="fwd",
    ),
    "short-steps": Suite(
        "forward and both gradients of documents of up to 64 tokens, every library",
        named_shapes.SHORT_TRAINING, named_shapes.TINY_SHORT, op="fwd+bwd", winners=WINNER_KINDS,
    ),
    variants.SUITE: Suite(
        "what each option of our forward costs: masks, winners, normalize, fp16",
        named_shapes.named(named_shapes.VARIANTS), named_shapes.TINY_FORWARD, variants.ALL,
        measure_shape=variants.measure_shape, ratio="over_plain",
    ),
    fp32.SUITE: Suite(
        "float32 inputs at each precision, and PyTorch's einsum",
        named_shapes.named(named_shapes.FP32), named_shapes.TINY_FORWARD, (fp32.HIGH, fp32.HIGHEST),
        measure_shape=fp32.measure_shape, ratio="over_einsum",
    ),
    quantized.SUITE: Suite(
        "fp8 and int8 inputs",
        named_shapes.named(named_shapes.QUANTIZED), named_shapes.TINY_FORWARD, quantized.ALL,
        measure_shape=quantized.measure_shape, ratio="over_bf16",
    ),
    plaid.SUITE: Suite(
        "residual-compressed documents",
        named_shapes.PLAID, named_shapes.TINY_PLAID, (plaid.PACKED, plaid.CENTROIDS),
        measure_shape=plaid.measure_shape, ratio="over_lik",
    ),
    from_hidden.SUITE: Suite(
        "scores from hidden states: projection, normalization and MaxSim in one call",
        named_shapes.FUSED_HEAD, named_shapes.TINY_FUSED_HEAD, (from_hidden.FUSED, from_hidden.UNFUSED),
        measure_shape=from_hidden.measure_shape, ratio="over_unfused",
    ),
    retrieval.SUITE: Suite(
        "the best 100 documents of a corpus on the GPU or in the host's memory",
        named_shapes.RETRIEVE, named_shapes.TINY_RETRIEVE, retrieval.ALL,
        measure_shape=retrieval.measure_shape, ratio="over_scores",
    ),
    varlen.SUITE: Suite(
        "packed and padded sequences of different lengths",
        named_shapes.VARLEN, named_shapes.TINY_VARLEN, varlen.ALL,
        measure_shape=varlen.measure_shape, ratio="over_ours",
    ),
    pairs.SUITE: Suite(
        "listed pairs of packed queries and documents",
        named_shapes.PAIR_LISTS, named_shapes.TINY_PAIR_LISTS, (pairs.FORWARD, pairs.STEP, pairs.DENSE),
        measure_shape=pairs.measure_shape, ratio="over_ours",
    ),
    "training": Suite(
        "forward and both gradients, every library",
        _TRAINING, _TINY_TRAINING, op="fwd+bwd", winners=WINNER_KINDS,
    ),
    steps.SUITE: Suite(
        "what each option of our training step costs, and what the host adds",
        named_shapes.TRAINING, named_shapes.TINY_TRAINING, steps.ALL,
        measure_shape=steps.measure_shape, ratio="over_plain",
    ),
    host.SUITE: Suite(
        "what the host's time makes of small calls, eager and compiled, beside a product of PyTorch's",
        named_shapes.HOST, named_shapes.TINY_HOST, host.ALL,
        measure_shape=host.measure_shape, ratio="over_product", peers=host.PEERS,
    ),
    "backward": Suite(
        "both gradients alone, from given winners",
        _TRAINING, _TINY_TRAINING, op="bwd", winners=WINNER_KINDS,
    ),
    heads.SUITE: Suite(
        "whole losses of colpali-engine and PyLate",
        named_shapes.HEADS, named_shapes.TINY_HEADS, heads.ALL,
        measure_shape=heads.measure_shape, ratio="over_einsum",
    ),
    contrastive.SUITE: Suite(
        "contrastive losses of batches of up to 16,384, with their memory",
        named_shapes.BATCHES, named_shapes.TINY_BATCHES, losses.ALL,
        measure_shape=contrastive.measure_shape, ratio="over_exact", large=named_shapes.LARGE_BATCHES,
        peers=contrastive.PEERS,
    ),
    xtr.SUITE: Suite(
        "training steps of XTR scores beside maxsim's, and beside Sentence Transformers' grid",
        named_shapes.XTR, named_shapes.TINY_XTR, xtr.ALL,
        measure_shape=xtr.measure_shape, ratio="over_maxsim", peers=xtr.PEERS,
    ),
    smooth.SUITE: Suite(
        "training steps of smooth_maxsim beside maxsim's, and beside PyTorch's logsumexp",
        named_shapes.SMOOTH, named_shapes.TINY_SMOOTH, smooth.ALL,
        measure_shape=smooth.measure_shape, ratio="over_maxsim",
    ),
    first_call.SUITE: Suite(
        "import and first call in a fresh process",
        tuple(first_call.OPS.values()),
    ),
}  # fmt: skip

# This suite measures a machine without a GPU.
ON_CPU: dict[str, Suite] = {
    cpu.SUITE: Suite("forward and training step on a CPU", (*named_shapes.CPU, *named_shapes.CPU_TRAINING)),
    instruction_sets.SUITE: Suite(
        "our forward on a CPU with each of its instruction sets",
        named_shapes.CPU_ISA,
        variants=instruction_sets.NAMES,
    ),
    cpu_threads.SUITE: Suite(
        "our forward on a CPU by threads, from memory and from the caches, and small calls",
        (*named_shapes.CPU_THREADS, *named_shapes.CPU_SMALL),
        variants=cpu_threads.VARIANTS,
        peers=(cpu_threads.READER,),
    ),
    corpus_search.SUITE: Suite(
        "the ten best documents of a corpus, beside engines that run in this process",
        named_shapes.CPU_CORPUS,
        variants=corpus_search.VARIANTS,
        peers=corpus_search.PEERS,
    ),
}
