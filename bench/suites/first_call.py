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
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from bench.harness.inputs import draw
from bench.harness.library import Implementation, training_step
from bench.harness.named_shapes import FORWARD, TRAINING
from bench.harness.results import ROOT, Results, Row, new_row
from bench.harness.settings import Settings
from bench.harness.text import error_text, number
from bench.peers.implementations import KEYS, Compiled, Flash, Lik

SUITE = "first-call"
RERANK = next(s for s in FORWARD if s.name == "text-short")
STEP = next(s for s in TRAINING if s.name == "train-32")
OPS = {"fwd": RERANK, "fwd+bwd": STEP}
COLD, WARM = "cold", "warm"
SAMPLES = 3
IMPORT = "import"  # in place of an op: import the library and call nothing

Times = dict[str, float]


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def child(key: str, op: str, device: torch.device, tiny: bool) -> Times:
    """Milliseconds of the import and of the first call, in this process."""
    shape = OPS.get(op, RERANK)
    x = draw(replace(shape, Nq=min(shape.Nq, 2), Nd=3, Ld=16) if tiny else shape, device, torch.bfloat16)
    x.require_grad()
    # PyTorch's own first backward imports modules for a second, which is not the library's time.
    torch.autograd.grad(2 * x.Q, x.Q, x.Q.detach())
    _sync(device)

    clock = time.perf_counter
    start = clock()
    impl: Implementation = KEYS[key]()
    imported = clock()
    if op == "fwd":
        impl.score(shape, None, train=False)(x.Q.detach(), x.D.detach())
    elif op != IMPORT:
        training_step(impl.score(shape, impl.backwards[0], train=True), (x.Q, x.D), x.grad_scores)()
    _sync(device)
    return {"import_ms": 1e3 * (imported - start), "call_ms": 1e3 * (clock() - imported)}


def _run_child(key: str, op: str, device: torch.device, cache: str, tiny: bool, limit_s: float) -> Times:
    command = [sys.executable, "-m", "bench.suites.first_call", key, op, "--device", device.type]
    env = {**os.environ, "TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
    run = subprocess.run(
        command + (["--tiny"] if tiny else []), cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=limit_s, check=False,
    )  # fmt: skip
    if run.returncode != 0:
        raise RuntimeError(run.stderr.strip().splitlines()[-1] if run.stderr.strip() else "no output")
    times: Times = json.loads(run.stdout.strip().splitlines()[-1])
    return times


def _rows(settings: Settings, key: str, op: str, tiny: bool) -> Iterator[Row]:
    """A row for each state of the kernel cache."""
    cls = KEYS[key]
    samples = 1 if tiny else SAMPLES
    with tempfile.TemporaryDirectory() as cache:
        for state in (COLD, WARM) if cls in (Lik, Flash) else (None,):
            count = 1 if state == COLD else samples
            row = new_row(SUITE, OPS[op], op, torch.bfloat16, cls.name, jit_cache=state, samples=count)
            limit = settings.limit_s * 3
            try:
                times = [_run_child(key, op, settings.device, cache, tiny, limit) for _ in range(count)]
                row["wall_us"] = 1e3 * statistics.median(t["call_ms"] for t in times)
                row["import_ms"] = statistics.median(t["import_ms"] for t in times)
            except subprocess.TimeoutExpired as problem:
                row.update(error=error_text(problem), over_limit_s=limit)
            except (RuntimeError, OSError, ValueError) as problem:
                row["error"] = error_text(problem)
            yield row


def run(settings: Settings, results: Results, keys: Sequence[str], tiny: bool = False) -> None:
    """Times are in wall_us and import_ms. torch.compile is left out, since it compiles for minutes."""
    keys = [key for key in keys if KEYS[key] is not Compiled]
    for key in keys:
        with tempfile.TemporaryDirectory() as cache:
            try:
                _run_child(key, IMPORT, settings.device, cache, tiny, settings.limit_s * 3)
            except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as problem:
                settings.log(f"{SUITE} {KEYS[key].name}: {error_text(problem)}")
    for op in OPS:
        rows = [row for key in keys for row in _rows(settings, key, op, tiny)]
        results.add(rows)
        for row in rows:
            state = f" ({row['jit_cache']} cache)" if row["jit_cache"] else ""
            took = f"import {number(row.get('import_ms'))} ms, call {number(1e-3 * (row['wall_us'] or 0))} ms"
            settings.log(f"{SUITE} {op} {row['impl']}{state}: {row.get('error') or took}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("key", choices=list(KEYS))
    parser.add_argument("op", choices=[*OPS, IMPORT])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    print(json.dumps(child(args.key, args.op, torch.device(args.device), args.tiny)))
