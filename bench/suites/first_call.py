"""The first call in a fresh process: what a serving process or a test run waits for.

One method for every implementation: a process of its own for each forward and each training step, in which
CUDA is initialised, PyTorch has differentiated once and the inputs exist before the clock starts. Then the
import of the library, and its first call, each by the wall clock. Triton's peers are run with an empty kernel
cache and with the cache just made. Each library is imported once before, untimed, so that no first figure
holds the time that a disk takes; but for empty caches each is the median of SAMPLES processes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

import torch

from bench.harness.results import ROOT
from bench.peers.implementations import KEYS, Compiled, Flash, Lik
from bench.suites.first_call_process import IMPORT, OPS, TINY
from late_interaction._doctor.text import error_text

COLD, WARM = "cold", "warm"
SAMPLES = 3


def _run_child(b, key, op, cache):
    words = [key, op, "--device", b.settings.device.type, *(["--tiny"] if b.shape in TINY.values() else [])]
    env = {**os.environ, "TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
    program = [sys.executable, "-m", "bench.suites.first_call_process", *words]
    limit = 3 * b.settings.limit_s
    run = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)
    if run.returncode != 0:
        raise RuntimeError(run.stderr.strip().splitlines()[-1] if run.stderr.strip() else "no output")
    return json.loads(run.stdout.strip().splitlines()[-1])


def _rows(b, key, op, cache):
    """A row for each state of the kernel cache."""
    cls, rows = KEYS[key], []
    for state in (COLD, WARM) if cls in (Lik, Flash) else (None,):
        count = 1 if state == COLD or b.shape in TINY.values() else SAMPLES
        row = b.row(cls.name, op, None, torch.bfloat16, jit_cache=state, samples=count)
        try:
            times = [_run_child(b, key, op, cache) for _ in range(count)]
            row["wall_us"] = 1e3 * statistics.median(t["call_ms"] for t in times)
            row["import_ms"] = statistics.median(t["import_ms"] for t in times)
        except (subprocess.TimeoutExpired, RuntimeError, OSError, ValueError) as problem:
            row["error"] = error_text(problem)
            if isinstance(problem, subprocess.TimeoutExpired):
                row["over_limit_s"] = 3 * b.settings.limit_s
        rows.append(row)
    return rows


def measure(b):
    """Times are in wall_us and import_ms. torch.compile is left out, since it compiles for minutes."""
    op = next(op for op, shape in OPS.items() if shape.name == b.shape.name)
    keys = [key for key, cls in KEYS.items() if cls is not Compiled and b.has(cls.name)]
    rows = []
    for key in keys:
        with tempfile.TemporaryDirectory() as cache:
            try:
                _run_child(b, key, IMPORT, cache)
            except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as problem:
                b.settings.log(f"first-call {KEYS[key].name}: {error_text(problem)}")
    for key in keys:
        with tempfile.TemporaryDirectory() as cache:
            rows += _rows(b, key, op, cache)
    return rows
