"""The parts of a roofline page with records of their own: a profile, the sweep, the planner's choices."""

import numpy as np
import pandas as pd

from bench.harness.library import OURS
from bench.harness.results import read, size_of, split
from bench.report.tables import best, frame, load, markdown, records_of, section
from bench.suites.sweep import LOSS
from bench.tuning import kernel_fingerprint, plan_regret
from late_interaction._doctor.text import number

# L2 bounds nothing: it carries all traffic between DRAM and the SMs, so its share says little.
_SHARES = {"tensor": "tensor_pct", "DRAM": "dram_pct", "L2": "l2_pct", "issue": "issue_pct"}
_BOUNDS = {
    "tensor_pct": "tensor cores", "dram_pct": "reading device memory", "issue_pct": "issuing instructions",
}  # fmt: skip


def profile(path):
    rows = load(path).rows
    measured = rows[[*_BOUNDS]].apply(pd.to_numeric)
    cells = {
        "shape": rows["shape"], "kernel": rows.kernel,
        **{name: rows[key].map(lambda x: f"{x:.0f}%" if x == x else "-") for name, key in _SHARES.items()},
        "registers": rows.registers.map("{:.0f}".format), "us": rows.duration_us.map(number),
        "bound by": [_BOUNDS[r.idxmax()] if r.notna().any() else "-" for _, r in measured.iterrows()],
    }  # fmt: skip
    note = (
        "One profiled call each (`python -m bench ncu --help` has the command): the busiest of the tensor "
        "pipes, device memory, L2 and issue slots, each as a share of its peak. A profiled kernel runs "
        "alone and cold, so its time is longer than above."
    )
    return section("Nsight Compute", note, markdown(pd.DataFrame(cells), 2))


def beside_others(rows, clock="gpu_us"):
    """Our row of each shape, with the time `other` of the best other library, whose name is `by`."""
    ours, others = (best(rows[(rows.impl == OURS) == mine], "shape", clock) for mine in (True, False))
    return ours.assign(other=others[clock], by=others.impl).dropna(subset=["other"])


def sweep(path):
    rows, body = load(path).rows, []
    for label, clock in (("GPU time", "gpu_us"), ("wall time", "wall_us")):
        both = beside_others(rows, clock)
        if len(both):
            faster = both.other / both[clock]
            figures = [faster.min(), *faster.quantile([0.05, 0.25, 0.5, 0.75, 0.95])]
            figures.append(np.exp(np.log(faster).mean()))
            slower = f"{(1 / faster > LOSS).sum()} of {len(both)}"
            body.append([label, *(f"{x:.2f}x" for x in figures), slower])
    names = ("worst", "p5", "p25", "p50", "p75", "p95", "geomean", f"slower by over {100 * (LOSS - 1):.0f}%")
    table = markdown(pd.DataFrame(body, columns=["best other over ours", *names]))
    others = ", ".join(rows.impl[rows.impl != OURS].drop_duplicates())
    drawn = f"{rows['shape'].nunique()} shapes drawn from a seed, bf16 (`python -m bench sweep`), "
    drawn += f"beside {others}."
    if path.with_suffix(".png").exists():
        drawn = f"![Our time over the best other's](../../bench/results/{path.stem}.png)\n\n{drawn}"
    both = beside_others(rows)
    lost = both.assign(over=both.gpu_us / both.other).query("over > @LOSS")
    lost = lost.sort_values("over", ascending=False, kind="stable")
    lines = [
        [size_of(row), number(row["gpu_us"]), number(row["other"]), row["by"], f"{row['over']:.2f}"]
        for row in records_of(lost)
    ]
    head = ["slower on", "ours us", "other us", "other", "ours / other"]
    losses = markdown(pd.DataFrame(lines, columns=head))
    return [*section("Random shapes", drawn, table), *filter(None, [losses])]


def plans(path, variants=plan_regret.VARIANTS):
    headers, recorded = split(read(path))
    rows = frame(plan_regret.judged(row) for row in recorded if row["variant"] in variants)
    timed, body = rows.dropna(subset=["regret"]), []
    for variant in variants:
        regrets = timed.regret[timed.variant == variant]
        if len(regrets):
            # The 95th percentile is one of the regrets.
            shown = (regrets.median(), regrets.quantile(0.95, interpolation="higher"), regrets.max())
            over = f"{(regrets > plan_regret.REGRET).sum()} of {len(regrets)}"
            body.append([variant, *(f"{100 * regret:.1f}%" for regret in shown), over])
    head = ["shapes", "median", "95th percentile", "worst", f"over {100 * plan_regret.REGRET:.0f}%"]
    note = (
        "Each random shape's time with the plan that the planner chooses today, over its time with the "
        "fastest plan, less 1 (`python -m bench plans`)."
    )
    if any(kernel_fingerprint.are_older(header) for header in headers):
        note += " These times are older than the kernels of this checkout."
    parts = section("The planner's choices", note, markdown(pd.DataFrame(body, columns=head)))
    missed = timed[timed.regret > plan_regret.REGRET].sort_values("regret", ascending=False, kind="stable")
    lines = []
    for row in records_of(missed):
        chosen, quickest = ((row[key], number(row["times"][row[key]])) for key in ("plan", "best"))
        lines.append([size_of(row), row["variant"], *chosen, *quickest, f"{100 * row['regret']:.0f}%"])
    head = ["shape", "variant", "chosen", "us", "best", "us", "regret"]
    return [*parts, *filter(None, [markdown(pd.DataFrame(lines, columns=head), 3)])]
