"""The generated part of docs/large_batches.md: steps of contrastive losses, their memory, and the model of
both beside what was measured; and the plot of the model up to batches that were not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.library import EINSUM, INF_CL, LIK, OURS
from bench.harness.results import Row, of_a_cpu, read, records, split
from bench.harness.text import number
from bench.peers import losses
from bench.report import tables
from bench.report.plots import pyplot
from bench.suites import contrastive

PLOT = "large_batches.png"
MIB = 2**20
Rows = Sequence[Row]


# ---- the model ----


@dataclass(frozen=True)
class Device:
    """What bounds a step. Rates per second."""

    name: str
    products: float  # FLOP of bf16 products
    cache: float  # bytes of L2 that gathers of rows read
    share: float = 0.9  # of the products' rate that scoring reaches
    link: float = 350e9  # bytes that a GPU sends to the next one of its host, while it receives as many
    between: float = 45e9  # and to one of another host

    def ring(self, gpus: int) -> float:
        """The rate of the slowest link of a ring, of hosts with 8 GPUs each."""
        return self.link if gpus <= 8 else self.between


@dataclass(frozen=True)
class Sizes:
    """A batch of B queries of Lq tokens and B documents of Ld tokens, over `gpus` GPUs."""

    B: int
    Lq: int = 32
    Ld: int = 180
    d: int = 128
    gpus: int = 1
    itemsize: int = 2

    @property
    def pairs(self) -> float:
        """Those of one GPU: its queries with all documents."""
        return self.B * self.B / self.gpus

    @property
    def embeddings(self) -> tuple[float, float]:
        """Bytes of one GPU's queries, and of its documents."""
        return tuple(self.B / self.gpus * L * self.d * self.itemsize for L in (self.Lq, self.Ld))  # type: ignore[return-value]


def seconds(size: Sizes, device: Device) -> float:
    """The exact step: two passes of products; the rows of the winners, read and added on both sides; and in a
    ring, documents in both passes and their gradient in one, where these take longer."""
    products = 2 * 2 * size.Lq * size.Ld * size.d * size.pairs / (device.share * device.products)
    winners = size.pairs * size.Lq
    rows = 2 * winners * size.d * size.itemsize / device.cache
    alone = products + rows
    if size.gpus == 1:
        return alone
    documents = size.embeddings[1] * (size.gpus - 1)
    link = device.ring(size.gpus)
    return max(products / 2, documents / link) + max(alone - products / 2, 2 * documents / link)


def beside_bytes(size: Sizes) -> float:
    """Memory beside inputs and gradients: 128 MiB of blocks, running sums of the softmax, and one float32
    copy of the smaller gradient. In a ring: a float32 copy of the queries' gradient and, with more than two
    GPUs, of the own documents'; two more shards of documents; a gradient that leaves and one that arrives."""
    fixed = 128 * MIB + 5 * 4 * size.B / size.gpus
    queries, documents = size.embeddings
    copies = 4 / size.itemsize
    if size.gpus == 1:
        return fixed + copies * min(queries, documents)
    own = copies if size.gpus > 2 else 0
    return fixed + copies * queries + (4 + own) * documents


def saved_bytes(size: Sizes) -> float:
    """What `maxsim` and cross entropy keep for the backward: two bytes a winner, and scores three times."""
    return size.pairs * (2 * size.Lq + 3 * 4)


# ---- the record ----


def _group(rows: Rows, shape: str) -> list[Row]:
    return [r for r in rows if (r["suite"], r["shape"]) == (contrastive.SUITE, shape)]


def _shapes(rows: Rows) -> list[str]:
    return list(dict.fromkeys(r["shape"] for r in rows if r["suite"] == contrastive.SUITE))


def _ms(row: Row) -> str:
    return number((row["gpu_us"] or row["wall_us"]) * 1e-3)


def _beside(row: Row) -> str:
    return number(row["peak_mib"] - row["gradients_mib"])


def _why_not(row: Row) -> str:
    if row.get("over_limit_s"):
        return f"over {row['over_limit_s']:g} s"
    if "takes" in (row.get("skipped") or "") or "OutOfMemory" in (row.get("error") or ""):
        return "no memory"
    return tables.why_not([row])


def _cell(group: Rows, impl: str, variant: str) -> str:
    found = [r for r in group if (r["impl"], r["variant"]) == (impl, variant)]
    if not found:
        return "-"
    row = found[0]
    if row["wall_us"] is None or row.get("error"):
        return _why_not(row)
    memory = f" / {_beside(row)}" if row["peak_mib"] is not None else ""
    return _ms(row) + memory


