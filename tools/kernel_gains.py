"""kernel_gains.py [RECORD]: what each family of forward kernels gains.

    python tools/kernel_gains.py bench/results/plans-nvidia-h200.json

RECORD is that of `python -m bench plans`, which timed every plan that a forward could have on random shapes.
In the table of each variant of the call `needed` counts the shapes on which a call without the family would
take over 1% longer, `mean` and `worst` say how much longer it would take. A family that no shape needs is one
to delete; what it costs to compile is in the build's ptxas.log.
"""

import json
import re
import sys
from pathlib import Path

import pandas as pd

RECORD = Path(__file__).resolve().parent.parent / "bench" / "results" / "plans-nvidia-h200.json"
NEEDED = 1.01
# Families of the record: plans whose names match.
PLANS = (
    *(f"rows {width}" for width in (160, 152, 144, 128, 112, 104, 80)), "rows .* copied",
    *(f"split {width}" for width in (152, 144, 128, 112, 104, 80)), "split .* paired",
    "short .*", "documents", "documents .x4", "documents [234]x", "direct", "direct 8", "direct 32",
    "registers 32 .*", "registers (128|256|512)", "thin", "wide",
)  # fmt: skip


def gains(record):
    """Variant of the call and plans -> shapes that have them, shapes that need them, mean, worst.

    Mean and worst are of a call's time without the plans over its time with them.
    """
    rows = [row for row in json.loads(Path(record).read_text()) if row.get("times")]
    calls = [(row["variant"], row["times"]) for row in rows]
    for times in (times for variant, times in calls.copy() if variant == "plain"):
        older = {name: us for name, us in times.items() if not re.match("rows|split|documents", name)}
        calls.append(("plain, on a GPU without wgmma", older))
    found = [(variant, plan, time_without(plan, times)) for variant, times in calls for plan in PLANS]
    frame = pd.DataFrame(found, columns=["variant", "plans", "without"]).dropna()
    kinds = frame.groupby(["variant", "plans"], sort=False).without
    return kinds.agg(shapes="size", needed=lambda x: (x > NEEDED).sum(), mean="mean", worst="max")


def time_without(plan, times):
    """The best time without plans of this name over the best of all; None where that says nothing."""
    others = [us for name, us in times.items() if not re.match(rf"{plan}\b", name)]
    return min(others) / min(times.values()) if 0 < len(others) < len(times) else None


if __name__ == "__main__":
    print(gains(*(sys.argv[1:] or [RECORD])).to_string(float_format="{:.4f}".format))
