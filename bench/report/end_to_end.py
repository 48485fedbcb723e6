"""The section of `python -m bench end-to-end`: training steps of whole recipes. There is none without a
record. What the sentences say follows from the rows."""

import pandas as pd

from bench.harness.results import read, split
from bench.peers.encoders import RECIPES
from bench.report.tables import markdown, of_device, section, stamp
from bench.suites.end_to_end import ALONE, CACHED, EXACT, LEFT_OUT, MAXSIM, STEP, VANILLA, VARIANTS
from bench.suites.training_steps import OUT_OF_MEMORY
from late_interaction._doctor.text import number

PLOT = "end_to_end.png"
LITTLE = 0.05  # of a step: less than this is not noticed


def values_of(row, variant):
    return row["variants"].get(variant, {})


def _seconds(value):
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def loss_share(values):
    return values["loss_s"] / values["s"] if "loss_s" in values and "s" in values else None


def percent(share):
    if share is None:
        return "-"
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"


def _gib(values):
    return f"{values['peak_mib'] / 1024:.1f}" if values.get("peak_mib") is not None else "-"


def _why_not(values):
    error = values.get("error", "-")
    if error == OUT_OF_MEMORY:
        return f"no memory ({values['where']})" if values.get("where") else "no memory"
    if error.startswith("wrong"):
        return "wrong"
    return error if error in ("-", LEFT_OUT) else "fails"


def seconds_cell(values):
    spread = f" ± {50 * values['spread']:.0f}%" if values.get("spread") else ""
    return _seconds(values["s"]) + spread if "s" in values else _why_not(values)


# ---- tables ----


def steps_of(rows, *modes):
    """Whole steps, or rows of these modes, by their batch."""
    wanted = modes or (STEP, CACHED)
    return sorted((r for r in rows if r["mode"] in wanted), key=lambda r: (r["batch"], r["mode"] == CACHED))


SHOWN = {MAXSIM: "`maxsim`", EXACT: "`losses.contrastive`"}


def _columns(rows):
    """The variants that were measured, and their titles."""
    found = [name for name in VARIANTS if any(name in r["variants"] for r in rows)]
    return {name: SHOWN.get(name, name) for name in found}


def steps_table(rows):
    steps = steps_of(rows)
    columns = _columns(steps)
    cells = {"batch": [f"{r['batch']:,}" + (", GradCache" if r["mode"] == CACHED else "") for r in steps]}
    for name, title in columns.items():
        found = [values_of(row, name) for row in steps]
        cells[title] = [seconds_cell(v) + (f" / {_gib(v)}" if "s" in v else "") for v in found]
    for name, title in columns.items():
        if name != MAXSIM:
            cells[f"loss, {title}"] = [percent(loss_share(values_of(row, name))) for row in steps]
    return markdown(pd.DataFrame(cells))


def alone_table(rows):
    alone = steps_of(rows, ALONE)
    cells = {"batch": [f"{row['batch']:,}" for row in alone]}
    for name, title in _columns(alone).items():
        found = [values_of(row, name) for row in alone]
        cells[title] = [
            f"{number(1e3 * v['s'])} / {number(v.get('peak_mib'))}" if "s" in v else _why_not(v)
            for v in found
        ]
    return markdown(pd.DataFrame(cells))


# ---- what they say ----


def no_memory_for(values, where):
    return values.get("error") == OUT_OF_MEMORY and values.get("where") == where


def where_little(steps):
    """Up to which batch vanilla's loss is next to nothing of its step, and its shares there and at first."""
    few = []
    for row in steps:
        share = loss_share(values_of(row, VANILLA))
        if share is not None and share >= LITTLE:
            break
        few += [(row, share)] if share is not None else []
    if not few:
        return None
    shares = [f"{percent(share)} at {row['batch']:,}" for row, share in (few[0], few[-1])]
    return few[-1][0]["batch"], ", ".join(dict.fromkeys(shares))


def finding(rows):
    """Up to which batch the loss changes nothing; "" where it counts from the first."""
    found = where_little(steps_of(rows))
    if found is None:
        return ""
    return (
        f"Up to a batch of {found[0]:,} the loss changes nothing: vanilla's, forward and backward, is less "
        f"than {LITTLE:.0%} of its step ({found[1]}), and the encoder is the rest."
    )


# ---- the section ----


def records(directory, device=None):
    """Headers and rows of each record (of a device), the longest first."""
    paths = sorted(directory.glob("end-to-end-*.json"))
    found = [split(read(path)) for path in paths if of_device(path, device)]
    found.sort(key=lambda record: -len(record[1]))
    return [(headers, rows) for headers, rows in found if steps_of(rows)]


def _of_recipe(name, rows):
    recipe, first = RECIPES[name], rows[0]
    note = (
        f"{recipe.about}; queries of {first['query']} tokens, documents of {first['document']}. Seconds of a"
        " step / GiB at its peak, with weights and optimizer; then the share of the loss in the step."
    )
    if any("spread" in values for row in rows for values in row["variants"].values()):
        note += " ±: half of the interquartile range."
    if part := next((r["part"] for r in rows if r.get("part")), None):
        note += f" GradCache encodes {part} queries with their documents at a time."
    parts = [*section(recipe.title, note, steps_table(rows)), finding(rows)]
    note = "Milliseconds / MiB beside the embeddings."
    parts += section("Its loss alone", note, alone_table(rows), level=3)
    return [part for part in parts if part]


def build(directory, device=None):
    """A section for each record (of a device), and nothing without one."""
    parts = []
    drawn = records(directory)[:1]
    for headers, rows in records(directory, device):
        packages = ", ".join(f"{name} {version}" for name, version in headers[0]["packages"].items())
        parts += [
            "Forward, loss, backward and optimizer, of encoders of the true sizes "
            f"with random weights and random inputs ({packages}; bfloat16 autocast, AdamW, attention by "
            "scaled_dot_product_attention). The loss is cross entropy over the scores of all pairs of the "
            "batch; its time is that of its forward and backward within the step. Vanilla is einsum, max and"
            ' sum. `losses.contrastive` computes the scores too. "no memory" says what ran out of it.',
            stamp(headers),
        ]
        if (headers, rows) in drawn:
            parts.append(f"![Share of the loss in a training step, by batch](../{PLOT})")
        for name in RECIPES:
            if mine := [r for r in rows if r["recipe"] == name]:
                parts += _of_recipe(name, mine)
    return parts
