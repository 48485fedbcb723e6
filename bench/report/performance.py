"""The generated part of docs/performance.md: each shape beside what bounds it, from the recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.harness import sweep_summary
from bench.harness.ceilings import NAMES, floor_us, reached
from bench.harness.inputs import SKEWED, SKEWED_UP_TO, UNIFORM
from bench.harness.library import EINSUM, LIK, OURS
from bench.harness.named_shapes import FORWARD, LONG, TRAINING
from bench.harness.results import Row, best, device_of, is_whole, of_a_cpu, read, records, size_of, split
from bench.harness.text import number
from bench.report import host
from bench.report.tables import over_best_other, stamp, table
from bench.suites import fp32, quantized, steps, variants
from bench.tuning import kernel_fingerprint, plan_regret


def _size(row: Row) -> str:
    layout = {"kd": " (KD)", "pairs": " (pairs)"}.get(row["layout"], "")
    return f"{row['Nq']} x {row['Nd']}, {row['Lq']}, {row['Ld']}{layout}, d={row['d']}"


def _percent(value: float | None) -> str:
    return f"{100 * value:.0f}%" if value is not None else "-"


class _Record:
    """Our rows of one file, by suite, shape and variant, with the ceilings of the run of each."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.headers, self.rows = split(rows)
        self.runs = {h["run"]: h for h in self.headers}

    def row(self, suite: str, shape: str, variant: str | None = None, impl: str = OURS) -> Row | None:
        wanted = (suite, shape, variant, impl)
        return best(
            r for r in self.rows if (r["suite"], r["shape"], r.get("variant"), r["impl"]) == wanted
        )  # fmt: skip

    def share(self, row: Row | None) -> tuple[float, str] | None:
        return reached(row, self.runs[row["run"]]) if row else None


def _times(above: Row | None, below: Row | None) -> str:
    return f"{above['gpu_us'] / below['gpu_us']:.2f}x" if above and below else "-"


def _forward(record: _Record) -> list[str]:
    body = []
    for shape in FORWARD:
        row = record.row("forward", shape.name) or record.row(variants.SUITE, shape.name, variants.PLAIN)
        share = record.share(row)
        if row is None or share is None:
            continue
        ceiling = share[0] * row["gpu_us"]
        figures = [number(ceiling), number(row["gpu_us"]), _percent(share[0])]
        body.append([shape.name, _size(row), NAMES[share[1]], *figures])
    if not body:
        return []
    head = ["shape", "Nq x Nd, Lq, Ld", "bound by", "ceiling us", "GPU us", "reached"]
    return ["### Scores alone, bf16", table(head, body, 3)]


def _variants(record: _Record) -> list[str]:
    body = []
    for shape in FORWARD:
        plain = record.row(variants.SUITE, shape.name, variants.PLAIN)
        if plain is None:
            continue
        winners = record.row(variants.SUITE, shape.name, variants.WINNERS)
        share = record.share(winners)
        names = (
            variants.WINNERS, variants.D_MASK, variants.MASKS, variants.WEIGHTS, variants.NORMALIZE,
            variants.FP16,
        )  # fmt: skip
        ratios = [_times(record.row(variants.SUITE, shape.name, name), plain) for name in names]
        body.append([shape.name, number(plain["gpu_us"]), _percent(share and share[0]), *ratios])
    note = (
        "Each option's time over the plain call, taken in turns in one run; masks drop a fifth of the "
        "tokens at random. `winners reach` is the share of the ceiling with winners saved."
    )
    head = [
        "shape", "plain us", "winners reach", "winners", "d_mask", "both masks", "q_weights", "normalize",
        "fp16",
    ]  # fmt: skip
    return ["### What the options cost", note, table(head, body, 1)] if body else []


