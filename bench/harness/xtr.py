"""Exact XTR scores by the paper's rule, and planted inputs whose selection no rounding moves.

A query token selects the k largest of its similarities with all document tokens. A document's score is the
sum of its largest selected similarities over the number of query tokens that have one. Random tokens have
similarities near the threshold that rounding can move over it. In planted inputs every query token follows
one direction. It has k similarities of 0.53 or, once in each document, of 0.67; up to as many of 0.35, which
are not selected; and all others are 0.
"""

import torch

from bench.harness.inputs import Inputs
from bench.harness.planted import MAX_DIRECTIONS, orthogonal_parts, units

_CHUNK_ELEMENTS = 1 << 27  # of fp64 similarities at a time
# Cosines of planted document tokens with their direction; that of a query token is the root of 1/2.
_WINNER, _SELECTED, _PASSED_OVER = 0.95, 0.75, 0.5


@torch.no_grad()
def exact_scores(Q, D, k):
    """fp64 scores ``[Nq, Nd]``, the grid of some queries at a time. No two similarities may be equal."""
    (Nd, Ld), Lq = D.shape[:2], Q.shape[1]
    tokens = D.double().flatten(0, 1)
    scores = []
    for queries in Q.double().split(max(1, _CHUNK_ELEMENTS // (Lq * len(tokens)))):
        grid = queries.flatten(0, 1) @ tokens.T
        least = grid.topk(min(k, len(tokens)), sorted=False).values.amin(-1, keepdim=True)
        maxima = grid.masked_fill_(grid < least, -torch.inf).view(-1, Lq, Nd, Ld).amax(-1)
        selected = maxima > -torch.inf
        scores.append(maxima.masked_fill_(~selected, 0.0).sum(1) / selected.sum(1).clamp_min(1))
    return torch.cat(scores)


def plant_selection(shape, k, grad_scores, dtype):
    """Planted inputs; their scores and the gradients of Q and D, in float64."""
    device, tokens = grad_scores.device, shape.Nd * shape.Ld
    k = min(k, tokens)
    count = max(1, min(MAX_DIRECTIONS, shape.d // 3, shape.Lq, 4 * tokens // (5 * k)))
    basis, of_queries, of_documents = orthogonal_parts(shape.d, count, device)

    def near(kind, cosine, part):
        cosine = cosine.unsqueeze(-1)
        return (cosine * basis[kind] + (1 - cosine**2).sqrt() * units(part, len(kind))).to(dtype)

    kind = torch.randint(count, (shape.Nq, shape.Lq), device=device)
    Q = near(kind.flatten(), torch.full((kind.numel(),), 0.5**0.5, device=device), of_queries)
    # Near a direction lie k tokens that are selected and up to k, in other documents, that are passed over.
    near_one = min(2 * k, tokens // count)
    places = torch.randperm(tokens, device=device)[: count * near_one].view(count, near_one)
    ranks = torch.rand(count, shape.Nd, device=device).gather(1, places // shape.Ld)
    places = places.gather(1, ranks.argsort(1))
    chosen = places[:, :k]
    document = chosen // shape.Ld
    winners = torch.full((count, shape.Nd), tokens, device=device)  # `tokens` where none is selected
    winners.scatter_reduce_(1, document, chosen, "amin")
    cosines = torch.full(places.shape, _PASSED_OVER, device=device)
    cosines[:, :k] = torch.where(chosen == winners.gather(1, document), _WINNER, _SELECTED)
    D = units(of_documents, tokens).to(dtype)
    own = torch.arange(count, device=device).repeat_interleave(near_one)
    D[places.flatten()] = near(own, cosines.flatten(), of_documents)
    inputs = Inputs(Q.view(shape.q_shape), D.view(shape.d_shape), grad_scores)
    return inputs, _results(inputs, kind, winners)


def _results(x, kind, winners):
    """Scores and gradients. `kind` ``[Nq, Lq]`` names a query token's direction, `winners` ``[directions,
    Nd]`` the document token that its maximum is of."""
    rows = x.D.double().flatten(0, 1)
    selected = winners < len(rows)
    best = rows[winners.clamp_max(len(rows) - 1)] * selected.unsqueeze(-1)
    query = torch.arange(len(kind), device=kind.device).unsqueeze(1).expand_as(kind)
    sums = rows.new_zeros(len(kind), len(winners), rows.shape[1])
    sums.index_put_((query, kind), x.Q.double(), accumulate=True)
    times = torch.nn.functional.one_hot(kind, len(winners)).sum(1).double()
    divisors = (times @ selected.double()).clamp_min_(1.0)
    grad = x.grad_scores.double() / divisors
    of_Q = torch.einsum("ij,pjd->ipd", grad, best)[query, kind]
    of_D = torch.zeros_like(rows)
    of_D[winners[selected]] = torch.einsum("ij,ipd->pjd", grad, sums)[selected]
    return [torch.einsum("ipd,pjd->ij", sums, best) / divisors, of_Q, of_D.view(x.D.shape)]
