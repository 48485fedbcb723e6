"""Listed pairs of packed batches, and one query with documents in no order: ours beside the peers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.harness.inputs import draw_packed, sets_of_bytes
from bench.harness.interleaved import Timed, check_gradients, measure, set_ratios
from bench.harness.library import FLASH, LIK, OURS, UnsupportedError, training_step
from bench.harness.planted import gradients, plant
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import PairShape, Shape
from bench.harness.timing import Call
from bench.suites import varlen

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
    """Distinct pairs in no order; every document occurs equally often."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(shape.Nd, generator=generator)
    place = torch.arange(shape.pairs)
    shift = torch.randint(shape.Nq, (shape.Nd,), generator=generator)
    pair_d = order[place % shape.Nd]
    pair_q = (shift[pair_d] + place // shape.Nd) % shape.Nq
    shuffle = torch.randperm(shape.pairs, generator=generator)
    return pair_q[shuffle].int().to(device), pair_d[shuffle].int().to(device)


@dataclass(frozen=True)
class _Call:
    """One row to measure."""

    variant: str
    op: str
    impl: str
    prepare: Callable[[], list[Call]]
    wanted: torch.Tensor
    check: Callable[[Row, object], None] | None = None


@dataclass(frozen=True)
class _Batch:
    """Packed sequences of the same lengths, several sets of tokens."""

    sets: list[tuple[torch.Tensor, torch.Tensor]]
    cu_q: torch.Tensor
    cu_d: torch.Tensor


def _draw(settings: Settings, shape: PairShape) -> _Batch:
    Q, D, cu_q, cu_d = draw_packed(shape, settings.device, settings.dtype, shape.even)
    count = sets_of_bytes((Q.numel() + D.numel()) * Q.element_size(), settings.cache_bytes)
    more = (draw_packed(shape, settings.device, settings.dtype, shape.even)[:2] for _ in range(count - 1))
    return _Batch([(Q, D), *more], cu_q, cu_d)


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    assert isinstance(shape, PairShape)
    batch = _draw(settings, shape)
    calls = _direct(settings, batch) if shape.Nq == 1 else _listed(settings, shape, batch)
    return _measured(settings, shape, calls, batch)


def _listed(settings: Settings, shape: PairShape, batch: _Batch) -> list[_Call]:
    cu_q, cu_d = batch.cu_q, batch.cu_d
    pair_q, pair_d = _draw_pairs(shape, settings.device)
    wanted = varlen.reference(*batch.sets[0], cu_q, cu_d)[pair_q.long(), pair_d.long()]
    grad = torch.randn_like(wanted, dtype=torch.float32)
    longest = {"max_seqlen_q": int(cu_q.diff().max()), "max_seqlen_d": int(cu_d.diff().max())}
    planted = plant(cu_q.diff().long(), cu_d.diff().long(), shape.d, settings.dtype)
    of_pairs = grad.new_zeros(shape.Nq, shape.Nd)
    of_pairs[pair_q.long(), pair_d.long()] = grad
    of_planted = gradients(planted, of_pairs)

    def scores(impl: str) -> Callable[..., torch.Tensor]:
        f = _function(*_PATHS[impl])
        return lambda Q, D: f(Q, D, cu_q, cu_d, pair_q, pair_d, **longest)

    def forward(impl: str) -> list[Call]:
        f = scores(impl)
        return [lambda x=x: f(*x) for x in batch.sets]  # type: ignore[misc]

    def step(impl: str, sets: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
        f = scores(impl)
        return [
            training_step(f, (Q.detach().requires_grad_(), D.detach().requires_grad_()), grad)
            for Q, D in sets
        ]

    def check(impl: str, row: Row, out: object) -> None:
        check_gradients(step(impl, [(planted.Q, planted.D)])[0], of_planted)(row, out)

    beside = _beside(settings, LIK)
    calls = [_Call(FORWARD, "fwd", impl, partial(forward, impl), wanted) for impl in beside]
    calls += [
        _Call(STEP, "fwd+bwd", impl, partial(step, impl, batch.sets), wanted, partial(check, impl))
        for impl in beside
    ]
    if shape.pairs == shape.Nq * shape.Nd and shape.even:  # the same scores by a dense call
        maxsim = _function("late_interaction", "maxsim")
        dense = [(Q.view(shape.q_shape), D.view(shape.d_shape)) for Q, D in batch.sets]
        every = wanted.new_empty(shape.scores_shape)
        every[pair_q.long(), pair_d.long()] = wanted
        calls.append(
            _Call(DENSE, "fwd", OURS, lambda: [lambda x=x: maxsim(*x) for x in dense], every)  # type: ignore[misc]
        )
    return calls


def _direct(settings: Settings, batch: _Batch) -> list[_Call]:
    order = torch.randperm(len(batch.cu_d) - 1, generator=torch.Generator().manual_seed(0))
    order = order.to(settings.device)
    starts, lengths = batch.cu_d[:-1][order].contiguous(), batch.cu_d.diff()[order].contiguous()
    wanted = varlen.reference(*batch.sets[0], batch.cu_q, batch.cu_d)[0][order]
    longest = int(lengths.max())

    def forward(impl: str) -> list[Call]:
        f = _function(*_DIRECT[impl])
        return [lambda x=x: f(*x, starts, lengths, longest) for x in batch.sets]  # type: ignore[misc]

    return [_Call(FORWARD, "fwd", impl, partial(forward, impl), wanted) for impl in _beside(settings, FLASH)]


def _beside(settings: Settings, peer: str) -> list[str]:
    return [OURS, *(i.name for i in settings.implementations if i.name == peer)]


def _measured(settings: Settings, shape: PairShape, calls: Sequence[_Call], batch: _Batch) -> list[Row]:
    tokens = dict(zip(("tokens_q", "tokens_d"), map(len, batch.sets[0]), strict=True))
    rows: list[Row] = []
    for op in dict.fromkeys(call.op for call in calls):
        timed = []
        for call in (c for c in calls if c.op == op):
            row = new_row(
                SUITE, shape, op, settings.dtype, call.impl, variant=call.variant,
                input_sets=len(batch.sets), pairs=shape.pairs, **tokens,
                cublas_tflops=settings.ceilings.cublas_tflops,
            )  # fmt: skip
            timed.append(Timed(row, call.prepare, call.wanted, call.check))
        found = measure(settings, timed)
        set_ratios(found[1:], "over_ours", found[0])
        rows += found
    return rows
