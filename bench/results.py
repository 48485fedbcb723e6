"""Rows, the file they live in, and the tables on the terminal."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .ceilings import reached
from .impls import LIK, OURS, package_version
from .shapes import Shape
from .timing import Ceilings

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "bench" / "results"

Row = dict[str, Any]

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


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit measured: LATE_INTERACTION_COMMIT where the tree travels without its history."""
    if given := os.environ.get("LATE_INTERACTION_COMMIT"):
        return given
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() or None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0] if lines else None


def _own_version() -> str | None:
    installed = package_version("late-interaction")
    file = ROOT / "VERSION"
    return installed or (file.read_text().strip() if file.exists() else None)


def _without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments that say what was measured; where the file went is nobody's business."""
    out: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith("--out="):
            skip = argument == "--out"
            out += [] if skip else [argument]
        else:
            skip = False
    return out


def told(error: BaseException) -> str:
    """An error for a row: its kind and the start of its text, file names without their folders."""
    text = re.sub(r"(?:/[\w.+@-]+)+/(?=[\w.+@-])", "", str(error).strip())
    return f"{type(error).__name__}: {text[:300]}"


def new_header(device: torch.device, ceilings: Ceilings, program: str = "bench", **values: Any) -> Row:
    """Where, when and with what the rows that share its `run` were measured."""
    on_gpu = device.type == "cuda"
    versions = {
        OURS: _own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{p: package_version(p) for p in ("triton", LIK, "flash-maxsim", "maxsim-cpu", "numpy")},
    }
    header: Row = {
        "kind": "header",
        "run": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "versions": {k: v for k, v in versions.items() if v is not None},
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "command": shlex.join(["python", "-m", program, *_without_out(sys.argv[1:])]),
        "cublas_tflops": ceilings.cublas_tflops,
        "cublas_tf32_tflops": ceilings.cublas_tf32_tflops,
        "read_tbps": ceilings.read_tbps,
        "copy_tbps": ceilings.copy_tbps,
        "product_us": ceilings.product_us,
        "product_step_us": ceilings.product_step_us,
    }
    header.update(values)
    return header


def line_of(row: Row) -> tuple[object, ...]:
    """What a line of a table shows."""
    return tuple(row.get(k) for k in ("suite", "shape", "op", "dtype", "winners"))


def group_of(row: Row) -> tuple[object, ...]:
    """What comes from one run, all implementations and variants of it, and is replaced as a whole."""
    return tuple(row.get(k) for k in ("suite", "shape", "op", "winners"))


def by_group(rows: Iterable[Row]) -> dict[tuple[object, ...], list[Row]]:
    out: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        out.setdefault(group_of(row), []).append(row)
    return out


class IncompleteError(ValueError):
    """Some implementations of a group that a record holds were measured, and not all."""


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
    """Five digits: more would be noise."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


def records(directory: Path) -> list[Path]:
    """The files of runs: not sweeps, plans, profiles or parts. Whole ones first, the CPU's last."""
    found = [
        p
        for p in directory.glob("*.json")
        if not p.name.startswith(("sweep-", "plans-", "ncu-")) and not p.name.endswith(".partial.json")
    ]
    return sorted(found, key=lambda p: (p.stem == "cpu", not is_whole(read(p)), p.name))


def read(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text())
    return rows


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """(headers, measurements)."""
    rows = list(rows)
    headers = [r for r in rows if r.get("kind") == "header"]
    return headers, [r for r in rows if r.get("kind") != "header"]


def is_whole(rows: Iterable[Row]) -> bool:
    """Whether a record has the forward suite. One that has not is of a GPU on which a few tables were taken
    again; docs/performance.md alone shows those."""
    return any(r.get("suite") == "forward" for r in rows)


def best(rows: Iterable[Row], key: str = "gpu_us") -> Row | None:
    """The fastest row that was measured."""
    timed = [r for r in rows if r.get(key) is not None]
    return min(timed, key=lambda r: float(r[key]), default=None)


def number(value: object) -> str:
    """A figure as a reader wants it: three digits below ten, no decimals above a hundred."""
    if not isinstance(value, (int, float)):
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def align(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    """A plain text table: the first `left` columns flush left, the figures flush right."""
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * w for w in widths], *body]:
        cells = zip(row, widths, strict=True)
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def groups(rows: Iterable[Row]) -> dict[tuple[object, ...], list[Row]]:
    """Rows by the line of a table that shows them, in the order they came."""
    out: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        out.setdefault(line_of(row), []).append(row)
    return out


def summary(rows: Iterable[Row], key: str = "gpu_us") -> str:
    """One line a measurement: ours beside late-interaction-kernels and the best of the others."""
    body = []
    for group in groups(rows).values():
        mine = best([r for r in group if r["impl"] == OURS], key)
        lik = best([r for r in group if r["impl"] == LIK], key)
        others = best([r for r in group if r["impl"] not in (OURS, LIK)], key)
        if mine is None and lik is None and others is None:
            continue
        first = group[0]
        ratio = mine[key] / lik[key] if mine and lik else None
        floor = 100 * first["floor_us"] / mine[key] if mine and first.get("floor_us") else None
        kind = first["dtype"] if first["dtype"] != "bfloat16" else None
        name = " ".join(str(v) for v in (first["shape"], first["op"], first["winners"], kind) if v)
        row = [name, number(mine and mine[key]), number(lik and lik[key])]
        row += [f"{ratio:.2f}" if ratio else "-", number(others and others[key])]
        row += [f"{floor:.0f}%" if floor else "-", number(mine and mine["wall_us"])]
        row += [number(lik and lik["wall_us"])]
        body.append(row)
    unit = "us" if key == "gpu_us" else "wall us"
    return align(
        ["shape", f"ours {unit}", "LIK", "ours/LIK", "others", "floor", "our wall", "LIK wall"], body
    )
