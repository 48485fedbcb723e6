"""Ten calls beside PyTorch and the peers that are installed, and the rates of a GPU beside the planner's."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from late_interaction import maxsim
from late_interaction._doctor.ceilings import Ceilings, float32_products, product_tflops
from late_interaction._doctor.checks import relative_error
from late_interaction._doctor.machine import planned_rates, said
from late_interaction._doctor.text import error_text
from late_interaction._doctor.timing import (
    QUICK,
    Call,
    by_one_clock,
    in_turn,
    release,
    sets_of_bytes,
    time_interleaved,
    time_limit,
)

Score = Callable[[Tensor, Tensor], Tensor]
# Queries, documents, their tokens and dims: shapes of `python -m bench run`, by their names there.
ON_GPU = {
    "text-short": (1, 1000, 32, 300), "text-long": (1, 1000, 32, 1024), "corpus-10k": (1, 10000, 32, 300),
    "colpali-rerank": (1, 1000, 128, 1024), "train-32": (32, 32, 32, 300), "train-128": (128, 128, 32, 300),
    "colpali-128": (128, 128, 32, 1030), "short-train-24": (256, 256, 16, 24),
}  # fmt: skip
ON_CPU = {
    "cpu-text": (1, 1000, 32, 300), "cpu-lq128": (1, 200, 128, 1024), "cpu-passage": (1, 2000, 32, 100),
    "cpu-title": (1, 5000, 32, 24),
}  # fmt: skip
STEPS = {"cuda": ("train-32", "train-128"), "cpu": ("cpu-train",)}
DTYPES = {"cuda": (torch.bfloat16,), "cpu": (torch.float32, torch.bfloat16)}
LIMIT_S, WRONG, DIFFERS, ROUNDS = 30, 1e-2, 0.2, 5
SOME = 16  # queries and documents whose scores are compared


def _einsum(Q: Tensor, D: Tensor) -> Tensor:
    return torch.einsum("isd,jtd->ijst", Q, D).amax(-1).float().sum(-1)


def _maxsim_cpu(Q: Tensor, D: Tensor) -> Tensor:
    found = importlib.import_module("maxsim_cpu").maxsim_scores(Q[0].numpy(), D.numpy())
    return torch.from_numpy(found)[None]


def _flash(Q: Tensor, D: Tensor) -> Tensor:
    return importlib.import_module("flash_maxsim").flash_maxsim_batched(Q, D, shared_docs=True)


def _lik(Q: Tensor, D: Tensor) -> Tensor:
    return importlib.import_module("late_interaction_kernels").maxsim(Q, D)


def _step(score: Score, Q: Tensor, D: Tensor) -> tuple[Tensor, ...]:
    leaves = Q.detach().requires_grad_(), D.detach().requires_grad_()
    scores = score(*leaves)
    return scores.detach(), *torch.autograd.grad(scores.sum(), leaves)


def _ways(device: torch.device, step: bool, dtype: torch.dtype, peers: dict[str, Any]) -> dict[str, Score]:
    ways: dict[str, Score] = {"late_interaction": maxsim, "torch einsum": _einsum}
    if device.type == "cuda":
        ways |= {"late-interaction-kernels": _lik} | ({} if step else {"flash-maxsim": _flash})
    elif dtype == torch.float32 and not step:
        ways["maxsim-cpu"] = _maxsim_cpu
    return {name: way for name, way in ways.items() if peers.get(name, True)}


def timings(device: torch.device, peers: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Time each shape; a row has the microseconds of each way, or why it has none."""
    shapes = ON_GPU if device.type == "cuda" else ON_CPU
    calls = [(name, shapes[name], False) for name in shapes]
    calls += [(name, shapes.get(name, (32, 32, 32, 300)), True) for name in STEPS[device.type]]
    for name, (Nq, Nd, Lq, Ld), step in calls:
        for dtype in DTYPES[device.type]:
            row = {"shape": name, "Nq": Nq, "Nd": Nd, "Lq": Lq, "Ld": Ld, "d": 128, "step": step}
            ways = _ways(device, step, dtype, peers)
            times = _time(ways, (Nq, Nd, Lq, Ld), dtype, device, step)
            yield row | {"dtype": str(dtype).removeprefix("torch."), "us": times}
            release(device)


def _time(
    ways: dict[str, Score], size: tuple[int, ...], dtype: torch.dtype, device: torch.device, step: bool
) -> dict[str, Any]:
    Nq, Nd, Lq, Ld = size
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    sets = [
        tuple(torch.nn.functional.normalize(torch.randn(*x, 128, device=device), dim=-1).to(dtype)
              for x in ((Nq, Lq), (Nd, Ld)))
        for _ in range(sets_of_bytes((Nq * Lq + Nd * Ld) * 128 * dtype.itemsize, cache))
    ]  # fmt: skip
    times: dict[str, Any] = {}
    calls: dict[str, list[Call]] = {}
    exact = _einsum(sets[0][0][:SOME].double(), sets[0][1][:SOME].double())
    for name, way in ways.items():
        try:
            with time_limit(LIMIT_S):  # a peer may compile and tune
                error = relative_error(way(*sets[0])[:SOME, :SOME], exact)
                if not error <= WRONG:
                    raise ValueError(f"wrong: its scores are off by {error:.2g}")
                calls[name] = [partial(_step, way, *x) if step else partial(way, *x) for x in sets]
                calls[name][0]()
        except Exception as problem:  # others are timed without it
            times[name] = error_text(problem)
            calls.pop(name, None)
    if device.type == "cuda":
        found = time_interleaved(by_one_clock([*calls.values()], True), QUICK, ROUNDS)
        return times | {name: each.us for name, each in zip(calls, found, strict=True)}
    turns = in_turn({name: each[0] for name, each in calls.items()}, device, ROUNDS)
    return times | {name: 1e6 * statistics.median(seconds) for name, seconds in turns.items()}


def rates(ceilings: Ceilings, device: torch.device) -> list[dict[str, Any]]:
    """Measure a GPU's products, in operations a clock and multiprocessor, beside what the planner counts on.

    The clock is read while products run; PyTorch's products stay a little below what the tensor cores can.
    Nothing is measured of a GPU that is planned as an older one: PyTorch knows nothing of that.
    """
    with float32_products("highest"):
        ffma = product_tflops(torch.float32, 4096, QUICK, device)
    gpu, planned = torch.cuda.get_device_properties(device), planned_rates()
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(200):
        a @ a
    asked = "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id=GPU-{gpu.uuid}"
    mhz = said("nvidia-smi", *asked)
    release(device)
    if mhz is None or not mhz.isdecimal():
        return []
    measured = {"fp16": ceilings.cublas_tflops, "tf32": ceilings.cublas_tf32_tflops, "ffma": ffma}
    rows = []
    for kind, tflops in measured.items():
        found, table = (tflops or 0) * 1e6 / (int(mhz) * gpu.multi_processor_count), planned[kind] or 1
        differs = abs(found / table - 1) > DIFFERS
        rows.append({"type": kind, "measured": found, "planned": table, "differs": differs})
    return rows
