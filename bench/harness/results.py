"""Rows, their groups, and the JSON files that hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.ceilings import reached
from bench.harness.shape import Shape

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "bench" / "results"

Row = dict[str, Any]

SEPARATE_SUITES = ("sweep", "plans")  # each has a record of its own, <suite>-<device>.json
OTHER_RECORDS = ("ncu", "st", "end-to-end")  # so do these, in a form of their own

# What every row has, in this order; a row may add keys of its own (gflops, error, skipped, ...).
KEYS = (
    *("suite", "shape", "op", "layout", "Nq", "Nd", "Lq", "Ld", "d", "dtype", "winners", "impl", "backward"),
    *("gpu_us", "wall_us", "peak_mib", "floor_us", "cublas_tflops", "rel_err"),
)


def new_row(suite: str, shape: Shape, op: str, dtype: torch.dtype, impl: str, **values: object) -> Row:
    row: Row = dict.fromkeys(KEYS)
    row.update(
        suite=suite, shape=shape.name, op=op, layout=shape.layout, dtype=str(dtype).removeprefix("torch."),
        Nq=shape.Nq, Nd=shape.Nd, Lq=shape.Lq, Ld=shape.Ld, d=shape.d, impl=impl, **values,
    )  # fmt: skip
    return row


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def line_of(row: Row) -> tuple[object, ...]:
    """The key of a line of a table."""
    return tuple(row.get(k) for k in ("suite", "shape", "op", "dtype", "winners"))


def group_of(row: Row) -> tuple[object, ...]:
    """The key of a group, whose implementations and variants come from one run and are replaced together."""
    return tuple(row.get(k) for k in ("suite", "shape", "op", "winners"))


def by_group(rows: Iterable[Row]) -> dict[tuple[object, ...], list[Row]]:
    out: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        out.setdefault(group_of(row), []).append(row)
    return out


class IncompleteError(ValueError):
    """A group was measured without some of the implementations that the record has."""


def replaced(earlier: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """`earlier`, headers among them, with whole groups replaced by those of `rows`."""
    new = by_group(r for r in rows if r.get("kind") != "header")
    old = by_group(r for r in earlier if r.get("kind") != "header")
    for group in new.keys() & old.keys():
        missing = {r["impl"] for r in old[group]} - {r["impl"] for r in new[group]}
        if missing:
            where = " ".join(str(part) for part in group if part)
            raise IncompleteError(
                f"{where}: the record has {', '.join(sorted(missing))} from another run; measure all again"
            )
    kept = [r for r in earlier if r.get("kind") != "header" and group_of(r) not in new]
    measured = [*kept, *(r for r in rows if r.get("kind") != "header")]
    runs = {r["run"] for r in measured}
    headers = {h["run"]: h for h in (*earlier, *rows) if h.get("kind") == "header" and h["run"] in runs}
    return [*headers.values(), *measured]


class Results:
    """The rows of this run, written to `path` after every shape, so that a time-out loses nothing."""

    def __init__(self, path: Path, header: Row, merge: bool = False) -> None:
        self.path = path
        self.header = header
        self.rows: list[Row] = []
        self._earlier = read(path) if merge and path.exists() else []

    def add(self, rows: Iterable[Row]) -> list[Row]:
        """Records the rows, each with its run and what it reached."""
        added = []
        for row in rows:
            share = reached(row, self.header)
            more = {"reached": share[0], "bound": share[1]} if share else {}
            added.append({**row, **more, "run": self.header["run"]})
        self.rows += added
        self.write()
        return added

    def write(self) -> None:
        write(self.path, replaced(self._earlier, [self.header, *self.rows]))


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(_rounded(r)) for r in rows)
    partial = path.with_name(path.name + ".part")
    partial.write_text(f"[\n{lines}\n]\n")
    partial.replace(path)


def _rounded(row: Row) -> Row:
    """Floats of five digits; more would be noise."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


def has_own_form(path: Path) -> bool:
    """Whether a record does not consist of rows with KEYS."""
    return path.name.startswith(tuple(f"{name}-" for name in OTHER_RECORDS))


def records(directory: Path) -> list[Path]:
    """Return the records of suites, without sweeps, plans, profiles and parts: whole ones, the newest first,
    those of a GPU planned as an older one behind them, then parts of other GPUs, then CPUs."""
    found = [
        p
        for p in directory.glob("*.json")
        if not has_own_form(p)
        and not p.name.startswith(tuple(f"{name}-" for name in SEPARATE_SUITES))
        and not p.name.endswith(".partial.json")
    ]
    found.sort(key=lambda p: p.name)
    found.sort(key=lambda p: newest_run(read(p)) if not of_a_cpu(p) else "", reverse=True)
    return sorted(found, key=lambda p: (of_a_cpu(p), not is_whole(read(p)), "-planned-as-" in p.name))


def of_a_cpu(path: Path) -> bool:
    """Records of a GPU have its name. Those of other CPUs than that of cpu.json are named cpu-*.json."""
    return path.stem == "cpu" or path.stem.startswith("cpu-")


def read(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text())
    return rows


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """(headers, measurements)."""
    rows = list(rows)
    headers = [r for r in rows if r.get("kind") == "header"]
    return headers, [r for r in rows if r.get("kind") != "header"]


def size_of(row: Row) -> str:
    """The problem size of a row, in one line."""
    return f"{row['Nq']} x {row['Nd']}, {row['Lq']}, {row['Ld']}, d={row['d']} {row['layout']}"


def is_whole(rows: Iterable[Row]) -> bool:
    """Whether a record has the forward suite. If not, a few tables were measured again on another GPU, and
    docs/performance.md alone shows them."""
    return any(r.get("suite") == "forward" for r in rows)


def newest_run(rows: Iterable[Row]) -> str:
    """When the forward suite of a record was measured; "" if it has none."""
    return max((str(r["run"]) for r in rows if r.get("suite") == "forward"), default="")


def whole_record(directory: Path) -> Path | None:
    """The newest record of a GPU that has the forward suite."""
    return next((p for p in records(directory) if not of_a_cpu(p) and is_whole(read(p))), None)


def device_of(headers: Iterable[Row]) -> str:
    """The name of the GPU that a record is of."""
    return next((str(h["gpu"]) for h in headers if h.get("gpu")), "GPU")


def best(rows: Iterable[Row], key: str = "gpu_us") -> Row | None:
    """The fastest row that was measured."""
    timed = [r for r in rows if r.get(key) is not None]
    return min(timed, key=lambda r: float(r[key]), default=None)


def groups(rows: Iterable[Row]) -> dict[tuple[object, ...], list[Row]]:
    """Rows by the line of a table that shows them, in the order they came."""
    out: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        out.setdefault(line_of(row), []).append(row)
    return out
