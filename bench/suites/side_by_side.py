"""Suites that measure every implementation on each shape: parity, then memory, GPU time and wall time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.harness.failures import attempt
from bench.harness.inputs import SKEWED, SKEWED_UP_TO, UNIFORM, Inputs, draw, draw_winners, sets_to_beat_cache
from bench.harness.library import LIK, OURS, Implementation, UnsupportedError, training_step
from bench.harness.parity import (
    GRADIENTS,
    SCORES,
    Reference,
    misplaced_winners,
    reference_gradients,
    reference_scores,
    relative_error,
    worst_error,
)
from bench.harness.planted import Planted, every_pair, gradients, plant_shape
from bench.harness.results import Results, Row, best, groups, new_row
from bench.harness.settings import ROTATE_BELOW_US, Settings
from bench.harness.shape import Shape, itemsize
from bench.harness.text import align, number
from bench.harness.timing import Call, gpu_time, peak_mib, time_limit, wall_time
from bench.peers.implementations import Compiled

MAX_SIMILARITY_BYTES = 40e9


@dataclass
class Prepared:
    """One implementation's call on every input set, and how to compare its results before it is timed."""

    calls: list[Call]
    error: Callable[[object], float]
    tolerance: float
    grad_error: Callable[[], float] | None = None  # of both gradients, on planted inputs


@dataclass
class Problem:
    """The inputs of all implementations of a group, and the exact results."""

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


def _step(impl: Implementation, problem: Problem, strategy: str | None) -> Prepared:
    shape, planted, grad = problem.shape, problem.planted, problem.planted_grad
    assert planted is not None and grad is not None
    score = impl.score(shape, strategy, train=True)

    def grad_error() -> float:
        leaves = planted.Q.view(shape.q_shape), planted.D.view(shape.d_shape)
        out = training_step(score, (leaves[0].requires_grad_(), leaves[1].requires_grad_()), grad)()
        return worst_error(out[1:], problem.wanted)

    calls: list[Call] = [training_step(score, (x.Q, x.D), x.grad_scores) for x in problem.sets]
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
    """Whether the results are right. The row gets the errors, and the reason if not."""
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
    """If one implementation could only be timed by events, times the whole group by events."""
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


def _judge_and_measure(
    settings: Settings, impl: Implementation, problem: Problem, op: str, strategy: str | None, row: Row
) -> Sequence[Call] | None:
    """The calls that were timed; None if their results are wrong, and the row says so."""
    _check_fits(impl, problem.shape, settings.dtype)
    prepared = _PREPARE[op](impl, problem, strategy)
    right = _judge(settings, prepared, row)
    if right:
        _measure(settings, prepared, row)
    if op == "fwd+bwd":
        _count_misplaced(impl, problem, row)
    return prepared.calls if right else None


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
            row = new_row(
                suite, shape, op, settings.dtype, impl.name, winners=winners, backward=strategy,
                floor_us=settings.floor_us(shape, op), cublas_tflops=settings.ceilings.cublas_tflops,
                input_sets=len(problem.sets),
            )  # fmt: skip
            work = partial(_judge_and_measure, settings, impl, problem, op, strategy, row)
            calls = attempt(settings, row, (impl.name, shape.name, op, strategy), work)
            if calls is not None:
                timed.append((row, calls))
            rows.append(row)
            if impl.builds_similarities:
                _release(settings.device)
    _by_one_clock(settings, timed)
    del problem, timed
    _release(settings.device)
    return rows


def line(rows: Sequence[Row]) -> str:
    """The times of one shape in a line."""
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


def run(
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


def summary(rows: Iterable[Row], key: str = "gpu_us") -> str:
    """A line for each group: ours, late-interaction-kernels, and the best of the others."""
    body = []
    for group in groups(rows).values():
        mine = best([r for r in group if r["impl"] == OURS], key)
        lik = best([r for r in group if r["impl"] == LIK], key)
        others = best([r for r in group if r["impl"] not in (OURS, LIK)], key)
        if mine is None and lik is None and others is None:
            continue
        first = group[0]
        ratio = mine[key] / lik[key] if mine and lik else None
        floor = 100 * first["floor_us"] / mine[key] if mine and first.get("floor_us") else None
        kind = first["dtype"] if first["dtype"] != "bfloat16" else None
        name = " ".join(str(v) for v in (first["shape"], first["op"], first["winners"], kind) if v)
        row = [name, number(mine and mine[key]), number(lik and lik[key])]
        row += [f"{ratio:.2f}" if ratio else "-", number(others and others[key])]
        row += [f"{floor:.0f}%" if floor else "-", number(mine and mine["wall_us"])]
        row += [number(lik and lik["wall_us"])]
        body.append(row)
    unit = "us" if key == "gpu_us" else "wall us"
    return align(
        ["shape", f"ours {unit}", "LIK", "ours/LIK", "others", "floor", "our wall", "LIK wall"], body
    )
