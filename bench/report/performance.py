"""The generated part of a roofline page: each shape beside what bounds it, from the recorded runs."""

from functools import partial

import pandas as pd

from bench.harness.ceilings import NAMES, floor_us, reached
from bench.harness.inputs import SKEWED, SKEWED_UP_TO, UNIFORM
from bench.harness.library import EINSUM, OURS
from bench.harness.named_shapes import FORWARD, HOST, LONG, TRAINING
from bench.harness.results import of_a_cpu, records
from bench.report import own_records
from bench.report.tables import (
    best,
    load,
    markdown,
    of_device,
    over_best_other,
    records_of,
    section,
    size,
    stamp,
)  # fmt: skip
from bench.suites import codes, dense, steps
from bench.tuning import plan_regret
from late_interaction._doctor.text import number


def _size(row):
    shown = size(row)
    return shown if "d=" in shown else f"{shown}, d={row['d']}"


def percent(value):
    return f"{100 * value:.0f}%" if value == value else "-"


def times(value):
    return f"{value:.2f}x" if value == value else "-"


def by_shape(rows, names, column="variant", figure="gpu_us"):
    """The figure of the fastest row of each shape, in their order, for each of `names`, values of `column`;
    NaN where there is none."""
    timed = rows.dropna(subset=["gpu_us"] if rows.gpu_us.notna().any() else [figure])
    first = timed.sort_values("gpu_us", kind="stable").drop_duplicates(["shape", column])
    wide = first.pivot(index="shape", columns=column, values=figure).reindex(columns=[*names])
    return wide.loc[[shape.name for shape in FORWARD if shape.name in wide.index]]


def _share(record, row):
    return reached(row, record.runs[row["run"]]) if row else None


def _row(rows, shape):
    """The fastest row of a shape."""
    found = best(rows[rows["shape"] == shape], "shape")
    return records_of(found)[0] if len(found) else None


def _forward(record):
    body = []
    plain = record.of("variants")
    ours = (record.of("forward").query("impl == @OURS"), plain[plain.variant == dense.PLAIN])
    for shape in FORWARD:
        row = _row(ours[0], shape.name) or _row(ours[1], shape.name)
        if row and (share := _share(record, row)):
            times_us = (number(factor * row["gpu_us"]) for factor in (share[0], 1.0))
            body.append([shape.name, _size(row), NAMES[share[1]], *times_us, percent(share[0])])
    head = ["shape", "Nq x Nd, Lq, Ld", "bound by", "ceiling us", "GPU us", "reached"]
    return section("Scores alone, bf16", "", markdown(pd.DataFrame(body, columns=head), 3))


def _variants(record):
    rows = record.of("variants")
    table = by_shape(rows, dense.VARIANTS).dropna(subset=[dense.PLAIN])
    winners = rows[rows.variant == dense.WINNERS]
    shares = [_share(record, _row(winners, name)) for name in table.index]
    names = {dense.MASKS: "both masks"}
    ratios = {names.get(v, v): (table[v] / table[dense.PLAIN]).map(times) for v in dense.VARIANTS[1:]}
    cells = {
        "shape": table.index, "plain us": table[dense.PLAIN].map(number),
        "winners reach": [percent(share[0]) if share else "-" for share in shares], **ratios,
    }  # fmt: skip
    note = (
        "Each option's time over the plain call, taken in turns in one run; masks drop a fifth of the "
        "tokens at random. `winners reach` is the share of the ceiling with winners saved."
    )
    return section("What the options cost", note, markdown(pd.DataFrame(cells)))


def _fp32(record):
    rows = record.of("fp32")
    rows = rows.assign(who=rows.variant.where(rows.impl == OURS, "einsum"))
    names = ("high", "highest", "einsum")
    table, errors = (by_shape(rows, names, "who", figure) for figure in ("gpu_us", "rel_err"))
    high = rows[rows.who == "high"]
    shares = [_share(record, _row(high, name)) for name in table.index]
    cells = {
        "shape": table.index, "high": table["high"].map(number),
        "reached": [f"{percent(s[0])} of {NAMES[s[1]]}" if s else "-" for s in shares],
        "highest": table["highest"].map(number), "einsum": table["einsum"].map(number),
        "einsum / highest": (table["einsum"] / table["highest"]).map(times),
        **{f"{name} err": errors[name].map(lambda x: f"{x:.1e}" if x == x else "-") for name in names},
    }  # fmt: skip
    note = (
        'GPU microseconds of float32 inputs: precision "high", "highest", and PyTorch\'s float32 einsum in '
        "chunks; then the relative error of each against fp64."
    )
    return section("float32 inputs", note, markdown(pd.DataFrame(cells)))


