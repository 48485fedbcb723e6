"""The plots: the roofline of the forward, and our time over the best other's on random shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.library import FLASH, LIK, OURS
from bench.harness.results import Row, best, groups, split

_STYLE = {
    OURS: {"color": "#c1121f", "marker": "o", "s": 46, "zorder": 4},
    LIK: {"color": "#669bbc", "marker": "s", "s": 30, "zorder": 3},
    FLASH: {"color": "#7f9172", "marker": "^", "s": 30, "zorder": 3},
}


def _points(rows: Sequence[Row], impl: str) -> list[tuple[float, float, str]]:
    """(FLOP per byte, TFLOP/s reached, shape) of every forward that `impl` ran."""
    out = []
    for group in groups(r for r in rows if r["suite"] == "forward").values():
        row = best([r for r in group if r["impl"] == impl])
        if row is None:
            continue
        flops = 2.0 * row["Nq"] * row["Nd"] * row["Lq"] * row["Ld"] * row["d"]
        size = 4 if row["dtype"] == "float32" else 2
        documents = row["Nd"] if row["layout"] == "in-batch" else row["Nq"] * row["Nd"]
        moved = (row["Nq"] * row["Lq"] + documents * row["Ld"]) * row["d"] * size + 4 * row["Nq"] * row["Nd"]
        out.append((flops / moved, flops / row["gpu_us"] * 1e-6, str(row["shape"])))
    return out


def _labels(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Labels of points: points closer than a label is wide share one label, a line for each point."""
    clusters: list[list[tuple[float, float, str]]] = []
    for point in sorted(points, key=lambda p: -p[1]):
        for cluster in clusters:
            near = any(1 / 1.6 < point[0] / other[0] < 1.6 for other in cluster)
            if near and cluster[-1][1] < 1.25 * point[1]:
                cluster.append(point)
                break
        else:
            clusters.append([point])
    out = []
    for cluster in clusters:
        by_height = sorted(cluster, key=lambda p: -p[1])
        middle = math.exp(sum(math.log(p[0]) for p in cluster) / len(cluster))
        out.append((middle, by_height[0][1], "\n".join(p[2] for p in by_height)))
    return out


def pyplot() -> Any:
    """matplotlib.pyplot without a display, or None."""
    try:
        import_module("matplotlib").use("Agg")
    except ImportError:
        return None
    return import_module("matplotlib.pyplot")


def roofline(rows: Sequence[Row], target: Path) -> str | None:
    """Draws `target`, or returns the reason why not."""
    headers, rows = split(rows)
    points = {impl: _points(rows, impl) for impl in _STYLE}
    ceilings = [h for h in headers if h.get("cublas_tflops") and h.get("read_tbps")]
    if not points[OURS] or not ceilings:
        return "no roofline: no forward of ours was timed on a GPU"
    plt = pyplot()
    if plt is None:
        return "no roofline: matplotlib is not installed"

    runs = {row.get("run") for row in rows if row["suite"] == "forward" and row["impl"] == OURS}
    header = next((h for h in ceilings if h.get("run") in runs), ceilings[-1])  # of the run that is drawn
    peak, bandwidth = float(header["cublas_tflops"]), float(header["read_tbps"])
    xs = [p[0] for shape_points in points.values() for p in shape_points]
    ys = [p[1] for shape_points in points.values() for p in shape_points]
    left, right = min(xs) / 1.6, max(xs) * 1.6
    figure, axes = plt.subplots(figsize=(8.4, 4.8), dpi=150)
    ridge = peak / bandwidth
    roof_x = [left, ridge, right] if left < ridge < right else [left, right]
    axes.plot(roof_x, [min(peak, bandwidth * x) for x in roof_x], color="#222222", linewidth=1.4)
    axes.annotate(f"cuBLAS bf16 {peak:.0f} TFLOP/s", (ridge, peak), ha="right", va="bottom", fontsize=8)
    read_label = min(ridge, right) * 0.6
    axes.annotate(
        f"reads {bandwidth:.2f} TB/s",
        (read_label, bandwidth * read_label),
        ha="right",
        va="bottom",
        fontsize=8,
    )
    for impl, shape_points in points.items():
        if shape_points:
            x, y, _ = zip(*shape_points, strict=True)
            axes.scatter(x, y, label=impl, edgecolors="white", linewidths=0.5, **_STYLE[impl])
    for x0, y0, name in _labels(points[OURS]):
        above = x0 > 2 * ridge and y0 > 0.8 * peak  # the roof is flat there, and the peers lie below
        axes.annotate(
            name, (x0, y0), xytext=(0, 5) if above else (6, -6), textcoords="offset points", fontsize=6,
            va="bottom" if above else "top", ha="center" if above else "left",
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlim=(left, right), ylim=(min(ys) / 1.5, 2.8 * max(peak, *ys)),
        xlabel="FLOP per byte that must move", ylabel="TFLOP/s reached (real tokens)",
        title=f"MaxSim forward, {header['gpu']}",
    )  # fmt: skip
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else "")
    axes.tick_params(axis="y", which="both", labelsize=7)
    axes.grid(True, which="both", linewidth=0.3, color="#dddddd")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    plt.close(figure)
    return None


