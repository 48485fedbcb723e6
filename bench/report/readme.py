"""The generated part of README.md, from the recorded runs: the roofline, a line for each kind of work, whole
training steps, and when all of it helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.library import COMPILED, EINSUM, FLASH, LIK, OURS
from bench.harness.results import Row, best, device_of, groups, read, split, whole_record
from bench.harness.text import number
from bench.peers.encoders import RECIPES
from bench.report import end_to_end, tables
from bench.suites import first_call, plaid, retrieval
from bench.suites.recipe_run import ALONE, EXACT, PEER, ST, STEP, VANILLA
from bench.suites.training_steps import LOSS

PLOT = "roofline.png"


@dataclass(frozen=True)
class _Line:
    what: str
    suite: str
    shape: str
    variant: str | None = None


_PAGES = _Line("scores and gradients, page images in-batch", "training", "colpali-128")
_COMPRESSED = _Line("scores of compressed documents", plaid.SUITE, "plaid-4", plaid.PACKED)
_TOP = _Line("the best 100 of 100,000 documents", retrieval.SUITE, "retrieve-100k", retrieval.TOP)
_LINES = (
    _Line("scores, reranking pages", "forward", "colpali-rerank"),
    _Line("scores and gradients, in-batch", "training", "pylate-256"),
    _PAGES,
    _Line("scores and gradients, distillation", "training", "kd-128x8"),
    _COMPRESSED,
    _TOP,
)
_FIRST = next(iter(RECIPES))  # the recipe that the lists speak of
SHORT, MANY = 128, 16  # tokens of a short query; documents, each of which one query meets


# ---- the table ----


def _rows(rows: Sequence[Row], line: _Line) -> list[Row]:
    wanted = (line.suite, line.shape, line.variant)
    found = [r for r in rows if (r["suite"], r["shape"], r.get("variant")) == wanted]
    return [r for r in found if r["winners"] in (None, "uniform")]


def _times_as_fast(group: Sequence[Row]) -> str:
    """The fastest of all others over ours."""
    others = [r for r in group if r["impl"] != OURS]
    return tables.over_best_other(best(r for r in group if r["impl"] == OURS), others)


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
        body.append([line.what, tables.size(ours), *cells, _times_as_fast(group)])
    head = ["GPU microseconds", "Nq x Nd, Lq, Ld", OURS, LIK, FLASH, "PyTorch", tables.OVER]
    return tables.table(head, body, left=2) if body else ""


# ---- whole steps ----


def _whole_steps(records: Sequence[end_to_end.Record]) -> list[tuple[Row, Row]]:
    """The largest step of each recipe that was timed with our loss, and the smallest of the first. With
    headers."""
    found = []
    for headers, rows in records:
        for name in RECIPES:
            steps = [r for r in end_to_end.steps_of(rows) if r["recipe"] == name]
            timed = [r for r in steps if "s" in r["variants"].get(EXACT, {})]
            smallest = timed[:1] if name == _FIRST and len(timed) > 1 else []
            found += [(headers[0], r) for r in smallest + timed[-1:]]
    return found


def steps_table(records: Sequence[end_to_end.Record]) -> str:
    body = []
    for header, row in _whole_steps(records):
        variants = row["variants"]
        shares = [end_to_end.loss_share(variants.get(name, {})) for name in (VANILLA, ST)]
        cached = "" if row["mode"] == STEP else ", GradCache"
        body.append(
            [
                RECIPES[row["recipe"]].title,
                f"{row['batch']:,}{cached}",
                device_of([header]).removeprefix("NVIDIA ").split()[0],
                *(end_to_end.seconds_cell(variants.get(name, {})) for name in (EXACT, PEER, ST, VANILLA)),
                end_to_end.percent(next((x for x in shares if x is not None), None)),
            ]
        )
    head = ["seconds of a whole step", "batch", "GPU", OURS, LIK, ST, "PyTorch", "loss without us"]
    return tables.table(head, body) if body else ""


# ---- when it helps ----


def _one_short_query(rows: Sequence[Row]) -> str | None:
    """The range of the peers' time over ours where each of many documents meets one short query."""
    ratios = []
    for group in groups(r for r in rows if r["suite"] == "forward").values():
        ours = best(r for r in group if r["impl"] == OURS)
        peers = [r for r in group if r["impl"] in (LIK, FLASH)]
        if ours is None or ours["Lq"] > SHORT or ours["Nd"] < MANY:
            continue
        ratio = tables.over_best_other(ours, peers)
        if ratio != "-" and (ours["Nq"] == 1 or ours["layout"] == "kd"):
            ratios.append(ratio)
    if not ratios:
        return None
    ratios.sort(key=lambda ratio: float(ratio.removesuffix("x")))
    return (
        f"documents in the GPU's memory, in bfloat16, that meet one query of up to {SHORT} tokens: all"
        f" libraries wait for the memory (the best peer takes {ratios[0]} to {ratios[-1]} of our time)."
    )


