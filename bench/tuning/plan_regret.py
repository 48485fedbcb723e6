"""What the planner's choices cost: the regret of each recorded shape, as the planner chooses today."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.harness.results import Row, size_of
from bench.harness.shape import IN_BATCH, Shape
from late_interaction._doctor.text import align, number

SUITE = "plans"
REGRET = 0.05  # above this a choice is listed as missed
H200 = (90, 132)  # compute capability, multiprocessors


@dataclass(frozen=True)
class Variant:
    """The options of a call."""

    dtype: str = "bf16"
    masked: bool = False
    normalize: bool = False
    winners: bool = False


PLAIN, MASKED = "plain", "d_mask"
JUDGED = {PLAIN: Variant(), MASKED: Variant(masked=True)}
OTHERS = {
    "winners": Variant(winners=True),
    "winners, d_mask": Variant(winners=True, masked=True),
    "normalize": Variant(normalize=True),
    "normalize, d_mask": Variant(normalize=True, masked=True),
    "e4m3": Variant("e4m3"),
    "int8": Variant("int8"),
    "int8, d_mask": Variant("int8", masked=True),
}
VARIANTS = JUDGED | OTHERS


def names(shape: Shape, variant: Variant, sm: int, sm_count: int) -> list[str]:
    """Every plan that our forward can have on this shape; the planner's choice comes first."""
    importlib.import_module("late_interaction")  # registers the operators
    text: str = torch.ops.late_interaction.explain_plan(
        shape.layout != IN_BATCH, shape.Nq, shape.Nd, shape.Lq, shape.Ld, shape.d, variant.dtype, "highest",
        variant.masked, variant.normalize, "alternatives", "auto", sm, sm_count,
    )  # fmt: skip
    return text.split("\n")[:-1]


def judged(row: Row) -> Row:
    """A recorded row with the plan that the planner chooses today; the times are those of the record."""
    if not row.get("times"):
        return row
    shape = Shape(*(row[k] for k in ("shape", "Nq", "Nd", "Lq", "Ld", "d", "layout")))
    plan = names(shape, VARIANTS[row["variant"]], *row.get("device", H200))[0]
    if plan not in row["times"]:
        return {**row, "plan": plan, "regret": None, "error": f"{plan} was not timed"}
    return {**row, "plan": plan, "regret": row["times"][plan] / min(row["times"].values()) - 1}


def figures(rows: Sequence[Row]) -> list[str]:
    """Median, 95th percentile and worst regret, and how many shapes are above REGRET."""
    regrets = sorted(r["regret"] for r in rows)
    p95 = regrets[min(len(regrets) - 1, int(0.95 * len(regrets)))]
    over = sum(regret > REGRET for regret in regrets)
    shown = (statistics.median(regrets), p95, regrets[-1])
    return [*(f"{100 * regret:.1f}%" for regret in shown), f"{over} of {len(regrets)}"]


FIGURES = ["median", "95th percentile", "worst", f"over {100 * REGRET:.0f}%"]


def by_variant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    timed = [r for r in rows if r.get("regret") is not None]
    return {v: found for v in VARIANTS if (found := [r for r in timed if r["variant"] == v])}


def missed(rows: Sequence[Row]) -> list[list[str]]:
    """Shapes above REGRET, worst first: size, variant, chosen plan and its time, best plan and its time."""
    over = [r for r in rows if (r.get("regret") or 0) > REGRET and r["variant"] in JUDGED]
    return [
        [
            size_of(r), r["variant"], r["plan"], number(r["times"][r["plan"]]), r["best"],
            number(r["times"][r["best"]]), f"{100 * r['regret']:.0f}%",
        ]
        for r in sorted(over, key=lambda r: -float(r["regret"]))
    ]  # fmt: skip


MISSED = ["shape", "variant", "chosen", "us", "best", "us", "regret"]


def summary(rows: Sequence[Row]) -> str:
    body = [[variant, *figures(found)] for variant, found in by_variant(rows).items()]
    parts = [align(["regret of the planner's choice", *FIGURES], body)]
    for row in rows:
        if row.get("mismatch"):
            parts.append(f"{', '.join(row['mismatch'])} differ from {row['plan']} on {size_of(row)}")
        if row.get("error"):
            parts.append(f"{size_of(row)}: {row['error']}")
    if lines := missed(rows):
        parts.append(align(MISSED, lines, left=3))
    return "\n".join(parts)
