"""The generated parts of docs/benchmarks: every library beside the others, and whole training steps."""

import pandas as pd

from bench.harness.library import COMPILED, EINSUM, FLASH, LIK, OURS, SENTENCE_TRANSFORMERS
from bench.harness.results import of_a_cpu, records
from bench.report import cpu, end_to_end, sentence_transformers
from bench.report.tables import (
    OVER,
    best,
    chosen,
    floor,
    load,
    markdown,
    of_device,
    over_best_other,
    pivot,
    records_of,
    section,
    side_by_side,
    size,
    stamp,
    starred,
    us,
    us_and_mib,
)  # fmt: skip
from late_interaction._doctor.text import number

SIZES = "Nq x Nd, Lq, Ld"
PYTORCH = "PyTorch"
LIBRARIES = (OURS, LIK, FLASH, PYTORCH)
_BESIDE_PEER = (
    (
        "Packed sequences", "varlen",
        "Packed `Tokens`: lengths up to Lq and Ld, short ones more often; `padded`: with masks, each "
        "query with documents of its own.",
    ),
    (
        "Listed pairs", "pairs-packed",
        "`score_pairs_packed`: each of 10,000 documents with one of 100 queries; all pairs of a dense batch,"
        " and a tenth of those. One query: `rerank_direct`, documents in no order.",
    ),
    ("Residual-compressed documents", "plaid", "65,536 centroids, random codes."),
    ("The best 100 documents", "retrieve", ""),
)  # fmt: skip


# ---- a GPU ----


def _of_libraries(record, rows, sizes):
    """A line for each shape: its name, sizes and floor, and the time of each library."""
    rows = rows.assign(who=rows.impl.replace({EINSUM: PYTORCH, COMPILED: PYTORCH}))
    wide = side_by_side(rows, "shape", "who", OURS, LIBRARIES)
    ours = records_of(best(rows[rows.impl == OURS], "shape"))
    wide.insert(0, "shape", [starred(row["shape"], row) for row in ours])
    wide.insert(1, sizes, [size(row) for row in ours])
    wide.insert(2, "floor", [floor(row, record) for row in ours])
    return wide


def forward_table(record, suite="forward"):
    return markdown(_of_libraries(record, record.of(suite), SIZES), left=2)


def training_table(record, suite="training"):
    rows = record.of(suite)
    wide = _of_libraries(record, rows[rows.winners == "uniform"], "Nq x Nd (or K), Lq, Ld")
    skewed = best(rows[(rows.winners == "skewed") & (rows.impl == OURS)], "shape")
    wide.insert(4, "skewed", skewed["gpu_us"].reindex(wide.index).map(number))
    return markdown(wide, left=2)


def memory_table(record):
    rows = record.of("training")
    rows = rows[rows.winners == "uniform"]
    who = rows.impl.replace({OURS: "ours", LIK: "LIK"}) + " " + rows.backward
    rows = rows.assign(who=who.str.strip())
    wide = pivot(rows, "shape", "who", lambda row: number(row["peak_mib"]), "peak_mib")
    names = ("ours lowmem", "ours unified", "LIK lowmem", "LIK unified", FLASH, EINSUM)
    return markdown(pd.DataFrame({"shape": wide.index, **chosen(wide, names)}))


def heads_table(record):
    rows = record.of("heads")
    rows = rows.assign(line=rows.variant + rows["shape"])
    names = (EINSUM, LIK, OURS)
    wide = pivot(rows, "line", "impl", lambda row: f"{number(row['gpu_us'])} / {number(row['peak_mib'])}")
    first = rows.drop_duplicates("line")
    over = over_best_other(rows, "line", "impl", OURS).reindex(wide.index).fillna("-")
    sizes = [size(row) for row in records_of(first)]
    cells = {"loss": first.variant.array, "B x n, Lq, Ld": sizes, **chosen(wide, names), OVER: over}
    return markdown(pd.DataFrame(cells), left=2)


