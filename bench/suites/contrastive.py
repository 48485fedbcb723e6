"""Contrastive losses of whole batches, forward and both gradients: contrastive_loss beside cross_entropy over
the scores of each library, and, of single vectors, beside a matrix product and Inf-CL.

The loss of every implementation is compared with the exact one on the inputs that are timed, and its
gradients on planted inputs of the same sizes. Steps of large batches take seconds: they are timed one after
the other, a few times each. All are timed by events, because some of them wait for the device. A step that
would take over STEP_LIMIT_S by its time at the batch before is left out, unless it is contrastive_loss's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence

import torch

from bench.harness.batches import Batch, Known, draw_batch, exact_loss, plant_batch, step
from bench.harness.interleaved import Timed, judged, measure, set_ratios
from bench.harness.library import EINSUM, INF_CL, UnsupportedError
from bench.harness.parity import worst_error
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import BatchShape, Shape
from bench.harness.timing import Call, Effort, time_few
from bench.peers import losses
from bench.peers.losses import Method

SUITE = "contrastive"
PEERS = (INF_CL,)  # which no other suite measures
STEP_LIMIT_S = 10.0
FEW, RUNS = 8192, 2  # from this batch on, so many runs are timed
MEMORY_SHARE = 0.8  # of the device, that may stay for a backward


def _step_bytes(batch: Batch) -> int:
    """Inputs, gradients, and what else is as large."""
    return 6 * (batch.Q.numel() + batch.D.numel()) * batch.Q.element_size()


def _check_fits(settings: Settings, method: Method, shape: BatchShape, batch: Batch) -> None:
    kept = method.kept_bytes(shape)
    if settings.device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(settings.device).total_memory
    if kept + _step_bytes(batch) > MEMORY_SHARE * total:
        raise UnsupportedError(f"what stays for the backward takes {kept / 1e9:.0f} GB")


def _check_time(settings: Settings, method: Method, shape: BatchShape) -> None:
    """By the time of a smaller batch of the same kind; a step grows at least with the batch's square."""
    if method.variant in (losses.EXACT, losses.LEAST, losses.WITH_TAIL):
        return
    seen = settings.steps_s.get(_key(method, shape))
    if seen and seen[1] * (shape.Nq / seen[0]) ** 2 > STEP_LIMIT_S:
        raise TimeoutError(f"a step takes {seen[1]:.2g} s at a batch of {seen[0]}")


def _key(method: Method, shape: BatchShape) -> tuple[object, ...]:
    return SUITE, method.impl, method.variant, shape.packed, shape.Lq, shape.Ld


def _timed(
    settings: Settings, shape: BatchShape, method: Method, batch: Batch, wanted: torch.Tensor, known: Known
) -> Timed:
    row = new_row(
        SUITE, shape, "fwd+bwd", settings.dtype, method.impl, variant=method.variant,
        floor_us=settings.floor_us(shape, "fwd+bwd"), cublas_tflops=settings.ceilings.cublas_tflops,
        tokens_q=batch.Q.numel() // shape.d, tokens_d=batch.D.numel() // shape.d,
    )  # fmt: skip

    def prepare() -> list[Call]:
        loss = method.make(shape)
        _check_fits(settings, method, shape, batch)
        return [lambda: step(loss, batch)]

    def check(row: Row, out: object) -> None:
        assert isinstance(out, tuple)
        row["gradients_mib"] = sum(x.numel() * x.element_size() for x in out[1:]) / 2**20
        found = step(method.make(shape), known.batch)
        row["grad_err"] = worst_error((found[0], *_rows(found[1:], known)), [known.loss, *known.gradients])
        if not row["grad_err"] <= method.limits[1]:
            raise ValueError(f"parity: a gradient is off by {row['grad_err']:.2g}, not timed")

    return Timed(row, prepare, wanted, check, capture=False, tolerance=method.limits[0])


def _rows(gradients: Sequence[torch.Tensor], known: Known) -> list[torch.Tensor]:
    return [x.view(y.shape) for x, y in zip(gradients, known.gradients, strict=True)]


def _chosen(settings: Settings, shape: BatchShape) -> list[Method]:
    """The methods of the implementations that were asked for. Inf-CL goes with PyTorch's own operators."""
    names = {i.name for i in settings.implementations}
    if EINSUM in names and settings.device.type == "cuda":
        if importlib.util.find_spec("inf_cl"):
            names.add(INF_CL)
        else:
            settings.log(f"{INF_CL} is not measured: no package inf_cl")
    return [m for m in losses.methods(shape) if m.impl in names]


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    assert isinstance(shape, BatchShape)
    batch = draw_batch(shape, settings.device, settings.dtype)
    wanted, known = exact_loss(batch), plant_batch(shape, batch)
    settings = dataclasses.replace(settings, effort=_short(settings.effort))
    rows, timed = [], []
    for method in _chosen(settings, shape):
        each = _timed(settings, shape, method, batch, wanted, known)
        rows.append(each.row)
        try:
            _check_time(settings, method, shape)
            timed.append((method, each))
        except TimeoutError as reason:
            each.row.update(error=f"TimeoutError: {reason}", over_limit_s=STEP_LIMIT_S)
    if shape.Nq >= FEW:
        for _, each in timed:
            _measure_long(settings, each)
    else:
        measure(settings, [each for _, each in timed])
    for method, each in timed:
        if each.row["wall_us"]:
            settings.steps_s[_key(method, shape)] = shape.Nq, each.row["wall_us"] * 1e-6
    set_ratios([r for r in rows if r is not rows[0]], "over_exact", rows[0])
    return rows


def _measure_long(settings: Settings, each: Timed) -> None:
    calls = judged(settings, each)
    if calls is None:
        return
    gpu, each.row["wall_us"] = time_few(calls[0], RUNS, settings.device)
    if gpu is not None:
        each.row.update(gpu_us=gpu.us, gpu_spread=gpu.spread, gpu_method=gpu.method)


def _short(effort: Effort) -> Effort:
    return dataclasses.replace(effort, min_replays=4, min_walls=1)
