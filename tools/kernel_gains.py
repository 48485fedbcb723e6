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
from collections import defaultdict
from pathlib import Path

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
    """Variant of the call -> plans -> (shapes that have them, shapes that need them, mean, worst).

    Mean and worst are of a call's time without the plans over its time with them.
    """
    calls = defaultdict(list)
    for row in json.loads(record.read_text()):
        if row.get("times"):
            calls[row["variant"]].append(row["times"])
            if row["variant"] == "plain":
                older = [n for n in row["times"] if not re.match("rows|split|documents", n)]
                calls["plain, on a GPU without wgmma"].append({name: row["times"][name] for name in older})
    found = defaultdict(dict)
    for variant, shapes in calls.items():
        for plan in PLANS:
            without = [ratio for times in shapes if (ratio := time_without(plan, times))]
            if without:
                needed = sum(ratio > NEEDED for ratio in without)
                found[variant][plan] = (len(without), needed, sum(without) / len(without), max(without))
    return found


def time_without(plan, times):
    """The best time without plans of this name over the best of all; None where that says nothing."""
    others = [us for name, us in times.items() if not re.match(rf"{plan}\b", name)]
    return min(others) / min(times.values()) if 0 < len(others) < len(times) else None


def main(record=RECORD):
    for variant, families in gains(Path(record)).items():
        print(f"{variant}: what a call takes without a family")
        print(f"  {'plans':32} {'shapes':>7} {'needed':>7} {'mean':>8} {'worst':>7}")
        for name, (count, needed, mean, worst) in families.items():
            print(f"  {name:32} {count:7} {needed:7} {mean:7.4f}x {worst:6.2f}x")


if __name__ == "__main__":
    main(*sys.argv[1:])