def beside_maxsim_table(record, suite, function, peer):
    """A line for each shape and variant: our maxsim step, our step of `function`, and the peer's."""
    every = record.of(suite)
    if not len(every):
        return ""
    of_maxsim = every[every.variant == "maxsim"]
    maxsim, plain = pivot(of_maxsim, "shape", "impl", us_and_mib)[OURS], best(of_maxsim, "shape")
    lines = []
    for (shape, variant), rows in every[every.variant != "maxsim"].groupby(["shape", "variant"], sort=False):
        first, mine = rows.iloc[0], best(rows[rows.impl == OURS], "shape")
        times = "-"
        if shape in mine.index and shape in plain.index:
            same = mine.gpu_method[shape] == plain.gpu_method[shape]
            clock = "gpu_us" if same and plain.gpu_us[shape] > 0 else "wall_us"
            times = f"{mine[clock][shape] / plain[clock][shape]:.2f}"
        wide = chosen(pivot(rows, "shape", "impl", us_and_mib), (OURS, peer))
        name = starred(str(variant), mine.iloc[0]) if len(mine) else variant
        over = over_best_other(rows, "shape", "impl", OURS)
        others = map(_only, (wide[peer], over))
        lines.append([size(first), name, maxsim[shape], wide[OURS][shape], times, *others])
    head = [SIZES, "", "`maxsim`", f"`{function}`", "times `maxsim`", peer, "over the peer"]
    return markdown(pd.DataFrame(lines, columns=head), left=2)


def _only(cells):
    return cells if isinstance(cells, str) else str(cells.iloc[0]) if len(cells) else "-"


def hidden_table(record):
    rows = record.of("fused-head")
    unfused = "linear, normalize, our maxsim"
    who = rows.impl.where(rows.variant == "fused", unfused)
    rows = rows.assign(line=rows["shape"] + rows.op, who=who)
    wide = side_by_side(rows, "line", "who", OURS, (unfused, LIK, OURS), us_and_mib)
    first = rows.drop_duplicates("line").set_index("line").loc[wide.index]
    wide.insert(0, SIZES, [size(row) for row in records_of(first)])
    wide.insert(1, "", first.op.map({"fwd": "forward", "fwd+bwd": "training step"}))
    return markdown(wide, left=2)


def beside_peer_table(record, suite):
    """A line for each shape and variant. No suite here has both peers."""
    rows = record.of(suite)
    rows = rows.assign(line=rows["shape"] + rows.op + rows.dtype + rows.variant)
    rows = rows.assign(who=rows.impl.replace({FLASH: LIK}))
    wide = side_by_side(rows, "line", "who", OURS, (OURS, LIK), _with_its_name)
    names = []
    for row in records_of(best(rows[rows.impl == OURS], "line")):
        bits = f", {row['nbits']:.0f} bit" if row["nbits"] > 0 and row["variant"] != "centroids alone" else ""
        listed = f", {row['pairs']:,.0f} pairs" if row["pairs"] > 0 else ""
        names.append((size(row), starred(row["variant"] + bits + listed, row)))
    wide.insert(0, SIZES, [each for each, _ in names])
    wide.insert(1, "", [name for _, name in names])
    return markdown(wide.rename(columns={OVER: "over the peer"}), left=2)


def _with_its_name(row):
    return us(row) + (f" ({FLASH})" if row["impl"] == FLASH else "")


def host_table(record):
    """Corpora that stay in the host's memory."""
    rows = record.of("retrieve").dropna(subset=["over_bus"])
    cells = {
        SIZES: [size(row) for row in records_of(rows)], "memory": rows.variant,
        "wall us": rows.wall_us.map(number),
        "GB/s": (rows.bus_gbps / rows.over_bus).map("{:.1f}".format),
        "of the bus": (100 / rows.over_bus).map("{:.0f}%".format),
    }  # fmt: skip
    return markdown(pd.DataFrame(cells), left=2)


