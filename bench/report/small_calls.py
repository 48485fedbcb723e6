"""The part of a roofline page on the host's time: small calls beside a product of PyTorch's."""

from __future__ import annotations

import pandas as pd

from bench.harness.library import EINSUM, OURS
from bench.harness.named_shapes import HOST
from bench.report.tables import Record, markdown, section
from bench.suites import steps
from late_interaction._doctor.text import number


def section_of(record: Record) -> list[str]:
    """Small calls beside a product of PyTorch's."""
    rows = record.of("host")
    rows = rows.assign(key=rows.op + rows.impl + rows.variant)
    wall, gpu = (rows.pivot(index="shape", columns="key", values=key) for key in ("wall_us", "gpu_us"))
    body = []
    for shape in HOST if len(rows) else ():
        if shape.name not in wall.index:
            continue
        us = wall.loc[shape.name]
        forward = f"fwd{OURS}{steps.EAGER}"
        above = us.get(forward) - gpu.loc[shape.name].get(forward)
        if above != above:
            continue
        eager = [number(us.get(f"fwd+bwd{impl}{steps.EAGER}")) for impl in (OURS, EINSUM)]
        losses = [
            " / ".join(number(us.get(f"fwd+bwd{impl}{way}")) for way in steps.HOST[1:])
            for impl in (OURS, EINSUM)
        ]
        product = number(us.get(f"fwd{EINSUM}{steps.EAGER}"))
        size = f"{shape.Nq} x {shape.Nd}"
        body.append([size, number(us[forward]), number(above), product, *eager, *losses])
    note = (
        "Wall microseconds, call and synchronization, taken in turns in one run: `maxsim` of 32 and 300 "
        f"tokens, and PyTorch's product `a @ b` of two bf16 matrices of {steps.EDGE} x {steps.EDGE}, on "
        "which the GPU spends next to nothing. `above GPU` is the forward's wall time less its GPU time. A "
        "step is a forward with both gradients. A loss is the cross entropy of the scores, or of the "
        'product, with both gradients: eager / `torch.compile` / `torch.compile(mode="reduce-overhead")`.'
    )
    head = [
        "queries x documents", "forward", "above GPU", "`a @ b`", "step", "`a @ b`, step", "loss of `maxsim`",
        "loss of `a @ b`",
    ]  # fmt: skip
    return section("What the host takes", note, markdown(pd.DataFrame(body, columns=head)))