def _quantized(record):
    rows = record.of("quantized")
    lik = f"LIK {codes.PER_TOKEN}"
    rows = rows.assign(who=rows.variant.where(rows.impl == OURS, lik))
    names = (*codes.QUANTIZED[1:], lik)
    table = by_shape(rows, (codes.BF16, *names), "who").dropna(subset=[*codes.QUANTIZED[1:]], how="all")

    def over(column):
        both = zip(column, table[codes.BF16], strict=True)
        return [f"{number(us)} ({times(us / plain)})" if us == us else "-" for us, plain in both]

    cells = {"shape": table.index, "bf16": table[codes.BF16].map(number)}
    note = "GPU microseconds, and over our own bf16 call of the same turns."
    return section(
        "8-bit inputs", note, markdown(pd.DataFrame(cells | {name: over(table[name]) for name in names}))
    )


def _ragged(record):
    """Packed documents in bf16 and as codes."""
    rows = record.of("ragged-codes")
    if rows.empty:
        return []
    table, body = rows.pivot(index="shape", columns="variant", values="gpu_us"), []
    for shape, found in table.iterrows():
        for lengths, ending in (("different", ", ragged"), ("equal", ", equal")):
            each = {kind: found[kind + ending] for kind in codes.RAGGED_KINDS}
            cells = {kind: f"{number(us)} ({us / each[codes.BF16]:.2f}x)" for kind, us in each.items()}
            body.append({"shape": shape, "lengths": lengths, **cells})
    note = (
        "GPU microseconds of packed documents, of different lengths (20 to 400 tokens) or of their mean, and"
        " over bf16."
    )
    return section("A corpus of codes", note, markdown(pd.DataFrame(body), 2))


