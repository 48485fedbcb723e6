"""The section and the plot of `python -m bench end-to-end`: training steps of whole recipes.

There is neither until a record exists. What the sentences say follows from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.harness.results import Row, read, split
from bench.harness.text import number
from bench.peers.encoders import RECIPES
from bench.report import tables
from bench.report.plots import pyplot
from bench.suites.recipe_run import (
    ALONE,
    CACHED,
    EXACT,
    LEFT_OUT,
    MAXSIM,
    PEER,
    ST,
    STEP,
    VANILLA,
    VARIANTS,
)
from bench.suites.training_steps import ENCODER, LOSS, OUT_OF_MEMORY

PLOT = "end_to_end.png"
LITTLE = 0.05  # of a step: less than this is not noticed
NOISE = 0.05  # of a step: what differs by more without the loss is said
Rows = Sequence[Row]
Record = tuple[list[Row], list[Row]]  # headers and rows


def _values(row: Row, variant: str) -> Row:
    found: Row = row["variants"].get(variant, {})
    return found


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def loss_share(values: Row) -> float | None:
    return values["loss_s"] / values["s"] if "loss_s" in values and "s" in values else None


def percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"


def _gib(values: Row) -> str:
    return f"{values['peak_mib'] / 1024:.1f}" if values.get("peak_mib") is not None else "-"


def _why_not(values: Row) -> str:
    error = values.get("error", "-")
    if error == OUT_OF_MEMORY:
        return f"no memory ({values['where']})" if values.get("where") else "no memory"
    if error.startswith("wrong"):
        return "wrong"
    return error if error in ("-", LEFT_OUT) else "fails"


def seconds_cell(values: Row) -> str:
    spread = f" ± {50 * values['spread']:.0f}%" if values.get("spread") else ""
    return _seconds(values["s"]) + spread if "s" in values else _why_not(values)


def _step_cell(values: Row) -> str:
    return seconds_cell(values) + (f" / {_gib(values)}" if "s" in values else "")


def _alone_cell(values: Row) -> str:
    if "s" not in values:
        return _why_not(values)
    return f"{number(1e3 * values['s'])} / {number(values.get('peak_mib'))}"


# ---- tables ----


def _modes(rows: Rows, *modes: str) -> list[Row]:
    return sorted((r for r in rows if r["mode"] in modes), key=lambda r: (r["batch"], r["mode"] == CACHED))


def steps_of(rows: Rows) -> list[Row]:
    """Whole steps, by their batch."""
    return _modes(rows, STEP, CACHED)


def _columns(rows: Rows) -> list[str]:
    """The variants that were measured."""
    return [name for name in VARIANTS if any(name in r["variants"] for r in rows)]


def _name(variant: str) -> str:
    return f"`{variant}`" if variant in (MAXSIM, EXACT) else variant


def steps_table(rows: Rows) -> str:
    steps = steps_of(rows)
    columns = _columns(steps)
    shares = [name for name in (VANILLA, ST, PEER, EXACT) if name in columns]
    body = [
        [
            f"{row['batch']:,}" + (", GradCache" if row["mode"] == CACHED else ""),
            *(_step_cell(_values(row, name)) for name in columns),
            *(percent(loss_share(_values(row, name))) for name in shares),
        ]
        for row in steps
    ]
    head = ["batch", *map(_name, columns), *(f"loss, {_name(name)}" for name in shares)]
    return tables.table(head, body) if body else ""


def alone_table(rows: Rows) -> str:
    alone = _modes(rows, ALONE)
    columns = _columns(alone)
    body = [[f"{r['batch']:,}", *(_alone_cell(_values(r, name)) for name in columns)] for r in alone]
    return tables.table(["batch", *map(_name, columns)], body) if body else ""


# ---- what they say ----


def no_memory_for(values: Row, where: str) -> bool:
    return values.get("error") == OUT_OF_MEMORY and values.get("where") == where


def where_little(steps: Rows) -> tuple[int, str] | None:
    """Up to which batch vanilla's loss is next to nothing of its step, and its shares there and at first."""
    few: list[Row] = []
    for row in steps:
        share = loss_share(_values(row, VANILLA))
        if share is not None and share >= LITTLE:
            break
        few += [row] if share is not None else []
    if not few:
        return None
    shares = [f"{percent(loss_share(_values(r, VANILLA)))} at {r['batch']:,}" for r in (few[0], few[-1])]
    return few[-1]["batch"], ", ".join(dict.fromkeys(shares))


