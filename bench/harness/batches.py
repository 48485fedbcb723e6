"""Batches of queries and their documents for contrastive losses, and the exact losses and gradients.

Two kinds of inputs. Those that are timed are random unit tokens, each document drawn towards its query, so
that a query's own document stands out about as in a trained model. Gradients are compared on planted inputs
(planted.py) whose documents lean towards queries, each most towards its own: their scores are one matrix
product, so the exact loss and gradients take a second at any batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.harness.inputs import draw, draw_packed
from bench.harness.parity import worst_error
from bench.harness.planted import plant, plant_shape

TEMPERATURE = 0.02
# How far a document token lies from a random one towards a token of its query. At B = 16,384 the loss is
# about 2, and 0.04% of the pairs have a softmax weight above 2^-12.
TOWARDS = 0.15
# How far planted documents lean towards all queries, and towards their own.
LEAN, OWN = 0.3, 0.16
_SLICE = 1 << 27  # similarities, or scores, at a time


@dataclass
class Batch:
    """Queries and documents, padded or packed. Document i belongs to query i."""

    Q: torch.Tensor
    D: torch.Tensor
    cu_q: torch.Tensor | None = None
    cu_d: torch.Tensor | None = None

    def leaves(self):
        return Batch(
            self.Q.detach().requires_grad_(), self.D.detach().requires_grad_(), self.cu_q, self.cu_d
        )  # fmt: skip


def _lengths(x, offsets):
    if offsets is not None:
        return offsets.diff().long()
    return torch.full((x.shape[0],), x.shape[1], device=x.device)


def draw_batch(shape, device, dtype):
    """Inputs to be timed."""
    if shape.packed:
        batch = Batch(*draw_packed(shape, device, dtype))
    else:
        x = draw(shape, device, dtype)
        batch = Batch(x.Q, x.D)
    Q, D = batch.Q.view(-1, shape.d), batch.D.view(-1, shape.d)
    q_lengths, d_lengths = _lengths(batch.Q, batch.cu_q), _lengths(batch.D, batch.cu_d)
    starts, ends = q_lengths.cumsum(0) - q_lengths, d_lengths.cumsum(0)
    for begin in range(0, len(D), _SLICE // shape.d):
        rows = torch.arange(begin, min(begin + _SLICE // shape.d, len(D)), device=device)
        document = torch.searchsorted(ends, rows, right=True)
        place = rows - (ends - d_lengths)[document]
        near = Q[starts[document] + place % q_lengths[document]].float()
        D[rows] = F.normalize(D[rows].float() + TOWARDS * near, dim=-1).to(dtype)
    return batch


# ---- the exact loss of any inputs ----


def _products(Q, D):
    """Products of all rows: in float64, or on a GPU of half-precision rows in float32, which is off by 1e-6
    of a score and takes a hundredth of the time."""
    if Q.is_cuda and Q.element_size() == 2:
        mm = torch.mm
        return mm(Q, D.T, out_dtype=torch.float32)
    return Q.double() @ D.double().T


@torch.no_grad()
def exact_loss(batch):
    """The loss in float64. Documents are padded with copies of their first token, so that slices have one
    shape; queries are summed by their lengths."""
    Q, D = batch.Q.view(-1, batch.Q.shape[-1]), batch.D.view(-1, batch.D.shape[-1])
    q_lengths, d_lengths = _lengths(batch.Q, batch.cu_q), _lengths(batch.D, batch.cu_d)
    longest, n = int(d_lengths.max()), len(q_lengths)
    d_starts = d_lengths.cumsum(0) - d_lengths
    place = torch.arange(longest, device=D.device)
    padded = d_starts[:, None] + place * (place < d_lengths[:, None])
    bounds = [0, *q_lengths.cumsum(0).tolist()]
    total = torch.zeros((), dtype=torch.float64, device=Q.device)
    queries = max(1, min(n, 4096 // max(1, int(q_lengths.max()))))
    documents = max(1, _SLICE // (longest * queries * int(q_lengths.max())))
    for i in range(0, n, queries):
        last = min(i + queries, n)
        rows = Q[bounds[i] : bounds[last]]
        query = torch.repeat_interleave(torch.arange(last - i, device=Q.device), q_lengths[i:last])
        scores = torch.zeros(last - i, n, dtype=torch.float64, device=Q.device)
        for j in range(0, n, documents):
            tokens = D[padded[j : j + documents].flatten()]
            best = _products(rows, tokens).view(len(rows), -1, longest).amax(-1)
            scores[:, j : j + documents].index_add_(0, query, best.double())
        labels = torch.arange(i, last, device=Q.device)
        total += F.cross_entropy(scores / TEMPERATURE, labels, reduction="sum")
    return total / n


# ---- planted inputs ----


@dataclass
class Known:
    """Planted inputs with their exact loss and gradients, in float64."""

    batch: Batch
    loss: torch.Tensor
    gradients: list[torch.Tensor]

    def error(self, found):
        """The largest relative error of a loss and its gradients."""
        gradients = [x.view(y.shape) for x, y in zip(found[1:], self.gradients, strict=True)]
        return worst_error((found[0], *gradients), [self.loss, *self.gradients])


def _lean(planted):
    """Adds to each document's token near a direction some of a random query's token of that direction, and of
    its own query's."""
    count = planted.directions
    token = planted.query.new_zeros(planted.queries, count)
    token[planted.query, planted.kind] = torch.arange(len(planted.query), device=token.device)
    kind = torch.arange(count, device=token.device).expand_as(token)
    other = token[torch.randint(planted.queries, token.shape, device=token.device), kind]
    mixed = OWN * planted.Q[token].float() + (1 - OWN) * planted.Q[other].float()
    rows = planted.at.flatten()
    leaning = planted.D[rows].float() + LEAN * mixed.flatten(0, 1)
    planted.D[rows] = F.normalize(leaning, dim=-1).to(planted.D.dtype)


