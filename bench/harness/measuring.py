"""How a suite measures one shape: every result is compared with the exact one, then timed."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from bench.harness.ceilings import least_us, reached
from bench.harness.inputs import draw
from bench.harness.library import OURS, Implementation, UnsupportedError, training_step
from bench.harness.parity import GRADIENTS, SCORES, worst_error
from bench.harness.results import Row, new_row
from bench.harness.shape import Shape, itemsize
from late_interaction._doctor import timing
from late_interaction._doctor.ceilings import Ceilings
from late_interaction._doctor.text import error_text, number

ROTATE_BELOW_US = 200.0  # a call that takes longer hardly gains from inputs in the L2 cache
ROUNDS = 5

Tensors = Sequence[torch.Tensor]
Function = Callable[..., torch.Tensor]


@dataclass
class Settings:
    """What all suites of one run share."""

    device: torch.device
    dtype: torch.dtype
    implementations: Sequence[Implementation]
    effort: timing.Effort
    ceilings: Ceilings
    limit_s: float  # for the first calls of one implementation on one shape: compilation and tuning
    compiles: bool = True  # measure our training step with torch.compile
    gave_up: set[tuple[object, ...]] = field(default_factory=set)
    # Batch and seconds of the last step of each kind, from which the time at a larger batch follows.
    steps_s: dict[tuple[object, ...], tuple[int, float]] = field(default_factory=dict)
    log: Callable[[str], None] = field(default=lambda line: print(line, flush=True))

    @property
    def on_gpu(self):
        return self.device.type == "cuda"

    @property
    def cache_bytes(self):
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size) if self.on_gpu else 0

    def floor_us(self, shape, op):
        """The least time of a call, by the ceilings of this run."""
        return least_us(shape, op, itemsize(self.dtype), dataclasses.asdict(self.ceilings))


@dataclass
class Timed:
    """A row to fill: what gives the calls, one for each input set, and what the first must return."""

    row: Row
    prepare: Callable[[], Sequence[timing.Call]]  # an exception goes into the row
    wanted: Tensors  # fp64; of the first values that a call returns
    check: Callable[[Row, object], None] | None = None  # adds to the row, or raises, by the first result
    capture: bool = True  # into a CUDA graph; where one call cannot be captured, none of the group is
    on_gpu: bool = True  # False: only its wall time is taken
    tolerance: float = SCORES


def function(module, name):
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as missing:
        raise UnsupportedError(f"there is no {module}.{name}") from missing
    return found


def attempt(settings, row, key, work):
    """What work() returns, or None if it fails; then the row has the reason. key: what a TimeoutError stands
    for, which is not tried again in this run."""
    try:
        if key in settings.gave_up:
            raise UnsupportedError("took too long to compile or tune before")
        return work()
    except UnsupportedError as reason:
        row["skipped"] = str(reason)
    except Exception as error:  # one failure must not end the run
        row["error"] = error_text(error)
        if isinstance(error, TimeoutError):
            settings.gave_up.add(key)
    if key in settings.gave_up:
        row["over_limit_s"] = settings.limit_s
    return None


def refuse(row, error, limit):
    """Write the error of gradients into the row, and raise if it is over the limit."""
    row["grad_err"] = error
    if not error <= limit:
        raise ValueError(f"parity: a gradient is off by {error:.2g}, not timed")


def check_gradients(step, wanted, limit=GRADIENTS):
    """For Timed.check: compares the gradients that `step` returns after the scores, on planted inputs."""
    return lambda row, _: refuse(row, worst_error(step()[1:], wanted), limit)


def _first_result(settings, timed):
    """The calls, once the first one has given the right result. Raises if it does not."""
    row = timed.row
    with timing.time_limit(settings.limit_s):
        calls = timed.prepare()
        out = calls[0]()
        values = out if isinstance(out, tuple) else (out,)
        row["rel_err"] = worst_error(values[: len(timed.wanted)], timed.wanted)
    if not row["rel_err"] <= timed.tolerance:
        raise ValueError(f"parity: relative error {row['rel_err']:.2g}, not timed")
    if timed.check:
        timed.check(row, out)
    row["peak_mib"] = timing.peak_mib(calls[0], settings.device)
    return calls


def judged(settings, timed):
    """The calls, if the first one gives the right result; None if not, and the row says why."""
    row = timed.row
    key = (row["impl"], row["shape"], row["op"], row.get("variant"), row["backward"])
    return attempt(settings, row, key, lambda: _first_result(settings, timed))


def measure(settings, timed):
    """Fill the rows: parity, then GPU time, interleaved and by one clock, then wall time. A drift of the
    clocks does not change ratios of what is interleaved."""
    ready = [(each, calls) for each in timed if (calls := judged(settings, each)) is not None]
    on_gpu = [(each.row, calls) for each, calls in ready if each.on_gpu and settings.on_gpu]
    if on_gpu:
        capture = all(each.capture for each, _ in ready if each.on_gpu)
        repetitions = timing.by_one_clock([calls for _, calls in on_gpu], capture)
        rounds = min(ROUNDS, settings.effort.min_replays)
        times = timing.time_interleaved(repetitions, settings.effort, rounds)
        for (row, _), gpu in zip(on_gpu, times, strict=True):
            row.update(gpu.row())
    for each, calls in ready:
        each.row["wall_us"] = timing.wall_time(calls, settings.effort, settings.device)
    return [each.row for each in timed]


def measure_one_by_one(settings, timed):
    """The same, one after the other: what PyTorch builds for one does not stay beside the next. Where one
    could only be timed by events, all are."""
    rows = []
    ready = []
    for each in timed:
        rows.append(each.row)
        if (calls := judged(settings, each)) is not None:
            if settings.on_gpu:
                each.row.update(timing.gpu_time(calls, settings.effort).row())
            each.row["wall_us"] = timing.wall_time(calls, settings.effort, settings.device)
            ready.append((each.row, calls))
        timing.release(settings.device)
    if len({row.get("gpu_method") for row, _ in ready}) > 1:
        for row, calls in ready:
            if row["gpu_method"] != "events":
                row.update(timing.gpu_time(calls, settings.effort, capture=False).row())
    return rows


@dataclass
class Bench:
    """One shape of one suite: what a suite's function is given."""

    settings: Settings
    suite: str
    shape: Shape

    def has(self, impl):
        return any(i.name == impl for i in self.settings.implementations)

    def row(self, impl, op, variant=None, dtype=None, **more):
        shape = more.pop("shape", self.shape)
        named = {"variant": variant} if variant is not None else {}
        return new_row(self.suite, shape, op, dtype or self.settings.dtype, impl, **named, **more)

    def sets(self, dtype=None, op="fwd", winners=None):
        """Enough input sets to outgrow the cache, for calls so short that it matters."""
        dtype, floor = dtype or self.settings.dtype, self.settings.floor_us(self.shape, op) or 0.0
        count = 1
        if floor < ROTATE_BELOW_US:
            count = timing.sets_of_bytes(self.shape.input_bytes(itemsize(dtype)), self.settings.cache_bytes)
        return [draw(self.shape, self.settings.device, dtype, winners) for _ in range(count)]

    def forward(self, impl, variant, make, sets, wanted, *, op="fwd", dtype=None, **options):
        """Calls of what `make` returns on each set of tensors, whose scores are compared with `wanted`.
        Options that Timed has no field for are keys of the row."""
        more = {k: options.pop(k) for k in list(options) if k not in Timed.__dataclass_fields__}
        row = self.row(impl, op, variant, dtype, input_sets=len(sets), **more)

        def prepare():
            f = make()
            return [partial(f, *x) for x in sets]

        return Timed(row, prepare, [wanted], **options)

    def step(self, impl, variant, make, sets, wanted, known, *, limit=GRADIENTS, **options):
        """Steps: the scores of each set's tensors, and their gradients for its gradient of the scores. Those
        of the known set, (tensors, gradient of the scores, exact gradients), are compared first."""

        def steps(inputs):
            f = make()
            return [training_step(f, tuple(t.detach().requires_grad_() for t in x), g) for x, g in inputs]

        def check(row, out):
            check_gradients(steps([known[:2]])[0], known[2], limit)(row, out)

        timed = self.forward(impl, variant, make, [x for x, _ in sets], wanted, op="fwd+bwd", **options)
        timed.prepare, timed.check = lambda: steps(sets), check
        return timed

    def measure(self, timed):
        return measure(self.settings, timed)


Measure = Callable[[Bench], list[Row]]


def line(rows, header):
    """One shape in a line: time and share of the ceiling of each implementation and variant."""
    parts = []
    for row in rows:
        who = row["impl"] if row["impl"] != OURS else "ours"
        named = (who, row["backward"], row.get("variant"), row["winners"])
        text = f"{' '.join(str(word) for word in named if word)} "
        if problem := row.get("error") or row.get("skipped"):
            text += problem[:70]
        else:
            text += number(row["gpu_us"] or row["wall_us"])
            share = reached(row, header)
            text += f" ({100 * share[0]:.0f}% {share[1]})" if share else ""
        parts.append(text)
    return f"{rows[0]['suite']} {rows[0]['shape']}: " + " | ".join(parts)


def run(settings, results, suite, shapes, measure):
    """Measure, print and record shape after shape."""
    for shape in shapes:
        try:
            rows = measure(Bench(settings, suite, shape))
        except Exception as error:  # drawing inputs or the reference ran out of memory
            settings.log(f"{suite} {shape.name}: {error_text(error)}")
            rows = []
        if rows:
            results.add(rows)
            settings.log(line(rows, results.header))
        timing.release(settings.device)
