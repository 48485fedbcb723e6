"""8-bit inputs: fp8 with a scale per token or per tensor, int8 with one per token, beside our bf16 call and
late-interaction-kernels' fp8. Every library gets the same quantized tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from bench.harness.inputs import FP8, INT8, quantize
from bench.harness.interleaved import Timed, draw_sets, measure, set_ratios
from bench.harness.library import LIK, OURS, UnsupportedError
from bench.harness.parity import reference_scores, relative_error
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import Shape
from bench.harness.timing import Call

SUITE = "quantized"
BF16 = "bf16"
PER_TOKEN, PER_TENSOR, INT8_PER_TOKEN = "fp8 per token", "fp8 per tensor", "int8 per token"
ALL = (BF16, PER_TOKEN, PER_TENSOR, INT8_PER_TOKEN)


def _restored(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.float() * (scale.unsqueeze(-1) if scale.dim() else scale)


def _function(module: str, name: str) -> Callable[..., object]:
    try:
        function: Callable[..., object] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as missing:
        raise UnsupportedError(f"there is no {module}.{name}") from missing
    return function


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    maxsim = importlib.import_module("late_interaction").maxsim
    sets = draw_sets(settings, shape, torch.bfloat16)
    exact, _ = reference_scores(shape, sets[0].Q, sets[0].D)

    def row(impl: str, variant: str, dtype: torch.dtype) -> Row:
        return new_row(
            SUITE, shape, "fwd", dtype, impl, variant=variant, input_sets=len(sets),
            cublas_tflops=settings.ceilings.cublas_tflops,
        )  # fmt: skip

    def plain() -> list[Call]:
        return [lambda x=x: maxsim(x.Q, x.D) for x in sets]  # type: ignore[misc]

    timed = [Timed(row(OURS, BF16, torch.bfloat16), plain, exact)]
    theirs = any(i.name == LIK for i in settings.implementations)
    for variant, dtype in ((PER_TOKEN, FP8), (PER_TENSOR, FP8), (INT8_PER_TOKEN, INT8)):
        per_token = variant != PER_TENSOR
        inputs = [(*quantize(x.Q, dtype, per_token), *quantize(x.D, dtype, per_token)) for x in sets]
        Q, scale_Q, D, scale_D = inputs[0]
        wanted, _ = reference_scores(shape, _restored(Q, scale_Q), _restored(D, scale_D))
        lost = relative_error(wanted, exact)
        # With a scale per tensor late-interaction-kernels waits for the device: it is left out.
        for impl in (OURS, *([LIK] if theirs and variant == PER_TOKEN else [])):
            module = "late_interaction_kernels" if impl == LIK else "late_interaction.lik"
            prepare = _codes(inputs) if impl == OURS and per_token else _calls(f"{module}.fp8", inputs)
            mine = {**row(impl, variant, dtype), "quantization_err": lost}
            timed.append(Timed(mine, prepare, wanted))
    rows = measure(settings, timed)
    set_ratios(rows[1:], "over_bf16", rows[0])
    return rows


def _codes(inputs: list[tuple[Any, Any, Any, Any]]) -> Callable[[], list[Call]]:
    def prepare() -> list[Call]:
        lib = importlib.import_module("late_interaction")
        dtype = inputs[0][0].dtype
        codec = lib.codecs.Int8() if dtype == INT8 else lib.codecs.Fp8(dtype)
        pairs = [(lib.Codes(codec, Q, q), lib.Codes(codec, D, d)) for Q, q, D, d in inputs]
        return [lambda Q=Q, D=D: lib.maxsim(Q, D) for Q, D in pairs]  # type: ignore[misc]

    return prepare


def _calls(module: str, inputs: list[tuple[Any, Any, Any, Any]]) -> Callable[[], list[Call]]:
    def prepare() -> list[Call]:
        f = _function(module, "maxsim_inference_fp8")
        return [
            lambda Q=Q, q=q, D=D, d=d: f(Q, D, scale_Q=q, scale_D=d)  # type: ignore[misc]
            for Q, q, D, d in inputs
        ]

    return prepare
