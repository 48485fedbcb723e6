"""The table of `python -m bench st`: Sentence Transformers with and without the patch."""

import pandas as pd

from bench.report.tables import load, markdown, of_device, records_of, section, stamp
from late_interaction._doctor.text import number


def _time(row, way):
    for error in (row.get(f"{way}_error"), row["error"]):
        if isinstance(error, str) and error:
            return error
    return number(row.get(f"{way}_ms"))


def _speedup(row):
    if (over := row.get("speedup_over")) and over == over:
        return f"over {over:.1f}x"
    ratio = row.get("speedup")
    return f"{row['without_ms'] / row['with_ms']:.2f}x" if ratio and ratio == ratio else "-"


def _table(rows):
    each = records_of(rows)
    cells = {
        "work": rows.work, "queries": rows.batch.map("{:,}".format),
        "without, ms": [_time(row, "without") for row in each], "with, ms": [_time(row,
        "with") for row in each],
        "speedup": [_speedup(row) for row in each],
    }  # fmt: skip
    if "with_peak_mib" in rows:
        cells |= {f"{way}, MiB": rows[f"{way}_peak_mib"].map(number) for way in ("without", "with")}
    return markdown(pd.DataFrame(cells))


def build(directory, device=None):
    """A section for each record (of a device)."""
    parts = []
    for path in sorted(directory.glob("st-*.json"), key=lambda p: (p.stem == "st-cpu", p.name)):
        if not of_device(path, device):
            continue
        record = load(path)
        first = record.headers[0]
        packages = ", ".join(f"{name} {version}" for name, version in first["packages"].items())
        note = (
            f"{packages}; {first['dtype'].removeprefix('torch.')}, d = 128. A training step is the forward "
            f"and backward of the loss alone, from embeddings of up to {first['query']} and "
            f"{first['document']} tokens; an evaluation scores and ranks embeddings that are there already."
        )
        if record.rows.work.str.contains("docstrings").any():
            note += " Docstrings are those of Python's standard library, by all-MiniLM-L6-v2 (d = 384)."
        title = "Sentence Transformers without and with its patch"
        parts += [*section(title, note, _table(record.rows)), stamp(record.headers)]
    return parts