def plant_batch(shape, of):
    """Planted inputs of the sizes of `of`, and what the loss of these is."""
    device, dtype = of.Q.device, of.Q.dtype
    if of.cu_q is not None and of.cu_d is not None:
        planted = plant(of.cu_q.diff().long(), of.cu_d.diff().long(), shape.d, dtype)
    else:
        planted = plant_shape(shape, device, dtype)
    _lean(planted)
    batch = Batch(planted.Q.view(of.Q.shape), planted.D.view(of.D.shape), of.cu_q, of.cu_d)
    return Known(batch, *_exact_planted(planted))


@torch.no_grad()
def _exact_planted(planted):
    n, count, d = planted.queries, planted.directions, planted.Q.shape[1]
    sums, rows = planted.sums().flatten(1), planted.D[planted.at.flatten()].double().view(n, count * d)
    of_sums, of_rows = torch.empty_like(sums), torch.zeros_like(rows)
    loss = torch.zeros((), dtype=torch.float64, device=sums.device)
    step = max(1, _SLICE // n)
    for begin in range(0, n, step):
        part = slice(begin, min(begin + step, n))
        logits = sums[part] @ rows.T / TEMPERATURE
        labels = torch.arange(part.start, part.stop, device=sums.device)
        loss += F.cross_entropy(logits, labels, reduction="sum") / n
        weights = logits.softmax(1)
        weights[labels - begin, labels] -= 1
        weights /= n * TEMPERATURE
        of_sums[part] = weights @ rows
        of_rows += weights.T @ sums[part]
    of_D = torch.zeros(planted.D.shape, dtype=torch.float64, device=sums.device)
    of_D[planted.at.flatten()] = of_rows.view(-1, d)
    return loss, [of_sums.view(n, count, d)[planted.query, planted.kind], of_D]


# ---- a step ----

Loss = Callable[[Batch], torch.Tensor]


def step(loss, batch):
    """The loss and both gradients."""
    leaves = batch.leaves()
    value = loss(leaves)
    return (value.detach(), *torch.autograd.grad(value, (leaves.Q, leaves.D)))
