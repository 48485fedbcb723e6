"""What the planner's choices cost: the regret of each recorded shape, as the planner chooses today."""

from dataclasses import dataclass

from bench.harness.shape import IN_BATCH, Shape
from late_interaction import ops

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


def names(shape, variant, sm, sm_count):
    """Every plan that our forward can have on this shape; the planner's choice comes first."""
    text = ops.explain_plan(
        shape.layout != IN_BATCH, shape.Nq, shape.Nd, shape.Lq, shape.Ld, shape.d, variant.dtype, "highest",
        variant.masked, variant.normalize, "alternatives", "auto", sm, sm_count,
    )  # fmt: skip
    return text.split("\n")[:-1]


def judged(row):
    """A recorded row with the plan that the planner chooses today; the times are those of the record."""
    if not row.get("times"):
        return row
    shape = Shape(*(row[k] for k in ("shape", "Nq", "Nd", "Lq", "Ld", "d", "layout")))
    plan = names(shape, VARIANTS[row["variant"]], *row.get("device", H200))[0]
    if plan not in row["times"]:
        return {**row, "plan": plan, "regret": None, "error": f"{plan} was not timed"}
    return {**row, "plan": plan, "regret": row["times"][plan] / min(row["times"].values()) - 1}
