"""Several calls on one shape, timed interleaved: a drift of the clocks does not change their ratios."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.harness.failures import attempt
from bench.harness.inputs import Inputs, draw, sets_to_beat_cache
from bench.harness.parity import GRADIENTS, SCORES, relative_error, worst_error
from bench.harness.results import Results, Row
from bench.harness.settings import ROTATE_BELOW_US, Settings
from bench.harness.shape import Shape
from bench.harness.text import error_text, number
from bench.harness.timing import Call, by_one_clock, peak_mib, time_interleaved, time_limit, wall_time

ROUNDS = 5

# Returns the calls, one for each input set. An exception goes into the row.
Prepare = Callable[[], Sequence[Call]]


@dataclass
class Timed:
    """A row to fill: how to call the function, and the fp64 scores that its first call must give."""

    row: Row
    prepare: Prepare
    wanted: torch.Tensor
    check: Callable[[Row, object], None] | None = None  # adds to the row, or raises, by the first result
    capture: bool = True  # into a CUDA graph; where one call cannot be captured, none of the group is
    on_gpu: bool = True  # False: only its wall time is taken
    tolerance: float = SCORES


def check_gradients(
    step: Callable[[], Sequence[torch.Tensor]], wanted: Sequence[torch.Tensor], limit: float = GRADIENTS
) -> Callable[[Row, object], None]:
    """For Timed.check: compares the gradients that `step` returns after the scores, on planted inputs."""

    def check(row: Row, _: object) -> None:
        row["grad_err"] = worst_error(step()[1:], wanted)
        if not row["grad_err"] <= limit:
            raise ValueError(f"parity: a gradient is off by {row['grad_err']:.2g}, not timed")

    return check


def draw_sets(settings: Settings, shape: Shape, dtype: torch.dtype) -> list[Inputs]:
    """Enough input sets to outgrow the cache, for calls so short that it matters."""
    floor = settings.floor_us(shape, "fwd") or 0.0
    count = sets_to_beat_cache(shape, dtype, settings.cache_bytes) if floor < ROTATE_BELOW_US else 1
    return [draw(shape, settings.device, dtype) for _ in range(count)]


def _first_result(settings: Settings, timed: Timed) -> Sequence[Call]:
    """The calls, once the first one has given the right result. Raises if it does not."""
    row = timed.row
    with time_limit(settings.limit_s):
        calls = timed.prepare()
        out = calls[0]()
        scores = out[0] if isinstance(out, tuple) else out
        assert isinstance(scores, torch.Tensor)
        row["rel_err"] = relative_error(scores, timed.wanted)
    if not row["rel_err"] <= timed.tolerance:
        raise ValueError(f"parity: relative error {row['rel_err']:.2g}, not timed")
    if timed.check:
        timed.check(row, out)
    row["peak_mib"] = peak_mib(calls[0], settings.device)
    return calls


def judged(settings: Settings, timed: Timed) -> Sequence[Call] | None:
    """The calls, if the first one gives the right result; None if not, and the row says why."""
    row = timed.row
    key = (row["impl"], row["shape"], row["op"], row.get("variant"))
    return attempt(settings, row, key, lambda: _first_result(settings, timed))


def measure(settings: Settings, timed: Sequence[Timed]) -> list[Row]:
    """Fills the rows: parity, then GPU time, interleaved and by one clock, then wall time."""
    ready = [(each, calls) for each in timed if (calls := judged(settings, each)) is not None]
    on_gpu = [(each.row, calls) for each, calls in ready if each.on_gpu and settings.device.type == "cuda"]
    if on_gpu:
        capture = all(each.capture for each, _ in ready if each.on_gpu)
        repetitions = by_one_clock([calls for _, calls in on_gpu], capture)
        rounds = min(ROUNDS, settings.effort.min_replays)
        for (row, _), gpu in zip(on_gpu, time_interleaved(repetitions, settings.effort, rounds), strict=True):
            row.update(gpu_us=gpu.us, gpu_spread=gpu.spread, gpu_method=gpu.method)
    for each, calls in ready:
        each.row["wall_us"] = wall_time(calls, settings.effort, settings.device)
    return [each.row for each in timed]


def set_ratios(rows: Sequence[Row], key: str, base: Row) -> None:
    """row[key] = the time of the row over that of the base, by the same clock: GPU time if both have it."""
    for row in rows:
        same = row["gpu_us"] and base["gpu_us"] and row.get("gpu_method") == base.get("gpu_method")
        clock = "gpu_us" if same else "wall_us"
        if row[clock] and base[clock]:
            row[key] = row[clock] / base[clock]


def line(rows: Sequence[Row], ratio: str) -> str:
    """One shape in a line: time, ratio and share of the ceiling of each variant."""
    parts = []
    for row in rows:
        label = row["variant"] if row["impl"] == "late_interaction" else f"{row['impl']} {row['variant']}"
        if problem := row.get("error") or row.get("skipped"):
            parts.append(f"{label} {problem[:70]}")
            continue
        text = f"{label} {number(row['gpu_us'] or row['wall_us'])}"
        text += f" {row[ratio]:.3f}x" if row.get(ratio) else ""
        text += f" ({100 * row['reached']:.0f}% {row['bound']})" if row.get("reached") else ""
        parts.append(text)
    return f"{rows[0]['suite']} {rows[0]['shape']}: " + " | ".join(parts)


def run(
    settings: Settings, results: Results, shapes: Sequence[Shape], ratio: str,
    measure_shape: Callable[[Settings, Shape], list[Row]],
) -> None:  # fmt: skip
    """Measures, prints and records shape after shape."""
    for shape in shapes:
        try:
            rows = measure_shape(settings, shape)
        except Exception as error:  # drawing inputs or the reference ran out of memory
            settings.log(f"{shape.name}: {error_text(error)}")
            rows = []
        if rows:
            settings.log(line(results.add(rows), ratio))
        gc.collect()
        if settings.device.type == "cuda":
            torch.cuda.synchronize(settings.device)
            torch.cuda.empty_cache()
