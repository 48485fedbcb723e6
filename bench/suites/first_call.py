"""The first call in a fresh process: what a serving process or a test run waits for.

One method for every implementation: a process of its own for each forward and each training step, in which
CUDA is initialised, PyTorch has differentiated once and the inputs exist before the clock starts. Then the
import of the library, and its first call, each by the wall clock. Triton's peers are run with an empty kernel
cache and with the cache just made. Each library is imported once before, untimed, so that no first figure
holds the time that a disk takes; but for empty caches each is the median of SAMPLES processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch

from bench.harness.inputs import draw
from bench.harness.library import Implementation, training_step
from bench.harness.measuring import Bench
from bench.harness.named_shapes import FORWARD, TRAINING
from bench.harness.results import ROOT, Row
from bench.peers.implementations import KEYS, Compiled, Flash, Lik
from late_interaction._doctor.text import error_text
from late_interaction._doctor.timing import sync

OPS = {
    "fwd": next(s for s in FORWARD if s.name == "text-short"),
    "fwd+bwd": next(s for s in TRAINING if s.name == "train-32"),
}
TINY = {op: replace(shape, Nq=min(shape.Nq, 2), Nd=3, Ld=16) for op, shape in OPS.items()}
COLD, WARM = "cold", "warm"
SAMPLES = 3
IMPORT = "import"  # in place of an op: import the library and call nothing

Times = dict[str, float]


def child(key: str, op: str, device: torch.device, tiny: bool) -> Times:
    """Milliseconds of the import and of the first call, in this process."""
    shape = (TINY if tiny else OPS)["fwd" if op == IMPORT else op]
    x = draw(shape, device, torch.bfloat16)
    x.require_grad()
    # PyTorch's own first backward imports modules for a second, which is not the library's time.
    torch.autograd.grad(2 * x.Q, x.Q, x.Q.detach())
    sync(device)

    clock = time.perf_counter
    start = clock()
    impl: Implementation = KEYS[key]()
    imported = clock()
    if op == "fwd":
        impl.score(shape, None, train=False)(x.Q.detach(), x.D.detach())
    elif op != IMPORT:
        training_step(impl.score(shape, impl.backwards[0], train=True), *x.step)()
    sync(device)
    return {"import_ms": 1e3 * (imported - start), "call_ms": 1e3 * (clock() - imported)}


def _run_child(b: Bench, key: str, op: str, cache: str) -> Times:
    words = [key, op, "--device", b.settings.device.type, *(["--tiny"] if b.shape in TINY.values() else [])]
    env = {**os.environ, "TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
    run = subprocess.run(
        [sys.executable, "-m", "bench.suites.first_call", *words], cwd=ROOT, env=env, capture_output=True,
        text=True,
        timeout=3 * b.settings.limit_s, check=False,
    )  # fmt: skip
    if run.returncode != 0:
        raise RuntimeError(run.stderr.strip().splitlines()[-1] if run.stderr.strip() else "no output")
    times: Times = json.loads(run.stdout.strip().splitlines()[-1])
    return times


def _rows(b: Bench, key: str, op: str, cache: str) -> list[Row]:
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


def measure(b: Bench) -> list[Row]:
    """Times are in wall_us and import_ms. torch.compile is left out, since it compiles for minutes."""
    op = next(op for op, shape in OPS.items() if shape.name == b.shape.name)
    keys = [key for key, cls in KEYS.items() if cls is not Compiled and b.has(cls.name)]
    rows: list[Row] = []
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("key", choices=list(KEYS))
    parser.add_argument("op", choices=[*OPS, IMPORT])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    print(json.dumps(child(args.key, args.op, torch.device(args.device), args.tiny)))
