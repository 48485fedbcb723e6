"""Whole losses, forward and backward, with the MaxSim of each library: the explicit-negative heads of
colpali-engine and the chunked contrastive loss of PyLate. They are written out here, so neither package
need be installed.

A loss reads from the device in the middle, as theirs do, so it cannot be captured and is timed by events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.harness.inputs import draw
from bench.harness.interleaved import Timed, measure, set_ratios
from bench.harness.library import EINSUM, Implementation
from bench.harness.parity import GRADIENTS, SCORES, reference_gradients, reference_scores, worst_error
from bench.harness.results import Row, new_row
from bench.harness.settings import Settings
from bench.harness.shape import IN_BATCH, KD, PAIRS, Shape
from bench.harness.timing import Call, Effort
from bench.peers.implementations import Einsum, Lik, Ours, similarity_einsum

SUITE = "heads"
ALONE, WITH_IN_BATCH, CHUNKED = "explicit negatives", "with in-batch term", "chunked contrastive"
PAIRWISE = "with pairwise in-batch term"
ALL = (ALONE, WITH_IN_BATCH, PAIRWISE, CHUNKED)
TEMPERATURE = 0.02
# Limits of relative error for the einsum's losses and gradients. It rounds similarities to bf16, which moves
# winners, and the loss divides the scores by a temperature.
ROUNDED_LOSS, ROUNDED_GRADIENTS = 5e-2, 0.6
# The chunked loss has most of its gradient in each query's own document: winners there that rounding may have
# moved.
MOVED = 3
CHUNK = 32  # queries, and documents, that the contrastive loss scores at a time

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """One library's MaxSim in the three layouts that losses use."""

    every: Score  # [B, Lq, d], [C, Ld, d] -> [B, C]
    pairs: Score  # [B, Lq, d], [B, Ld, d] -> [B]
    own: Score  # [B, Lq, d], [B, n, Ld, d] -> [B, n]


def _einsum(layout: str) -> Score:
    """As colpali-engine and PyLate write it."""
    return lambda Q, D: torch.einsum(similarity_einsum(layout), Q, D).amax(-1).sum(-1)


def _scores(impl: Implementation, shape: Shape) -> Scores:
    if isinstance(impl, Einsum):
        return Scores(_einsum(IN_BATCH), _einsum(PAIRS), _einsum(KD))
    every, pairs, own = (
        impl.score(dataclasses.replace(shape, layout=layout), "auto", train=True)
        for layout in (IN_BATCH, PAIRS, KD)
    )
    return Scores(every, pairs, own)


# ---- the losses ----


def _by_length(scores: torch.Tensor, Q: torch.Tensor) -> torch.Tensor:
    """Scores over the number of query tokens without padding. Prints a warning if one is out of bounds, which
    reads from the device."""
    lengths = (Q[:, :, 0] != 0).sum(1)
    scores = scores / lengths.view(-1, *[1] * (scores.dim() - 1))
    least, most = torch.aminmax(scores)
    if least < -1.001 or most > 1.001:
        print(f"normalized scores between {least.item():.3f} and {most.item():.3f}")
    return scores


def _pairwise(scores: torch.Tensor) -> torch.Tensor:
    """Each query's positive, on the diagonal, against the best of the other documents alone."""
    own = scores.diagonal()
    best, second = scores.topk(2, dim=1).values.unbind(1)
    return F.softplus((torch.where(best == own, second, best) - own) / TEMPERATURE).mean()


def _contrastive(scores: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores / TEMPERATURE, torch.arange(len(scores), device=scores.device))


def negative_head(
    scores: Scores, Q: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor, in_batch: float,
    pairwise: bool = False,
) -> torch.Tensor:  # fmt: skip
    """colpali-engine's ColbertNegativeCELoss, or its ColbertPairwiseNegativeCELoss, by default. `in_batch`
    weighs the in-batch term, in which alone they differ."""
    of_positives = _by_length(scores.pairs(Q, positives), Q)
    of_negatives = _by_length(scores.own(Q, negatives), Q)
    loss = F.softplus((of_negatives - of_positives.unsqueeze(1)) / TEMPERATURE).mean()
    if in_batch > 0:
        of_all = _by_length(scores.every(Q, positives), Q)
        term = _pairwise if pairwise else _contrastive
        loss = loss * (1 - in_batch) + term(of_all) * in_batch
    return loss


