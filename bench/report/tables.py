"""Records as pandas frames, and frames of text as Markdown tables."""

import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from bench.harness.ceilings import floor_us
from bench.harness.results import Row, read, split
from late_interaction._doctor.text import number

OVER = "over best other"
# A row may lack figures, which are NaN then, and words, which are "".
FIGURES = (
    *("gpu_us", "wall_us", "peak_mib", "rel_err", "gradients_mib", "over_limit_s", "import_ms", "gflops",
    "gbps"),
    *("threads", "over_bus", "bus_gbps", "nbits", "pairs", "regret"),
)  # fmt: skip
WORDS = ("variant", "winners", "backward", "gpu_method", "error", "skipped", "jit_cache", "plan")


@dataclass
class Record:
    """A file of bench/results: the headers of its runs, and a frame of its rows."""

    path: Path
    headers: list[Row]
    rows: pd.DataFrame

    def __post_init__(self):
        self.runs = {header["run"]: header for header in self.headers}

    @property
    def device(self):
        return next((str(h["gpu"]) for h in self.headers if h.get("gpu")), "GPU")

    def of(self, suite):
        return self.rows[self.rows.suite == suite]


def frame(rows):
    out = pd.DataFrame(list(rows))
    for name in FIGURES:
        out[name] = pd.to_numeric(out[name]) if name in out else float("nan")
    for name in WORDS:
        out[name] = out[name].fillna("") if name in out else ""
    return out


def load(path):
    headers, rows = split(read(path))
    return Record(path, headers, frame(rows))


def records_of(rows):
    return rows.to_dict("records")


# ---- text ----


def markdown(table, left=1):
    """A Markdown table; "" without rows. The first `left` columns are flush left, the figures flush right."""
    if not len(table):
        return ""
    align = ["left"] * left + ["right"] * (table.shape[1] - left)
    return str(table.to_markdown(index=False, disable_numparse=True, colalign=align))


def section(title, note, body, level=2):
    return [text for text in (f"{'#' * level} {title}", note, body) if text] if body else []


def _range(figures, digits):
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (min(figures), max(figures))))


def stamp(headers):
    """The device, the versions and the rates of the runs, in one paragraph. Records have each run's own."""
    h = headers[0]
    device = f"{h['gpu']}, driver {h['driver']}" if h["gpu"] else f"{h['cpu']}, {h['threads']} threads"
    versions = {}
    for name, version in (pair for header in headers for pair in header["versions"].items()):
        versions.setdefault(name, {})[version] = None
    packages = ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items())
    text = f"{device}; {packages}."
    if rated := [header for header in headers if header.get("cublas_tflops")]:
        products = _range([header["cublas_tflops"] for header in rated], 0)
        reads = _range([header["read_tbps"] for header in rated], 2)
        text += (
            f" Ceilings of these runs: cuBLAS bf16 8192^3 at {products} TFLOP/s, large reads at {reads} TB/s."
        )
    return text


def of_device(path, device):
    """True if a record is one of these devices' (their names in lower case), or if no device is asked for."""
    return device is None or re.sub(r"^(st|end-to-end)-", "", path.stem) in device


def size(row):
    shape = f"{row['Nq']} x {row['Nd']}, {row['Lq']}, {row['Ld']}"
    shape += {"kd": " (KD)", "pairs": " (pairs)"}.get(row["layout"], "")
    return shape + (f", d={row['d']}" if row["d"] != 128 else "")


def starred(name, row):
    """The name, with a star where the row was timed by events."""
    return name + ("\\*" if row["gpu_method"] == "events" else "")


def us(row):
    """GPU / wall microseconds."""
    return f"{number(row['gpu_us'])} / {number(row['wall_us'])}"


def us_and_mib(row):
    return f"{us(row)} / {number(row['peak_mib'])}"


def floor(row, record):
    return number(floor_us(row, record.runs[row["run"]]))


def why_not(row):
    """(rank, why a row has no time): the reason of the lowest rank is told of several rows."""
    if row["over_limit_s"] == row["over_limit_s"]:
        return 0, f"over {number(row['over_limit_s']).removesuffix('.0')} s"
    if row["error"]:
        return 1, "wrong" if "parity" in row["error"] else "fails"
    return 2, "-"


# ---- frames of text ----


def best(rows, line, key="gpu_us"):
    """The fastest row of each line that has a time, in the record's order."""
    timed = rows.dropna(subset=[key])
    return timed.sort_values(key, kind="stable").drop_duplicates(line).set_index(line, drop=False).reindex(
        timed[line].drop_duplicates()
    )  # fmt: skip


def pivot(rows, line, column, figure=us, key="gpu_us"):
    """A frame of text with a row for each line and a column for each value of `column`: the figure of the
    fastest row, or why there is none."""
    told = []
    for row in records_of(rows):
        rank, reason = why_not(row)
        told.append((-1, figure(row)) if row[key] == row[key] else (rank, reason))
    rows = rows.assign(_rank=[rank for rank, _ in told], _cell=[cell for _, cell in told])
    first = rows.sort_values([key, "_rank"]).drop_duplicates([line, column])
    wide = first.set_index([line, column])["_cell"].unstack(column)
    return wide.reindex(rows[line].drop_duplicates()).fillna("-")


def chosen(wide, columns):
    """These columns, of which some may be missing, by their names."""
    return {name: wide.get(name, "-") for name in columns}


def over_best_other(rows, line, column, ours):
    """The time of the fastest of all others over ours, by the same clock, for each line."""
    mine = best(rows[rows[column] == ours], line)
    clock = rows[line].map(mine["gpu_method"])
    others = rows[(rows[column] != ours) & (rows["gpu_method"] == clock)]
    ratio = others.groupby(line)["gpu_us"].min().reindex(mine.index) / mine["gpu_us"]
    return ratio.map(lambda x: f"{x:.2f}x" if x == x else "-")


def side_by_side(rows, line, column, ours, names, figure=us):
    """A frame with a row for each line that has a time of ours: a column for each of `names`, and OVER."""
    wide = pivot(rows, line, column, figure)
    over = over_best_other(rows, line, column, ours)
    return pd.DataFrame({**chosen(wide.reindex(over.index), names), OVER: over})