def first_call_table(record):
    """A line for each library and state of its kernel cache: import, first forward, first step."""
    rows = record.of("first-call")
    rows = rows.assign(line=rows.impl + rows.jit_cache)
    calls = pivot(rows, "line", "op", lambda row: f"{row['wall_us'] * 1e-3:,.0f}", "wall_us")
    imports = pivot(rows, "line", "suite", lambda row: f"{row['import_ms']:,.0f}", "import_ms")
    first = rows.drop_duplicates("line").set_index("line")
    cells = {
        "": first.impl, "kernel cache": first.jit_cache.replace("", "-"),
        "import, ms": imports.get("first-call"), "first forward, ms": calls.get("fwd"),
        "first training step, ms": calls.get("fwd+bwd"),
    }  # fmt: skip
    return markdown(pd.DataFrame(cells), left=2)


def _gpu(record):
    tables = (
        (
            "Forward, no gradient",
            "Microseconds, GPU time / wall time (call + synchronize). `floor` is the larger of FLOPs over "
            "cuBLAS' rate and bytes over that of a large read, both measured in the same run.",
            forward_table(record),
        ),
        (
            "Forward and both gradients",
            "The fastest gradient strategy of each library. `skewed`: our GPU time when a few document "
            "tokens win most (winner index Ld x u^4).",
            training_table(record),
        ),
        ("Peak memory of that step", "MiB above the inputs.", memory_table(record)),
        (
            "Short documents, no gradient", "As the first table, of documents of 1 to 64 tokens.",
            forward_table(record, "short"),
        ),
        (
            "Short documents, forward and both gradients", "As the second table.",
            training_table(record, "short-steps"),
        ),
        (
            "Whole losses, forward and backward",
            "Microseconds of one after another, by events / peak MiB: colpali-engine's explicit-negative "
            "heads, which are the same without an in-batch term, and PyLate's contrastive loss, in chunks "
            "of 32 x 32.",
            heads_table(record),
        ),
        (
            "XTR scores, forward and both gradients",
            "GPU / wall microseconds / peak MiB, results included. Each query token selects the k largest "
            'of its similarities with all document tokens (`rule="paper"`). `maxsim` is our step on the '
            "same inputs; Sentence Transformers builds the grid of all similarities, in bfloat16, and is "
            "written out here without its masks.",
            beside_maxsim_table(record, "xtr", "xtr_scores", SENTENCE_TRANSFORMERS),
        ),
        (
            "Smooth maximum, forward and both gradients",
            "GPU / wall microseconds / peak MiB, results included, with `tau=0.1`. PyTorch builds all "
            "similarities by one einsum.",
            beside_maxsim_table(record, "smooth", "smooth_maxsim", EINSUM),
        ),
        (
            "Scores from hidden states",
            "GPU / wall microseconds / peak MiB, results included, of projecting d_model = 768 to d = 128, "
            "normalizing and scoring.",
            hidden_table(record),
        ),
        *(
            (title, f"{note} GPU / wall microseconds.".strip(), beside_peer_table(record, suite))
            for title, suite, note in _BESIDE_PEER
        ),
        (
            "A corpus in the host's memory", "The best 100 documents, beside one copy from pinned memory.",
            host_table(record),
        ),
        (
            "First call in a fresh process",
            "The import of the library and its first call, with CUDA initialised and PyTorch's own first "
            "backward done; of Triton's kernels with an empty cache on disk (cold) and with the cache just "
            "made (warm). The median of 3 processes, of cold caches one.",
            first_call_table(record),
        ),
    )  # fmt: skip
    parts = [part for title, note, body in tables for part in section(title, note, body)]
    return [stamp(record.headers), *parts] if parts else []


def _text(parts):
    return "\n\n".join(parts) if parts else "No run is recorded yet."


def build(directory, device=None):
    """The Markdown between the markers: the tables of a device, or of all that have records."""
    found = [path for path in records(directory) if of_device(path, device)]
    return _text(
        [part for path in found for part in (cpu.section_of if of_a_cpu(path) else _gpu)(load(path))]
    )


def steps(directory, device=None):
    """Write the pages of whole training steps, and of Sentence Transformers with the patch and without."""
    return _text([*end_to_end.build(directory, device), *sentence_transformers.build(directory, device)])
