"""Packed sequences of different lengths, and the same sequences padded: ours beside maxsim_varlen and
maxsim_padded of late-interaction-kernels."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from bench.harness.inputs import draw_packed, sets_of_bytes
from bench.harness.interleaved import Timed, check_gradients, measure, set_ratios
from bench.harness.library import LIK, OURS, UnsupportedError, training_step
from bench.harness.planted import Planted, every_pair, gradients, plant
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import IN_BATCH, KD, Shape
from bench.harness.timing import Call

SUITE = "varlen"
FORWARD, STEP = "forward", "forward + backward"
PADDED, PADDED_STEP = "padded", "padded, forward + backward"
ALL = (FORWARD, STEP, PADDED, PADDED_STEP)

_PACKAGES = {OURS: "late_interaction.lik", LIK: "late_interaction_kernels"}
Scores = Callable[..., torch.Tensor]


def _function(impl: str, module: str) -> Scores:
    path = f"{_PACKAGES[impl]}.{module}"
    try:
        function: Scores = getattr(importlib.import_module(path), f"maxsim_{module}")
    except (ImportError, AttributeError) as missing:
        raise UnsupportedError(f"there is no {path}.maxsim_{module}") from missing
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


def padded(
    tokens: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, filler: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed sequences as [n, longest, d], lengths). Padding is not zero: a score with it is wrong."""
    lengths = cu_seqlens.diff()
    out = tokens.new_full((len(lengths), longest, tokens.shape[-1]), filler)
    out[torch.arange(longest, device=tokens.device) < lengths.unsqueeze(1)] = tokens
    return out, lengths


@dataclass(frozen=True)
class _Case:
    """One function on one form of the sequences: `sets` hold Q and D, `others` the arguments after them."""

    module: str
    variants: tuple[str, str]  # forward; with both gradients
    sets: list[tuple[torch.Tensor, torch.Tensor]]
    others: tuple[torch.Tensor, ...]
    options: dict[str, int]
    wanted: torch.Tensor  # scores of the first set
    grad: torch.Tensor
    planted: tuple[torch.Tensor, torch.Tensor]
    of_planted: list[torch.Tensor]  # its gradients

    def forward(self, impl: str) -> list[Call]:
        f = _function(impl, self.module)
        return [lambda x=x: f(*x, *self.others, **self.options) for x in self.sets]  # type: ignore[misc]

    def _step(self, f: Scores, x: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], tuple[Any, ...]]:
        leaves = x[0].detach().requires_grad_(), x[1].detach().requires_grad_()
        return training_step(lambda *inputs: f(*inputs, *self.others, **self.options), leaves, self.grad)

    def step(self, impl: str) -> list[Call]:
        f = _function(impl, self.module)
        return [self._step(f, x) for x in self.sets]

    def check(self, impl: str) -> Callable[[Row, object], None]:
        def check(row: Row, out: object) -> None:
            step = self._step(_function(impl, self.module), self.planted)
            check_gradients(step, self.of_planted)(row, out)

        return check


@dataclass(frozen=True)
class _Batch:
    """Packed sequences, several sets of tokens with the same lengths, and planted ones."""

    sets: list[tuple[torch.Tensor, torch.Tensor]]
    cu_q: torch.Tensor
    cu_d: torch.Tensor
    planted: Planted
    wanted: torch.Tensor  # fp64 scores of the first set, [queries, documents]


def _draw(settings: Settings, shape: Shape) -> _Batch:
    drawn = dataclasses.replace(shape, Nd=shape.documents)
    Q, D, cu_q, cu_d = draw_packed(drawn, settings.device, settings.dtype)
    count = sets_of_bytes((Q.numel() + D.numel()) * Q.element_size(), settings.cache_bytes)
    more = (draw_packed(drawn, settings.device, settings.dtype)[:2] for _ in range(count - 1))
    planted = plant(cu_q.diff().long(), cu_d.diff().long(), shape.d, settings.dtype)
    return _Batch([(Q, D), *more], cu_q, cu_d, planted, reference(Q, D, cu_q, cu_d))


def _packed(batch: _Batch) -> _Case:
    grad = torch.randn_like(batch.wanted, dtype=torch.float32)
    longest = {"max_seqlen_q": int(batch.cu_q.diff().max()), "max_seqlen_d": int(batch.cu_d.diff().max())}
    planted = batch.planted
    return _Case(
        "varlen", (FORWARD, STEP), batch.sets, (batch.cu_q, batch.cu_d), longest, batch.wanted, grad,
        (planted.Q, planted.D), gradients(planted, grad),
    )  # fmt: skip


def _padded(batch: _Batch, shape: Shape) -> _Case:
    """The same sequences for maxsim_padded, where each query has its own documents."""
    own_documents = (shape.Nq, shape.Nd)

    def form(Q: torch.Tensor, D: torch.Tensor, filler: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
        documents = padded(D, batch.cu_d, shape.Ld, filler)[0].unflatten(0, own_documents)
        return padded(Q, batch.cu_q, shape.Lq, filler)[0], documents

    wanted = batch.wanted.view(shape.Nq, *own_documents).diagonal().T
    grad = torch.randn_like(wanted, dtype=torch.float32).contiguous()
    own = every_pair(dataclasses.replace(shape, layout=KD), grad)
    exact = form(*gradients(batch.planted, own), 0.0)  # type: ignore[misc]  # padding has no gradient
    lengths = batch.cu_q.diff(), batch.cu_d.diff().unflatten(0, own_documents)
    return _Case(
        "padded", (PADDED, PADDED_STEP), [form(*x) for x in batch.sets], lengths, {}, wanted, grad,
        form(batch.planted.Q, batch.planted.D), [*exact],
    )  # fmt: skip


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    """Queries of up to Lq tokens, documents of up to Ld, most of them short."""
    batch = _draw(settings, shape)
    cases = []
    if shape.layout == IN_BATCH:
        cases.append(_packed(batch))
    if shape.layout == KD or shape.Nq == 1:
        cases.append(_padded(batch, shape))
    Q, D = batch.sets[0]
    tokens = {"tokens_q": len(Q), "tokens_d": len(D)}
    return [row for case in cases for row in _measured(settings, shape, case, tokens)]


def _measured(settings: Settings, shape: Shape, case: _Case, tokens: dict[str, int]) -> list[Row]:
    impls = [OURS, *(i.name for i in settings.implementations if i.name == LIK)]
    # maxsim_padded of late-interaction-kernels reads the longest lengths back on every call.
    waits = LIK in impls and case.module == "padded"
    rows = []
    for variant, op in zip(case.variants, ("fwd", "fwd+bwd"), strict=True):
        timed = []
        for impl in impls:
            row = new_row(
                SUITE, shape, op, settings.dtype, impl, variant=variant, input_sets=len(case.sets), **tokens,
                cublas_tflops=settings.ceilings.cublas_tflops,
            )  # fmt: skip
            prepare = partial(case.forward if op == "fwd" else case.step, impl)
            check = None if op == "fwd" else case.check(impl)
            timed.append(Timed(row, prepare, case.wanted, check, capture=not waits))
        found = measure(settings, timed)
        set_ratios(found[1:], "over_ours", found[0])
        rows += found
    return rows
