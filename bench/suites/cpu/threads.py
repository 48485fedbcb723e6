"""The CPU suite of threads: our forward with 1, 2, 4, ... of them, on documents from memory and on one
document that stays in the caches, beside a plain read of the same bytes; small calls, which come apart."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from bench.harness.inputs import INT8, draw, quantize
from bench.harness.library import OURS
from bench.harness.parity import SCORES, reference_scores, relative_error
from bench.harness.results import Results, Row, new_row
from bench.harness.shape import Shape
from bench.harness.text import number
from bench.suites.cpu.calls import Call

SUITE = "cpu-threads"

MEMORY, CACHE, READ, APART = "memory", "cache", "read", "apart"
READER = "torch read"
VARIANTS = (MEMORY, CACHE, READ, APART)
DTYPES = (torch.float32, torch.bfloat16, INT8)
_REST_S = 0.005  # between calls that come apart: the pool's threads have gone to sleep
_WARM, _MORE = 2, 3  # calls are short: more of them than other suites take


def thread_counts() -> list[int]:
    most = torch.get_num_threads()
    powers = [1 << n for n in range(most.bit_length())]
    return [*(n for n in powers if n < most), most]


def _seconds(call: Call, rounds: int, rest_s: float = 0.0) -> list[float]:
    times = []
    for _ in range(_WARM + _MORE * rounds):
        if rest_s:
            time.sleep(rest_s)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times[_WARM:]


def _call(shape: Shape, dtype: torch.dtype, one_document: bool) -> tuple[Call, torch.Tensor, int]:
    """The forward, the scores that it should give, and the bytes of its documents. One document: all are the
    first, by a stride of 0."""
    lib = importlib.import_module("late_interaction")
    maxsim = importlib.import_module("late_interaction").ops.maxsim_quantized

    def documents(x: torch.Tensor) -> torch.Tensor:
        return x[:1].expand_as(x) if one_document else x

    x = draw(shape, torch.device("cpu"), torch.float32 if dtype == INT8 else dtype)
    if dtype != INT8:
        D = documents(x.D)
        return lambda: lib.maxsim(x.Q, D), reference_scores(shape, x.Q, D)[0], D.nbytes
    (Q, scale_Q), (codes, scales) = (quantize(tokens, INT8, per_token=True) for tokens in (x.Q, x.D))
    D, scale_D = documents(codes), documents(scales)
    wanted = reference_scores(shape, Q * scale_Q.unsqueeze(-1), D * scale_D.unsqueeze(-1))[0]
    return lambda: maxsim(Q, D, scale_Q, scale_D, None, None), wanted, D.nbytes


def _rows(
    shape: Shape, dtype: torch.dtype, variant: str, rounds: int, call: Call, wanted: torch.Tensor
) -> list[Row]:
    rows = []
    for threads in thread_counts():
        torch.set_num_threads(threads)
        row = new_row(SUITE, shape, "fwd", dtype, OURS, gflops=None, variant=variant, threads=threads)
        scores = call()
        assert isinstance(scores, torch.Tensor)
        row["rel_err"] = relative_error(scores, wanted)
        if row["rel_err"] > SCORES:
            row["error"] = f"parity: relative error {row['rel_err']:.2g}"
        times = _seconds(call, rounds, _REST_S if variant == APART else 0.0)
        seconds = statistics.median(times)
        row["wall_us"], row["gflops"] = 1e6 * seconds, shape.flops / seconds * 1e-9
        row["least_us"] = 1e6 * min(times)
        rows.append(row)
    return rows


def _reads(shape: Shape, rounds: int) -> list[Row]:
    """GB/s of the faster of a sum and a dot product over so many bytes as bf16 documents have."""
    size = shape.input_bytes(2) // 2 // 4
    x = torch.rand(2 * size)
    a, b = x[:size], x[size:]
    rows = []
    for threads in thread_counts():
        torch.set_num_threads(threads)
        row = new_row(SUITE, shape, "read", torch.float32, READER, variant=READ, threads=threads)
        times = min((_seconds(call, rounds) for call in (x.sum, lambda: torch.dot(a, b))), key=min)
        row["wall_us"], row["least_us"] = 1e6 * statistics.median(times), 1e6 * min(times)
        row["gbps"] = x.nbytes / row["wall_us"] * 1e-3
        rows.append(row)
    return rows


def measure(shape: Shape, rounds: int) -> list[Row]:
    """A shape of many tokens, from memory and from the caches."""
    threads = torch.get_num_threads()
    rows = []
    try:
        for dtype in DTYPES:
            for variant in (MEMORY, CACHE):
                call, wanted, size = _call(shape, dtype, variant == CACHE)
                rows += _rows(shape, dtype, variant, rounds, call, wanted)
                for row in rows[-len(thread_counts()) :]:
                    row["gbps"] = size / row["wall_us"] * 1e-3 if variant == MEMORY else None
        rows += _reads(shape, rounds)
    finally:
        torch.set_num_threads(threads)
    return rows


def measure_small(shape: Shape, rounds: int) -> list[Row]:
    """A request of few tokens, after a rest."""
    threads = torch.get_num_threads()
    try:
        call, wanted, _ = _call(shape, torch.bfloat16, one_document=False)
        return _rows(shape, torch.bfloat16, APART, rounds, call, wanted)
    finally:
        torch.set_num_threads(threads)


def run(
    results: Results, shapes: Sequence[Shape], small: Sequence[Shape], rounds: int,
    log: Callable[[str], None],
) -> None:  # fmt: skip
    for chosen, measured in ((shapes, measure), (small, measure_small)):
        for shape in chosen:
            rows = measured(shape, rounds)
            results.add(rows)
            for row in rows:
                told = f"{number(row['gbps'])} GB/s" if row["variant"] == READ else number(row["gflops"])
                log(f"cpu {shape.name} {row['dtype']} {row['variant']}, {row['threads']} threads: {told}")
