"""The generated part of docs/large_batches.md: steps of contrastive losses, their memory, and the model of
both beside what was measured and up to batches that were not."""

from dataclasses import dataclass

import pandas as pd

from bench.harness.library import EINSUM, INF_CL, LIK, OURS
from bench.harness.results import of_a_cpu, records
from bench.peers import losses
from bench.report.tables import load, markdown, records_of, section, stamp, why_not
from late_interaction._doctor.text import number

PLOT = "large_batches.png"
SUITE = "contrastive"
MIB = 2**20
SIMULATED_GPUS = (1, 8, 64)


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

    def ring(self, gpus):
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
    def pairs(self):
        """Those of one GPU: its queries with all documents."""
        return self.B * self.B / self.gpus

    @property
    def embeddings(self):
        """Bytes of one GPU's queries, and of its documents."""
        row = self.B / self.gpus * self.d * self.itemsize
        return row * self.Lq, row * self.Ld


def seconds(size, device):
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


def beside_bytes(size):
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


def saved_bytes(size):
    """What `maxsim` and cross entropy keep for the backward: two bytes a winner, and scores three times."""
    return size.pairs * (2 * size.Lq + 3 * 4)


# ---- what was measured ----

_COLUMNS = (
    ("`losses.contrastive`", OURS, losses.EXACT),
    ("`kept_bytes=0`", OURS, losses.LEAST),
    ("`tail=2**-10`", OURS, losses.WITH_TAIL),
    ("`maxsim`, winners saved", OURS, losses.SAVED),
    ("recomputed", OURS, losses.RECOMPUTED),
    (LIK, LIK, losses.SCORED),
    (EINSUM, EINSUM, losses.SCORED),
)
_SINGLE_COLUMNS = (
    ("`losses.contrastive`", OURS, losses.EXACT),
    ("matmul + cross_entropy, bf16", EINSUM, losses.MATMUL),
    (INF_CL, INF_CL, losses.INFINITE),
    ("`maxsim` + cross_entropy", OURS, losses.SAVED),
)


def beside_mib(row):
    """MiB at the peak of a step, without its gradients."""
    return float(row["peak_mib"] - row["gradients_mib"])


def _cell(row):
    if row["wall_us"] == row["wall_us"] and not row["error"]:
        us = row["gpu_us"] if row["gpu_us"] == row["gpu_us"] else row["wall_us"]
        memory = f" / {number(beside_mib(row))}" if row["peak_mib"] == row["peak_mib"] else ""
        return number(us * 1e-3) + memory
    if row["over_limit_s"] == row["over_limit_s"]:
        return f"over {row['over_limit_s']:g} s"
    return "no memory" if "takes" in row["skipped"] or "OutOfMemory" in row["error"] else why_not(row)[1]


def steps_table(record, single):
    """A line for each batch: milliseconds / MiB beside inputs and gradients."""
    rows = record.of(SUITE)
    rows = rows[((rows.Lq == 1) & (rows.Ld == 1)) == single]
    body = []
    for shape, group in rows.groupby("shape", sort=False):
        first, found = group.iloc[0], {(r["impl"], r["variant"]): r for r in records_of(group)}
        size = f"{first.Nq:,}, {first.Lq} x {first.Ld}, d = {first.d}"
        size += ", packed" if str(shape).startswith("packed") else ""
        columns = _SINGLE_COLUMNS if single else _COLUMNS
        body.append(
            [size, *(_cell(found[key]) if (key := column[1:]) in found else "-" for column in columns)]
        )
    head = ["batch, Lq x Ld", *(title for title, *_ in (_SINGLE_COLUMNS if single else _COLUMNS))]
    return markdown(pd.DataFrame(body, columns=head))


def exact_steps(record):
    """Steps of padded batches that pass by blocks, the smallest first."""
    rows = record.of(SUITE).dropna(subset=["gpu_us"])
    packed = rows["shape"].str.startswith("packed")
    rows = rows[(rows.impl == OURS) & (rows.Lq > 1) & ~packed & (rows.Nq >= 2048)]
    both = [rows[rows.variant == variant] for variant in (losses.EXACT, losses.LEAST)]
    return records_of(pd.concat(both).drop_duplicates("Nq", keep="last").sort_values("Nq"))