def _little(steps: Rows) -> str | None:
    if (found := where_little(steps)) is None:
        return None
    batch, shares = found
    return (
        f"Up to a batch of {batch:,} the loss changes nothing: vanilla's, forward and backward, is less than"
        f" {LITTLE:.0%} of its step ({shares}), and the encoder is the rest."
    )


def _beside_peer(row: Row) -> str:
    peer = _values(row, PEER)
    if "s" not in peer:
        return ""
    return f" (with LIK {_seconds(peer['s'])} s, {percent(loss_share(peer))} of it the loss)"


def _decides(steps: Rows) -> str | None:
    """The largest batch that vanilla can do, where its loss counts."""
    both = [r for r in steps if loss_share(_values(r, VANILLA)) is not None and "s" in _values(r, EXACT)]
    if not both or (loss_share(_values(both[-1], VANILLA)) or 0.0) < LITTLE:
        return None
    row = both[-1]
    vanilla, ours = _values(row, VANILLA), _values(row, EXACT)
    return (
        f"At {row['batch']:,} the loss is {percent(loss_share(vanilla))} of vanilla's step, which takes"
        f" {_seconds(vanilla['s'])} s, and {percent(loss_share(ours))} of the step with `contrastive_loss`,"
        f" which takes {_seconds(ours['s'])} s: {vanilla['s'] / ours['s']:.2f} times as fast"
        f"{_beside_peer(row)}."
    )


def _in_chunks(steps: Rows) -> str | None:
    """The largest batch at which Sentence Transformers' own maxsim counts."""
    counts = [r for r in steps if (loss_share(_values(r, ST)) or 0.0) >= LITTLE and "s" in _values(r, EXACT)]
    if not counts:
        return None
    row = counts[-1]
    theirs, ours = _values(row, ST), _values(row, EXACT)
    return (
        f"Sentence Transformers' `maxsim`, which needs less memory, is {percent(loss_share(theirs))} of the"
        f" step at {row['batch']:,}; with `contrastive_loss` that step is {theirs['s'] / ours['s']:.2f} times"
        " as fast."
    )


def _encoder_full(steps: Rows) -> str | None:
    for row in steps:
        if row["mode"] == STEP and any(no_memory_for(values, ENCODER) for values in row["variants"].values()):
            return (
                f"At {row['batch']:,} there is no memory for the encoder's activations, whoever computes the"
                " loss; from there on GradCache encodes the batch in parts."
            )
    return None


def _vanilla_full(steps: Rows, alone: Rows) -> str | None:
    for row in steps:
        ours = _values(row, EXACT)
        if no_memory_for(_values(row, VANILLA), LOSS) and "s" in ours:
            return (
                f"At {row['batch']:,} vanilla's loss runs out of memory; with `contrastive_loss` a step takes"
                f" {_seconds(ours['s'])} s, {percent(loss_share(ours))} of it the loss, and peaks at"
                f" {_gib(ours)} GiB{_beside_peer(row)}."
            )
    for row in alone:
        ours = _values(row, EXACT)
        if no_memory_for(_values(row, VANILLA), LOSS) and "s" in ours:
            return (
                f"Alone, vanilla's loss runs out of memory at {row['batch']:,}, where `contrastive_loss`"
                f" takes {number(1e3 * ours['s'])} ms; no step of that batch was timed."
            )
    return None


def _other_than_the_loss(steps: Rows) -> str | None:
    """The step whose seconds differ most between variants where their losses' seconds do not."""
    found: list[tuple[float, Row, Row, Row]] = []
    for row in steps:
        timed = [dict(v, name=name) for name, v in row["variants"].items() if "loss_s" in v]
        if timed and row["mode"] == STEP:
            fast, slow = (by(timed, key=lambda v: float(v["s"])) for by in (min, max))
            between = slow["s"] - fast["s"]
            if between > NOISE * fast["s"] and slow["loss_s"] - fast["loss_s"] < between / 2:
                found.append((between / fast["s"], row, fast, slow))
    if not found:
        return None
    _, row, fast, slow = max(found, key=lambda each: each[0])
    loss_ms, step_ms = (1e3 * (slow[key] - fast[key]) for key in ("loss_s", "s"))
    calls = f"medians of {slow['calls']} calls" if slow["calls"] > 1 else "one call each"
    return (
        f"The encoder's own time varies by more than losses differ: at {row['batch']:,} a step with"
        f" {_name(slow['name'])} took {number(step_ms)} ms longer than one with {_name(fast['name'])}, of"
        f" which {number(max(loss_ms, 0.0))} ms are the loss's; what else differed is not recorded ({calls})."
    )


