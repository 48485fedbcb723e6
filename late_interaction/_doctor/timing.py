"""GPU time, wall time and peak memory of a call."""

from __future__ import annotations

import gc
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key")

_cuda: Any = torch.cuda  # its stream and event classes have no types


@dataclass(frozen=True)
class Effort:
    """How long to measure. Times are per implementation and shape."""

    gpu_ms: float = 60.0  # GPU time spent replaying
    min_replays: int = 10
    max_replays: int = 60
    wall_ms: float = 40.0
    min_walls: int = 10
    max_walls: int = 100


WALLS_IN_TURN = 5  # calls of a group, before the next group has its turn

QUICK = Effort(gpu_ms=15, min_replays=5, max_replays=15, wall_ms=15, min_walls=5, max_walls=25)


@dataclass(frozen=True)
class GpuTime:
    us: float
    spread: float  # interquartile range over the median
    method: str  # "graph" or "events"

    def row(self) -> dict[str, object]:
        return {"gpu_us": self.us, "gpu_spread": self.spread, "gpu_method": self.method}


def release(device: torch.device) -> None:
    """Give memory that nothing uses back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def sets_of_bytes(size: int, cache_bytes: int, limit: int = 64) -> int:
    """Count the input sets of `size` bytes to rotate among, so that no call finds its own in the L2 cache."""
    if cache_bytes == 0 or size >= 2 * cache_bytes:
        return 1
    return min(limit, -(-3 * cache_bytes // size))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """(median, interquartile range / median)."""
    median = statistics.median(values)
    if len(values) < 4:
        return median, 0.0
    q1, _, q3 = statistics.quantiles(values, n=4)
    return median, (q3 - q1) / median


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds`: a long autotuning costs one row, not the run."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return

    expired = TimeoutError(f"no result within {seconds:g} s")

    def expire(signum: int, frame: object) -> None:
        raise expired

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except Exception as error:
        if error is not expired and expired.__traceback__:  # a compiler turned it into another error
            raise expired from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_events(runs: Sequence[Call]) -> list[float]:
    """Return the milliseconds of each run.

    The runs are queued back to back, so the GPU never waits for the host as long as enqueueing one takes less
    time than running one.
    """
    events = [_cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    events[0].record()
    for run, event in zip(runs, events[1:], strict=True):
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def _capture(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    """One graph of `count` calls, rotating among `calls` (one per input set)."""
    side = _cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()  # freeing another graph's memory in the middle would spoil this one
    try:
        with torch.cuda.graph(graph):
            for i in range(count):
                calls[i % len(calls)]()
    finally:
        gc.enable()
    return graph


@dataclass(frozen=True)
class Repetition:
    """What is timed as a whole: a CUDA graph's replay, or, where capture fails, a pass over the calls."""

    run: Call
    count: int  # calls in it
    method: str  # "graph" or "events"


def repetition(calls: Sequence[Call], capture: bool = True) -> Repetition:
    """Make a repetition of calls that run the same thing on different inputs.

    A graph holds all of them, so inputs that would fit the L2 cache are cold each time. capture=False is for
    calls that wait for the device.
    """
    for call in calls:  # also loads every kernel, which cannot happen inside a capture
        call()
    torch.cuda.synchronize()
    events = Repetition(lambda: [call() for call in calls], len(calls), "events")
    if not capture:
        return events
    estimate = statistics.median(_time_events([calls[i % len(calls)] for i in range(5)]))
    if estimate < 1.0 or len(calls) > 1:
        # At least 2 ms of work in a graph hides its launch; each input set once at least.
        count = len(calls) * max(1, round(min(64.0, 2.0 / max(estimate, 1e-3)) / len(calls)))
    else:
        count = 1
    try:
        return Repetition(_capture(calls, count).replay, count, "graph")
    except Exception:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # Its generator of random numbers may still be in the capture that failed. A copy is not.
        generator = _cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        return events