def _sizes(row):
    return Sizes(row["Nq"], row["Lq"], row["Ld"], row["d"])


def fitted(record):
    """The device of a record: its rate of products as measured in the run of the largest step, and the rate
    at which winners' rows are gathered, from what that step takes beyond its products."""
    steps = exact_steps(record)
    header = record.runs[steps[-1]["run"]] if steps else {}
    if not header.get("cublas_tflops"):
        return None
    size = _sizes(steps[-1])
    products = 1e12 * header["cublas_tflops"]
    left = steps[-1]["gpu_us"] * 1e-6 - seconds(size, Device("", products, float("inf")))
    if left <= 0:
        return None
    moved = 2 * size.pairs * size.Lq * size.d * size.itemsize
    return Device(header["gpu"], products, moved / left)


def model_table(record, device):
    """Each measured batch beside the model, whose one fitted figure comes from the largest."""
    body = []
    for row in exact_steps(record):
        size = _sizes(row)
        took, predicted = row["gpu_us"] * 1e-6, seconds(size, device)
        body.append([
            f"{size.B:,}", number(1e3 * took), number(1e3 * predicted), f"{predicted / took:.2f}",
            number(beside_mib(row)), number(beside_bytes(size) / MIB),
        ])  # fmt: skip
    head = ["batch", "measured ms", "model ms", "model / measured", "measured MiB", "model MiB"]
    return markdown(pd.DataFrame(body, columns=head))


def simulated_table(device):
    body = []
    for size in (Sizes(B, gpus=gpus) for gpus in SIMULATED_GPUS for B in (1 << 16, 1 << 18, 1 << 20)):
        held = sum(size.embeddings) * 2 + beside_bytes(size)
        memory = [number(x / 2**30) for x in (beside_bytes(size), held, saved_bytes(size))]
        body.append([f"{size.B:,}", str(size.gpus), number(seconds(size, device)), *memory])
    head = ["batch", "GPUs", "step, s", "beside, GiB a GPU", "with inputs and gradients"]
    head.append("winners saved instead")
    return markdown(pd.DataFrame(body, columns=head))


# ---- the page ----


def _headers(record):
    """Return the headers of all runs of this suite, first of the run that the model is fitted to."""
    runs = [row["run"] for row in exact_steps(record)[::-1]]
    return [record.runs[run] for run in dict.fromkeys([*runs, *record.of(SUITE).run])]


def recorded(directory):
    """Each record of a GPU that has this suite."""
    found = [load(path) for path in records(directory) if not of_a_cpu(path)]
    return [record for record in found if len(record.of(SUITE))]


def build(directory):
    """The Markdown between the markers."""
    parts = []
    drawn = False
    for record in recorded(directory):
        headers = _headers(record)
        parts.append(f"### On one {headers[0]['gpu']}")
        figures = "Milliseconds of a step, forward and both gradients / MiB at its peak, without these."
        parts += section("Batches of token embeddings", figures, steps_table(record, single=False), 4)
        parts += section("One vector a side", "The same.", steps_table(record, single=True), 4)
        if device := fitted(record):
            note = (
                f"Products at {device.share * device.products * 1e-12:,.0f} TFLOP/s, {device.share:.0%} of "
                f"cuBLAS in that run; rows at {device.cache * 1e-12:.1f} TB/s, fitted to the largest batch."
            )
            parts += section("The model beside what was measured", note, model_table(record, device), 4)
            note = (
                f"By the same model, of GPUs like this one in a ring of {device.link * 1e-9:.0f} GB/s in a "
                f"host of 8 and {device.between * 1e-9:.0f} GB/s between hosts; nothing here was measured."
            )
            parts += section("Simulated", note, simulated_table(device), 4)
            parts += [] if drawn else [f"![Time and memory of a step, simulated and measured]({PLOT})"]
            drawn = True
        parts.append(stamp(headers))
    return "\n\n".join(parts) if parts else "No run is recorded yet."
