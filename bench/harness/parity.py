"""The fp64 reference that every implementation is compared with before it is timed."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from bench.harness.shape import IN_BATCH
from late_interaction._doctor.checks import relative_error

# Limits of relative error, of scores and of gradients. An einsum in bf16 rounds the similarities. Gradients
# are compared on planted inputs (planted.py). There, rounding a gradient to bf16 comes to 1.7e-3, and to
# 2.3e-3 where grad_scores is rounded too (einsum, some peers).
SCORES, GRADIENTS = 1e-2, 3e-3
_CHUNK_ELEMENTS = 1 << 27  # of fp64 similarities at a time


@torch.no_grad()
def reference_scores(shape, Q, D, q_mask=None, d_mask=None, normalize=False):
    """(scores fp64 [Nq, Nd], winners int64 [Nq, Nd, Lq]), a slice of documents at a time, and of the query
    tokens that meet one document where it is too long for all. A query with documents of its own is scored
    alone. A q_mask of numbers is weights.

    Every document must keep a token: the winners of one that does not are not marked.
    """
    Nq, Nd, Lq, Ld, d = shape.Nq, shape.Nd, shape.Lq, shape.Ld, shape.d
    if shape.layout != IN_BATCH:
        alone, D = replace(shape, Nq=1, layout=IN_BATCH), D.view(Nq, Nd, Ld, d)
        q_masks = [None] * Nq if q_mask is None else q_mask.split(1)
        d_masks = [None] * Nq if d_mask is None else d_mask.view(Nq, Nd, Ld)
        each = zip(Q.split(1), D, q_masks, d_masks, strict=True)
        parts = [reference_scores(alone, *own, normalize) for own in each]
        return torch.cat([scores for scores, _ in parts]), torch.cat([winners for _, winners in parts])
    scores = torch.empty(Nq, Nd, dtype=torch.float64, device=Q.device)
    winners = torch.empty(Nq, Nd, Lq, dtype=torch.int64, device=Q.device)

    def tokens(x):
        return F.normalize(x.double(), dim=-1) if normalize else x.double()

    rows = tokens(Q.reshape(Nq * Lq, d))
    step = max(1, _CHUNK_ELEMENTS // (Nq * Lq * Ld))
    at_once = max(1, _CHUNK_ELEMENTS // (step * Ld))
    for j in range(0, Nd, step):
        docs = tokens(D[j : j + step].reshape(-1, d))
        found = []
        for part in rows.split(at_once):
            sims = (part @ docs.T).view(len(part), -1, Ld)
            if d_mask is not None:
                sims.masked_fill_(~d_mask[j : j + step], -torch.inf)
            found.append(sims.max(-1))
        best = torch.cat([x.values for x in found]).view(Nq, Lq, -1)
        scores[:, j : j + step] = (best if q_mask is None else best * q_mask.unsqueeze(-1)).sum(1)
        winners[:, j : j + step] = torch.cat([x.indices for x in found]).view(Nq, Lq, -1).transpose(1, 2)
    return scores, winners


@torch.no_grad()
def reference_gradients(shape, Q, D, grad_scores, winners):
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
def misplaced_winners(shape, Q, D, winners, best_ones, rounding=1e-5):
    """The fraction of `winners` whose similarity is below the best by more than fp32 rounding."""
    i, j, s = (winners.long() != best_ones).nonzero().unbind(1)
    document = j if shape.layout == IN_BATCH else i * shape.Nd + j
    docs = D.reshape(-1, shape.Ld, shape.d)
    query = Q[i, s].double()

    def similarity(who):
        return (query * docs[document, who[i, j, s].long()].double()).sum(-1)

    best = similarity(best_ones)
    wrong = best - similarity(winners) > rounding * best.abs().clamp_min(1.0)
    return float(wrong.sum()) / max(1, winners.numel())


def worst_error(out, wanted):
    return max(relative_error(o, w) for o, w in zip(out, wanted, strict=True))
