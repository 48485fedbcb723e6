"""The same calls with a patch on and with it off, interleaved in one process.

With it off means LATE_INTERACTION_DISABLE=1: then every call runs the other library's own code.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from bench.harness.results import Row
from bench.harness.text import error_text
from bench.harness.timing import peak_mib, time_limit

WITH, WITHOUT = "with", "without"
LONG_S = 20.0


@contextmanager
def patched(way: str) -> Iterator[None]:
    """One of the two ways; the patch itself stays in place."""
    os.environ["LATE_INTERACTION_DISABLE"] = "0" if way == WITH else "1"
    try:
        yield
    finally:
        os.environ["LATE_INTERACTION_DISABLE"] = "0"


def interleaved(
    calls: dict[str, Callable[[], object]], device: torch.device, rounds: int, limit_s: float | None = None
) -> Row:
    """Median milliseconds and peak MiB of each, or why there is none. The first call of each is warm-up, and
    tells the memory; of one that takes over LONG_S it is also the only one. One that takes over limit_s is
    given up: its error says so, and `<way>_over_ms` has the limit."""
    row: Row = {}
    times: dict[str, list[float]] = {way: [] for way in calls}
    long: set[str] = set()
    for turn in range(rounds + 1):
        for way, call in calls.items():
            if f"{way}_error" in row or way in long:
                continue
            try:
                with patched(way), time_limit(limit_s) if limit_s else nullcontext():
                    start = time.perf_counter()
                    if turn == 0 and device.type == "cuda":
                        row[f"{way}_peak_mib"] = peak_mib(call, device)
                    else:
                        call()
                    _synchronize(device)
                    took = time.perf_counter() - start
                if took > LONG_S:
                    long.add(way)
                if turn > 0 or took > LONG_S:
                    times[way].append(1e3 * took)
            except torch.OutOfMemoryError:
                row[f"{way}_error"] = "out of memory"
            except TimeoutError:
                row |= {f"{way}_error": f"over {limit_s:g} s", f"{way}_over_ms": 1e3 * (limit_s or 0.0)}
            except Exception as error:
                row[f"{way}_error"] = error_text(error)
            _collect(device)
    for way, found in times.items():
        if found and f"{way}_error" not in row:
            row[f"{way}_ms"] = statistics.median(found)
            row[f"{way}_calls"] = len(found)
    return row


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collect(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
