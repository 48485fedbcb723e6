"""The plots: the roofline of the forward, our time over the best other's on random shapes, the model of large
batches, and the share of the loss in training steps. Each function says why it cannot draw, or returns
None."""

from importlib import import_module
from importlib.util import find_spec

from bench.harness.ceilings import reached
from bench.harness.library import FLASH, LIK, OURS
from bench.peers.encoders import RECIPES
from bench.report import end_to_end, large_batches
from bench.report.own_records import beside_others
from bench.report.tables import best, records_of, size
from bench.suites.end_to_end import EXACT, PEER, VANILLA

RED, BLUE, GREEN, NAVY, BLACK = "#c1121f", "#669bbc", "#7f9172", "#1f3b73", "#222222"
_LIBRARIES = {OURS: (RED, "o"), LIK: (BLUE, "s"), FLASH: (GREEN, "^")}
_LAYOUTS = {"in-batch": (RED, "o"), "kd": (BLUE, "s"), "pairs": (GREEN, "^")}


def drawn(target, size, draw, **grid):
    """Save what `draw(figure, every axes)` draws on this grid of axes, in the style of all plots."""
    if find_spec("matplotlib") is None:
        return f"no {target.name}: matplotlib is not installed"
    import_module("matplotlib").use("Agg")
    plt = import_module("matplotlib.pyplot")
    figure, every = plt.subplots(figsize=size, dpi=140, squeeze=False, layout="constrained", **grid)
    draw(figure, every.ravel())
    for axes in every.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, linewidth=0.4, color="#dddddd")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    plt.close(figure)
    return None


def roofline(record, target):
    """The share of its bound that each shape reaches."""
    forward = record.of("forward")
    lines = {}
    for impl in _LIBRARIES:
        for row in records_of(best(forward[forward.impl == impl], "shape")):
            if share := reached(row, record.runs[row["run"]]):
                lines.setdefault(f"{row['shape']}  ({size(row)})", {})[impl] = 100 * share[0], share[1]
    panels = {
        title: names
        for title, bounds in (("reading the tokens once", "R"), ("the products, at the rate of cuBLAS", "CT"))
        if (names := [name for name, of in lines.items() if OURS in of and of[OURS][1] in bounds])
    }
    if not panels:
        return "no roofline: no forward of ours was timed on a GPU"

    def draw(figure, every):
        for axes, (title, names) in zip(every, panels.items(), strict=True):
            for impl, (color, marker) in _LIBRARIES.items():
                ys = [y for y, name in enumerate(names) if impl in lines[name]]
                style = {"color": color, "marker": marker, "zorder": 4 if impl == OURS else 3}
                label = impl if axes is every[0] else None
                axes.scatter(
                    [lines[names[y]][impl][0] for y in ys], ys, s=36, label=label, edgecolors="white", **style
                )
            axes.set_yticks(range(len(names)), names, fontsize=7)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.axvline(100, color=BLACK, linewidth=1.2)
            axes.set_title(f"bound by {title}", fontsize=8, loc="left")
        every[-1].set(xlim=(0, None), xlabel="% of the bound that the forward reaches")
        figure.suptitle(f"MaxSim forward, bf16, {record.device}", fontsize=10)

    height = 1.2 + 0.22 * sum(map(len, panels.values()))
    ratios = [len(names) for names in panels.values()]
    return drawn(target, (8.4, height), draw, nrows=len(panels), sharex=True, height_ratios=ratios)