def _first_call(rows: Sequence[Row]) -> str | None:
    steps = [r for r in rows if r["suite"] == first_call.SUITE and r["op"] == "fwd+bwd" and r["wall_us"]]
    ours = [r["wall_us"] for r in steps if r["impl"] == OURS]
    cold = [r["wall_us"] for r in steps if r["impl"] == LIK and r["jit_cache"] == first_call.COLD]
    if not ours or not cold:
        return None
    return (
        f"processes that start often: the first scores and gradients take {1e-3 * ours[0]:.0f} ms, and"
        f" {1e-6 * cold[0]:.1f} s where {LIK} compiles and tunes its own first."
    )


def _large_batches(records: Sequence[end_to_end.Record]) -> str | None:
    alone = [r for _, rows in records for r in rows if r["mode"] == ALONE and r["recipe"] == _FIRST]
    full = [r for r in alone if end_to_end.no_memory_for(r["variants"].get(VANILLA, {}), LOSS)]
    both = [r for r in alone if all("s" in r["variants"].get(name, {}) for name in (VANILLA, EXACT))]
    if not full or not both or "s" not in full[0]["variants"].get(EXACT, {}):
        return None
    vanilla, ours = (both[-1]["variants"][name] for name in (VANILLA, EXACT))
    return (
        f"batches of thousands: of {both[-1]['batch']:,} queries the loss takes"
        f" {number(ours['peak_mib'])} MiB and {number(1e3 * ours['s'])} ms,"
        f" PyTorch's einsum {number(vanilla['peak_mib'])} MiB and"
        f" {number(1e3 * vanilla['s'])} ms; of {full[0]['batch']:,} einsum runs out of memory."
    )


def _small_batches(records: Sequence[end_to_end.Record]) -> str | None:
    for _, rows in records[:1]:
        steps = end_to_end.steps_of([r for r in rows if r["recipe"] == _FIRST])
        if found := end_to_end.where_little(steps):
            return (
                f"small batches behind an encoder: up to a batch of {found[0]:,} PyTorch's own loss is less"
                f" than {end_to_end.LITTLE:.0%} of a step of {RECIPES[_FIRST].title} ({found[1]})."
            )
    return None


def _kinds_of_work(rows: Sequence[Row]) -> list[str]:
    found = []
    for line, what in (
        (_PAGES, "page images: {} as fast as the best other in scores and gradients of a batch."),
        (_COMPRESSED, "documents that are stored compressed: {} as fast as the best other."),
        (_TOP, "search by several queries at a time: {} as fast as the best other."),
    ):
        if (ratio := _times_as_fast(_rows(rows, line))) != "-":
            found.append(what.format(ratio))
    return found


def when(rows: Sequence[Row], records: Sequence[end_to_end.Record]) -> str:
    """Two lists: when it helps, and when it does not."""
    helps = [_large_batches(records), *_kinds_of_work(rows), _first_call(rows)]
    lists = {
        "**It helps** with": helps,
        "**It does not help** with": [
            _small_batches(records),
            _one_short_query(rows),
        ],
    }
    parts = [
        "\n".join([f"{title}", "", *(f"- {line}" for line in lines if line)])
        for title, lines in lists.items()
        if any(lines)
    ]
    return "\n\n".join(parts)


def build(directory: Path) -> str:
    """The Markdown between the markers."""
    parts: list[str] = []
    if (directory / PLOT).exists():
        parts.append(f"![Roofline of the MaxSim forward](bench/results/{PLOT})")
    records = end_to_end.records(directory)
    rows: list[Row] = []
    if (path := whole_record(directory)) is not None:
        headers, rows = split(read(path))
        if lines := table(rows):
            note = f"bf16, d = 128, on one {device_of(headers)}; `{tables.OVER}` counts PyTorch."
            parts += [note, lines]
    if steps := steps_table(records):
        note = (
            "Whole training steps, encoder and optimizer included (true sizes, random weights). `loss without"
            f" us`: the share of the step that PyTorch's loss takes, or {ST}' where PyTorch's has no memory."
            " Where steps differ by more, it is the encoder's time that does: these are medians of few calls."
        )
        parts += [note, steps]
    if box := when(rows, records):
        parts.append(box)
    if not parts:
        parts = ["No run is recorded yet: `make bench` on a GPU writes bench/results."]
    return "\n\n".join(parts)
