"""MaxSim from hidden states: our fused head beside linear + normalize + our maxsim, and beside
late-interaction-kernels, scores alone and with all gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .impls import LIK, OURS
from .inputs import draw
from .parity import reference_scores
from .results import Row, new_row
from .shapes import HiddenShape, Shape
from .suites import Settings
from .timing import Call
from .together import Timed, measure, set_ratios

SUITE = "fused-head"
FUSED, UNFUSED = "fused", "unfused"
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _unfused(maxsim: Callable[..., torch.Tensor]) -> Head:
    return lambda Q, H, W: maxsim(Q, F.normalize(F.linear(H, W), dim=-1))


def _exact(shape: HiddenShape, Q: torch.Tensor, H: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """Scores in fp64, a few documents projected at a time."""
    W64 = W.double()
    D = torch.cat([F.normalize(F.linear(part.double(), W64), dim=-1) for part in H.split(16)])
    return reference_scores(shape, Q, D)[0]


def take(settings: Settings, shape: Shape) -> list[Row]:
    assert isinstance(shape, HiddenShape)
    device, dtype = settings.device, settings.dtype
    drawn = draw(Shape(shape.name, shape.Nq, shape.Nd, shape.Lq, 1, shape.d), device, dtype)
    Q, grad_scores = drawn.Q, drawn.grad_scores
    H = torch.randn(shape.hidden_shape, device=device, dtype=dtype)
    W = (torch.randn(shape.d, shape.d_model, device=device) / shape.d_model**0.5).to(dtype)
    wanted = _exact(shape, Q, H, W)
    lib: Any = importlib.import_module("late_interaction")
    fused = importlib.import_module("late_interaction.fused_head").maxsim_from_hidden
    heads: list[tuple[str, str, Head]] = [(OURS, UNFUSED, _unfused(lib.maxsim)), (OURS, FUSED, fused)]
    if any(i.name == LIK for i in settings.implementations):
        theirs = importlib.import_module("late_interaction_kernels.fused_head").maxsim_from_hidden
        heads.append((LIK, FUSED, theirs))

    def row(impl: str, variant: str, op: str) -> Row:
        return new_row(
            SUITE, shape, op, dtype, impl, variant=variant, d_model=shape.d_model,
            floor_us=settings.floor_us(shape, op) if op == "fwd" else None,
            cublas_tflops=settings.ceilings.cublas_tflops,
        )  # fmt: skip

    def scores(head: Head) -> list[Call]:
        return [lambda: head(Q, H, W)]

    def step(head: Head) -> list[Call]:
        leaves = [x.detach().requires_grad_() for x in (Q, H, W)]

        def run() -> tuple[torch.Tensor, ...]:
            out = head(*leaves)
            return (out.detach(), *torch.autograd.grad(out, leaves, grad_scores))

        return [run]

    rows = []
    for op, calls in (("fwd", scores), ("fwd+bwd", step)):
        timed = [
            Timed(row(impl, variant, op), lambda f=head, c=calls: c(f), wanted)  # type: ignore[misc]
            for impl, variant, head in heads
        ]
        measured = measure(settings, timed)
        set_ratios(measured[1:], "over_unfused", measured[0])
        rows += measured
    return rows
