"""The generated part of README.md, from the recorded runs: the roofline, a line for each kind of work, whole
training steps, and when all of it helps."""

import pandas as pd

from bench.harness.library import COMPILED, EINSUM, FLASH, LIK, OURS
from bench.harness.results import whole_record
from bench.peers.encoders import RECIPES
from bench.report import end_to_end
from bench.report.tables import OVER, best, load, markdown, over_best_other, records_of, side_by_side, size
from bench.suites import codes, first_call
from bench.suites.end_to_end import ALONE, EXACT, PEER, ST, STEP, VANILLA
from bench.suites.training_steps import LOSS
from late_interaction._doctor.text import number

PLOT = "roofline.png"
_PAGES, _COMPRESSED, _TOP = (
    "training colpali-128 ",
    f"plaid plaid-4 {codes.PACKED}",
    f"retrieve retrieve-100k {codes.TOP}",
)
_LINES = {  # suite, shape and variant: what it is
    "forward colpali-rerank ": "scores, reranking pages",
    "training pylate-256 ": "scores and gradients, in-batch",
    _PAGES: "scores and gradients, page images in-batch",
    "training kd-128x8 ": "scores and gradients, distillation",
    _COMPRESSED: "scores of compressed documents",
    _TOP: "the best 100 of 100,000 documents",
}
_FIRST = next(iter(RECIPES))  # the recipe that the lists speak of
SHORT, MANY = 128, 16  # tokens of a short query; documents, each of which one query meets


# ---- the tables ----


def _lines(record):
    """The rows of _LINES, in their order."""
    rows = record.rows[record.rows.winners != "skewed"]
    rows = rows.assign(
        line=rows.suite + " " + rows["shape"] + " " + rows.variant,
        who=rows.impl.replace({EINSUM: "PyTorch", COMPILED: "PyTorch"}),
    )
    rows = rows[rows.line.isin([*_LINES])]
    return rows.sort_values("line", key=lambda line: line.map([*_LINES].index), kind="stable")


def table(record):
    rows = _lines(record)
    names = (OURS, LIK, FLASH, "PyTorch")
    wide = side_by_side(rows, "line", "who", OURS, names, lambda r: number(r["gpu_us"]))
    wide.insert(0, "GPU microseconds", [_LINES[line] for line in wide.index])
    ours = records_of(best(rows[rows.impl == OURS], "line"))
    wide.insert(1, "Nq x Nd, Lq, Ld", [size(row) for row in ours])
    return markdown(wide, left=2)


def _whole_steps(records):
    """The largest step of each recipe that was timed with our loss, and the smallest of the first. With
    headers."""
    found = []
    for headers, rows in records:
        for name in RECIPES:
            steps = [r for r in end_to_end.steps_of(rows) if r["recipe"] == name]
            timed = [r for r in steps if "s" in end_to_end.values_of(r, EXACT)]
            smallest = timed[:1] if name == _FIRST and len(timed) > 1 else []
            found += [(headers[0], r) for r in smallest + timed[-1:]]
    return found


def steps_table(records):
    body = []
    for header, row in _whole_steps(records):
        values = {name: end_to_end.values_of(row, name) for name in (EXACT, PEER, ST, VANILLA)}
        shares = [end_to_end.loss_share(values[name]) for name in (VANILLA, ST)]
        batch = f"{row['batch']:,}" + ("" if row["mode"] == STEP else ", GradCache")
        gpu = header["gpu"].removeprefix("NVIDIA ").split()[0]
        share = end_to_end.percent(next((x for x in shares if x is not None), None))
        cells = map(end_to_end.seconds_cell, values.values())
        body.append([RECIPES[row["recipe"]].title, batch, gpu, *cells, share])
    head = ["seconds of a whole step", "batch", "GPU", OURS, LIK, ST, "PyTorch", "loss without us"]
    return markdown(pd.DataFrame(body, columns=head))


# ---- when it helps ----


