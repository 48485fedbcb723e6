"""The best documents of a corpus: top 100 beside the scores alone, by us and late-interaction-kernels; of a
million documents in fp8; and of a corpus in the host's memory, beside the rate of the bus."""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.harness.inputs import draw
from bench.harness.interleaved import Timed, measure, set_ratios
from bench.harness.library import LIK, OURS
from bench.harness.parity import reference_scores
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.harness.timing import Call

SUITE = "retrieve"
K = 100
INPUT_SETS = 1  # every corpus is many times the L2 cache
SCORES, TOP, NORMALIZED = "scores alone", "top 100", "top 100, normalized"
ONE_QUERY = "scores alone, one query"
PINNED, PAGEABLE, MAPPED = "pinned", "pageable", "memory-mapped"
ALL = (SCORES, TOP, NORMALIZED, ONE_QUERY, PINNED, PAGEABLE, MAPPED)
HOST, FP8 = "host", "fp8"  # parts of a shape's name: the corpus lies in the host's memory; it is quantized
_DRAWN = 20_000  # documents quantized at a time


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    if FP8 in shape.name:
        return _quantized(settings, shape)
    inputs = draw(shape, settings.device, settings.dtype)
    return (_from_host if HOST in shape.name else _on_device)(settings, shape, inputs.Q, inputs.D)


def _row(settings: Settings, shape: Shape, impl: str, variant: str, **values: Any) -> Row:
    return new_row(
        SUITE, shape, "fwd", settings.dtype, impl, variant=variant, input_sets=INPUT_SETS,
        floor_us=settings.floor_us(shape, "fwd"), cublas_tflops=settings.ceilings.cublas_tflops, **values,
    )  # fmt: skip


def _on_device(settings: Settings, shape: Shape, Q: torch.Tensor, D: torch.Tensor) -> list[Row]:
    exact, _ = reference_scores(shape, Q, D)
    best = exact.topk(min(K, shape.Nd)).values
    maxsim = importlib.import_module("late_interaction").maxsim

    def calls(f: Callable[..., object], **options: bool) -> Callable[[], list[Call]]:
        return lambda: [lambda: f(Q, D, K, **options)]

    timed = [Timed(_row(settings, shape, OURS, SCORES), lambda: [lambda: maxsim(Q, D)], exact)]
    libraries = [(OURS, "late_interaction.lik")]
    if any(i.name == LIK for i in settings.implementations):
        libraries.append((LIK, "late_interaction_kernels"))
    for impl, package in libraries:
        topk = importlib.import_module(f"{package}.topk").maxsim_topk
        retrieve = importlib.import_module(f"{package}.retrieve").retrieve
        timed.append(Timed(_row(settings, shape, impl, TOP), calls(topk), best))
        timed.append(Timed(_row(settings, shape, impl, NORMALIZED), calls(retrieve), best))
    rows = measure(settings, timed)
    set_ratios(rows[1:], "over_scores", rows[0])
    return rows


def _quantized(settings: Settings, shape: Shape) -> list[Row]:
    fp8 = importlib.import_module("late_interaction.lik.fp8")
    Q, scale_Q = fp8.quantize_fp8_per_token(
        draw(dataclasses.replace(shape, Nd=1), settings.device, torch.bfloat16).Q
    )
    codes, scales, exact = [], [], []
    for start in range(0, shape.Nd, _DRAWN):
        part = dataclasses.replace(shape, Nd=min(_DRAWN, shape.Nd - start))
        D, scale_D = fp8.quantize_fp8_per_token(draw(part, settings.device, torch.bfloat16).D)
        restored = (fp8.dequantize_fp8_per_token(x, scale) for x, scale in ((Q, scale_Q), (D, scale_D)))
        exact.append(reference_scores(part, *restored)[0])
        codes.append(D)
        scales.append(scale_D)
    D, scale_D, wanted = torch.cat(codes), torch.cat(scales), torch.cat(exact, dim=1)
    codes.clear()

    def scores(queries: int) -> torch.Tensor:
        out: torch.Tensor = fp8.maxsim_inference_fp8(
            Q[:queries], D, scale_Q=scale_Q[:queries], scale_D=scale_D
        )
        return out

    best = min(K, shape.Nd)
    calls: dict[str, tuple[Shape, Call, torch.Tensor]] = {
        ONE_QUERY: (dataclasses.replace(shape, Nq=1), lambda: scores(1), wanted[:1]),
        SCORES: (shape, lambda: scores(shape.Nq), wanted),
        TOP: (shape, lambda: scores(shape.Nq).topk(best), wanted.topk(best).values),
    }
    timed = []
    for variant, (of, call, result) in calls.items():
        row = new_row(SUITE, of, "fwd", D.dtype, OURS, variant=variant, input_sets=INPUT_SETS)
        timed.append(Timed(row, lambda call=call: [call], result))  # type: ignore[misc]
    rows = measure(settings, timed)
    set_ratios(rows[2:], "over_scores", rows[1])
    return rows


def _from_host(settings: Settings, shape: Shape, Q: torch.Tensor, D: torch.Tensor) -> list[Row]:
    """Wall time of a corpus in pinned memory, in pageable memory, and in a file mapped into memory."""
    search = importlib.import_module("late_interaction").search
    pinned, target = D.cpu().pin_memory(), torch.empty_like(D)
    best = search(Q, D, K).indices
    size = D.numel() * D.element_size()
    bus = _wall(lambda: target.copy_(pinned, non_blocking=True))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "corpus.bin")
        D.cpu().view(torch.int16).numpy().tofile(path)
        mapped = torch.from_file(str(path), size=D.numel(), dtype=D.dtype).view(D.shape)
        for variant, corpus in ((PINNED, pinned), (PAGEABLE, D.cpu()), (MAPPED, mapped)):
            row = _row(settings, shape, OURS, variant, bus_gbps=size / bus * 1e-3)
            if torch.equal(search(Q, corpus, K).indices, best):
                row["wall_us"] = _wall(lambda corpus=corpus: search(Q, corpus, K))  # type: ignore[misc]
                row["over_bus"] = row["wall_us"] / bus
            else:
                row["error"] = "not the documents found on the device"
            rows.append(row)
    return rows


def _wall(call: Call) -> float:
    """Best of three, in microseconds."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)