_COLUMNS = (
    ("`contrastive_loss`", OURS, losses.EXACT),
    ("`kept_bytes=0`", OURS, losses.LEAST),
    ("`tail=2**-10`", OURS, losses.WITH_TAIL),
    ("`maxsim`, winners saved", OURS, losses.SAVED),
    ("recomputed", OURS, losses.RECOMPUTED),
    (LIK, LIK, losses.SCORED),
    (EINSUM, EINSUM, losses.SCORED),
)
_SINGLE_COLUMNS = (
    ("`contrastive_loss`", OURS, losses.EXACT),
    ("matmul + cross_entropy, bf16", EINSUM, losses.MATMUL),
    (INF_CL, INF_CL, losses.INFINITE),
    ("`maxsim` + cross_entropy", OURS, losses.SAVED),
)


def steps_table(rows: Rows, single: bool) -> str:
    """A line for each batch: milliseconds / MiB beside inputs and gradients."""
    columns = _SINGLE_COLUMNS if single else _COLUMNS
    body = []
    for shape in _shapes(rows):
        group = _group(rows, shape)
        first = group[0]
        if (first["Lq"] == first["Ld"] == 1) != single:
            continue
        size = f"{first['Nq']:,}, {first['Lq']} x {first['Ld']}, d = {first['d']}"
        size += ", packed" if shape.startswith("packed") else ""
        body.append([size, *(_cell(group, impl, variant) for _, impl, variant in columns)])
    head = ["batch, Lq x Ld", *(title for title, _, _ in columns)]
    return tables.table(head, body) if body else ""


def _exact(rows: Rows) -> list[Row]:
    """Steps of padded batches that pass by blocks, the smallest first."""
    found = {
        r["Nq"]: r
        for variant in (losses.EXACT, losses.LEAST)
        for r in rows
        if (r["suite"], r.get("variant"), r["impl"]) == (contrastive.SUITE, variant, OURS)
        and r["Lq"] > 1 and not str(r["shape"]).startswith("packed") and r["gpu_us"] and r["Nq"] >= 2048
    }  # fmt: skip
    return [found[batch] for batch in sorted(found)]


def _sizes(row: Row) -> Sizes:
    return Sizes(row["Nq"], row["Lq"], row["Ld"], row["d"])


def fitted(rows: Rows, header: Row) -> Device | None:
    """The device of a record: its rate of products as measured, and the rate at which winners' rows are
    gathered, from what the largest step takes beyond its products."""
    steps = _exact(rows)
    if not steps or not header.get("cublas_tflops"):
        return None
    largest = steps[-1]
    size = _sizes(largest)
    products = 1e12 * header["cublas_tflops"]
    without = seconds(size, Device("", products, float("inf")))
    left = largest["gpu_us"] * 1e-6 - without
    if left <= 0:
        return None
    moved = 2 * size.pairs * size.Lq * size.d * size.itemsize
    return Device(header["gpu"], products, moved / left)


def model_table(rows: Rows, device: Device) -> str:
    """Each measured batch beside the model, whose one fitted figure comes from the largest."""
    body = []
    for row in _exact(rows):
        size = _sizes(row)
        took, predicted = row["gpu_us"] * 1e-6, seconds(size, device)
        beside = row["peak_mib"] - row["gradients_mib"]
        body.append([
            f"{size.B:,}", number(1e3 * took), number(1e3 * predicted), f"{predicted / took:.2f}",
            number(beside), number(beside_bytes(size) / MIB),
        ])  # fmt: skip
    head = ["batch", "measured ms", "model ms", "model / measured", "measured MiB", "model MiB"]
    return tables.table(head, body) if body else ""


def simulated_table(device: Device) -> str:
    body = []
    for gpus in SIMULATED_GPUS:
        for B in (1 << 16, 1 << 18, 1 << 20):
            size = Sizes(B, gpus=gpus)
            held = sum(size.embeddings) * 2 + beside_bytes(size)
            body.append([
                f"{B:,}", str(gpus), number(seconds(size, device)), number(beside_bytes(size) / 2**30),
                number(held / 2**30), number(saved_bytes(size) / 2**30),
            ])  # fmt: skip
    head = [
        "batch", "GPUs", "step, s", "beside, GiB a GPU", "with inputs and gradients", "winners saved instead",
    ]  # fmt: skip
    return tables.table(head, body)


SIMULATED_GPUS = (1, 8, 64)
_STYLES = {1: "#c1121f", 8: "#669bbc", 64: "#1f3b73"}


