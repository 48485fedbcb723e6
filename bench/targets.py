"""What the GPU is meant to reach, and whether the recorded rows do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from . import fp32, hidden, pairs, plaid, quantized, retrieval, steps, variants, varlen
from .ceilings import NAMES, reached
from .impls import EINSUM, OURS
from .inputs import SKEWED, UNIFORM
from .results import Row, align, best, number, split
from .shapes import COMPUTE_BOUND, FP32, QUANTIZED, READ_BOUND, VARIANTS, named

_HARDER = ("train-128", "d768")  # few tiles for every multiprocessor; rows longer than a stage of the ring
_GPU_US = {"text-short": 20.0, "colpali-rerank": 66.0, "train-32": 7.0}
_STEP_US = {
    "train-32": 18.0, "pylate-256": 470.0, "pylate-512": 1850.0, "colpali-128": 340.0,
    "colpali-lq128": 1130.0, "longq-64": 2300.0, "kd-128x8": 150.0, "kd-256x16": 570.0, "pairs-256": 48.0,
}  # fmt: skip
_SKEWED = 1.25  # times the uniform limit
_STEP_HOST_US = 50.0  # that a training step may take above its GPU time
_STEP_RATIOS = {steps.RECOMPUTE: 1.7, steps.HIGH: 1.6, steps.AUTOCAST: 1.6}  # over the bf16 step
_VARLEN_US = {
    ("varlen-128", varlen.FORWARD): 60.0, ("varlen-128", varlen.STEP): 150.0,
    ("varlen-rerank-10k", varlen.FORWARD): 116.0,
}  # fmt: skip
_PAIRS_US = 130.0  # of the sparse list, pairs-10k
_LISTED = 1.1  # times the dense call, of the list of all pairs
_PLAID_US = {"plaid-2": 300.0, "plaid-4": 550.0}
_HEAD_US = {
    ("head-32x128", "fwd"): 140.0, ("head-32x128", "fwd+bwd"): 420.0,
    ("head-32x512", "fwd"): 1100.0, ("head-32x512", "fwd+bwd"): 2600.0,
}  # fmt: skip
_TOP_US = 2800.0  # of the best documents of retrieve-100k
_OF_THE_BUS = 0.9  # for a corpus in the host's memory
_HOST_US = 15.0  # that a call may take above its GPU time
_LONG = 1024  # document tokens from which the end of a document hardly shows


@dataclass(frozen=True)
class Verdict:
    group: str
    shape: str
    value: float
    limit: float
    at_most: bool
    unit: str  # "%" of a ceiling, "us" or "x"
    ceiling: str = ""

    @property
    def met(self) -> bool:
        # A target is stated in the digits that are shown; noise beyond them decides nothing.
        slack = 0.05 if self.unit == "us" else 0.0005
        return self.value <= self.limit + slack if self.at_most else self.value >= self.limit - slack

    def figure(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * value:.0f}%" if value == self.limit else f"{100 * value:.1f}%"
        return f"{value:.3f}x" if self.unit == "x" else f"{number(value)} us"

    @property
    def wanted(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.figure(self.limit)}"


class _Rows:
    """Our rows of a record, each with the ceilings of its run."""

    def __init__(self, rows: Iterable[Row]) -> None:
        headers, measured = split(rows)
        self._headers = {h["run"]: h for h in headers}
        self._rows = measured

    def find(
        self, suite: str, shape: str, variant: str | None = None, impl: str = OURS, op: str = "fwd",
        key: str = "gpu_us",
    ) -> Row | None:  # fmt: skip
        wanted = (
            r for r in self._rows
            if (r["suite"], r["shape"], r.get("variant"), r["impl"]) == (suite, shape, variant, impl)
            and r["op"] == op
            and (variant is not None or r["dtype"] == "bfloat16")
        )  # fmt: skip
        return best(wanted, key)

    def plain(self, shape: str) -> Row | None:
        return self.find("forward", shape) or self.find(variants.SUITE, shape, variants.PLAIN)

    def step(self, shape: str, winners: str) -> Row | None:
        """The training step as it is by default."""
        wanted = (OURS, "training", shape, winners, "auto", "bfloat16")
        keys = ("impl", "suite", "shape", "winners", "backward", "dtype")
        return best(r for r in self._rows if tuple(r.get(k) for k in keys) == wanted)

    def share(self, row: Row) -> tuple[float, str] | None:
        return reached(row, self._headers[row["run"]]) if row.get("run") in self._headers else None


def _shares(rows: _Rows, group: str, found: Iterable[tuple[Row | None, float]]) -> Iterator[Verdict]:
    for row, limit in found:
        if row is not None and (share := rows.share(row)):
            yield Verdict(group, row["shape"], share[0], limit, False, "%", NAMES[share[1]])


def _ratios(
    group: str, found: Iterable[tuple[Row | None, Row | None, float]], at_most: bool
) -> Iterator[Verdict]:
    for above, below, limit in found:
        if above is not None and below is not None:
            yield Verdict(group, above["shape"], above["gpu_us"] / below["gpu_us"], limit, at_most, "x")


def _latency(rows: _Rows) -> Iterator[Verdict]:
    for shape, limit in _GPU_US.items():
        if row := rows.plain(shape):
            yield Verdict("short calls, GPU time", shape, row["gpu_us"], limit, True, "us")
    for shape in _GPU_US:
        if (row := rows.plain(shape)) and row["wall_us"] is not None:
            host = row["wall_us"] - row["gpu_us"]
            yield Verdict("short calls, wall above GPU", shape, host, _HOST_US, True, "us")


def _training(rows: _Rows) -> Iterator[Verdict]:
    for winners, times in ((UNIFORM, 1.0), (SKEWED, _SKEWED)):
        for shape, limit in _STEP_US.items():
            if row := rows.step(shape, winners):
                yield Verdict(f"training step, {winners}", shape, row["gpu_us"], times * limit, True, "us")
    for shape in _STEP_US:
        if (row := rows.step(shape, UNIFORM)) and row["wall_us"] is not None:
            host = row["wall_us"] - row["gpu_us"]
            yield Verdict("training step, wall above GPU", shape, host, _STEP_HOST_US, True, "us")


def _steps(rows: _Rows) -> Iterator[Verdict]:
    for variant, limit in _STEP_RATIOS.items():
        for shape in _STEP_US:
            row = rows.find(steps.SUITE, shape, variant, op="fwd+bwd")
            if row and row.get("over_plain"):
                yield Verdict(f"training step, {variant}", shape, row["over_plain"], limit, True, "x")


def _surface(rows: _Rows) -> Iterator[Verdict]:
    for (shape, op), limit in _HEAD_US.items():
        if row := rows.find(hidden.SUITE, shape, hidden.FUSED, op=op):
            yield Verdict(f"fused head, {op}", shape, row["gpu_us"], limit, True, "us")
    for (shape, variant), limit in _VARLEN_US.items():
        op = "fwd" if variant == varlen.FORWARD else "fwd+bwd"
        if row := rows.find(varlen.SUITE, shape, variant, op=op):
            yield Verdict(f"packed, {op}", shape, row["gpu_us"], limit, True, "us")
    if row := rows.find(pairs.SUITE, "pairs-10k", pairs.FORWARD):
        yield Verdict("listed pairs, sparse", "pairs-10k", row["gpu_us"], _PAIRS_US, True, "us")
    listed = rows.find(pairs.SUITE, "pairs-grid", pairs.FORWARD)
    dense = rows.find(pairs.SUITE, "pairs-grid", pairs.DENSE)
    yield from _ratios("listed pairs, all of them, over the dense call", [(listed, dense, _LISTED)], True)
    for shape, limit in _PLAID_US.items():
        if row := rows.find(plaid.SUITE, shape, plaid.PACKED):
            yield Verdict("residuals, packed", shape, row["gpu_us"], limit, True, "us")
    if row := rows.find(retrieval.SUITE, "retrieve-100k", retrieval.TOP):
        yield Verdict(f"retrieve, {retrieval.TOP}", "retrieve-100k", row["gpu_us"], _TOP_US, True, "us")
    for memory in (retrieval.PINNED, retrieval.PAGEABLE, retrieval.MAPPED):
        if row := rows.find(retrieval.SUITE, "retrieve-host-40k", memory, key="over_bus"):
            share = 1 / row["over_bus"]
            yield Verdict("corpora of the host", memory, share, _OF_THE_BUS, False, "%", "the bus")


def judge(record: Iterable[Row]) -> list[Verdict]:
    """Every target that the record has figures for, group by group."""
    rows = _Rows(record)

    def variant(name: str) -> list[tuple[Row | None, Row | None]]:
        suite = variants.SUITE
        return [(rows.find(suite, s, name), rows.find(suite, s, variants.PLAIN)) for s in VARIANTS]

    def narrow(name: str) -> Iterator[tuple[Row | None, Row | None, float]]:
        for s in QUANTIZED:
            wide = rows.find(quantized.SUITE, s, quantized.BF16)
            yield rows.find(quantized.SUITE, s, name), wide, 0.58 if s in READ_BOUND else 1 / 1.6

    winners = [
        (rows.find(variants.SUITE, s.name, variants.WINNERS), 0.88 if s.Ld >= _LONG else 0.80)
        for s in named(COMPUTE_BOUND)
    ]
    scores = [(rows.plain(s), 0.85 if s in _HARDER else 0.95) for s in COMPUTE_BOUND]
    tf32 = [(rows.find(fp32.SUITE, s, fp32.HIGH), 0.80) for s in FP32 if s not in READ_BOUND]
    exact = [
        (
            rows.find(fp32.SUITE, s, fp32.HIGHEST, EINSUM),
            rows.find(fp32.SUITE, s, fp32.HIGHEST),
            2.0,
        )
        for s in FP32
        if s not in READ_BOUND
    ]
    out = [
        *_shares(rows, "scores alone, compute-bound", scores),
        *_shares(rows, "scores and winners, compute-bound", winners),
        *_shares(rows, "scores alone, read-bound", ((rows.plain(s), 0.95) for s in READ_BOUND)),
        *_latency(rows),
    ]
    for group, name, limit in (
        ("d_mask over plain", variants.D_MASK, 1.03),
        ("both masks over plain", variants.MASKS, 1.03),
        ("normalize over plain", variants.NORMALIZE, 1.08),
    ):
        out += _ratios(group, ((a, b, limit) for a, b in variant(name)), True)
    out += _shares(rows, "float32, high", tf32)
    out += _ratios("float32, highest: einsum over ours", exact, False)
    for name in (quantized.PER_TOKEN, quantized.PER_TENSOR, quantized.INT8_PER_TOKEN):
        out += _ratios(f"{name} over bf16", narrow(name), True)
    return [*out, *_training(rows), *_steps(rows), *_surface(rows)]


def _cells(v: Verdict) -> list[str]:
    value = v.figure(v.value) + (f" of {v.ceiling}" if v.ceiling else "")
    return [v.group, v.shape, value, v.wanted, "reached" if v.met else "not yet"]


HEAD = ["target", "shape", "measured", "wanted", ""]


def body(verdicts: Sequence[Verdict]) -> list[list[str]]:
    return [_cells(v) for v in verdicts]


def grouped(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """A row a group: how many shapes reach it, and which do not."""
    groups: dict[str, list[Verdict]] = {}
    for v in verdicts:
        groups.setdefault(v.group, []).append(v)
    out = []
    for name, members in groups.items():
        limits = sorted({v.wanted for v in members})
        missing = ", ".join(f"{v.shape} {v.figure(v.value)}" for v in members if not v.met)
        done = sum(v.met for v in members)
        wanted = " / ".join(limits) if len(limits) <= 4 else "a limit a shape"
        out.append([name, wanted, f"{done} of {len(members)}", missing or "-"])
    return out


GROUPED_HEAD = ["target", "wanted", "reached", "not yet"]


def table(verdicts: Sequence[Verdict]) -> str:
    """For the terminal; empty where the record holds nothing to judge."""
    if not verdicts:
        return ""
    done = sum(v.met for v in verdicts)
    return f"{align(HEAD, body(verdicts), left=2)}\n{done} of {len(verdicts)} targets reached"