def _fp32(record: _Record) -> list[str]:
    body = []
    for shape in FORWARD:
        high = record.row(fp32.SUITE, shape.name, fp32.HIGH)
        highest = record.row(fp32.SUITE, shape.name, fp32.HIGHEST)
        einsum = record.row(fp32.SUITE, shape.name, fp32.HIGHEST, EINSUM)
        if high is None and highest is None:
            continue
        share = record.share(high)
        cells = [number(r and r["gpu_us"]) for r in (high, highest, einsum)]
        errors = [f"{r['rel_err']:.1e}" if r else "-" for r in (high, highest, einsum)]
        reach = f"{_percent(share[0])} of {NAMES[share[1]]}" if share else "-"
        body.append([shape.name, cells[0], reach, cells[1], cells[2], _times(einsum, highest), *errors])
    note = (
        'GPU microseconds of float32 inputs: precision "high", "highest", and PyTorch\'s float32 einsum in '
        "chunks; then the relative error of each against fp64."
    )
    head = [
        "shape",
        "high",
        "reached",
        "highest",
        "einsum",
        "einsum / highest",
        "high err",
        "highest err",
        "einsum err",
    ]
    return ["### float32 inputs", note, table(head, body, 1)] if body else []


def _quantized(record: _Record) -> list[str]:
    body = []
    for shape in FORWARD:
        wide = record.row(quantized.SUITE, shape.name, quantized.BF16)
        if wide is None:
            continue
        names = (quantized.PER_TOKEN, quantized.PER_TENSOR, quantized.INT8_PER_TOKEN)
        ours = [record.row(quantized.SUITE, shape.name, name) for name in names]
        lik = record.row(quantized.SUITE, shape.name, quantized.PER_TOKEN, LIK)
        if not any(ours):
            continue
        cells = [f"{number(r['gpu_us'])} ({_times(r, wide)})" if r else "-" for r in [*ours, lik]]
        body.append([shape.name, number(wide["gpu_us"]), *cells])
    note = "GPU microseconds, and over our own bf16 call of the same turns."
    head = [
        "shape",
        "bf16",
        *(quantized.PER_TOKEN, quantized.PER_TENSOR, quantized.INT8_PER_TOKEN),
        "LIK fp8 per token",
    ]
    return ["### 8-bit inputs", note, table(head, body, 1)] if body else []


def _training(record: _Record) -> list[str]:
    body = []
    for shape in (*TRAINING, *LONG):
        steps = [
            r for r in record.rows if r["suite"] == "training" and r["shape"] == shape.name and r["gpu_us"]
        ]
        ours = {r["winners"]: r for r in steps if r["impl"] == OURS and r["backward"] == "auto"}
        if UNIFORM not in ours or (SKEWED not in ours and shape.Ld <= SKEWED_UP_TO):
            continue
        uniform, skewed = ours[UNIFORM], ours.get(SKEWED)
        header = record.runs[uniform["run"]]
        floor = floor_us(uniform, header)
        if floor is None:
            continue
        products = shape.arithmetic("fwd+bwd") / header["cublas_tflops"]
        bound = "products" if products >= shape.bytes_moved("fwd+bwd", 2) / header["read_tbps"] else "memory"
        # One row of D for grad_Q and one of Q for grad_D, for each winner.
        gathered = 2 * 2 * shape.Nq * shape.Nd * shape.Lq * shape.d
        others = [r for r in steps if r["impl"] != OURS and r["winners"] == UNIFORM]
        other = best(others)
        body.append([
            shape.name, _size(uniform), bound, number(floor), f"{gathered / 2**20:,.0f}",
            number(uniform["gpu_us"]), _percent(floor / uniform["gpu_us"]),
            number(skewed and skewed["gpu_us"]), number(uniform["wall_us"]),
            number(uniform["peak_mib"]), number(other and other["gpu_us"]), over_best_other(uniform, others),
        ])  # fmt: skip
    note = (
        'Forward and both gradients with `backward="auto"`. The floor counts the products at cuBLAS\' rate, '
        "or each input and gradient moved once at that of a large read, whichever takes longer, by the "
        "ceilings of the same run. What it leaves out is what "
        "the backward spends its time on where many queries meet a document: the rows of the winners, one of "
        "D and one of Q each, gathered through L2 (`rows MiB`). Where each query has its own documents, "
        "writing grad_D, mostly zeros, takes most of the backward. `skewed`: the winner's index is Ld u^4."
    )
    head = [
        "shape", "Nq x Nd, Lq, Ld", "floor by", "floor us", "rows MiB", "GPU us", "reached", "skewed us",
        "wall us", "peak MiB", "best other us", "other / ours",
    ]  # fmt: skip
    return ["### Training step, bf16", note, table(head, body, 3)] if body else []


