"""Packed sequences of lengths of their own, and the same ones padded: ours beside late-interaction-kernels'
maxsim_varlen and maxsim_padded."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from .impls import LIK, OURS, UnsupportedError
from .inputs import draw_packed
from .results import Row, new_row
from .shapes import IN_BATCH, KD, Shape
from .suites import Settings
from .timing import Call
from .together import Timed, measure, set_ratios

SUITE = "varlen"
FORWARD, STEP = "forward", "forward + backward"
PADDED, PADDED_STEP = "padded", "padded, forward + backward"

_PACKAGES = {OURS: "late_interaction", LIK: "late_interaction_kernels"}
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


def padded(tokens: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed sequences as [n, longest, d], lengths). The padding is no zeros: it shows where it counts."""
    lengths = cu_seqlens.diff()
    out = tokens.new_full((len(lengths), longest, tokens.shape[-1]), 2.0)
    out[torch.arange(longest, device=tokens.device) < lengths.unsqueeze(1)] = tokens
    return out, lengths


@dataclass(frozen=True)
class _Case:
    """One function on one form of the same sequences: `leaves` are Q and D, `others` what follows them."""

    module: str
    variants: tuple[str, str]  # forward; with both gradients
    leaves: tuple[torch.Tensor, torch.Tensor]
    others: tuple[torch.Tensor, ...]
    options: dict[str, int]
    wanted: torch.Tensor

    def forward(self, impl: str) -> list[Call]:
        f = _function(impl, self.module)
        return [lambda: f(*self.leaves, *self.others, **self.options)]

    def step(self, impl: str) -> list[Call]:
        f = _function(impl, self.module)
        leaves = [x.detach().requires_grad_() for x in self.leaves]
        grad = torch.randn_like(self.wanted, dtype=torch.float32)

        def run() -> tuple[torch.Tensor, ...]:
            scores = f(*leaves, *self.others, **self.options)
            return (scores.detach(), *torch.autograd.grad(scores, leaves, grad))

        return [run]


def take(settings: Settings, shape: Shape) -> list[Row]:
    """Queries of up to Lq tokens, documents of up to Ld, most of them short."""
    drawn = dataclasses.replace(shape, Nd=shape.documents)
    Q, D, cu_q, cu_d = draw_packed(drawn, settings.device, settings.dtype)
    wanted = reference(Q, D, cu_q, cu_d)
    cases = []
    if shape.layout == IN_BATCH:
        longest = {"max_seqlen_q": int(cu_q.diff().max()), "max_seqlen_d": int(cu_d.diff().max())}
        cases.append(_Case("varlen", (FORWARD, STEP), (Q, D), (cu_q, cu_d), longest, wanted))
    if shape.layout == KD or shape.Nq == 1:  # maxsim_padded has documents of each query's own
        queries, query_lengths = padded(Q, cu_q, shape.Lq)
        documents, lengths = (x.unflatten(0, (shape.Nq, shape.Nd)) for x in padded(D, cu_d, shape.Ld))
        leaves, others = (queries, documents), (query_lengths, lengths)
        own = wanted.view(shape.Nq, shape.Nq, shape.Nd).diagonal().T
        cases.append(_Case("padded", (PADDED, PADDED_STEP), leaves, others, {}, own))
    tokens = {"tokens_q": len(Q), "tokens_d": len(D)}
    return [row for case in cases for row in _measured(settings, shape, case, tokens)]


def _measured(settings: Settings, shape: Shape, case: _Case, tokens: dict[str, int]) -> list[Row]:
    theirs = [LIK] if any(i.name == LIK for i in settings.implementations) else []
    timed = []
    forward, step = case.variants
    for variant, op, prepare in ((forward, "fwd", case.forward), (step, "fwd+bwd", case.step)):
        for impl in (OURS, *theirs):
            row = new_row(
                SUITE, shape, op, settings.dtype, impl, variant=variant, input_sets=1, **tokens,
                cublas_tflops=settings.ceilings.cublas_tflops,
            )  # fmt: skip
            waits = impl == LIK and case.module == "padded"  # it reads the longest lengths back on every call
            timed.append(Timed(row, partial(prepare, impl), case.wanted, capture=not waits))
    rows = measure(settings, timed)
    for own, *others in (rows[: 1 + len(theirs)], rows[1 + len(theirs) :]):
        set_ratios(others, "over_ours", own)
    return rows
