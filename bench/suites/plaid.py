"""Residual-compressed documents: decompression and MaxSim in one call, and scores by centroids alone, beside
late-interaction-kernels. Every library gets the same index of random codes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness.inputs import sets_of_bytes
from bench.harness.interleaved import Timed, measure, set_ratios
from bench.harness.library import LIK, OURS
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.harness.timing import Call

SUITE = "plaid"
PACKED, CENTROIDS = "packed", "centroids alone"
N_CENTROIDS = 65536
_DOCUMENTS = 250  # decompressed in fp64 at a time
_LIK_BYTES = 2**31 - 1


@dataclass
class Index:
    Q: torch.Tensor  # [Lq, d]
    codes: torch.Tensor  # int32 [Nd, Ld]
    residuals: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    centroids: torch.Tensor
    weights: torch.Tensor
    nbits: int
    table: torch.Tensor  # fp32 [n, Lq], similarities of the centroids


def bits(shape: Shape) -> int:
    """The bits of a bucket, at the end of the shape's name: plaid-2."""
    return int(shape.name.rpartition("-")[2])


def draw(shape: Shape, device: torch.device, dtype: torch.dtype, n: int = N_CENTROIDS) -> Index:
    """Documents of equal length: late-interaction-kernels tunes its kernel for the longest."""
    nbits = bits(shape)
    unit = [F.normalize(torch.randn(rows, shape.d, device=device), dim=-1) for rows in (shape.Lq, n)]
    Q, centroids = (x.to(dtype) for x in unit)
    codes = torch.randint(n, (shape.Nd, shape.Ld), device=device, dtype=torch.int32)
    row = (shape.d * nbits + 7) // 8
    residuals = torch.randint(256, (shape.Nd, shape.Ld, row), device=device, dtype=torch.uint8)
    lengths = torch.full((shape.Nd,), shape.Ld, device=device)
    offsets = torch.arange(shape.Nd + 1, device=device, dtype=torch.int32) * shape.Ld
    weights = torch.linspace(-0.05, 0.05, 2**nbits, device=device)
    table = centroids.float() @ Q.float().T
    return Index(Q, codes, residuals, lengths, offsets, centroids, weights, nbits, table)


def exact(index: Index) -> torch.Tensor:
    """fp64 scores [Nd]."""
    score = importlib.import_module("late_interaction").reference.maxsim_residual_reference
    Q = index.Q.double()
    parts = [
        score(Q, *(x[at : at + _DOCUMENTS] for x in (index.codes, index.residuals, index.lengths)),
              index.centroids, index.weights, index.nbits, normalize=True)
        for at in range(0, len(index.codes), _DOCUMENTS)
    ]  # fmt: skip
    return torch.cat(parts)


def _calls(module: Any, variant: str, sets: Sequence[Index]) -> Callable[[], list[Call]]:
    def call(x: Index) -> Call:
        if variant == CENTROIDS:
            return lambda: module.plaid_approx_score(x.table, x.codes, x.lengths)
        flat = (x.Q, x.codes.flatten(), x.residuals.flatten(0, 1), x.offsets)
        flat += (x.centroids, x.weights, x.nbits)
        longest = x.codes.shape[1]  # spares late-interaction-kernels a wait for the device
        return lambda: module.maxsim_residual_varlen(*flat, max_seqlen_d=longest, normalize=True)

    return lambda: [call(x) for x in sets]


def _bytes(index: Index, variant: str) -> int:
    """The bytes that a call reads, without centroids."""
    read = [index.codes, index.table] if variant == CENTROIDS else [index.codes, index.residuals]
    return sum(x.numel() * x.element_size() for x in read)


def _approximate(index: Index) -> torch.Tensor:
    """fp64 scores by centroids alone."""
    score = importlib.import_module("late_interaction").reference.plaid_approx_score_reference
    table = index.table.double()
    parts = zip(index.codes.split(1000), index.lengths.split(1000), strict=True)
    return torch.cat([score(table, codes, lengths) for codes, lengths in parts])


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    rows = []
    for variant in (PACKED, CENTROIDS):
        rows += _measured(settings, shape, variant)
    return rows


def _measured(settings: Settings, shape: Shape, variant: str) -> list[Row]:
    size = N_CENTROIDS if settings.device.type == "cuda" else 64
    first = draw(shape, settings.device, torch.bfloat16, size)
    count = sets_of_bytes(_bytes(first, variant), settings.cache_bytes)
    sets = [first, *(draw(shape, settings.device, torch.bfloat16, size) for _ in range(count - 1))]
    wanted = _approximate(first) if variant == CENTROIDS else exact(first)
    modules = {OURS: "late_interaction.lik.plaid"}
    if any(i.name == LIK for i in settings.implementations):
        modules[LIK] = "late_interaction_kernels.plaid"
    timed, skipped = [], []
    for impl, module in modules.items():
        row = new_row(
            SUITE, shape, "fwd", torch.bfloat16, impl, variant=variant, nbits=first.nbits, input_sets=count
        )
        if impl == LIK and variant == PACKED and first.residuals.numel() > _LIK_BYTES:
            skipped.append({**row, "skipped": "its offsets into residuals have 32 bits"})
            continue
        calls = _calls(importlib.import_module(module), variant, sets)
        waits = impl == LIK and variant == PACKED  # its assertion reads from the device
        timed.append(Timed(row, calls, wanted, capture=not waits))
    found = measure(settings, timed)
    if len(found) > 1:
        set_ratios(found[:1], "over_lik", found[1])
    return found + skipped
