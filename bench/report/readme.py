"""The generated part of README.md: the roofline and a line for each kind of work, from the recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.library import COMPILED, EINSUM, FLASH, LIK, OURS
from bench.harness.results import Row, best, device_of, read, split, whole_record
from bench.harness.text import number
from bench.report import tables
from bench.suites import plaid

PLOT = "roofline.png"


@dataclass(frozen=True)
class _Line:
    what: str
    suite: str
    shape: str
    variant: str | None = None


_LINES = (
    _Line("rerank pages", "forward", "colpali-rerank"),
    _Line("score long queries", "forward", "longq-64"),
    _Line("training step, in-batch", "training", "pylate-256"),
    _Line("training step, page images", "training", "colpali-128"),
    _Line("training step, distillation", "training", "kd-128x8"),
    _Line("score compressed documents", plaid.SUITE, "plaid-4", plaid.PACKED),
)


def _rows(rows: Sequence[Row], line: _Line) -> list[Row]:
    wanted = (line.suite, line.shape, line.variant)
    found = [r for r in rows if (r["suite"], r["shape"], r.get("variant")) == wanted]
    return [r for r in found if r["winners"] in (None, "uniform")]


def table(rows: Sequence[Row]) -> str:
    body = []
    for line in _LINES:
        group = _rows(rows, line)
        ours = best(r for r in group if r["impl"] == OURS)
        if ours is None:
            continue
        cells = [
            tables.cell([r for r in group if r["impl"] in impls], lambda r: number(r["gpu_us"]))
            for impls in ((OURS,), (LIK,), (FLASH,), (EINSUM, COMPILED))
        ]
        others = [r for r in group if r["impl"] != OURS]
        body.append([line.what, tables.size(ours), *cells, tables.over_best_other(ours, others)])
    head = ["GPU microseconds", "Nq x Nd, Lq, Ld", OURS, LIK, FLASH, "PyTorch", tables.OVER]
    return tables.table(head, body, left=2) if body else ""


def build(directory: Path) -> str:
    """The Markdown between the markers."""
    parts: list[str] = []
    if (directory / PLOT).exists():
        parts.append(f"![Roofline of the MaxSim forward](bench/results/{PLOT})")
    if (path := whole_record(directory)) is not None:
        headers, rows = split(read(path))
        if lines := table(rows):
            note = f"bf16, d = 128, on one {device_of(headers)}; `{tables.OVER}` counts PyTorch."
            parts += [note, lines]
    if not parts:
        parts = ["No run is recorded yet: `make bench` on a GPU writes bench/results."]
    return "\n\n".join(parts)