def chunked_contrastive(scores: Scores, Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
    """PyLate's CachedContrastive loss, whose gradients go to Q.grad and D.grad chunk by chunk."""
    total = torch.zeros((), device=Q.device)
    for start in range(0, len(Q), CHUNK):
        queries = Q[start : start + CHUNK]
        tile = torch.cat([scores.every(queries, D[j : j + CHUNK]) for j in range(0, len(D), CHUNK)], dim=1)
        labels = torch.arange(start, start + len(queries), device=Q.device)
        loss = F.cross_entropy(tile, labels, reduction="sum")
        loss.backward()
        total += loss.detach()
    return total / len(Q)


# ---- the exact results ----


def _exact(
    shape: Shape, Q: torch.Tensor, D: torch.Tensor
) -> tuple[torch.Tensor, Callable[[], list[torch.Tensor]]]:
    """fp64 scores to compute a loss from, and a function that, after its backward, returns the gradients of Q
    and D."""
    scores, winners = reference_scores(shape, Q.detach(), D.detach())
    scores.requires_grad_()

    def gradients() -> list[torch.Tensor]:
        assert scores.grad is not None
        return list(reference_gradients(shape, Q.detach(), D.detach(), scores.grad, winners))

    return scores.squeeze(1) if shape.layout == PAIRS else scores, gradients


@dataclass
class Step:
    """A loss on one set of inputs, and its exact results."""

    run: Callable[[Scores], tuple[torch.Tensor, ...]]  # the loss and the gradients of all inputs
    wanted: list[torch.Tensor]


def _negative_step(settings: Settings, shape: Shape, in_batch: float, pairwise: bool = False) -> Step:
    pairs = dataclasses.replace(shape, Nd=1, layout=PAIRS)
    grid = dataclasses.replace(shape, Nd=shape.Nq, layout=IN_BATCH)
    x = draw(shape, settings.device, settings.dtype)
    positives = draw(pairs, settings.device, settings.dtype).D
    leaves = (x.Q, positives, x.D)

    (p, p_gradients), (n, n_gradients) = _exact(pairs, x.Q, positives), _exact(shape, x.Q, x.D)
    g, g_gradients = _exact(grid, x.Q, positives) if in_batch else (p, lambda: [0.0, 0.0])
    exact = Scores(lambda *_: g, lambda *_: p, lambda *_: n)
    loss = negative_head(exact, x.Q, positives, x.D, in_batch, pairwise)
    loss.backward()
    (q_p, d_p), (q_n, d_n), (q_g, d_g) = p_gradients(), n_gradients(), g_gradients()
    for leaf in leaves:
        leaf.requires_grad_()

    def run(scores: Scores) -> tuple[torch.Tensor, ...]:
        loss = negative_head(scores, *leaves, in_batch, pairwise)
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    return Step(run, [loss.detach(), q_p + q_n + q_g, d_p + d_g, d_n])


def _chunked_step(settings: Settings, shape: Shape) -> Step:
    x = draw(shape, settings.device, settings.dtype)
    exact, gradients = _exact(shape, x.Q, x.D)
    loss = F.cross_entropy(exact, torch.arange(shape.Nq, device=x.Q.device), reduction="sum")
    loss.backward()
    wanted = [loss.detach() / shape.Nq, *gradients()]
    x.require_grad()

    def run(scores: Scores) -> tuple[torch.Tensor, ...]:
        loss = chunked_contrastive(scores, x.Q, x.D)
        assert x.Q.grad is not None and x.D.grad is not None
        out = loss, x.Q.grad, x.D.grad
        x.Q.grad = x.D.grad = None
        return out

    return Step(run, wanted)


def measure_shape(settings: Settings, shape: Shape) -> list[Row]:
    # Steps take up to a second each.
    settings = dataclasses.replace(settings, effort=_short(settings.effort))
    if shape.layout == IN_BATCH:
        return _measured(settings, shape, CHUNKED, _chunked_step(settings, shape))
    rows = _measured(settings, shape, ALONE, _negative_step(settings, shape, 0.0))
    rows += _measured(settings, shape, WITH_IN_BATCH, _negative_step(settings, shape, 0.5))
    return rows + _measured(settings, shape, PAIRWISE, _negative_step(settings, shape, 0.5, pairwise=True))


def _short(effort: Effort) -> Effort:
    return dataclasses.replace(effort, min_replays=4, min_walls=1)


def _measured(settings: Settings, shape: Shape, variant: str, step: Step) -> list[Row]:
    timed = []
    for impl in settings.implementations:
        if not isinstance(impl, Einsum | Lik | Ours):
            continue
        rounds = impl.moves_winners(settings.dtype)
        limit = ROUNDED_GRADIENTS if rounds else GRADIENTS
        if variant == CHUNKED:
            limit = max(limit, (2 * MOVED / (shape.Nq * shape.Lq)) ** 0.5)

        def check(row: Row, out: object, limit: float = limit) -> None:
            assert isinstance(out, tuple)
            row["grad_err"] = worst_error(out, step.wanted)
            if not row["grad_err"] <= limit:
                raise ValueError(f"parity: a gradient is off by {row['grad_err']:.2g}, not timed")

        def prepare(impl: Implementation = impl) -> list[Call]:
            scores = _scores(impl, shape)
            return [lambda: step.run(scores)]

        row = new_row(SUITE, shape, "fwd+bwd", settings.dtype, impl.name, variant=variant)
        off = ROUNDED_LOSS if rounds else SCORES
        timed.append(Timed(row, prepare, step.wanted[0], check, capture=False, tolerance=off))
    rows = measure(settings, timed)
    for base in [r for r in rows if r["impl"] == EINSUM]:
        set_ratios([r for r in rows if r is not base], "over_einsum", base)
    return rows