_LAYOUTS: dict[str, dict[str, Any]] = {
    "in-batch": {"color": "#c1121f", "marker": "o"},
    "kd": {"color": "#669bbc", "marker": "s"},
    "pairs": {"color": "#7f9172", "marker": "^"},
}


def _pairs_of_times(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Layout -> (the best other's GPU time, ours) of every shape that both ran."""
    out: dict[str, list[tuple[float, float]]] = {}
    for group in groups(rows).values():
        ours = best([r for r in group if r["impl"] == OURS])
        peer = best([r for r in group if r["impl"] != OURS])
        if ours and peer:
            out.setdefault(ours["layout"], []).append((peer["gpu_us"], ours["gpu_us"]))
    return out


_LINES = ((1, "-"), (2, "--"), (4, ":"))  # times faster than the peer


def _name_the_lines(figure: Any, axes: Any) -> None:
    """Labels each diagonal, once the axes have their final size."""
    box = axes.get_position()
    width, height = figure.get_size_inches() * (box.width, box.height)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    slope = height / math.log(top / bottom) * math.log(right / left) / width
    for factor, _ in _LINES:
        axes.annotate(
            "the same time" if factor == 1 else f"{factor}x faster", (right / 1.1, right / 1.1 / factor),
            xytext=(-3, 2), textcoords="offset points", fontsize=7, ha="right", va="bottom",
            rotation=math.degrees(math.atan(slope)), rotation_mode="anchor",
        )  # fmt: skip


def sweep(rows: Sequence[Row], target: Path) -> str | None:
    """Draws a point for each shape: our time over the best other's. Returns the reason if it cannot."""
    headers, rows = split(rows)
    points = _pairs_of_times(rows)
    if not points:
        return "no plot of the sweep: no shape was timed beside a peer on a GPU"
    plt = pyplot()
    if plt is None:
        return "no plot of the sweep: matplotlib is not installed"
    every = [p for layout in points.values() for p in layout]
    low, high = min(min(p) for p in every) / 1.5, max(max(p) for p in every) * 1.5
    figure, axes = plt.subplots(figsize=(6.4, 6.0), dpi=150)
    for factor, dashes in _LINES:
        line = [low / factor, high / factor]
        axes.plot([low, high], line, color="#222222", linewidth=0.9, linestyle=dashes)
    for layout, style in _LAYOUTS.items():
        if shape_points := points.get(layout):
            x, y = zip(*shape_points, strict=True)
            label = f"{layout} ({len(shape_points)})"
            axes.scatter(x, y, s=18, label=label, edgecolors="white", linewidths=0.4, zorder=3, **style)
    gpu = next((h["gpu"] for h in reversed(headers) if h.get("gpu")), "GPU")
    axes.set(
        xscale="log", yscale="log", xlim=(low, high), ylim=(min(p[1] for p in every) / 1.5, high),
        xlabel="the best other, GPU time, us", ylabel="late_interaction, GPU time, us",
        title=f"MaxSim forward on {len(every)} random shapes, {gpu}",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(True, which="major", linewidth=0.4, color="#dddddd")
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    figure.tight_layout()
    _name_the_lines(figure, axes)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    plt.close(figure)
    return None
