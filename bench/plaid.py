"""Residual-compressed documents: decompression and MaxSim in one, and scores by centroids alone, beside
late-interaction-kernels: every library gets the same index, of random codes. And an index that fast-plaid
built, beside its search with every document a candidate that it decompresses."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .impls import LIK, OURS
from .plaid_index import Files, missing
from .results import Row, new_row
from .shapes import Shape
from .suites import Settings
from .timing import Call
from .together import Timed, measure, set_ratios

SUITE = "plaid"
PACKED, CENTROIDS = "packed", "centroids alone"
SEARCH = "search"  # in the name of a shape, and what fast-plaid does
FAST_PLAID = "fast-plaid"
TOP = 10
N_CENTROIDS = 65536
_DOCUMENTS = 250  # whose fp64 tokens are in memory at a time
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
    """Of a bucket, as the shape's name ends: plaid-2."""
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
              index.centroids, index.weights, index.nbits)
        for at in range(0, len(index.codes), _DOCUMENTS)
    ]  # fmt: skip
    return torch.cat(parts)


def _calls(module: Any, variant: str, x: Index) -> Callable[[], list[Call]]:
    if variant == CENTROIDS:
        return lambda: [lambda: module.plaid_approx_score(x.table, x.codes, x.lengths)]
    flat = (x.Q, x.codes.flatten(), x.residuals.flatten(0, 1), x.offsets, x.centroids, x.weights, x.nbits)
    longest = x.codes.shape[1]  # spares late-interaction-kernels a wait for the device
    return lambda: [lambda: module.maxsim_residual_varlen(*flat, max_seqlen_d=longest)]


def _searched(settings: Settings, shape: Shape) -> list[Row]:
    """The best documents by fast-plaid's search, and by scoring the same files here."""
    nbits = bits(shape)
    row = new_row(SUITE, shape, "fwd", torch.bfloat16, FAST_PLAID, variant=SEARCH, nbits=nbits)
    if reason := missing():
        return [{**row, "skipped": reason}]
    centres = torch.randn(200, shape.d)
    picks = torch.randint(200, (shape.Nd, shape.Ld))
    documents = [F.normalize(centres[i] + 0.6 * torch.randn(shape.Ld, shape.d), dim=-1) for i in picks]
    Q = F.normalize(documents[0][: shape.Lq] + 0.05 * torch.randn(shape.Lq, shape.d), dim=-1).unsqueeze(0)
    engines = importlib.import_module("fast_plaid.search")
    with tempfile.TemporaryDirectory() as folder:
        engine = engines.FastPlaid(index=folder, device=str(settings.device))
        engine.create(documents_embeddings=documents, nbits=nbits)
        files = Files.read(Path(folder), settings.device)
        queries = Q.to(settings.device, torch.bfloat16)
        wanted = files.exact(queries)[0].topk(TOP).values
        wide = {"n_ivf_probe": 64, "n_full_scores": 4 * shape.Nd, "show_progress": False}

        def search() -> torch.Tensor:
            found = engine.search(Q, top_k=TOP, **wide)
            return torch.tensor([score for _, score in found[0]], device=settings.device)

        def score() -> torch.Tensor:
            return files.score(queries)[0].topk(TOP).values

        mine = new_row(SUITE, shape, "fwd", torch.bfloat16, OURS, variant=SEARCH, nbits=nbits)
        timed = [
            Timed(mine, lambda: [score], wanted),
            Timed(row, lambda: [search], wanted, capture=False),
        ]
        rows = measure(settings, timed)
    set_ratios(rows[:1], "over_fast_plaid", rows[1])
    return rows


def take(settings: Settings, shape: Shape) -> list[Row]:
    if SEARCH in shape.name:
        return _searched(settings, shape)
    small = settings.device.type != "cuda"
    index = draw(shape, settings.device, torch.bfloat16, 64 if small else N_CENTROIDS)
    by_centroids = importlib.import_module("late_interaction").reference.plaid_approx_score_reference
    wanted = exact(index)
    approximate = torch.cat(
        [
            by_centroids(index.table.double(), codes, lengths)
            for codes, lengths in zip(index.codes.split(1000), index.lengths.split(1000), strict=True)
        ]
    )
    modules = {OURS: "late_interaction.plaid"}
    if any(i.name == LIK for i in settings.implementations):
        modules[LIK] = "late_interaction_kernels.plaid"
    rows = []
    for variant in (PACKED, CENTROIDS):
        timed, skipped = [], []
        for impl, module in modules.items():
            row = new_row(SUITE, shape, "fwd", torch.bfloat16, impl, variant=variant, nbits=index.nbits)
            if impl == LIK and variant == PACKED and index.residuals.numel() > _LIK_BYTES:
                skipped.append({**row, "skipped": "its offsets into residuals have 32 bits"})
                continue
            calls = _calls(importlib.import_module(module), variant, index)
            waits = impl == LIK and variant == PACKED  # for the assertion that its bound covers all documents
            aim = approximate if variant == CENTROIDS else wanted
            timed.append(Timed(row, calls, aim, capture=not waits))
        found = measure(settings, timed)
        if len(found) > 1:
            set_ratios(found[:1], "over_lik", found[1])
        rows += found + skipped
    return rows
