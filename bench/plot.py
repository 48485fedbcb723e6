"""The roofline: what each implementation reaches, against what the card can do."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from .impls import FLASH, LIK, OURS
from .results import Row, best, groups, split

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
    """Points that lie close together share one label, a name a line in the order of their heights."""
    clusters: list[list[tuple[float, float, str]]] = []
    for point in sorted(points, key=lambda p: -p[1]):
        for cluster in clusters:
            if 1 / 1.15 < point[0] / cluster[-1][0] < 1.15 and cluster[-1][1] < 1.25 * point[1]:
                cluster.append(point)
                break
        else:
            clusters.append([point])
    out = []
    for cluster in clusters:
        by_height = sorted(cluster, key=lambda p: -p[1])
        out.append((max(p[0] for p in cluster), by_height[0][1], "\n".join(p[2] for p in by_height)))
    return out


def roofline(rows: Sequence[Row], target: Path) -> str | None:
    """Draws `target`; or says in a line why it did not."""
    headers, rows = split(rows)
    points = {impl: _points(rows, impl) for impl in _STYLE}
    ceilings = [h for h in headers if h.get("cublas_tflops") and h.get("read_tbps")]
    if not points[OURS] or not ceilings:
        return "no roofline: no forward of ours was timed on a GPU"
    try:
        import_module("matplotlib").use("Agg")
    except ImportError:
        return "no roofline: matplotlib is not installed"
    plt = import_module("matplotlib.pyplot")

    header = ceilings[-1]
    peak, bandwidth = float(header["cublas_tflops"]), float(header["read_tbps"])
    xs = [p[0] for shape_points in points.values() for p in shape_points]
    left, right = min(xs) / 1.6, max(xs) * 1.6
    figure, axes = plt.subplots(figsize=(8.4, 4.8), dpi=150)
    ridge = peak / bandwidth
    roof_x = [left, ridge, right] if left < ridge < right else [left, right]
    axes.plot(roof_x, [min(peak, bandwidth * x) for x in roof_x], color="#222222", linewidth=1.4)
    axes.annotate(f"cuBLAS bf16 {peak:.0f} TFLOP/s", (ridge, peak), ha="left", va="bottom", fontsize=8)
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
        shift, side = ((2, -6), "center") if x0 > right / 3 else ((6, -6), "left")
        axes.annotate(
            name, (x0, y0), xytext=shift, textcoords="offset points", fontsize=6, va="top", ha=side
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlim=(left, right),
        xlabel="FLOP per byte that must move", ylabel="TFLOP/s reached (real tokens)",
        title=f"MaxSim forward, {header['gpu']}",
    )  # fmt: skip
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="both", labelsize=7)
    axes.grid(True, which="both", linewidth=0.3, color="#dddddd")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    plt.close(figure)
    return None
