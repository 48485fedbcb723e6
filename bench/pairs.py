"""Listed pairs of packed batches, and documents that lie anywhere: ours beside the peers' calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from . import varlen
from .impls import FLASH, LIK, OURS, UnsupportedError
from .inputs import draw_packed
from .results import Row, new_row
from .shapes import PairShape, Shape
from .suites import Settings
from .timing import Call
from .together import Timed, measure, set_ratios

SUITE = "pairs-packed"
FORWARD, STEP, DENSE = "forward", "forward + backward", "dense call"

_PATHS = {
    OURS: ("late_interaction.score_pairs", "score_pairs_packed"),
    LIK: ("late_interaction_kernels.score_pairs", "score_pairs_packed"),
}
_DIRECT = {
    OURS: ("late_interaction.score_pairs", "rerank_direct"),
    FLASH: ("flash_maxsim", "flash_maxsim_rerank_direct"),
}


def _function(module: str, name: str) -> Callable[..., torch.Tensor]:
    try:
        function: Callable[..., torch.Tensor] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as missing:
        raise UnsupportedError(f"there is no {module}.{name}") from missing
    return function


def _draw_pairs(shape: PairShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """No pair twice, each document as often as any other, in no order."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(shape.Nd, generator=generator)
    place = torch.arange(shape.pairs)
    shift = torch.randint(shape.Nq, (shape.Nd,), generator=generator)
    pair_d = order[place % shape.Nd]
    pair_q = (shift[pair_d] + place // shape.Nd) % shape.Nq
    shuffle = torch.randperm(shape.pairs, generator=generator)
    return pair_q[shuffle].int().to(device), pair_d[shuffle].int().to(device)


def take(settings: Settings, shape: Shape) -> list[Row]:
    assert isinstance(shape, PairShape)
    Q, D, cu_q, cu_d = draw_packed(shape, settings.device, settings.dtype, shape.even)
    if shape.Nq == 1:
        return _take_direct(settings, shape, Q, D, cu_d)
    pair_q, pair_d = _draw_pairs(shape, settings.device)
    wanted = _reference(Q, D, cu_q, cu_d, pair_q, pair_d)
    grad = torch.randn_like(wanted, dtype=torch.float32)
    longest = {"max_seqlen_q": int(cu_q.diff().max()), "max_seqlen_d": int(cu_d.diff().max())}
    listed = (cu_q, cu_d, pair_q, pair_d)

    def forward(impl: str) -> list[Call]:
        f = _function(*_PATHS[impl])
        return [lambda: f(Q, D, *listed, **longest)]

    def step(impl: str) -> list[Call]:
        f = _function(*_PATHS[impl])
        q, d = Q.detach().requires_grad_(), D.detach().requires_grad_()

        def run() -> tuple[torch.Tensor, ...]:
            scores = f(q, d, *listed, **longest)
            return (scores.detach(), *torch.autograd.grad(scores, (q, d), grad))

        return [run]

    calls: list[tuple[str, str, str, Callable[[], list[Call]]]] = []
    for variant, op, prepare in ((FORWARD, "fwd", forward), (STEP, "fwd+bwd", step)):
        for impl in _beside(settings, LIK):
            calls.append((variant, op, impl, lambda prepare=prepare, impl=impl: prepare(impl)))  # type: ignore[misc]
    if shape.pairs == shape.Nq * shape.Nd and shape.even:  # the same scores, asked for as what they are
        score = _function("late_interaction", "maxsim")
        dense = Q.view(shape.q_shape), D.view(shape.d_shape)
        at = pair_q.long() * shape.Nd + pair_d
        back = torch.empty_like(at)
        back[at] = torch.arange(len(at), device=at.device)
        calls.append((DENSE, "fwd", OURS, lambda: [lambda: score(*dense)]))
        return _measured(settings, shape, calls, wanted, Q, D, {DENSE: wanted[back].view(shape.scores_shape)})
    return _measured(settings, shape, calls, wanted, Q, D, {})


def _take_direct(
    settings: Settings, shape: PairShape, Q: torch.Tensor, D: torch.Tensor, cu_d: torch.Tensor
) -> list[Row]:
    order = torch.randperm(shape.Nd, generator=torch.Generator().manual_seed(0)).to(settings.device)
    starts, lengths = cu_d[:-1][order].contiguous(), cu_d.diff()[order].contiguous()
    cu_q = torch.tensor([0, len(Q)], dtype=torch.int32, device=settings.device)
    wanted = varlen.reference(Q, D, cu_q, cu_d)[0][order]
    longest = int(lengths.max())

    def forward(impl: str) -> list[Call]:
        f = _function(*_DIRECT[impl])
        return [lambda: f(Q, D, starts, lengths, longest)]

    calls = [
        (FORWARD, "fwd", impl, lambda impl=impl: forward(impl))  # type: ignore[misc]
        for impl in _beside(settings, FLASH)
    ]
    return _measured(settings, shape, calls, wanted, Q, D, {})


def _beside(settings: Settings, peer: str) -> list[str]:
    return [OURS, *(i.name for i in settings.implementations if i.name == peer)]


def _reference(Q: torch.Tensor, D: torch.Tensor, *listed: torch.Tensor) -> torch.Tensor:
    cu_q, cu_d, pair_q, pair_d = listed
    return varlen.reference(Q, D, cu_q, cu_d)[pair_q.long(), pair_d.long()]


def _measured(
    settings: Settings, shape: PairShape, calls: list[tuple[str, str, str, Callable[[], list[Call]]]],
    wanted: torch.Tensor, Q: torch.Tensor, D: torch.Tensor, others: dict[str, Any],
) -> list[Row]:  # fmt: skip
    timed = []
    for variant, op, impl, prepare in calls:
        row = new_row(
            SUITE, shape, op, settings.dtype, impl, variant=variant, input_sets=1, pairs=shape.pairs,
            tokens_q=len(Q), tokens_d=len(D), cublas_tflops=settings.ceilings.cublas_tflops,
        )  # fmt: skip
        timed.append(Timed(row, prepare, others.get(variant, wanted)))
    rows = measure(settings, timed)
    for own in [r for r in rows if r["impl"] == OURS and r["variant"] != DENSE]:
        same = [r for r in rows if r is not own and r["op"] == own["op"]]
        set_ratios(same, "over_ours", own)
    return rows
