"""The fp64 reference that every implementation is compared with before it is timed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from bench.harness.shape import IN_BATCH, Shape
from late_interaction._doctor.checks import relative_error

# Limits of relative error, of scores and of gradients. An einsum in bf16 rounds the similarities. Gradients
# are compared on planted inputs (planted.py). There, rounding a gradient to bf16 comes to 1.7e-3, and to
# 2.3e-3 where grad_scores is rounded too (einsum, some peers).
SCORES, GRADIENTS = 1e-2, 3e-3
_CHUNK_ELEMENTS = 1 << 27  # of fp64 similarities at a time


def _candidates(shape: Shape, D: torch.Tensor) -> torch.Tensor:
    """D as [Nq, K, Ld, d]; pairs are K = 1."""
    return D.view(shape.Nq, shape.Nd, shape.Ld, shape.d)


@torch.no_grad()
def reference_scores(
    shape: Shape, Q: torch.Tensor, D: torch.Tensor, q_mask: torch.Tensor | None = None,
    d_mask: torch.Tensor | None = None, normalize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(scores fp64 [Nq, Nd], winners int64 [Nq, Nd, Lq]), a slice of documents or queries at a time, and of
    the query tokens that meet one document where it is too long for all. A q_mask of numbers is weights.

    Every document must keep a token: the winners of one that does not are not marked.
    """
    Nq, Nd, Lq, Ld, d = shape.Nq, shape.Nd, shape.Lq, shape.Ld, shape.d
    scores = torch.empty(Nq, Nd, dtype=torch.float64, device=Q.device)
    winners = torch.empty(Nq, Nd, Lq, dtype=torch.int64, device=Q.device)

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x.double(), dim=-1) if normalize else x.double()

    def total(best: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """The sum over query tokens, [queries, Lq, documents] -> [queries, documents]."""
        return (best if keep is None else best * keep.unsqueeze(-1)).sum(1)

    if shape.layout == IN_BATCH:
        rows = tokens(Q.reshape(Nq * Lq, d))
        step = max(1, _CHUNK_ELEMENTS // (Nq * Lq * Ld))
        at_once = max(1, _CHUNK_ELEMENTS // (step * Ld))
        for j in range(0, Nd, step):
            docs = tokens(D[j : j + step].reshape(-1, d))
            values, indices = [], []
            for part in rows.split(at_once):
                sims = (part @ docs.T).view(len(part), -1, Ld)
                if d_mask is not None:
                    sims.masked_fill_(~d_mask[j : j + step], -torch.inf)
                best = sims.max(-1)
                values.append(best.values)
                indices.append(best.indices)
            scores[:, j : j + step] = total(torch.cat(values).view(Nq, Lq, -1), q_mask)
            winners[:, j : j + step] = torch.cat(indices).view(Nq, Lq, -1).transpose(1, 2)
    else:
        D = _candidates(shape, D)
        step = max(1, _CHUNK_ELEMENTS // (Nd * Ld * max(Lq, d)))
        for i in range(0, Nq, step):
            docs = tokens(D[i : i + step]).flatten(1, 2)
            sims = torch.bmm(tokens(Q[i : i + step]), docs.transpose(1, 2)).view(-1, Lq, Nd, Ld)
            if d_mask is not None:
                keep = d_mask.view(Nq, 1, Nd, Ld)[i : i + step]
                sims.masked_fill_(~keep, -torch.inf)
            best = sims.max(-1)
            scores[i : i + step] = total(best.values, None if q_mask is None else q_mask[i : i + step])
            winners[i : i + step] = best.indices.transpose(1, 2)
    return scores, winners


@torch.no_grad()
def reference_gradients(
    shape: Shape, Q: torch.Tensor, D: torch.Tensor, grad_scores: torch.Tensor, winners: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 gradients of the scores, given the winners."""
    Nq, Nd, Lq, Ld, d = shape.Nq, shape.Nd, shape.Lq, shape.Ld, shape.d
    grads = grad_scores.double().view(Nq, Nd)
    q = Q.double()
    docs = D.reshape(-1, d)
    grad_Q = torch.zeros(Nq, Lq, d, dtype=torch.float64, device=Q.device)
    grad_D = torch.zeros(docs.shape, dtype=torch.float64, device=Q.device)
    i = torch.arange(Nq, device=Q.device)
    first_row = torch.arange(shape.documents, device=Q.device) * Ld
    for j in range(Nd):
        document = first_row[j].expand(Nq) if shape.layout == IN_BATCH else first_row[i * Nd + j]
        rows = (document[:, None] + winners[:, j].long()).view(-1)  # [Nq * Lq] rows of D
        weight = grads[:, j, None, None]
        grad_Q += weight * docs[rows].double().view(Nq, Lq, d)
        grad_D.index_add_(0, rows, (weight * q).view(-1, d))
    return grad_Q, grad_D.view(D.shape)


@torch.no_grad()
def misplaced_winners(
    shape: Shape, Q: torch.Tensor, D: torch.Tensor, winners: torch.Tensor, best_ones: torch.Tensor,
    rounding: float = 1e-5,
) -> float:  # fmt: skip
    """The fraction of `winners` whose similarity is below the best by more than fp32 rounding."""
    i, j, s = (winners.long() != best_ones).nonzero().unbind(1)
    document = j if shape.layout == IN_BATCH else i * shape.Nd + j
    docs = D.reshape(-1, shape.Ld, shape.d)
    query = Q[i, s].double()

    def similarity(who: torch.Tensor) -> torch.Tensor:
        return (query * docs[document, who[i, j, s].long()].double()).sum(-1)

    best = similarity(best_ones)
    wrong = best - similarity(winners) > rounding * best.abs().clamp_min(1.0)
    return float(wrong.sum()) / max(1, winners.numel())


def worst_error(out: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> float:
    return max(relative_error(o, w) for o, w in zip(out, wanted, strict=True))
