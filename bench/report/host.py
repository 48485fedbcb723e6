"""The part of docs/performance.md on the host's time: small calls beside a product of PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable

from bench.harness.library import EINSUM, OURS
from bench.harness.named_shapes import HOST
from bench.harness.results import Row, split
from bench.harness.text import number
from bench.report.tables import table
from bench.suites.host import COMPILED, EAGER, EDGE, LOSS, REDUCED, SUITE

_NOTE = (
    "Wall microseconds, call and synchronization, taken in turns in one run: `maxsim` of 32 and 300 tokens,"
    f" and PyTorch's product `a @ b` of two bf16 matrices of {EDGE} x {EDGE}, on which the GPU spends next to"
    " nothing. `above GPU` is the forward's wall time less its GPU time. A step is a forward with both"
    " gradients. A loss is the cross entropy of the scores, or of the product, with both gradients: eager /"
    ' `torch.compile` / `torch.compile(mode="reduce-overhead")`.'
)
_HEAD = (
    "queries x documents", "forward", "above GPU", "`a @ b`", "step", "`a @ b`, step", "loss of `maxsim`",
    "loss of `a @ b`",
)  # fmt: skip


def section(rows: Iterable[Row]) -> list[str]:
    """The section, where a record has the suite."""
    walls = {(r["shape"], r["op"], r["impl"], r["variant"]): r for r in split(rows)[1] if r["suite"] == SUITE}
    body = []
    for shape in HOST:

        def wall(op: str, impl: str, variant: str = EAGER, name: str = shape.name) -> float | None:
            row = walls.get((name, op, impl, variant))
            return row and row["wall_us"]

        forward = walls.get((shape.name, "fwd", OURS, EAGER))
        if forward is None or forward["wall_us"] is None or forward["gpu_us"] is None:
            continue
        losses = [
            " / ".join(number(wall("fwd+bwd", impl, variant)) for variant in (LOSS, COMPILED, REDUCED))
            for impl in (OURS, EINSUM)
        ]
        above = number(forward["wall_us"] - forward["gpu_us"])
        steps = [number(wall("fwd+bwd", impl)) for impl in (OURS, EINSUM)]
        size = f"{shape.Nq} x {shape.Nd}"
        body.append([size, number(forward["wall_us"]), above, number(wall("fwd", EINSUM)), *steps, *losses])
    return ["### What the host takes", _NOTE, table([*_HEAD], body, 1)] if body else []