def time_interleaved(repetitions: Sequence[Repetition], effort: Effort, rounds: int = 1) -> list[GpuTime]:
    """Return the median GPU time of one call of each.

    Rounds interleave their runs: a drift of the clocks then changes all times alike.
    """
    times: list[list[float]] = [[] for _ in repetitions]
    runs = []
    for each in repetitions:
        each.run()
        torch.cuda.synchronize()
        once = max(_time_events([each.run])[0], 1e-3)
        most = effort.max_replays * (1 if each.method == "graph" else 20)
        runs.append(-(-int(min(most, max(effort.min_replays, effort.gpu_ms / once))) // rounds))
    for _ in range(rounds):
        for each, mine, count in zip(repetitions, times, runs, strict=True):
            mine += _time_events([each.run] * count)
    found = [quartiles(mine) for mine in times]
    return [
        GpuTime(1e3 * median / each.count, spread, each.method)
        for each, (median, spread) in zip(repetitions, found, strict=True)
    ]


def gpu_time(calls: Sequence[Call], effort: Effort, capture: bool = True) -> GpuTime:
    """Return the median GPU time of one call.

    It is taken over CUDA-graph replays, or over an event loop where capture fails or is not wanted.
    """
    return time_interleaved([repetition(calls, capture)], effort)[0]


def by_one_clock(calls: Sequence[Sequence[Call]], capture: bool) -> list[Repetition]:
    """Make a repetition of each, all by graphs or, if one of them cannot be captured, all by events."""
    found = [repetition(each, capture) for each in calls]
    if len({each.method for each in found}) > 1:
        found = [repetition(each, capture=False) for each in calls]
    return found


def wall_time(calls: Sequence[Call], effort: Effort, device: torch.device) -> float:
    """Median microseconds of call + synchronize, as a user's clock sees it."""
    times: list[float] = []
    gc.collect()
    gc.disable()
    try:
        sync(device)
        end = time.perf_counter() + effort.wall_ms * 1e-3
        while len(times) < effort.min_walls or (len(times) < effort.max_walls and time.perf_counter() < end):
            times.append(wall_seconds(calls[len(times) % len(calls)], device))
    finally:
        gc.enable()
    return 1e6 * statistics.median(times)


def wall_times(groups: Sequence[Sequence[Call]], effort: Effort, device: torch.device) -> list[list[float]]:
    """Return microseconds of call + synchronize: of each group, the median of each round.

    In a round every group makes a few calls, so that what else the machine does meanwhile slows all of them
    alike.
    """
    times: list[list[float]] = [[] for _ in groups]
    end = time.perf_counter() + effort.wall_ms * 4e-3 * len(groups)
    gc.collect()
    gc.disable()
    try:
        while len(times[0]) < effort.min_walls or (
            len(times[0]) < effort.max_walls and time.perf_counter() < end
        ):
            for calls, mine in zip(groups, times, strict=True):
                mine.append(1e6 * statistics.median(_walls(calls, device)))
    finally:
        gc.enable()
    return times


def _walls(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Seconds of some calls. One comes before them, since caches hold another group's code and data."""
    calls[0]()
    sync(device)
    return [wall_seconds(calls[i % len(calls)], device) for i in range(WALLS_IN_TURN)]


def wall_seconds(call: Call, device: torch.device) -> float:
    start = time.perf_counter()
    call()
    sync(device)
    return time.perf_counter() - start


def in_turn(calls: dict[Key, Call], device: torch.device, rounds: int) -> dict[Key, list[float]]:
    """Seconds of each call in each round, in which all take turns; a round before them warms up."""
    times: dict[Key, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            seconds = wall_seconds(call, device)
            times[name] += [seconds] if turn else []
    return times


def time_few(call: Call, runs: int, device: torch.device) -> tuple[GpuTime | None, float]:
    """(GPU time, wall microseconds) of a call that takes seconds and has run before: medians of few runs."""
    walls: list[float] = []

    def run() -> None:
        sync(device)
        walls.append(1e6 * wall_seconds(call, device))

    if device.type != "cuda":
        for _ in range(runs):
            run()
        return None, statistics.median(walls)
    median, spread = quartiles(_time_events([run] * runs))
    return GpuTime(1e3 * median, spread, "events"), statistics.median(walls)


def peak_mib(call: Call, device: torch.device) -> float | None:
    """MiB that one call allocates at its peak above what was there before: outputs included."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak / 2**20