def sweep(record, target):
    """A point for each shape: our time over the best other's."""
    both = beside_others(record.rows)
    if not len(both):
        return "no plot of the sweep: no shape was timed beside a peer on a GPU"

    def draw(figure, every):
        axes = every[0]
        low, high = both[["gpu_us", "other"]].min().min() / 1.5, both[["gpu_us", "other"]].max().max() * 1.5
        for factor, dashes in ((1, "-"), (2, "--"), (4, ":")):
            label = "the same time" if factor == 1 else f"{factor}x faster"
            ends = [low / factor, high / factor]
            axes.plot([low, high], ends, color=BLACK, linewidth=0.9, linestyle=dashes, label=label)
        for layout, (color, marker) in _LAYOUTS.items():
            of = both[both.layout == layout]
            style = {"s": 16, "color": color, "marker": marker, "label": f"{layout} ({len(of)})"}
            axes.scatter(of.other, of.gpu_us, zorder=3, **style)
        title = f"MaxSim forward on {len(both)} random shapes, {record.device}"
        axes.set(
            xscale="log", yscale="log", xlim=(low, high), ylim=(both.gpu_us.min() / 1.5, high), title=title
        )
        axes.set(xlabel="the best other, GPU time, us", ylabel="late_interaction, GPU time, us")

    return drawn(target, (6.4, 6.0), draw)


def batches(record, device, target):
    """The model over batches and GPUs, with what was measured."""
    steps = large_batches.exact_steps(record)
    sizes = [1 << n for n in range(11, 21)]

    def draw(figure, axes):
        left, right = axes
        for gpus, color in zip(large_batches.SIMULATED_GPUS, (RED, BLUE, NAVY), strict=True):
            of = [large_batches.Sizes(B, gpus=gpus) for B in sizes]
            label = f"{gpus} GPU{'s' if gpus > 1 else ''}"
            left.plot(sizes, [large_batches.seconds(s, device) for s in of], color=color, label=label)
            right.plot(sizes, [large_batches.beside_bytes(s) / 2**30 for s in of], color=color, label=label)
        saved = [large_batches.saved_bytes(large_batches.Sizes(B)) / 2**30 for B in sizes]
        right.plot(sizes, saved, color=GREEN, linestyle=":", label="1 GPU, winners saved")
        style = {"color": BLACK, "s": 26, "zorder": 4, "label": "measured, 1 GPU"}
        measured = [row["Nq"] for row in steps]
        left.scatter(measured, [row["gpu_us"] * 1e-6 for row in steps], **style)
        right.scatter(measured, [large_batches.beside_mib(row) / 1024 for row in steps], **style)
        left.set(ylabel="seconds of a step", title="Time")
        right.set(ylabel="GiB a GPU beside inputs and gradients", title="Memory")
        for each in axes:
            each.set(xlabel="batch: queries, and as many documents", xscale="log", yscale="log")
            each.set_xticks([1 << n for n in range(11, 21, 3)], [f"$2^{{{n}}}$" for n in range(11, 21, 3)])
            each.minorticks_off()
        title = f"losses.contrastive, exact: lines are simulated, points measured ({device.name})"
        figure.suptitle(title, fontsize=10)

    return drawn(target, (9.6, 4.4), draw, ncols=2)


def recipes(headers, rows, target):
    """The share of the loss in a step."""
    steps = end_to_end.steps_of(rows)
    names = [name for name in RECIPES if any(r["recipe"] == name for r in steps)]

    def draw(figure, axes):
        for ax, name in zip(axes, names, strict=True):
            mine = [r for r in steps if r["recipe"] == name]
            for variant, color in ((VANILLA, GREEN), (PEER, BLUE), (EXACT, RED)):
                shares = [(r["batch"], end_to_end.loss_share(end_to_end.values_of(r, variant))) for r in mine]
                points = [(batch, 100 * share) for batch, share in shares if share is not None]
                if points:
                    ax.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=variant)
            ticks = sorted({r["batch"] for r in mine})
            ax.set(title=RECIPES[name].title, xlabel="batch", xscale="log", ylabel="loss, % of a step")
            ax.set_xticks(ticks, [str(batch) for batch in ticks], fontsize=7)
            ax.minorticks_off()
            ax.set_ylim(bottom=0)
        figure.suptitle(f"Share of MaxSim with its loss and backward ({headers[0]['gpu']})", fontsize=10)

    return drawn(target, (3.4 * len(names), 3.6), draw, ncols=len(names), sharey=True)
