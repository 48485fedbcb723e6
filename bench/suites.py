"""Runs the implementations over the shapes of a suite: parity first, then memory, GPU time, wall time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from .impls import Compiled, Implementation, UnsupportedError
from .inputs import SKEWED, SKEWED_UP_TO, UNIFORM, Inputs, draw, draw_winners, sets_to_beat_cache
from .parity import Reference, misplaced_winners, reference, reference_gradients, relative_error, tolerance
from .results import Results, Row, new_row, number, told
from .shapes import Shape, itemsize
from .timing import Call, Ceilings, Effort, gpu_time, peak_mib, time_limit, wall_time

# The card that the project's targets are stated for; another GPU's floors come from its own ceilings.
H200_FLOPS, H200_BYTES = 790e12, 4.3e12

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
    gave_up: set[tuple[str, str, str]] = field(default_factory=set)
    log: Callable[[str], None] = field(default=lambda line: print(line, flush=True))

    @property
    def cache_bytes(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def floor_us(self, shape: Shape, op: str) -> float | None:
        """max(FLOPs / peak, bytes / bandwidth) of the real tokens."""
        if self.device.type != "cuda":
            return None
        flops, bandwidth = H200_FLOPS, H200_BYTES
        if "H200" not in torch.cuda.get_device_name(self.device):
            flops = 1e12 * (self.ceilings.cublas_tflops or flops * 1e-12)
            bandwidth = 1e12 * (self.ceilings.read_tbps or bandwidth * 1e-12)
        return shape.floor_us(op, itemsize(self.dtype), flops, bandwidth)


@dataclass
class Prepared:
    """One implementation's call on every input set, and how to compare its result."""

    calls: list[Call]
    error: Callable[[object], float]
    tolerance: float


def _check_fits(impl: Implementation, shape: Shape, dtype: torch.dtype) -> None:
    size = shape.similarities * itemsize(dtype)
    if impl.builds_similarities and size > MAX_SIMILARITY_BYTES:
        raise UnsupportedError(f"the similarity tensor alone takes {size / 1e9:.0f} GB")


def _forward(
    impl: Implementation, shape: Shape, strategy: str | None, sets: list[Inputs], ref: Reference
) -> Prepared:
    score = impl.score(shape, strategy, train=False)

    def call(x: Inputs) -> Call:
        return lambda: score(x.Q, x.D)

    def error(out: object) -> float:
        assert isinstance(out, torch.Tensor)
        return relative_error(out, ref.scores)

    return Prepared([call(x) for x in sets], error, tolerance(False, False))


def _for_winners_of(impl: Implementation, shape: Shape, x: Inputs, ref: Reference) -> Reference:
    """With the gradients of the winners that `impl` found, if none is worse than the reference's: of tokens
    whose similarities are equal but for rounding, either may win."""
    with torch.no_grad():
        found = impl.winners(shape, x)
        if found is None or misplaced_winners(shape, x.Q, x.D, found, ref) > 0:
            return ref
        return replace(ref, gradients=reference_gradients(shape, x.Q, x.D, x.grad_scores, found))


def _step(
    impl: Implementation, shape: Shape, strategy: str | None, sets: list[Inputs], ref: Reference
) -> Prepared:
    score = impl.score(shape, strategy, train=True)
    ref = _for_winners_of(impl, shape, sets[0], ref)

    def call(x: Inputs) -> Call:
        def run() -> tuple[torch.Tensor, ...]:
            scores = score(x.Q, x.D)
            # Kept with their graph, scores would tie the leaves to the stream of this call.
            return (scores.detach(), *torch.autograd.grad(scores, (x.Q, x.D), x.grad_scores))

        return run

    return Prepared(
        [call(x) for x in sets], _gradient_error(ref), tolerance(True, impl.moves_winners(sets[0].Q.dtype))
    )


def _backward(
    impl: Implementation, shape: Shape, strategy: str | None, sets: list[Inputs], ref: Reference
) -> Prepared:
    calls: list[Call] = [impl.backward(shape, strategy, x) for x in sets]
    return Prepared(calls, _gradient_error(ref), tolerance(True, False))


def _gradient_error(ref: Reference) -> Callable[[object], float]:
    """The worst of the gradients' errors, and of the scores' if they come along."""

    def error(out: object) -> float:
        assert isinstance(out, tuple) and ref.gradients is not None
        wanted = ref.gradients if len(out) == 2 else (ref.scores, *ref.gradients)
        return max(relative_error(o, w) for o, w in zip(out, wanted, strict=True))

    return error


_PREPARE = {"fwd": _forward, "fwd+bwd": _step, "bwd": _backward}


def _draw_all(
    settings: Settings, shape: Shape, op: str, winners: str | None
) -> tuple[list[Inputs], Reference]:
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
        grads = reference_gradients(shape, first.Q, first.D, first.grad_scores, first.winners)
        return sets, Reference(torch.empty(0), first.winners, grads)
    ref = reference(shape, first.Q, first.D, None if op == "fwd" else first.grad_scores)
    if op == "fwd+bwd":
        for x in sets:
            x.require_grad()
    return sets, ref


def _measure(settings: Settings, prepared: Prepared, row: Row) -> None:
    """Fills one row; parity is judged before anything is timed."""
    start = time.perf_counter()
    with time_limit(settings.limit_s):
        row["rel_err"] = prepared.error(prepared.calls[0]())
        row["first_s"] = time.perf_counter() - start
        if not row["rel_err"] <= prepared.tolerance:
            row["error"] = f"parity: relative error {row['rel_err']:.2g}, not timed"
            return
    row["peak_mib"] = peak_mib(prepared.calls[0], settings.device)
    if settings.device.type == "cuda":
        gpu = gpu_time(prepared.calls, settings.effort)
        row.update(gpu_us=gpu.us, gpu_spread=gpu.spread, gpu_method=gpu.method)
    row["wall_us"] = wall_time(prepared.calls, settings.effort, settings.device)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def run_shape(settings: Settings, suite: str, shape: Shape, op: str, winners: str | None) -> list[Row]:
    """Every implementation on one shape, each with each of its gradient strategies."""
    sets, ref = _draw_all(settings, shape, op, winners)
    rows: list[Row] = []
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
                input_sets=len(sets),
            )  # fmt: skip
            try:
                _check_fits(impl, shape, settings.dtype)
                if (impl.name, shape.name, op) in settings.gave_up:
                    raise UnsupportedError("took too long to compile or tune before")
                _measure(settings, _PREPARE[op](impl, shape, strategy, sets, ref), row)
                if op == "fwd+bwd" and (winners_found := impl.winners(shape, sets[0])) is not None:
                    x = sets[0]
                    row["winners_wrong"] = misplaced_winners(shape, x.Q, x.D, winners_found, ref)
            except UnsupportedError as reason:
                row["skipped"] = str(reason)
            except TimeoutError as reason:  # not to be waited for again on the same problem
                row["error"] = told(reason)
                settings.gave_up.add((impl.name, shape.name, op))
            except Exception as error:  # recorded in the row: one failure must not end the run
                row["error"] = told(error)
            rows.append(row)
            if impl.builds_similarities:
                _release(settings.device)
    del sets, ref
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
