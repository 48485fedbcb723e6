"""The CPU suite. Calls of the implementations are interleaved, so that other load on the machine slows all of
them alike: compare figures within one run only. Documents are there as each implementation wants them: int8
codes with a scale a token, NumKong's packed matrices."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.harness.inputs import INT8, Inputs, draw, quantize
from bench.harness.library import EINSUM, GEMM, MAXSIM_CPU, NUMKONG, OURS
from bench.harness.parity import GRADIENTS, SCORES, reference_scores, relative_error, worst_error
from bench.harness.planted import every_pair, gradients, plant_shape
from bench.harness.results import Results, Row, best, groups, new_row
from bench.harness.shape import Shape
from bench.harness.text import align, error_text, number
from bench.peers.implementations import einsum_maxsim

SUITE = "cpu"

Call = Callable[[], object]

_REST_S = 0.005  # before each call: idle OpenMP workers of the previous library spin for a while


def _ours(shape: Shape, x: Inputs) -> Call:
    lib = importlib.import_module("late_interaction")
    return lambda: lib.maxsim(x.Q, x.D)


def _einsum(shape: Shape, x: Inputs) -> Call:
    return lambda: einsum_maxsim(x.Q, x.D, shape.layout)


def _maxsim_cpu(shape: Shape, x: Inputs) -> Call:
    """One fp32 query at a time is all its API takes."""
    lib = importlib.import_module("maxsim_cpu")
    query, docs = x.Q[0].numpy(), x.D.numpy()
    return lambda: torch.from_numpy(lib.maxsim_scores(query, docs))


def _numkong(shape: Shape, x: Inputs) -> Call:
    """One query with one document at a time. It returns the sum of distances, 1 minus a similarity each."""
    lib = importlib.import_module("numkong")
    query, *documents = (lib.maxsim_pack(tokens.numpy(), "f32") for tokens in (x.Q[0], *x.D))
    return lambda: shape.Lq - torch.tensor([[lib.maxsim_packed(query, each) for each in documents]])


def _gemm(shape: Shape, x: Inputs) -> Call:
    """The products without the max, through PyTorch: what the matrix units can give."""
    rows, docs = x.Q.view(-1, shape.d), x.D.view(-1, shape.d).T
    out = torch.empty(rows.shape[0], docs.shape[1], dtype=x.Q.dtype)
    return lambda: torch.mm(rows, docs, out=out)


def _contestants(shape: Shape, x: Inputs) -> dict[str, Callable[[Shape, Inputs], Call]]:
    all_: dict[str, Callable[[Shape, Inputs], Call]] = {OURS: _ours}
    if x.Q.dtype == torch.float32 and shape.Nq == 1:
        all_ |= {MAXSIM_CPU: _maxsim_cpu, NUMKONG: _numkong}
    return {**all_, EINSUM: _einsum, GEMM: _gemm}


def time_interleaved(calls: dict[str, Call], rounds: int, warm: bool = False) -> dict[str, float]:
    """Median seconds of each call; every round times each of them once. warm: after another one."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            time.sleep(_REST_S)
            if warm:
                call()
            start = time.perf_counter()
            call()
            if i:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def run_forward(shape: Shape, dtype: torch.dtype, rounds: int) -> list[Row]:
    x = draw(shape, torch.device("cpu"), dtype)
    scores = reference_scores(shape, x.Q, x.D)[0]
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    for name, prepare in _contestants(shape, x).items():
        row = rows[name] = new_row(SUITE, shape, "fwd", dtype, name, gflops=None)
        try:
            call = prepare(shape, x)
            if name != GEMM:
                out = call()
                assert isinstance(out, torch.Tensor)
                row["rel_err"] = relative_error(out, scores)
                if row["rel_err"] > SCORES:
                    row["error"] = f"parity: relative error {row['rel_err']:.2g}"
            calls[name] = call  # a wrong one is timed too, its row says that it is wrong
        except ImportError:
            row["skipped"] = "not installed"
        except Exception as error:  # recorded in the row
            row["error"] = error_text(error)
    return _fill(rows, time_interleaved(calls, rounds), shape.flops)


