"""Runs the implementations over the shapes of a suite: parity first, then memory, GPU time, wall time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .impls import Compiled, Implementation, UnsupportedError
from .inputs import SKEWED, SKEWED_UP_TO, UNIFORM, Inputs, draw, draw_winners, sets_to_beat_cache
from .parity import (
    GRADIENTS,
    SCORES,
    Reference,
    misplaced_winners,
    reference_gradients,
    reference_scores,
    relative_error,
    worst_error,
)
from .planted import Planted, every_pair, gradients, plant_shape
from .results import Results, Row, new_row, number, told
from .shapes import Shape, itemsize
from .timing import Call, Ceilings, Effort, gpu_time, peak_mib, time_limit, wall_time

MAX_SIMILARITY_BYTES = 40e9
# Calls this long read their inputs in a time that does not show: rotating among input sets adds nothing.
ROTATE_BELOW_US = 200.0


@dataclass
class Settings:
    device: torch.device
    dtype: torch.dtype
    implementations: Sequence[Implementation]
    effort: Effort
    ceilings: Ceilings
    limit_s: float  # for the first calls of one implementation on one shape: compilation and tuning
    retune: bool = False
    compile_all: bool = False
    compiles: bool = True  # steps of ours with torch.compile
    gave_up: set[tuple[object, ...]] = field(default_factory=set)
    log: Callable[[str], None] = field(default=lambda line: print(line, flush=True))

    @property
    def cache_bytes(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def floor_us(self, shape: Shape, op: str) -> float | None:
        """max(FLOPs / cuBLAS' rate, bytes / a large read's) of the real tokens, by this run's ceilings."""
        flops, bandwidth = self.ceilings.cublas_tflops, self.ceilings.read_tbps
        if flops is None or bandwidth is None:
            return None
        return shape.floor_us(op, itemsize(self.dtype), 1e12 * flops, 1e12 * bandwidth)


@dataclass
class Prepared:
    """One implementation's call on every input set, and how to compare its results before it is timed."""

    calls: list[Call]
    error: Callable[[object], float]
    tolerance: float
    grad_error: Callable[[], float] | None = None  # of both gradients, on planted inputs


@dataclass
class Problem:
    """What all implementations of a group are given, and what they should give."""

    shape: Shape
    sets: list[Inputs]
    ref: Reference
    wanted: list[torch.Tensor]  # gradients: of given winners, or of the planted inputs
    planted: Planted | None = None
    planted_grad: torch.Tensor | None = None


def _check_fits(impl: Implementation, shape: Shape, dtype: torch.dtype) -> None:
    size = shape.similarities * itemsize(dtype)
    if impl.builds_similarities and size > MAX_SIMILARITY_BYTES:
        raise UnsupportedError(f"the similarity tensor alone takes {size / 1e9:.0f} GB")


def _scores_error(ref: Reference) -> Callable[[object], float]:
    def error(out: object) -> float:
        scores = out[0] if isinstance(out, tuple) else out
        assert isinstance(scores, torch.Tensor)
        return relative_error(scores, ref.scores)

    return error


def _forward(impl: Implementation, problem: Problem, strategy: str | None) -> Prepared:
    score = impl.score(problem.shape, strategy, train=False)

    def call(x: Inputs) -> Call:
        return lambda: score(x.Q, x.D)

    return Prepared([call(x) for x in problem.sets], _scores_error(problem.ref), SCORES)


