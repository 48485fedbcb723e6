"""MaxSim from hidden states: our fused head beside linear + normalize + our maxsim, and beside
late-interaction-kernels, scores alone and with all gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness.inputs import draw, sets_of_bytes
from bench.harness.interleaved import Timed, check_gradients, measure, set_ratios
from bench.harness.library import LIK, OURS
from bench.harness.parity import reference_scores
from bench.harness.planted import gradients, plant_shape
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import HiddenShape, Shape
from bench.harness.timing import Call

SUITE = "fused-head"
FUSED, UNFUSED = "fused", "unfused"
# The limit is higher than that of other gradients because projected rows, and unfused normalized rows, are
# rounded to bf16 too. On a CPU the error is 3.4e-3 fused, 4.2e-3 unfused, and 5.2e-3 unfused at d = 16.
GRADIENTS = 6e-3
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # Q, hidden states, weight


def _unfused(maxsim: Callable[..., torch.Tensor]) -> Head:
    return lambda Q, H, W: maxsim(Q, _project(H, W))


def _exact(shape: HiddenShape, Q: torch.Tensor, H: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """Scores in fp64, a few documents projected at a time."""
    W64 = W.double()
    D = torch.cat([_project(part.double(), W64) for part in H.split(16)])
    return reference_scores(shape, Q, D)[0]


def _project(H: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    return F.normalize(F.linear(H, W), dim=-1)


def _planted(
    shape: HiddenShape, W: torch.Tensor, grad_scores: torch.Tensor
) -> tuple[Leaves, list[torch.Tensor]]:
    """Q, hidden states that W projects to planted tokens, and W; with their fp64 gradients."""
    planted = plant_shape(shape, W.device, torch.float32)
    planted.Q = planted.Q.to(W.dtype)
    inverse = torch.linalg.pinv(W.float()).T  # [d, d_model]
    H = torch.randn(planted.D.shape[0], shape.d_model, device=W.device)
    H += (shape.d**0.5 * planted.D - H @ W.float().T) @ inverse  # W projects H to the planted tokens alone
    H = H.to(W.dtype)
    W64 = W.double().requires_grad_()
    wanted = gradients(planted, grad_scores, H, lambda rows: _project(rows, W64), (W64,))
    leaves = planted.Q.view(shape.q_shape), H.view(shape.hidden_shape), W
    return leaves, wanted


def _step(head: Head, inputs: Leaves, grad_scores: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    leaves = [x.detach().requires_grad_() for x in inputs]

    def run() -> tuple[torch.Tensor, ...]:
        out = head(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad_scores))

    return run


def _heads(settings: Settings) -> list[tuple[str, str, Head]]:
    lib: Any = importlib.import_module("late_interaction")
    fused = importlib.import_module("late_interaction.fused_head").maxsim_from_hidden
    heads: list[tuple[str, str, Head]] = [
        (OURS, UNFUSED, _unfused(lib.maxsim)),
        (OURS, FUSED, partial(fused, normalize=True)),
    ]
    if any(i.name == LIK for i in settings.implementations):
        theirs = importlib.import_module("late_interaction_kernels.fused_head").maxsim_from_hidden
        heads.append((LIK, FUSED, theirs))
    return heads


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    assert isinstance(shape, HiddenShape)
    device, dtype = settings.device, settings.dtype
    drawn = draw(Shape(shape.name, shape.Nq, shape.Nd, shape.Lq, 1, shape.d), device, dtype)
    Q, grad_scores = drawn.Q, drawn.grad_scores
    W = (torch.randn(shape.d, shape.d_model, device=device) / shape.d_model**0.5).to(dtype)
    count = sets_of_bytes(shape.input_bytes(W.element_size()), settings.cache_bytes)
    sets = [torch.randn(shape.hidden_shape, device=device, dtype=dtype) for _ in range(count)]
    wanted = _exact(shape, Q, sets[0], W)
    planted, of_planted = _planted(shape, W, grad_scores)

    def timed(impl: str, variant: str, head: Head, op: str) -> Timed:
        row = new_row(
            SUITE, shape, op, dtype, impl, variant=variant, d_model=shape.d_model, input_sets=count,
            floor_us=settings.floor_us(shape, op) if op == "fwd" else None,
            cublas_tflops=settings.ceilings.cublas_tflops,
        )  # fmt: skip

        def scores() -> list[Call]:
            return [lambda H=H: head(Q, H, W) for H in sets]  # type: ignore[misc]

        def steps() -> list[Call]:
            return [_step(head, (Q, H, W), grad_scores) for H in sets]

        if op == "fwd":
            return Timed(row, scores, wanted)
        check = check_gradients(_step(head, planted, grad_scores), of_planted, GRADIENTS)
        return Timed(row, steps, wanted, check)

    rows = []
    for op in ("fwd", "fwd+bwd"):
        measured = measure(settings, [timed(*each, op) for each in _heads(settings)])
        set_ratios(measured[1:], "over_unfused", measured[0])
        rows += measured
    return rows