def _training(record):
    rows = record.of("training").dropna(subset=["gpu_us"])
    auto = rows[(rows.impl == OURS) & (rows.backward == "auto")]
    uniform = rows[rows.winners == UNIFORM]
    compared = uniform[(uniform.impl != OURS) | (uniform.backward == "auto")]
    over = over_best_other(compared, "shape", "impl", OURS)
    body = []
    for shape in (*TRAINING, *LONG):
        row, hot = (_row(auto[auto.winners == kind], shape.name) for kind in (UNIFORM, SKEWED))
        if not row or (not hot and shape.Ld <= SKEWED_UP_TO):
            continue
        header = record.runs[row["run"]]
        floor = floor_us(row, header)
        if floor is None:
            continue
        products = shape.arithmetic("fwd+bwd") / header["cublas_tflops"]
        bound = "products" if products >= shape.bytes_moved("fwd+bwd", 2) / header["read_tbps"] else "memory"
        # One row of D for grad_Q and one of Q for grad_D, for each winner.
        gathered = 2 * 2 * shape.Nq * shape.Nd * shape.Lq * shape.d
        other = _row(uniform[uniform.impl != OURS], shape.name)
        body.append([
            shape.name, _size(row), bound, number(floor), f"{gathered / 2**20:,.0f}", number(row["gpu_us"]),
            percent(floor / row["gpu_us"]), number(hot and hot["gpu_us"]), number(row["wall_us"]),
            number(row["peak_mib"]), number(other and other["gpu_us"]), over[shape.name],
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
    return section("Training step, bf16", note, markdown(pd.DataFrame(body, columns=head), 3))


def _steps(record):
    rows = record.of("steps")
    order = [shape.name for shape in TRAINING]
    gpu, wall, mib = (
        rows.pivot(index="shape", columns="variant", values=key).reindex(order, columns=[*steps.STEPS])
        for key in ("gpu_us", "wall_us", "peak_mib")
    )
    plain = gpu[steps.PLAIN].dropna()
    gpu, wall, mib = (table.loc[plain.index] for table in (gpu, wall, mib))
    gradients = pd.Series({shape.name: shape.input_bytes(2) / 2**20 for shape in TRAINING})[plain.index]
    options = {
        "q_weights": steps.WEIGHTS, "learned": steps.LEARNED, "recompute": steps.RECOMPUTE,
        "float32 high": steps.HIGH, "float32 autocast": steps.AUTOCAST,
    }  # fmt: skip
    host = {
        "host us": steps.PLAIN, "one thread": steps.ONE_THREAD, "torch.compile": steps.COMPILED,
        "CUDA graph": steps.GRAPH,
    }  # fmt: skip
    cells = {
        "shape": plain.index, "bf16 us": plain.map(number),
        **{title: (gpu[name] / plain).map(times) for title, name in options.items()},
        "recompute MiB": (mib[steps.RECOMPUTE] - gradients).map(number),
        **{title: (wall[name] - plain).map(number) for title, name in host.items()},
    }  # fmt: skip
    note = (
        "The bf16 step in the same turns as others: weights of the query tokens, without and with a "
        'gradient of theirs; `winners="recompute"`, with the MiB that it takes beside the gradients; '
        'float32 inputs at "high" and under bf16 autocast, which are twice the bytes. Then wall time above '
        "GPU time: eager; eager without autograd's own thread for the device "
        "(`torch.autograd.set_multithreading_enabled(False)`); compiled by `torch.compile`; as a CUDA graph."
    )
    runs = [record.runs[run] for run in rows.run.drop_duplicates()]
    if runs and runs[-1].get("product_step_us"):
        eager = f"{number(runs[-1]['product_step_us'])} us eager"
        note += f" PyTorch's own product of two small tensors, with both gradients: {eager}."
    return section("What a step's options cost", note, markdown(pd.DataFrame(cells)))


def _negatives(record):
    """The largest step where each query has its own documents, library by library."""
    shape = next(s for s in TRAINING if s.name == "kd-256x16")
    rows = record.of("training").dropna(subset=["gpu_us"])
    rows = rows[(rows["shape"] == shape.name) & (rows.winners == UNIFORM)]
    if rows.impl.nunique() < 2:
        return []
    rows = rows.sort_values("gpu_us", ascending=False, kind="stable")
    cells = {
        "library": rows.impl + (", " + rows.backward).where(rows.backward != "", ""),
        "ms": (rows.gpu_us * 1e-3).map("{:.2f}".format),
        "GB with inputs": ((rows.peak_mib * 2**20 + shape.input_bytes(2)) * 1e-9).map("{:.1f}".format),
        "MiB above": rows.peak_mib.map(number),
    }
    note = (
        f"Forward and both gradients of {_size(records_of(rows)[0])}, bf16: GPU time, the peak of allocated "
        "memory with the inputs, and MiB above them."
    )
    return section("Sixteen negatives a query", note, markdown(pd.DataFrame(cells)))


def _small_calls(record):
    """The host's time: small calls beside a product of PyTorch's."""
    rows = record.of("host")
    rows = rows.assign(key=rows.op + rows.impl + rows.variant)
    wall, gpu = (rows.pivot(index="shape", columns="key", values=key) for key in ("wall_us", "gpu_us"))
    forward, body = f"fwd{OURS}{steps.EAGER}", []
    for shape in (shape for shape in HOST if shape.name in wall.index):
        us = wall.loc[shape.name]
        above = us.get(forward) - gpu.loc[shape.name].get(forward)
        if above != above:
            continue
        eager, losses = (
            [" / ".join(number(us.get(f"fwd+bwd{impl}{way}")) for way in ways) for impl in (OURS, EINSUM)]
            for ways in (steps.HOST[:1], steps.HOST[1:])
        )
        product = number(us.get(f"fwd{EINSUM}{steps.EAGER}"))
        figures = [number(us[forward]), number(above), product, *eager, *losses]
        body.append([f"{shape.Nq} x {shape.Nd}", *figures])
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


PARTS = (
    _forward, _variants, _fp32, _quantized, _ragged, _training, _steps, _small_calls, _negatives,
)  # fmt: skip
OWN = {
    "ncu": own_records.profile, "sweep": own_records.sweep,
    "plans": partial(own_records.plans, variants=plan_regret.JUDGED),
}  # fmt: skip


def build(directory, device=None):
    """The Markdown between the markers: the tables of a device, or of all that have records."""
    parts = []
    for path in records(directory):
        if of_a_cpu(path) or not of_device(path, device):
            continue
        record = load(path)
        measured = [text for part in PARTS for text in part(record)]
        for kind, part in OWN.items():
            if (own := directory / f"{kind}-{path.name}").exists():
                measured += part(own)
        parts += [stamp(record.headers), *measured] if measured else []
    return "\n\n".join(parts) if parts else "No run on a GPU is recorded yet."