def findings(rows: Rows) -> list[str]:
    """Sentences on one recipe: where the loss changes nothing, and where it decides."""
    steps, alone = steps_of(rows), _modes(rows, ALONE)
    found = (
        _little(steps), _other_than_the_loss(steps), _decides(steps), _encoder_full(steps),
        _vanilla_full(steps, alone), _in_chunks(steps),
    )  # fmt: skip
    return [sentence for sentence in found if sentence]


# ---- the plot ----

_STYLES = {VANILLA: "#7f9172", PEER: "#669bbc", EXACT: "#c1121f"}


def plot(rows: Rows, title: str, target: Path) -> str | None:
    """Draws the share of the loss in a step. Returns the reason if it cannot."""
    plt = pyplot()
    if plt is None:
        return "no plot of end-to-end steps: matplotlib is not installed"
    names = [name for name in RECIPES if any(r["recipe"] == name for r in steps_of(rows))]
    figure, axes = plt.subplots(
        1,
        len(names),
        figsize=(3.4 * len(names), 3.6),
        dpi=130,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, name in zip(axes[0], names, strict=True):
        steps = steps_of([r for r in rows if r["recipe"] == name])
        for variant, color in _STYLES.items():
            shares = [(r["batch"], loss_share(_values(r, variant))) for r in steps]
            points = [(batch, 100 * share) for batch, share in shares if share is not None]
            if points:
                ax.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=variant)
        batches = sorted({r["batch"] for r in steps})
        ax.set(title=RECIPES[name].title, xlabel="batch", xscale="log")
        ax.set_xticks(batches, [str(batch) for batch in batches], fontsize=7)
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, linewidth=0.4, color="#dddddd")
    axes[0][0].set(ylabel="loss, % of a step")
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    plt.close(figure)
    return None


# ---- the section ----


def records(directory: Path) -> list[Record]:
    """Headers and rows of each record, the longest first."""
    found = [split(read(path)) for path in sorted(directory.glob("end-to-end-*.json"))]
    found.sort(key=lambda record: -len(record[1]))
    return [(headers, rows) for headers, rows in found if steps_of(rows)]


def draw(directory: Path, target: Path) -> list[str]:
    """Draws the plot of the first record. Returns what it could not do."""
    for headers, rows in records(directory)[:1]:
        problem = plot(rows, f"Share of MaxSim with its loss and backward ({headers[0]['gpu']})", target)
        return [problem] if problem else []
    return []


def _of_recipe(name: str, rows: Rows) -> list[str]:
    recipe, first = RECIPES[name], rows[0]
    note = (
        f"{recipe.about}; queries of {first['query']} tokens, documents of {first['document']}. Seconds of a"
        " step / GiB at its peak, with weights and optimizer; then the share of the loss in the step."
    )
    if any("spread" in values for row in rows for values in row["variants"].values()):
        note += " ±: half of the interquartile range."
    if part := next((r["part"] for r in rows if r.get("part")), None):
        note += f" GradCache encodes {part} queries with their documents at a time."
    parts = [*tables.section(f"{recipe.title}.", note, steps_table(rows)), *[" ".join(findings(rows))]]
    parts += tables.section("Its loss alone.", "Milliseconds / MiB beside the embeddings.", alone_table(rows))
    return [part for part in parts if part]


def build(directory: Path) -> list[str]:
    """A section for each record, and nothing without one."""
    parts: list[str] = []
    for i, (headers, rows) in enumerate(records(directory)):
        packages = ", ".join(f"{name} {version}" for name, version in headers[0]["packages"].items())
        parts.append(
            "**Whole training steps.** Forward, loss, backward and optimizer, of encoders of the true sizes"
            f" with random weights and random inputs ({packages}; bfloat16 autocast, AdamW, attention by"
            " scaled_dot_product_attention). The loss is cross entropy over the scores of all pairs of the"
            " batch; its time is that of its forward and backward within the step. Vanilla is einsum, max and"
            " sum."
            ' `contrastive_loss` computes the scores too. "no memory" says what ran out of it.'
        )
        for name in RECIPES:
            if mine := [r for r in rows if r["recipe"] == name]:
                parts += _of_recipe(name, mine)
        if i == 0:
            parts.append(f"![Share of the loss in a training step, by batch]({PLOT})")
        parts.append(tables.stamp(headers))
    return parts
