"""float32 inputs: our "high" beside cuBLAS in TF32, our "highest" beside PyTorch's float32 einsum,
with the error of each against fp64."""

from __future__ import annotations

import importlib

import torch

from bench.harness.ceilings import float32_products
from bench.harness.interleaved import Timed, draw_sets, measure, set_ratios
from bench.harness.library import EINSUM, OURS
from bench.harness.parity import reference_scores
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import IN_BATCH, Shape
from bench.harness.timing import Call
from bench.peers.implementations import similarity_einsum

SUITE = "fp32"
HIGH, HIGHEST = "high", "highest"
CHUNK_BYTES = 1 << 31  # float32 similarities in memory at a time


def chunked_einsum(Q: torch.Tensor, D: torch.Tensor, layout: str) -> torch.Tensor:
    """MaxSim in float32 as PyTorch users write it, in chunks whose similarities fit CHUNK_BYTES: chunks of
    documents, or of queries if each has its own documents."""
    equation = similarity_einsum(layout)
    others = Q.shape[0] if layout == IN_BATCH else D.shape[1:-2].numel()
    step = max(1, CHUNK_BYTES // (4 * others * Q.shape[1] * D.shape[-2]))
    if layout == IN_BATCH:
        parts = [torch.einsum(equation, Q, part).amax(-1).sum(-1) for part in D.split(step)]
        return torch.cat(parts, 1)
    both = zip(Q.split(step), D.split(step), strict=True)
    return torch.cat([torch.einsum(equation, q, part).amax(-1).sum(-1) for q, part in both])


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    maxsim = importlib.import_module("late_interaction").maxsim
    sets = draw_sets(settings, shape, torch.float32)
    wanted, _ = reference_scores(shape, sets[0].Q, sets[0].D)

    def ours(precision: str) -> list[Call]:
        return [lambda x=x: maxsim(x.Q, x.D, precision=precision) for x in sets]  # type: ignore[misc]

    def einsum() -> list[Call]:
        return [lambda x=x: chunked_einsum(x.Q, x.D, shape.layout) for x in sets]  # type: ignore[misc]

    def row(impl: str, variant: str) -> Row:
        return new_row(
            SUITE, shape, "fwd", torch.float32, impl, variant=variant, input_sets=len(sets),
            cublas_tflops=settings.ceilings.cublas_tflops,
        )  # fmt: skip

    with float32_products(HIGHEST):
        rows = measure(settings, [
            Timed(row(EINSUM, HIGHEST), einsum, wanted),
            Timed(row(OURS, HIGHEST), lambda: ours(HIGHEST), wanted),
            Timed(row(OURS, HIGH), lambda: ours(HIGH), wanted),
        ])  # fmt: skip
    set_ratios(rows[1:], "over_einsum", rows[0])
    return rows
