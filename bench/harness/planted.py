"""Inputs whose winners no rounding moves, and their exact gradients.

Some random tokens have two best matches that rounding cannot tell apart. A gradient may then go to the
other one, and the difference hides the error of the gradient's own arithmetic. Here the embedding space is
cut in three orthogonal parts: a few directions, what queries add to them, and what documents add. Every query
token follows one direction, every document holds one token near each direction, and its other tokens meet no
query token: a similarity is 1/2 for the winner and 0, but for rounding, for every other token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.harness.shape import IN_BATCH

MAX_DIRECTIONS = 64


@dataclass
class Planted:
    """Packed tokens: `query` and `kind` name a query token's query and direction, `at` the row of each
    document's token near each direction."""

    Q: torch.Tensor  # [tokens, d]
    D: torch.Tensor  # [tokens, d]
    query: torch.Tensor  # [query tokens]
    kind: torch.Tensor  # [query tokens]
    at: torch.Tensor  # [documents, directions]
    queries: int

    @property
    def directions(self):
        return self.at.shape[1]

    def sums(self):
        """fp64 sums ``[queries, directions, d]`` of each query's tokens that follow a direction."""
        shape = self.queries, self.directions, self.Q.shape[1]
        sums = torch.zeros(shape, dtype=torch.float64, device=self.Q.device)
        return sums.index_put_((self.query, self.kind), self.Q.double(), accumulate=True)


def _ragged(lengths):
    """(sequence, place in it) of every token of sequences end to end."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = lengths.cumsum(0) - lengths
    return sequence, torch.arange(len(sequence), device=lengths.device) - starts[sequence]


def orthogonal_parts(d, count, device):
    """Orthonormal rows: `count` directions, what queries add to them, and what documents add."""
    space = torch.linalg.qr(torch.randn(d, d, device=device)).Q
    return tuple(space.split([count, d // 3, d - count - d // 3]))


def units(part, rows):
    """Random unit rows in a part of the space."""
    return F.normalize(torch.randn(rows, len(part), device=part.device), dim=-1) @ part


def plant(q_lengths, d_lengths, d, dtype):
    """Queries and documents of these lengths, all at least 1."""
    device = q_lengths.device
    query, place = _ragged(q_lengths)
    count = max(1, min(MAX_DIRECTIONS, d // 3, int(q_lengths.max()), int(d_lengths.min())))
    basis, of_queries, of_documents = orthogonal_parts(d, count, device)
    kind = place % count

    def near(which, part):
        return (0.5**0.5 * (basis[which] + units(part, len(which)))).to(dtype)

    # A document's tokens near the directions are evenly spread, from a start that differs by document.
    starts = d_lengths.cumsum(0) - d_lengths
    first = (torch.rand(len(d_lengths), device=device) * d_lengths).long()
    order = torch.arange(count, device=device)
    at = (first[:, None] + order * (d_lengths // count)[:, None]) % d_lengths[:, None] + starts[:, None]
    D = units(of_documents, int(d_lengths.sum())).to(dtype)
    D[at.flatten()] = near(order.repeat(len(d_lengths)), of_documents)
    return Planted(near(kind, of_queries), D, query, kind, at, len(q_lengths))


def plant_shape(shape, device, dtype):
    q_lengths, d_lengths = (
        torch.full((count,), length, device=device)
        for count, length in ((shape.Nq, shape.Lq), (shape.documents, shape.Ld))
    )
    return plant(q_lengths, d_lengths, shape.d, dtype)


def every_pair(shape, grad_scores):
    """grad_scores as [queries, documents], 0 where a layout's pairs do not meet."""
    if shape.layout == IN_BATCH:
        return grad_scores
    out = grad_scores.new_zeros(shape.Nq, shape.Nq, shape.Nd)
    own = torch.arange(shape.Nq, device=out.device)
    out[own, own] = grad_scores.view(shape.Nq, shape.Nd)
    return out.flatten(1)


def gradients(planted, grad_scores, D=None, project=None, weights=()):
    """fp64 gradients of Q, of D and of `weights`, for grad_scores [queries, documents]. With `project`, D
    are the rows [tokens, ...] that it takes to the planted ones."""
    given = planted.D if D is None else D
    rows = given[planted.at.flatten()].double().requires_grad_()
    sums = planted.sums().requires_grad_()
    winners = rows if project is None else project(rows)
    scores = torch.einsum("ipd,jpd->ij", sums, winners.view(*planted.at.shape, -1))
    of_sums, of_rows, *others = torch.autograd.grad(scores, (sums, rows, *weights), grad_scores.double())
    of_D = torch.zeros(given.shape, dtype=torch.float64, device=given.device)
    of_D[planted.at.flatten()] = of_rows
    return [of_sums[planted.query, planted.kind], of_D, *others]


def known_step(shape, grad_scores, dtype):
    """Planted tokens of a shape, the gradient of their scores, and their exact gradients."""
    planted = plant_shape(shape, grad_scores.device, dtype)
    tokens = planted.Q.view(shape.q_shape), planted.D.view(shape.d_shape)
    return tokens, grad_scores, gradients(planted, every_pair(shape, grad_scores))