def _steps(record: _Record) -> list[str]:
    body = []
    product_us = None
    for shape in TRAINING:
        found = {
            r["variant"]: r for r in record.rows if r["suite"] == steps.SUITE and r["shape"] == shape.name
        }
        plain = found.get(steps.PLAIN)
        if plain is None or not plain["gpu_us"]:
            continue
        product_us = record.runs[plain["run"]].get("product_step_us")
        gradients = shape.input_bytes(2) / 2**20
        cells = [shape.name, number(plain["gpu_us"])]
        for name in (steps.WEIGHTS, steps.LEARNED, steps.RECOMPUTE, steps.HIGH, steps.AUTOCAST):
            cells.append(_times(found.get(name), plain))
        again = found.get(steps.RECOMPUTE)
        cells.append(number(again["peak_mib"] - gradients) if again and again["peak_mib"] else "-")
        for name in (steps.PLAIN, steps.ONE_THREAD, steps.COMPILED, steps.GRAPH):
            row = found.get(name)
            cells.append(number(row["wall_us"] - plain["gpu_us"]) if row and row["wall_us"] else "-")
        body.append(cells)
    note = (
        "The bf16 step in the same turns as others: weights of the query tokens, without and with a gradient "
        'of theirs; `winners="recompute"`, with the MiB that it takes beside the gradients; float32 inputs '
        'at "high" and under bf16 autocast, which are twice the bytes. Then '
        "wall time above GPU time: eager; eager without autograd's own thread for the device "
        "(`torch.autograd.set_multithreading_enabled(False)`); compiled by `torch.compile`; as a CUDA graph."
    )
    if product_us:
        eager = f"{number(product_us)} us eager"
        note += f" PyTorch's own product of two small tensors, with both gradients: {eager}."
    head = [
        "shape", "bf16 us", "q_weights", "learned", "recompute", "float32 high", "float32 autocast",
        "recompute MiB", "host us", "one thread", "torch.compile", "CUDA graph",
    ]  # fmt: skip
    return ["### What a step's options cost", note, table(head, body, 1)] if body else []


def _negatives(record: _Record) -> list[str]:
    """The largest step where each query has its own documents, library by library."""
    shape = next(s for s in TRAINING if s.name == "kd-256x16")
    wanted = [
        r for r in record.rows
        if (r["suite"], r["shape"], r["winners"]) == ("training", shape.name, UNIFORM) and r["gpu_us"]
    ]  # fmt: skip
    if len({r["impl"] for r in wanted}) < 2:
        return []
    body = []
    for row in sorted(wanted, key=lambda r: float(r["gpu_us"]), reverse=True):
        name = row["impl"] + (f", {row['backward']}" if row["backward"] else "")
        total = (row["peak_mib"] * 2**20 + shape.input_bytes(2)) * 1e-9
        body.append([name, f"{row['gpu_us'] * 1e-3:.2f}", f"{total:.1f}", number(row["peak_mib"])])
    note = (
        f"Forward and both gradients of {_size(wanted[0])}, bf16: GPU time, the peak of allocated memory "
        "with the inputs, and MiB above them."
    )
    head = ["library", "ms", "GB with inputs", "MiB above"]
    return ["### Sixteen negatives a query", note, table(head, body, 1)]


def _profile(path: Path) -> list[str]:
    if not path.exists():
        return []
    body = []
    shares = {"tensor": "tensor_pct", "DRAM": "dram_pct", "L2": "l2_pct", "issue": "issue_pct"}
    # L2 is left out: it carries all traffic between DRAM and the SMs, so its share says little.
    bounds = {"tensor": "tensor cores", "DRAM": "reading device memory", "issue": "issuing instructions"}
    for row in split(read(path))[1]:
        figures = [f"{row[k]:.0f}%" if row[k] is not None else "-" for k in shares.values()]
        registers = "-" if row["registers"] is None else f"{row['registers']:.0f}"
        known = [name for name in bounds if row[shares[name]] is not None]
        bound = bounds[max(known, key=lambda name: float(row[shares[name]]))] if known else "-"
        body.append([row["shape"], row["kernel"], *figures, registers, number(row["duration_us"]), bound])
    note = (
        "One profiled call each (`python -m bench ncu --help` has the command): the busiest of the tensor "
        "pipes, device memory, L2 and issue slots, each as a share of its peak. A profiled kernel runs alone "
        "and cold, so its time is longer than above."
    )
    head = ["shape", "kernel", *shares, "registers", "us", "bound by"]
    return ["### Nsight Compute", note, table(head, body, 2)] if body else []


