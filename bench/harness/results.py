"""Rows, their groups, and the JSON files that hold them: a list of rows, those of kind "header" among
them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "bench" / "results"

Row = dict[str, Any]

SEPARATE_SUITES = ("sweep", "plans")  # each has a record of its own, <suite>-<device>.json
WORK_RECORDS = ("st", "end-to-end")  # rows are pieces of work
OTHER_RECORDS = ("ncu", *WORK_RECORDS)  # in forms of their own

# What every row has, in this order; a row may add keys of its own (variant, gflops, error, skipped, ...).
KEYS = (
    *("suite", "shape", "op", "layout", "Nq", "Nd", "Lq", "Ld", "d", "dtype", "winners", "impl", "backward"),
    *("gpu_us", "wall_us", "peak_mib", "rel_err"),
)


class IncompleteError(ValueError):
    """A group was measured without some of the implementations that the record has."""


def new_row(suite, shape, op, dtype, impl, **values):
    row = dict.fromkeys(KEYS)
    row.update(
        suite=suite, shape=shape.name, op=op, layout=shape.layout, dtype=str(dtype).removeprefix("torch."),
        Nq=shape.Nq, Nd=shape.Nd, Lq=shape.Lq, Ld=shape.Ld, d=shape.d, impl=impl, **values,
    )  # fmt: skip
    return row


def slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def size_of(row):
    """The problem size of a row, in one line."""
    return f"{row['Nq']} x {row['Nd']}, {row['Lq']}, {row['Ld']}, d={row['d']} {row['layout']}"


def split(rows):
    """(headers, measurements)."""
    rows = list(rows)
    headers = [r for r in rows if r.get("kind") == "header"]
    return headers, [r for r in rows if r.get("kind") != "header"]


def group_of(row):
    """The key of a group, whose implementations and variants come from one run and are replaced together."""
    if "work" in row:
        return row["work"], row["batch"]
    return tuple(row.get(k) for k in ("suite", "shape", "op", "winners"))


def by_group(rows):
    out = {}
    for row in rows:
        out.setdefault(group_of(row), []).append(row)
    return out


def replaced(earlier, rows):
    """`earlier`, headers among them, with whole groups replaced by those of `rows`."""
    (old_headers, old_rows), (new_headers, new_rows) = split(earlier), split(rows)
    old, new = by_group(old_rows), by_group(new_rows)
    for group in new.keys() & old.keys():
        missing = {r.get("impl") for r in old[group]} - {r.get("impl") for r in new[group]}
        if missing:
            where, names = " ".join(str(part) for part in group if part), ", ".join(sorted(map(str, missing)))
            raise IncompleteError(f"{where}: the record has {names} from another run; measure all again")
    measured = [*(r for r in old_rows if group_of(r) not in new), *new_rows]
    runs = {r["run"] for r in measured}
    headers = {h["run"]: h for h in (*old_headers, *new_headers) if h["run"] in runs}
    return [*headers.values(), *measured]


def print_faults(rows):
    """A line for each row that failed, or whose scores are wrong."""
    for row in rows:
        wrong = row.get("error") or (f"scores are off: {row['mismatch']}" if row.get("mismatch") else "")
        if wrong:
            words = (row.get(k) for k in ("suite", "shape", "impl", "backward", "variant"))
            print(f"error: {' '.join(str(word) for word in words if word)}: {wrong[:160]}")


class Results:
    """The rows of this run, written to `path` after every addition, so that a time-out loses nothing. With
    `merge`, groups of the file that this run does not measure stay."""

    def __init__(self, path, header, merge=False):
        self.path, self.header = path, header
        self.rows = []
        self._earlier = read(path) if path and merge and path.exists() else []

    def add(self, rows):
        self.rows += [{**row, "run": self.header["run"]} for row in rows]
        if self.path is not None:
            write(self.path, replaced(self._earlier, [self.header, *self.rows]))


# ---- files ----


def read(path):
    return json.loads(path.read_text())


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(_rounded(r)) for r in rows)
    partial = path.with_name(path.name + ".part")
    partial.write_text(f"[\n{lines}\n]\n")
    partial.replace(path)


def _rounded(value):
    """Floats of five digits; more would be noise."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def of_a_cpu(path):
    """Records of a GPU have its name. Those of other CPUs than that of cpu.json are named cpu-*.json."""
    return path.stem == "cpu" or path.stem.startswith("cpu-")


def _newest_forward(path):
    return max((str(r["run"]) for r in read(path) if r.get("suite") == "forward"), default="")


def records(directory):
    """Return the records of suites, without sweeps, plans, profiles and parts: whole ones, the newest first,
    those of a GPU planned as an older one behind them, then parts of other GPUs, then CPUs."""
    others = tuple(f"{name}-" for name in (*SEPARATE_SUITES, *OTHER_RECORDS))
    found = [p for p in sorted(directory.glob("*.json")) if not p.name.startswith(others)]
    found = [p for p in found if not p.name.endswith(".partial.json")]
    newest = {p: "" if of_a_cpu(p) else _newest_forward(p) for p in found}
    found.sort(key=newest.__getitem__, reverse=True)
    return sorted(found, key=lambda p: (of_a_cpu(p), not newest[p], "-planned-as-" in p.name))


def whole_record(directory):
    """The newest record of a GPU that has the forward suite."""
    return next((p for p in records(directory) if not of_a_cpu(p) and _newest_forward(p)), None)


# ---- merging ----


def record_of(part):
    """The name of the record that these rows belong to."""
    headers, rows = split(part)
    kinds = {f"{r['suite']}-" if r["suite"] in SEPARATE_SUITES else "" for r in rows}
    if len(kinds) != 1:
        raise ValueError(f"rows of {len(kinds)} kinds of record in one file")
    return f"{kinds.pop()}{slug(headers[-1]['gpu'] or 'cpu')}.json"


def add_arguments(p):
    p.add_argument(
        "parts", type=Path, nargs="+", metavar="FILE", help="files of `run --out`, or other records"
    )
    p.add_argument(
        "--out", type=Path, default=DIRECTORY, help="the folder of records; default: bench/results"
    )


def merge(args, broken_rules):
    """Merge the files of runs into the records of their devices.

    The rows of one device go to `<device>.json`, `sweep-<device>.json` and `plans-<device>.json`
    in --out. A group (suite, shape, op, winners) of a later file replaces the same group of an earlier file
    and of the record, with all its implementations and variants. A group that lacks an implementation of the
    record is refused, and so is one that breaks a rule of bench/rules.py.
    """
    done = {}
    try:
        for part in map(read, args.parts):
            path = args.out / record_of(part)
            before = done.get(path) or (read(path) if path.exists() else [])
            done[path] = replaced(before, part)
    except (OSError, ValueError) as error:
        kind = "" if isinstance(error, IncompleteError) else f"{type(error).__name__}: "
        print(f"{kind}{error}", file=sys.stderr)
        return 1
    broken = [line for rows in done.values() for line in broken_rules(rows)]
    if broken:
        print("\n".join(broken), file=sys.stderr)
        return 1
    for path, rows in done.items():
        write(path, rows)
        print(f"{len(split(rows)[1])} rows in {path}")
    return 0
