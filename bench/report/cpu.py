"""The part of docs/benchmarks on CPUs."""

import pandas as pd

from bench.harness.library import EINSUM, GEMM, MAXSIM_CPU, NUMKONG, OURS
from bench.report.tables import chosen, markdown, pivot, records_of, section, size, stamp
from late_interaction._doctor.text import number

SIZES = "Nq x Nd, Lq, Ld"


def _wrong(row):
    return " (wrong)" if "parity" in row["error"] else ""


def cpu_table(record):
    rows = record.of("cpu")
    impl = rows.impl.replace({GEMM: "the GEMM alone"})
    rows = rows.assign(line=rows["shape"] + rows.op + rows.dtype, impl=impl)
    names = (OURS, MAXSIM_CPU, NUMKONG, EINSUM, "the GEMM alone")
    wide = pivot(rows, "line", "impl", lambda row: number(row["gflops"]) + _wrong(row), "wall_us")
    what = {"fwd": "forward", "fwd+bwd": "training step"}
    lines = [f"{size(r)}, {r['dtype']}, {what[r['op']]}" for r in records_of(rows.drop_duplicates("line"))]
    return markdown(pd.DataFrame({SIZES: lines, **chosen(wide.reset_index(drop=True), names)}))


def by_line(rows, line, column, figure, names):
    """Sizes, `names`, and the figure for each value of `column`; a row for each combination of `line`."""
    first = rows.drop_duplicates([*line])
    wide = rows.pivot(index=[*line], columns=column, values=figure).map(number)
    wide = wide.loc[pd.MultiIndex.from_frame(first[[*line]])]
    table = pd.DataFrame({SIZES: [size(row) for row in records_of(first)], **names})
    return pd.concat([table, wide.reset_index(drop=True)], axis=1)


def instruction_set_table(record):
    rows = record.of("cpu-isa")
    if not len(rows):
        return ""
    names = {"": [f"`{row['variant']}`" for row in records_of(rows.drop_duplicates(["shape", "variant"]))]}
    wide = by_line(rows, ("shape", "variant"), "dtype", "gflops", names)
    return markdown(wide[[*wide.columns[:2], *rows.dtype.drop_duplicates()]], left=2)


def _threads(count):
    return f"{count:.0f} thread{'s' if count > 1 else ''}"


def threads_table(record):
    """GFLOP/s by threads; of plain reads GB/s."""
    rows = record.of("cpu-threads")
    rows = rows[rows.variant != "apart"]
    if not len(rows):
        return ""
    rows = rows.assign(figure=rows.gflops.fillna(rows.gbps))
    where = {"memory": "from memory", "cache": "one document, in the caches", "read": ""}
    line = ("shape", "dtype", "variant")
    first = rows.drop_duplicates([*line])
    dtypes = first.dtype.where(first.variant != "read", "GB/s of a plain read")
    names = {"": dtypes.tolist(), "documents": first.variant.map(where).tolist()}
    wide = by_line(rows, line, "threads", "figure", names).rename(columns=_named_threads)
    last = rows[rows.threads == rows.threads.max()]
    wide["GB/s with all"] = last.drop_duplicates([*line]).gbps.map(number).array
    return markdown(wide, left=3)


def _named_threads(column):
    return _threads(column) if isinstance(column, float) else column


def small_calls_table(record):
    """Microseconds by threads."""
    rows = record.of("cpu-threads")
    rows = rows[rows.variant == "apart"]
    if not len(rows):
        return ""
    wide = by_line(rows, ("shape", "dtype"), "threads", "wall_us", {})
    return markdown(wide.rename(columns=_named_threads))


def corpus_table(record):
    """Microseconds a candidate."""
    rows = record.of("cpu-corpus")
    rows = rows.assign(line=rows.impl + rows.dtype, each=rows.wall_us / rows.Nd)
    wide = pivot(rows, "line", "variant", lambda r: number(r["each"]) + _wrong(r), "wall_us")
    first = rows.drop_duplicates("line")
    cells = {
        "": first.impl.array, "stored as": first.dtype.replace("uint8", "residuals of 2 bits").array,
        "all threads": wide.get(""), "one thread": wide.get("one thread"),
    }  # fmt: skip
    return markdown(pd.DataFrame(cells), left=2) if len(rows) else ""


def section_of(record):
    of = f"{record.headers[0]['cpu']}, {record.headers[0]['threads']} threads"
    tables = (
        (
            of,
            "GFLOP/s; implementations take turns, so read each row as ratios. NumKong takes one document a "
            "call, in one thread; its release 7.8.6 ranks tokens by int8 codes without their scales. Wrong: "
            "scores are off by over 1%.",
            cpu_table(record),
        ),
        (
            f"{of}: by instruction set",
            "GFLOP/s of the forward with each instruction set that the CPU has, one run.",
            instruction_set_table(record),
        ),
        (
            f"{of}: more and more of them",
            "GFLOP/s of the forward in calls without a pause: of documents from memory, and of one document "
            "as often, which stays in the caches. GB/s are those of documents from memory.",
            threads_table(record),
        ),
        (
            f"{of}: small calls",
            "Microseconds of wall time of a bfloat16 call 5 ms after the one before, when the threads of "
            "PyTorch's pool sleep. Calls of under a million multiply-adds take one thread.",
            small_calls_table(record),
        ),
        (
            f"{of}: search of a corpus",
            "Microseconds a candidate: the ten best of 2,000 documents of 100 tokens for a query of 32, d = "
            "128. qdrant-client in its local mode, LanceDB embedded and without an index; NumKong scores a "
            "document a call and takes one thread. Wrong: scores are off by over 1%.",
            corpus_table(record),
        ),
    )
    parts = [part for title, note, body in tables for part in section(title, note, body)]
    return [*parts, stamp(record.headers)] if parts else []
