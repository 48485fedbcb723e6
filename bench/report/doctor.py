"""The generated part of docs/doctor.md: what the doctor found, by the files that it wrote."""

import json

import pandas as pd

from bench.report.tables import markdown
from late_interaction._doctor.text import number


def _machine(found):
    device, ceilings = found["device"], found["ceilings"]
    wrong, checked = [row["check"] for row in found["operators"] if not row["ok"]], len(found["operators"])
    apart = [f"{row['type']} {number(row['measured'])}" for row in found["rates"] if row["differs"]]
    return [
        f"{device['name']}, {device['threads']} threads", found["made"],
        found["installed"]["late_interaction"], found["installed"]["torch"],
        f"wrong: {', '.join(wrong)}" if wrong else f"all {checked} agree",
        *(number(ceilings[key]) for key in ("product_bf16_tflops", "read_gb_s", "copy_gb_s")),
        ", ".join(apart) or "-",
    ]  # fmt: skip


HEAD = [
    "machine", "on", "late_interaction", "torch", "operators beside float64", "bf16 product, TFLOP/s",
    "reads, GB/s", "copies, GB/s", "rates over 20% off the planner's",
]  # fmt: skip


def _timings(found):
    rows = []
    for row in found["timings"]:
        step = ", both gradients" if row["step"] else ""
        what = f"{row['Nq']} x {row['Nd']}, {row['Lq']}, {row['Ld']}, {row['dtype']}{step}"
        cells = {name: us if isinstance(us, str) else number(us) for name, us in row["us"].items()}
        rows.append({"Nq x Nd, Lq, Ld": what, **cells})
    return markdown(pd.DataFrame(rows).fillna("-"))


def build(results):
    machines = [json.loads(path.read_text()) for path in sorted((results / "doctor").glob("*.json"))]
    machines.sort(key=lambda found: found["device"]["type"] == "cpu")
    parts = [markdown(pd.DataFrame([_machine(found) for found in machines], columns=HEAD), left=5)]
    for found in machines:
        parts += [f"### {found['device']['name']}, in microseconds", _timings(found)]
    return "\n\n".join(parts)
