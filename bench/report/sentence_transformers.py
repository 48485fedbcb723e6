"""The table of `python -m bench st`: Sentence Transformers with and without the patch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.harness.results import Row, read, split
from bench.harness.text import number
from bench.report import tables


def _time(row: Row, way: str) -> str:
    return row.get(f"{way}_error") or row.get("error") or number(row.get(f"{way}_ms"))


def _line(row: Row, memory: bool) -> list[str]:
    ratio = f"{row['without_ms'] / row['with_ms']:.2f}x" if row.get("speedup") else "-"
    if row.get("speedup_over"):
        ratio = f"over {row['speedup_over']:.1f}x"
    cells = [str(row["work"]), f"{row['batch']:,}", _time(row, "without"), _time(row, "with"), ratio]
    if memory:
        cells += [number(row.get("without_peak_mib")), number(row.get("with_peak_mib"))]
    return cells


def _table(rows: Sequence[Row]) -> str:
    memory = any(row.get("with_peak_mib") is not None for row in rows)
    head = ["work", "queries", "without, ms", "with, ms", "speedup"]
    head += ["without, MiB", "with, MiB"] if memory else []
    return tables.table(head, [_line(row, memory) for row in rows]) if rows else ""


def build(directory: Path) -> list[str]:
    """A section for each record."""
    parts: list[str] = []
    for path in sorted(directory.glob("st-*.json"), key=lambda p: (p.stem == "st-cpu", p.name)):
        headers, rows = split(read(path))
        if not rows:
            continue
        first = headers[0]
        packages = ", ".join(f"{name} {version}" for name, version in first["packages"].items())
        note = (
            f"{packages}; {first['dtype'].removeprefix('torch.')}, d = 128. A training step is the forward"
            f" and backward of the loss alone, from embeddings of up to {first['query']} and"
            f" {first['document']} tokens; an evaluation scores and ranks embeddings that are there already."
        )
        if any("docstrings" in row["work"] for row in rows):
            note += " Docstrings are those of Python's standard library, by all-MiniLM-L6-v2 (d = 384)."
        title = "Sentence Transformers without and with its patch"
        title += " on a CPU." if first["gpu"] is None else "."
        parts += [*tables.section(title, note, _table(rows)), tables.stamp(headers)]
    return parts
