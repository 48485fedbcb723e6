"""The first call in a fresh process: what a serving process or a test run waits for.

Each implementation gets a process of its own, in which CUDA is initialised, PyTorch has differentiated once
and the inputs exist before the clock starts. Triton's peers are run twice: with an empty kernel cache, and
with the cache just made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from .impls import KEYS, Compiled, Flash, Implementation, Lik
from .inputs import draw
from .results import ROOT, Results, Row, new_row, number, told
from .shapes import FORWARD, TRAINING
from .suites import Settings

RERANK = next(s for s in FORWARD if s.name == "text-short")
STEP = next(s for s in TRAINING if s.name == "train-32")


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def child(key: str, device: torch.device, tiny: bool) -> dict[str, float]:
    """Milliseconds of import, of the first forward and of the first training step, in this process."""
    rerank, step = (replace(s, Nq=min(s.Nq, 2), Nd=3, Ld=16) if tiny else s for s in (RERANK, STEP))
    x = draw(rerank, device, torch.bfloat16)
    y = draw(step, device, torch.bfloat16)
    y.require_grad()
    # PyTorch's own first backward, which imports a second's worth of modules to check a given gradient.
    torch.autograd.grad(2 * y.Q, y.Q, y.Q.detach())
    _sync(device)

    clock = time.perf_counter
    start = clock()
    impl: Implementation = KEYS[key]()
    imported = clock()
    impl.score(rerank, None, train=False)(x.Q, x.D)
    _sync(device)
    forward = clock()
    scores = impl.score(step, impl.backwards[0], train=True)(y.Q, y.D)
    torch.autograd.grad(scores, (y.Q, y.D), y.grad_scores)
    _sync(device)
    end = clock()
    return {
        "import_ms": 1e3 * (imported - start),
        "fwd": 1e3 * (forward - imported),
        "fwd+bwd": 1e3 * (end - forward),
    }


def _run_child(key: str, device: torch.device, cache: str, tiny: bool, limit_s: float) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.first_call", key, "--device", device.type]
    env = {**os.environ, "TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
    run = subprocess.run(
        command + (["--tiny"] if tiny else []), cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=limit_s, check=False,
    )  # fmt: skip
    if run.returncode != 0:
        raise RuntimeError(run.stderr.strip().splitlines()[-1] if run.stderr.strip() else "no output")
    times: dict[str, float] = json.loads(run.stdout.strip().splitlines()[-1])
    return times


def run(settings: Settings, results: Results, keys: Sequence[str], tiny: bool = False) -> None:
    """One row for each implementation, op and state of the compilation cache; times are in wall_us."""
    for key in keys:
        cls = KEYS[key]
        if cls is Compiled:
            continue  # minutes of compilation say nothing about anyone's kernels
        jit = cls in (Lik, Flash)
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm") if jit else (None,):
                rows: list[Row] = []
                times: dict[str, float] = {}
                error = None
                try:
                    times = _run_child(key, settings.device, cache, tiny, settings.limit_s * 3)
                except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as problem:
                    error = told(problem)
                for shape, op in ((RERANK, "fwd"), (STEP, "fwd+bwd")):
                    row = new_row("first-call", shape, op, torch.bfloat16, cls.name, jit_cache=state)
                    if error:
                        row["error"] = error
                    else:
                        row["wall_us"] = 1e3 * times[op]
                        row["import_ms"] = times["import_ms"]
                    rows.append(row)
                results.add(rows)
                outcome = error or ", ".join(f"{k} {number(v)} ms" for k, v in times.items())
                settings.log(f"first-call {cls.name}{f' ({state} cache)' if state else ''}: {outcome}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("key", choices=list(KEYS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    print(json.dumps(child(args.key, torch.device(args.device), args.tiny)))
