"""What a sweep says: our time over the best other's by shape, its percentiles, and where it loses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.harness.library import OURS
from bench.harness.results import Row, size_of
from late_interaction._doctor.text import align, number

SUITE = "sweep"
LOSS = 1.05  # times the best other's time


def clock(row: Row) -> float | None:
    """GPU time, or wall time where there is no GPU."""
    time_us = row["gpu_us"] if row["gpu_us"] is not None else row["wall_us"]
    return None if time_us is None else float(time_us)


def ratio(rows: Sequence[Row], key: str = "") -> float | None:
    """Our time over the best other's."""

    def of(row: Row) -> float | None:
        return row[key] if key else clock(row)

    ours = [t for r in rows if r["impl"] == OURS and (t := of(r))]
    peers = [t for r in rows if r["impl"] != OURS and (t := of(r))]
    return ours[0] / min(peers) if ours and peers else None


def by_shape(rows: Sequence[Row]) -> dict[str, list[Row]]:
    out: dict[str, list[Row]] = {}
    for row in rows:
        out.setdefault(row["shape"], []).append(row)
    return out


def losses(rows: Sequence[Row]) -> list[tuple[float, Row, Row]]:
    """(our time over the best other's, our row, its row) where that is more than LOSS, worst first."""
    out = []
    for group in by_shape(rows).values():
        found = ratio(group)
        if found is not None and found > LOSS:
            ours = next(r for r in group if r["impl"] == OURS)
            peer = min((r for r in group if r["impl"] != OURS and clock(r)), key=lambda r: clock(r) or 0.0)
            out.append((found, ours, peer))
    return sorted(out, key=lambda loss: -loss[0])


PERCENTILES = ("worst", "p5", "p25", "p50", "p75", "p95", "geomean")


def percentiles(ratios: Sequence[float]) -> dict[str, float]:
    """Percentiles of how many times faster we are: the low ones are the bad ones."""
    faster = sorted(1 / r for r in ratios)
    cuts = statistics.quantiles(faster, n=100, method="inclusive") if len(faster) > 1 else faster * 99
    out = {"worst": faster[0], **{f"p{p}": cuts[p - 1] for p in (5, 25, 50, 75, 95)}}
    return {**out, "geomean": math.exp(statistics.fmean(math.log(f) for f in faster))}


SLOWER = f"slower by over {100 * (LOSS - 1):.0f}%"


def by_clock(rows: Sequence[Row]) -> dict[str, list[str]]:
    """How many times faster we are, as PERCENTILES, and on how many shapes slower; by either clock."""
    out = {}
    for label, key in (("GPU time", "gpu_us"), ("wall time", "wall_us")):
        ratios = [r for group in by_shape(rows).values() if (r := ratio(group, key)) is not None]
        if ratios:
            slower = f"{sum(r > LOSS for r in ratios)} of {len(ratios)}"
            out[label] = [*(f"{v:.2f}x" for v in percentiles(ratios).values()), slower]
    return out


def summary(rows: Sequence[Row]) -> str:
    parts = [f"{len(by_shape(rows))} shapes"]
    for label, (*figures, slower) in by_clock(rows).items():
        told = ", ".join(f"{k} {v}" for k, v in zip(PERCENTILES, figures, strict=True))
        parts.append(f"{label}, best other over ours: {told}; {SLOWER} on {slower}")
    for row in rows:
        if row.get("mismatch"):
            against = "fp64" if row["impl"] == OURS else "ours"
            parts.append(f"{row['impl']} is {row['rel_err']:.2g} off {against} on {size_of(row)}")
    failed: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("error"):
            failed.setdefault(row["impl"], []).append(row)
    for impl, which in failed.items():
        parts.append(f"{impl} failed on {len(which)}, first {size_of(which[0])}: {which[0]['error'][:120]}")
    if found := losses(rows):
        body = []
        for r, ours, peer in found:
            times = [number(clock(ours)), number(clock(peer)), peer["impl"], f"{r:.2f}"]
            body.append([size_of(ours), *times, str(ours.get("plan", ""))])
        parts.append(align(["losses", "ours us", "other us", "other", "ours/other", "plan"], body))
    return "\n".join(parts)
