"""Packed sequences of lengths of their own: ours beside late-interaction-kernels' maxsim_varlen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise

import torch

from .impls import LIK, OURS, UnsupportedError
from .inputs import draw_packed
from .results import Row, new_row
from .shapes import Shape
from .suites import Settings
from .timing import Call
from .together import Timed, measure, set_ratios

SUITE = "varlen"
FORWARD, STEP = "forward", "forward + backward"


def _function(impl: str) -> Callable[..., torch.Tensor]:
    module = {OURS: "late_interaction.varlen", LIK: "late_interaction_kernels.varlen"}[impl]
    try:
        function: Callable[..., torch.Tensor] = importlib.import_module(module).maxsim_varlen
    except (ImportError, AttributeError) as missing:
        raise UnsupportedError(f"there is no {module}.maxsim_varlen") from missing
    return function


def reference(Q: torch.Tensor, D: torch.Tensor, cu_q: torch.Tensor, cu_d: torch.Tensor) -> torch.Tensor:
    """Scores in float64, a document at a time."""
    bounds = cu_d.tolist()
    queries = torch.repeat_interleave(torch.arange(len(cu_q) - 1, device=Q.device), cu_q.diff())
    scores = torch.zeros(len(cu_q) - 1, len(bounds) - 1, dtype=torch.float64, device=Q.device)
    rows = Q.detach().double()
    for j, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            best = (rows @ D[begin:end].detach().double().t()).amax(-1)
            scores[:, j].index_add_(0, queries, best)
    return scores


def take(settings: Settings, shape: Shape) -> list[Row]:
    """Queries of up to Lq tokens, documents of up to Ld, most of them short."""
    Q, D, cu_q, cu_d = draw_packed(shape, settings.device, settings.dtype)
    wanted = reference(Q, D, cu_q, cu_d)
    grad = torch.randn_like(wanted, dtype=torch.float32)
    longest = {"max_seqlen_q": int(cu_q.diff().max()), "max_seqlen_d": int(cu_d.diff().max())}

    def forward(impl: str) -> Callable[[], list[Call]]:
        f = _function(impl)
        return lambda: [lambda: f(Q, D, cu_q, cu_d, **longest)]

    def step(impl: str) -> Callable[[], list[Call]]:
        f = _function(impl)
        q, d = Q.detach().requires_grad_(), D.detach().requires_grad_()

        def run() -> tuple[torch.Tensor, ...]:
            scores = f(q, d, cu_q, cu_d, **longest)
            return (scores.detach(), *torch.autograd.grad(scores, (q, d), grad))

        return lambda: [run]

    theirs = [LIK] if any(i.name == LIK for i in settings.implementations) else []
    timed = []
    for variant, op, prepare in ((FORWARD, "fwd", forward), (STEP, "fwd+bwd", step)):
        for impl in (OURS, *theirs):
            row = new_row(
                SUITE, shape, op, settings.dtype, impl, variant=variant, input_sets=1,
                tokens_q=len(Q), tokens_d=len(D), cublas_tflops=settings.ceilings.cublas_tflops,
            )  # fmt: skip

            def ready(
                prepare: Callable[..., Callable[[], list[Call]]] = prepare, impl: str = impl
            ) -> list[Call]:
                return prepare(impl)()

            timed.append(Timed(row, ready, wanted))
    rows = measure(settings, timed)
    for own, *others in (rows[: 1 + len(theirs)], rows[1 + len(theirs) :]):
        set_ratios(others, "over_ours", own)
    return rows