def step_of(
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    leaves: tuple[torch.Tensor, torch.Tensor],
    grad: torch.Tensor,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Scores and both gradients."""

    def run() -> tuple[torch.Tensor, ...]:
        scores = score(*leaves)
        # Kept with their graph, scores would tie the leaves to the stream of this call.
        return (scores.detach(), *torch.autograd.grad(scores, leaves, grad))

    return run


def _step(impl: Implementation, problem: Problem, strategy: str | None) -> Prepared:
    shape, planted, grad = problem.shape, problem.planted, problem.planted_grad
    assert planted is not None and grad is not None
    score = impl.score(shape, strategy, train=True)

    def grad_error() -> float:
        leaves = planted.Q.view(shape.q_shape), planted.D.view(shape.d_shape)
        out = step_of(score, (leaves[0].requires_grad_(), leaves[1].requires_grad_()), grad)()
        return worst_error(out[1:], problem.wanted)

    calls: list[Call] = [step_of(score, (x.Q, x.D), x.grad_scores) for x in problem.sets]
    return Prepared(calls, _scores_error(problem.ref), SCORES, grad_error)


def _backward(impl: Implementation, problem: Problem, strategy: str | None) -> Prepared:
    calls: list[Call] = [impl.backward(problem.shape, strategy, x) for x in problem.sets]

    def error(out: object) -> float:
        assert isinstance(out, tuple)
        return worst_error(out, problem.wanted)

    return Prepared(calls, error, GRADIENTS)


_PREPARE = {"fwd": _forward, "fwd+bwd": _step, "bwd": _backward}


def _draw_all(settings: Settings, shape: Shape, op: str, winners: str | None) -> Problem:
    floor = settings.floor_us(shape, op) or 0.0
    count = 1
    if floor < ROTATE_BELOW_US:
        count = sets_to_beat_cache(shape, settings.dtype, settings.cache_bytes)
    kind = winners if op == "fwd+bwd" else None
    sets = [draw(shape, settings.device, settings.dtype, kind) for _ in range(count)]
    first = sets[0]
    if op == "bwd":
        for x in sets:
            x.winners = draw_winners(shape, winners or UNIFORM, settings.device)
        assert first.winners is not None
        wanted = reference_gradients(shape, first.Q, first.D, first.grad_scores, first.winners)
        return Problem(shape, sets, Reference(torch.empty(0), first.winners), [*wanted])
    ref = Reference(*reference_scores(shape, first.Q, first.D))
    if op == "fwd":
        return Problem(shape, sets, ref, [])
    for x in sets:
        x.require_grad()
    planted = plant_shape(shape, settings.device, settings.dtype)
    of_planted = gradients(planted, every_pair(shape, first.grad_scores))
    return Problem(shape, sets, ref, of_planted, planted, first.grad_scores)


def _judge(settings: Settings, prepared: Prepared, row: Row) -> bool:
    """Whether the results are right; the row says so or why not."""
    start = time.perf_counter()
    with time_limit(settings.limit_s):
        row["rel_err"] = prepared.error(prepared.calls[0]())
        row["first_s"] = time.perf_counter() - start
    if not row["rel_err"] <= prepared.tolerance:
        row["error"] = f"parity: relative error {row['rel_err']:.2g}, not timed"
    elif prepared.grad_error:
        row["grad_err"] = prepared.grad_error()
        if not row["grad_err"] <= GRADIENTS:
            row["error"] = f"parity: a gradient is off by {row['grad_err']:.2g}, not timed"
    return not row.get("error")


def _measure(settings: Settings, prepared: Prepared, row: Row) -> None:
    row["peak_mib"] = peak_mib(prepared.calls[0], settings.device)
    if settings.device.type == "cuda":
        _gpu_time(settings, prepared.calls, row)
    row["wall_us"] = wall_time(prepared.calls, settings.effort, settings.device)


def _gpu_time(settings: Settings, calls: Sequence[Call], row: Row, capture: bool = True) -> None:
    gpu = gpu_time(calls, settings.effort, capture)
    row.update(gpu_us=gpu.us, gpu_spread=gpu.spread, gpu_method=gpu.method)


def _by_one_clock(settings: Settings, timed: Sequence[tuple[Row, Sequence[Call]]]) -> None:
    """Where one implementation could be timed by events alone, times the others of the group so as well."""
    if len({row.get("gpu_method") for row, _ in timed}) > 1:
        for row, calls in timed:
            if row["gpu_method"] != "events":
                _gpu_time(settings, calls, row, capture=False)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _count_misplaced(impl: Implementation, problem: Problem, row: Row) -> None:
    x = problem.sets[0]
    with torch.no_grad():
        found = impl.winners(problem.shape, x)
        if found is not None:
            row["winners_wrong"] = misplaced_winners(problem.shape, x.Q, x.D, found, problem.ref)


def run_shape(settings: Settings, suite: str, shape: Shape, op: str, winners: str | None) -> list[Row]:
    """Every implementation on one shape, each with each of its gradient strategies."""
    problem = _draw_all(settings, shape, op, winners)
    rows: list[Row] = []
    timed: list[tuple[Row, Sequence[Call]]] = []
    for impl in settings.implementations:
        if isinstance(impl, Compiled) and not (shape.compiled or settings.compile_all):
            continue
        if op == "bwd" and type(impl).backward is Implementation.backward:
            continue
        if settings.retune:
            impl.retune()
        for strategy in impl.backwards if op != "fwd" else (None,):
            key = (impl.name, shape.name, op, strategy)
            row = new_row(
                suite, shape, op, settings.dtype, impl.name, winners=winners, backward=strategy,
                floor_us=settings.floor_us(shape, op), cublas_tflops=settings.ceilings.cublas_tflops,
                input_sets=len(problem.sets),
            )  # fmt: skip
            try:
                _check_fits(impl, shape, settings.dtype)
                if key in settings.gave_up:
                    raise UnsupportedError("took too long to compile or tune before")
                prepared = _PREPARE[op](impl, problem, strategy)
                if _judge(settings, prepared, row):
                    _measure(settings, prepared, row)
                    timed.append((row, prepared.calls))
                if op == "fwd+bwd":
                    _count_misplaced(impl, problem, row)
            except UnsupportedError as reason:
                row["skipped"] = str(reason)
            except TimeoutError as reason:  # not to be waited for again on the same problem
                row["error"] = told(reason)
                settings.gave_up.add(key)
            except Exception as error:  # recorded in the row: one failure must not end the run
                row["error"] = told(error)
            if key in settings.gave_up:
                row["over_limit_s"] = settings.limit_s
            rows.append(row)
            if impl.builds_similarities:
                _release(settings.device)
    _by_one_clock(settings, timed)
    del problem, timed
    _release(settings.device)
    return rows


def line(rows: Sequence[Row]) -> str:
    """What one shape gave, on one line."""
    first = rows[0]
    name = " ".join(str(v) for v in (first["suite"], first["shape"], first["op"], first["winners"]) if v)
    parts = []
    for row in rows:
        label = row["impl"] + (f"/{row['backward']}" if row["backward"] else "")
        problem = row.get("error") or row.get("skipped")
        time_us = row["gpu_us"] if row["gpu_us"] is not None else row["wall_us"]
        parts.append(f"{label} {problem[:70]}" if problem else f"{label} {number(time_us)}")
    floor = f" (floor {number(first['floor_us'])})" if first["floor_us"] else ""
    return f"{name}{floor}: " + " | ".join(parts)


def run_suite(
    settings: Settings, results: Results, suite: str, shapes: Sequence[Shape], op: str,
    winners: Sequence[str | None] = (None,),
) -> None:  # fmt: skip
    """Measures, prints and records shape after shape."""
    for shape in shapes:
        for kind in winners:
            if kind == SKEWED and shape.Ld > SKEWED_UP_TO:
                continue
            try:
                rows = run_shape(settings, suite, shape, op, kind)
            except Exception as error:  # drawing inputs or the reference ran out of memory
                settings.log(f"{suite} {shape.name} {kind or ''}: {type(error).__name__}: {error}")
                _release(settings.device)
                continue
            if rows:
                results.add(rows)
                settings.log(line(rows))


WINNER_KINDS = (UNIFORM, SKEWED)