def _one_short_query(record):
    """The range of the peers' time over ours where each of many documents meets one short query."""
    rows = record.of("forward")
    one = (rows.Nq == 1) | (rows.layout == "kd")
    rows = rows[rows.impl.isin([OURS, LIK, FLASH]) & (rows.Lq <= SHORT) & (rows.Nd >= MANY) & one]
    ratios = [ratio for ratio in over_best_other(rows, "shape", "impl", OURS) if ratio != "-"]
    ratios.sort(key=lambda ratio: float(ratio.removesuffix("x")))
    if not ratios:
        return ""
    return (
        f"documents in the GPU's memory, in bfloat16, that meet one query of up to {SHORT} tokens: all "
        f"libraries wait for the memory (the best peer takes {ratios[0]} to {ratios[-1]} of our time)."
    )


def _first_call(record):
    steps = record.of("first-call").query("op == 'fwd+bwd'").dropna(subset=["wall_us"])
    ours = steps[steps.impl == OURS].wall_us.tolist()
    cold = steps[(steps.impl == LIK) & (steps.jit_cache == first_call.COLD)].wall_us.tolist()
    if not ours or not cold:
        return ""
    return (
        f"processes that start often: the first scores and gradients take {1e-3 * ours[0]:.0f} ms, and "
        f"{1e-6 * cold[0]:.1f} s where {LIK} compiles and tunes its own first."
    )


def _large_batches(records):
    alone = [r for _, rows in records for r in rows if r["mode"] == ALONE and r["recipe"] == _FIRST]
    each = [(r, end_to_end.values_of(r, VANILLA), end_to_end.values_of(r, EXACT)) for r in alone]
    full = [x for x in each if end_to_end.no_memory_for(x[1], LOSS)]
    both = [x for x in each if "s" in x[1] and "s" in x[2]]
    if not full or not both or "s" not in full[0][2]:
        return ""
    row, vanilla, ours = both[-1]
    return (
        f"batches of thousands: of {row['batch']:,} queries the loss takes {number(ours['peak_mib'])} MiB "
        f"and {number(1e3 * ours['s'])} ms, PyTorch's einsum {number(vanilla['peak_mib'])} MiB and "
        f"{number(1e3 * vanilla['s'])} ms; of {full[0][0]['batch']:,} einsum runs out of memory."
    )


def _small_batches(records):
    steps = [r for _, rows in records[:1] for r in end_to_end.steps_of(rows) if r["recipe"] == _FIRST]
    found = end_to_end.where_little(steps)
    if not found:
        return ""
    return (
        f"small batches behind an encoder: up to a batch of {found[0]:,} PyTorch's own loss is less than "
        f"{end_to_end.LITTLE:.0%} of a step of {RECIPES[_FIRST].title} ({found[1]})."
    )


def when(record, records):
    """Two lists: when it helps, and when it does not."""
    helps, helps_not = [_large_batches(records)], [_small_batches(records)]
    if record:
        over = over_best_other(_lines(record), "line", "who", OURS)
        for line, what in (
            (_PAGES, "page images: {} as fast as the best other in scores and gradients of a batch."),
            (_COMPRESSED, "documents that are stored compressed: {} as fast as the best other."),
            (_TOP, "search by several queries at a time: {} as fast as the best other."),
        ):
            helps += [what.format(over[line])] if over.get(line, "-") != "-" else []
        helps.append(_first_call(record))
        helps_not.append(_one_short_query(record))
    lists = {"**It helps** with": helps, "**It does not help** with": helps_not}
    return "\n\n".join(
        "\n".join([title, "", *(f"- {line}" for line in lines if line)])
        for title, lines in lists.items()
        if any(lines)
    )


def build(directory):
    """The Markdown between the markers."""
    parts = []
    if (directory / PLOT).exists():
        parts.append(f"![Roofline of the MaxSim forward](bench/results/{PLOT})")
    records, path = end_to_end.records(directory), whole_record(directory)
    record = load(path) if path else None
    if record and (lines := table(record)):
        parts += [f"bf16, d = 128, on one {record.device}; `{OVER}` counts PyTorch.", lines]
    if steps := steps_table(records):
        note = (
            "Whole training steps, encoder and optimizer included (true sizes, random weights). `loss without"
            f" us`: the share of the step that PyTorch's loss takes, or {ST}' where PyTorch's has no memory."
            " Where steps differ by more, it is the encoder's time that does: these are medians of few calls."
        )
        parts += [note, steps]
    if box := when(record, records):
        parts.append(box)
    return "\n\n".join(parts or ["No run is recorded yet: `make bench` on a GPU writes bench/results."])