def run_int8(shape: Shape, rounds: int) -> list[Row]:
    """A forward of int8 codes, beside PyTorch's product of the same codes."""
    x = draw(shape, torch.device("cpu"), torch.float32)
    (Q, scale_Q), (D, scale_D) = (quantize(tokens, INT8, per_token=True) for tokens in (x.Q, x.D))
    maxsim = importlib.import_module("late_interaction").ops.maxsim_quantized
    rows_of_q, columns = Q.view(-1, shape.d), D.view(-1, shape.d).T
    calls: dict[str, Call] = {
        OURS: lambda: maxsim(Q, D, scale_Q, scale_D, None, None),
        GEMM: lambda: torch._int_mm(rows_of_q, columns),
    }
    rows = {name: new_row(SUITE, shape, "fwd", INT8, name, gflops=None) for name in calls}
    scores = reference_scores(shape, Q * scale_Q.unsqueeze(-1), D * scale_D.unsqueeze(-1))[0]
    found = calls[OURS]()
    assert isinstance(found, torch.Tensor)
    rows[OURS]["rel_err"] = relative_error(found, scores)
    if rows[OURS]["rel_err"] > SCORES:
        rows[OURS]["error"] = f"parity: relative error {rows[OURS]['rel_err']:.2g}"
    return _fill(rows, time_interleaved(calls, rounds), shape.flops)


def run_step(shape: Shape, dtype: torch.dtype, rounds: int) -> list[Row]:
    """Forward and both gradients."""
    x = draw(shape, torch.device("cpu"), dtype)
    planted = plant_shape(shape, torch.device("cpu"), dtype)
    known = Inputs(planted.Q.view(shape.q_shape), planted.D.view(shape.d_shape), x.grad_scores)
    wanted = gradients(planted, every_pair(shape, x.grad_scores))
    x.require_grad()
    known.require_grad()
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    for name, prepare in {OURS: _ours, EINSUM: _einsum}.items():
        row = rows[name] = new_row(SUITE, shape, "fwd+bwd", dtype, name, winners="uniform", gflops=None)
        try:

            def step(x: Inputs = x, prepare: Callable[[Shape, Inputs], Call] = prepare) -> Any:
                return torch.autograd.grad(prepare(shape, x)(), (x.Q, x.D), x.grad_scores)

            row["grad_err"] = worst_error(step(known), wanted)
            if row["grad_err"] > GRADIENTS:
                row["error"] = f"parity: a gradient is off by {row['grad_err']:.2g}"
            calls[name] = step
        except Exception as error:  # recorded in the row
            row["error"] = error_text(error)
    return _fill(rows, time_interleaved(calls, rounds), shape.flops)


def _fill(rows: dict[str, Row], seconds: dict[str, float], flops: int) -> list[Row]:
    for name, s in seconds.items():
        rows[name]["wall_us"] = 1e6 * s
        rows[name]["gflops"] = flops / s * 1e-9
    return list(rows.values())


def line(rows: Sequence[Row]) -> str:
    first = rows[0]
    parts = []
    for row in rows:
        told = f"{number(row['gflops'])} GFLOP/s" if row["gflops"] else "not measured"
        problem = row.get("error") or row.get("skipped")
        parts.append(f"{row['impl']} {told}" + (f" ({problem[:60]})" if problem else ""))
    return f"cpu {first['shape']} {first['op']} {first['dtype']}: " + " | ".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """GFLOP/s of every implementation, a line a measurement."""
    names = (OURS, MAXSIM_CPU, NUMKONG, EINSUM, GEMM)
    body = []
    for group in groups(rows).values():
        first = group[0]
        found = [best([r for r in group if r["impl"] == name], "wall_us") for name in names]
        body.append(
            [f"{first['shape']} {first['op']} {first['dtype']}", *(number(r and r["gflops"]) for r in found)]
        )
    return align(["GFLOP/s", *names], body)


def run(
    results: Results, forward: Sequence[Shape], training: Sequence[Shape], rounds: int,
    log: Callable[[str], None],
) -> None:  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        for shapes, measure in ((forward, run_forward), (training, run_step)):
            for shape in shapes:
                rows = measure(shape, dtype, rounds)
                results.add(rows)
                log(line(rows))
    for shape in forward:
        rows = run_int8(shape, rounds)
        results.add(rows)
        log(line(rows))