def plot(rows: Rows, device: Device, target: Path) -> str | None:
    """Draws the model over batches and GPUs, with what was measured. Returns the reason if it cannot."""
    plt = pyplot()
    if plt is None:
        return "no plot of large batches: matplotlib is not installed"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.4), dpi=130, layout="constrained")
    batches = [1 << n for n in range(11, 21)]
    for gpus, color in _STYLES.items():
        sizes = [Sizes(B, gpus=gpus) for B in batches]
        label = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        left.plot(batches, [seconds(s, device) for s in sizes], color=color, label=label)
        right.plot(batches, [beside_bytes(s) / 2**30 for s in sizes], color=color, label=label)
    saved = [saved_bytes(Sizes(B)) / 2**30 for B in batches]
    right.plot(batches, saved, color="#7f9172", linestyle=":", label="1 GPU, winners saved")
    _draw_measured(rows, left, right)
    left.set(ylabel="seconds of a step", title="Time")
    right.set(ylabel="GiB a GPU beside inputs and gradients", title="Memory")
    for axes in (left, right):
        axes.set(xlabel="batch: queries, and as many documents", xscale="log", yscale="log")
        axes.set_xticks([1 << n for n in range(11, 21, 3)], [f"$2^{{{n}}}$" for n in range(11, 21, 3)])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, linewidth=0.4, color="#dddddd")
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"contrastive_loss, exact: lines are simulated, points measured ({device.name})", fontsize=10
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    plt.close(figure)
    return None


def _draw_measured(rows: Rows, left: Any, right: Any) -> None:
    steps = _exact(rows)
    batches = [r["Nq"] for r in steps]
    style: dict[str, Any] = {"color": "#222222", "s": 26, "zorder": 4, "label": "measured, 1 GPU"}
    left.scatter(batches, [r["gpu_us"] * 1e-6 for r in steps], **style)
    beside = [(r["peak_mib"] - r["gradients_mib"]) / 1024 for r in steps]
    right.scatter(batches, beside, **style)


# ---- the page ----


def _of_suite(headers: Rows, rows: Rows) -> Rows:
    """The headers of all runs of this suite. First that of the step which the model is fitted to, if there is
    one: the model needs the ceilings of its run."""
    runs = [r["run"] for r in (*_exact(rows)[::-1], *rows) if r["suite"] == contrastive.SUITE]
    by_run = {h["run"]: h for h in headers}
    return [by_run[run] for run in dict.fromkeys(runs)]


def _records(directory: Path) -> list[tuple[Rows, Rows]]:
    """The headers and rows of each record that has this suite."""
    found = []
    for path in records(directory):
        headers, rows = split(read(path))
        if not of_a_cpu(path) and _shapes(rows):
            found.append((_of_suite(headers, rows), rows))
    return found


def draw(directory: Path, target: Path) -> list[str]:
    """Draws the plot of the first record that has what it needs. Returns what it could not do."""
    for (header, *_), rows in _records(directory):
        if device := fitted(rows, header):
            problem = plot(rows, device, target)
            return [problem] if problem else []
    return []


def build(directory: Path) -> str:
    """The Markdown between the markers."""
    parts: list[str] = []
    drawn = False
    for headers, rows in _records(directory):
        header = headers[0]
        parts.append(f"### On one {header['gpu']}")
        figures = "Milliseconds of a step, forward and both gradients / MiB at its peak, without these."
        parts += tables.section("Batches of token embeddings.", figures, steps_table(rows, single=False))
        parts += tables.section("One vector a side.", "The same.", steps_table(rows, single=True))
        if device := fitted(rows, header):
            note = (
                f"Products at {device.share * device.products * 1e-12:,.0f} TFLOP/s, {device.share:.0%} of"
                f" cuBLAS in that run; rows at {device.cache * 1e-12:.1f} TB/s, fitted to the largest batch."
            )
            parts += tables.section("The model beside what was measured.", note, model_table(rows, device))
            note = (
                "By the same model, of GPUs like this one in a ring of"
                f" {device.link * 1e-9:.0f} GB/s in a host of 8 and {device.between * 1e-9:.0f} GB/s between"
                " hosts; nothing here was measured."
            )
            parts += tables.section("Simulated.", note, simulated_table(device))
            if not drawn:
                parts.append(f"![Time and memory of a step, simulated and measured]({PLOT})")
            drawn = True
        parts.append(tables.stamp(headers))
    return "\n\n".join(parts) if parts else "No run is recorded yet."