def _sweep(path: Path) -> list[str]:
    groups = sweep_summary.by_shape(split(read(path))[1] if path.exists() else [])
    body = []
    for label, key in (("GPU time", "gpu_us"), ("wall time", "wall_us")):
        ratios = [r for group in groups.values() if (r := sweep_summary.ratio(group, key))]
        if ratios:
            figures = sweep_summary.percentiles(ratios)
            slower = f"{sum(r > sweep_summary.LOSS for r in ratios)} of {len(ratios)}"
            body.append([label, *(f"{v:.2f}x" for v in figures.values()), slower])
    if not body:
        return []
    head = [
        "best other over ours",
        *sweep_summary.PERCENTILES,
        f"slower by over {100 * (sweep_summary.LOSS - 1):.0f}%",
    ]
    parts = ["### Random shapes"]
    if path.with_suffix(".png").exists():
        parts.append(f"![Our time over the best other's](../bench/results/{path.stem}.png)")
    others = dict.fromkeys(r["impl"] for group in groups.values() for r in group if r["impl"] != OURS)
    beside = f"beside {', '.join(others)}"
    parts.append(f"{len(groups)} shapes drawn from a seed, bf16 (`python -m bench sweep`), {beside}.")
    parts.append(table(head, body, 1))
    lost = []
    for found, ours, other in sweep_summary.losses([row for group in groups.values() for row in group]):
        times = [
            number(sweep_summary.clock(ours)),
            number(sweep_summary.clock(other)),
            other["impl"],
            f"{found:.2f}",
        ]
        lost.append([size_of(ours), *times, str(ours.get("plan", ""))])
    if lost:
        parts.append(table(["slower on", "ours us", "other us", "other", "ours / other", "plan"], lost, 1))
    return parts


def _plans(path: Path) -> list[str]:
    headers, rows = split(read(path)) if path.exists() else ([], [])
    rows = [plan_regret.judged(row) for row in rows if row["variant"] in plan_regret.JUDGED]
    body = [[variant, *plan_regret.figures(found)] for variant, found in plan_regret.by_variant(rows).items()]
    if not body:
        return []
    note = (
        "Each random shape's time with the plan that the planner chooses today, over its time with the "
        "fastest plan, less 1 (`python -m bench plans`)."
    )
    if any(kernel_fingerprint.are_older(header) for header in headers):
        note += " These times are older than the kernels of this checkout."
    parts = ["### The planner's choices", note, table(["shapes", *plan_regret.FIGURES], body, 1)]
    if missed := plan_regret.missed(rows):
        parts.append(table(plan_regret.MISSED, missed, 3))
    return parts


def build(directory: Path) -> str:
    """The Markdown between the markers of docs/performance.md."""
    parts: list[str] = []
    for path in records(directory):
        if of_a_cpu(path):
            continue
        rows = read(path)
        record = _Record(rows)
        device = f"## On one {device_of(record.headers)}"
        if not is_whole(rows):
            if again := [*_variants(record), *_steps(record), *host.section(rows), *_negatives(record)]:
                parts += [device, *again, stamp(record.headers)]
            continue
        measured = [*_forward(record), *_variants(record), *_fp32(record)]
        measured += [*_quantized(record), *_training(record), *_steps(record), *host.section(rows)]
        measured += _negatives(record)
        measured += _profile(directory / f"ncu-{path.name}")
        measured += _sweep(directory / f"sweep-{path.name}")
        measured += _plans(directory / f"plans-{path.name}")
        if measured:
            parts += [device, *measured, stamp(record.headers)]
    return "\n\n".join(parts) if parts else "No run on a GPU is recorded yet."
