"""Whole losses, forward and backward: those of colpali-engine and PyLate around each library's MaxSim, and
contrastive losses of large batches.

The explicit-negative heads of colpali-engine and the chunked contrastive loss of PyLate are written out
here, so neither package need be installed. A loss reads from the device in the middle, as theirs do, so it
cannot be captured and is timed by events; so are all contrastive losses, some of which wait for the device.
"""

import dataclasses
import importlib.util
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.harness.batches import draw_batch, exact_loss, plant_batch, step
from bench.harness.inputs import draw
from bench.harness.library import EINSUM, INF_CL, Score, UnsupportedError
from bench.harness.measuring import Timed, judged, measure, refuse
from bench.harness.parity import GRADIENTS, SCORES, reference_gradients, reference_scores, worst_error
from bench.harness.shape import IN_BATCH, KD, PAIRS
from bench.peers import losses
from bench.peers.implementations import Einsum, Lik, Ours, similarity_einsum
from late_interaction._doctor.timing import time_few

# ---- the heads ----

ALONE, WITH_IN_BATCH, CHUNKED = "explicit negatives", "with in-batch term", "chunked contrastive"
PAIRWISE = "with pairwise in-batch term"
HEADS = (ALONE, WITH_IN_BATCH, PAIRWISE, CHUNKED)
TEMPERATURE = 0.02
# Limits of relative error for the einsum's losses and gradients. It rounds similarities to bf16, which moves
# winners, and the loss divides the scores by a temperature.
ROUNDED_LOSS, ROUNDED_GRADIENTS = 5e-2, 0.6
# The chunked loss has most of its gradient in each query's own document: winners there that rounding may have
# moved.
MOVED = 3
CHUNK = 32  # queries, and documents, that the contrastive loss scores at a time


@dataclass(frozen=True)
class Scores:
    """One library's MaxSim in the three layouts that losses use."""

    every: Score  # [B, Lq, d], [C, Ld, d] -> [B, C]
    pairs: Score  # [B, Lq, d], [B, Ld, d] -> [B]
    own: Score  # [B, Lq, d], [B, n, Ld, d] -> [B, n]


def _einsum(layout):
    """As colpali-engine and PyLate write it."""
    return lambda Q, D: torch.einsum(similarity_einsum(layout), Q, D).amax(-1).sum(-1)


def scores_of(impl, shape):
    if isinstance(impl, Einsum):
        return Scores(*(_einsum(layout) for layout in (IN_BATCH, PAIRS, KD)))
    shapes = (dataclasses.replace(shape, layout=layout) for layout in (IN_BATCH, PAIRS, KD))
    return Scores(*(impl.score(each, "auto", train=True) for each in shapes))


def _by_length(scores, Q):
    """Scores over the number of query tokens without padding. Prints a warning if one is out of bounds, which
    reads from the device."""
    lengths = (Q[:, :, 0] != 0).sum(1)
    scores = scores / lengths.view(-1, *[1] * (scores.dim() - 1))
    least, most = torch.aminmax(scores)
    if least < -1.001 or most > 1.001:
        print(f"normalized scores between {least.item():.3f} and {most.item():.3f}")
    return scores


def _pairwise(scores):
    """Each query's positive, on the diagonal, against the best of the other documents alone."""
    own = scores.diagonal()
    best, second = scores.topk(2, dim=1).values.unbind(1)
    return F.softplus((torch.where(best == own, second, best) - own) / TEMPERATURE).mean()


def _contrastive(scores):
    return F.cross_entropy(scores / TEMPERATURE, torch.arange(len(scores), device=scores.device))


def negative_head(scores, Q, positives, negatives, in_batch, pairwise=False):
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


def chunked_contrastive(scores, Q, D):
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


def _exact(shape, Q, D):
    """fp64 scores to compute a loss from, and a function that, after its backward, returns the gradients of Q
    and D."""
    scores, winners = reference_scores(shape, Q.detach(), D.detach())
    scores.requires_grad_()

    def gradients():
        return list(reference_gradients(shape, Q.detach(), D.detach(), scores.grad, winners))

    return scores.squeeze(1) if shape.layout == PAIRS else scores, gradients


def _negative_step(settings, shape, in_batch, pairwise=False):
    """Return what runs the loss of a library's scores on one set of inputs, to itself and the gradients of
    all inputs; and its exact results."""
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

    def run(scores):
        loss = negative_head(scores, *leaves, in_batch, pairwise)
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    return run, [loss.detach(), q_p + q_n + q_g, d_p + d_g, d_n]


def _chunked_step(settings, shape):
    """Return what runs the contrastive loss by chunks, and the exact loss and gradients."""
    x = draw(shape, settings.device, settings.dtype)
    exact, gradients = _exact(shape, x.Q, x.D)
    loss = F.cross_entropy(exact, torch.arange(shape.Nq, device=x.Q.device), reduction="sum")
    loss.backward()
    wanted = [loss.detach() / shape.Nq, *gradients()]
    x.require_grad()

    def run(scores):
        loss = chunked_contrastive(scores, x.Q, x.D)
        out = loss, x.Q.grad, x.D.grad
        x.Q.grad = x.D.grad = None
        return out

    return run, wanted


def _head(b, impl, variant, of):
    run, wanted = of
    rounds = impl.rounds_similarities
    limit = ROUNDED_GRADIENTS if rounds else GRADIENTS
    if variant == CHUNKED:
        limit = max(limit, (2 * MOVED / (b.shape.Nq * b.shape.Lq)) ** 0.5)

    def check(row, out):
        refuse(row, worst_error(out, wanted), limit)

    def prepare():
        return [partial(run, scores_of(impl, b.shape))]

    row, off = b.row(impl.name, "fwd+bwd", variant), ROUNDED_LOSS if rounds else SCORES
    return Timed(row, prepare, wanted[:1], check, capture=False, tolerance=off)


def measure_heads(b):
    settings = _short(b.settings)
    if b.shape.layout == IN_BATCH:
        steps = {CHUNKED: partial(_chunked_step, settings, b.shape)}
    else:
        steps = {
            ALONE: partial(_negative_step, settings, b.shape, 0.0),
            WITH_IN_BATCH: partial(_negative_step, settings, b.shape, 0.5),
            PAIRWISE: partial(_negative_step, settings, b.shape, 0.5, pairwise=True),
        }
    impls = [i for i in settings.implementations if isinstance(i, Einsum | Lik | Ours)]
    rows = []
    for variant, make in steps.items():
        of = make()
        rows += measure(settings, [_head(b, impl, variant, of) for impl in impls])
    return rows


def _short(settings):
    """Steps take up to seconds each."""
    return dataclasses.replace(
        settings, effort=dataclasses.replace(settings.effort, min_replays=4, min_walls=1)
    )


# ---- contrastive losses of batches, of single vectors beside a matrix product and Inf-CL ----

CONTRASTIVE_PEERS = (INF_CL,)  # which no other suite measures
STEP_LIMIT_S = 10.0
FEW, RUNS = 8192, 2  # from this batch on, so many runs are timed, one after the other
MEMORY_SHARE = 0.8  # of the device, that may stay for a backward


def check_fits(settings, method, shape, batch):
    kept = method.kept_bytes(shape)
    if settings.on_gpu:
        step_bytes = 6 * (batch.Q.nbytes + batch.D.nbytes)  # inputs, gradients, and what else is as large
        total = torch.cuda.get_device_properties(settings.device).total_memory
        if kept + step_bytes > MEMORY_SHARE * total:
            raise UnsupportedError(f"what stays for the backward takes {kept / 1e9:.0f} GB")


def _kind(method, shape):
    return method.impl, method.variant, shape.packed, shape.Lq, shape.Ld


def _takes_too_long(settings, method, shape):
    """By the time of a smaller batch of the same kind; a step grows at least with the batch's square."""
    seen = settings.steps_s.get(_kind(method, shape))
    if method.variant in (losses.EXACT, losses.LEAST, losses.WITH_TAIL) or not seen:
        return None
    if seen[1] * (shape.Nq / seen[0]) ** 2 <= STEP_LIMIT_S:
        return None
    return f"TimeoutError: a step takes {seen[1]:.2g} s at a batch of {seen[0]}"


def _of_batch(b, method, batch, wanted, known):
    """The loss is compared with the exact one on the inputs that are timed, and its gradients on planted
    inputs of the same sizes."""
    shape = b.shape
    tokens = {"tokens_q": batch.Q.numel() // shape.d, "tokens_d": batch.D.numel() // shape.d}
    row = b.row(method.impl, "fwd+bwd", method.variant, **tokens)

    def prepare():
        loss = method.make(shape)
        check_fits(b.settings, method, shape, batch)
        return [partial(step, loss, batch)]

    def check(row, out):
        row["gradients_mib"] = sum(x.nbytes for x in out[1:]) / 2**20
        refuse(row, known.error(step(method.make(shape), known.batch)), method.limits[1])

    return Timed(row, prepare, [wanted], check, capture=False, tolerance=method.limits[0])


def _measure_long(settings, each):
    if (calls := judged(settings, each)) is not None:
        gpu, each.row["wall_us"] = time_few(calls[0], RUNS, settings.device)
        each.row.update(gpu.row() if gpu else {})


def measure_contrastive(b):
    """A step that would take over STEP_LIMIT_S by its time at the batch before is left out, unless it is
    contrastive_loss's."""
    shape, settings = b.shape, _short(b.settings)
    batch = draw_batch(shape, settings.device, settings.dtype)
    wanted, known = exact_loss(batch), plant_batch(shape, batch)
    names = {i.name for i in settings.implementations}
    if EINSUM in names and settings.on_gpu and importlib.util.find_spec("inf_cl"):
        names.add(INF_CL)  # it goes with PyTorch's own operators
    rows, timed = [], []
    for method in (m for m in losses.methods(shape) if m.impl in names):
        each = _of_batch(b, method, batch, wanted, known)
        rows.append(each.row)
        if reason := _takes_too_long(settings, method, shape):
            each.row.update(error=reason, over_limit_s=STEP_LIMIT_S)
        else:
            timed.append((method, each))
    if shape.Nq >= FEW:
        for _, each in timed:
            _measure_long(settings, each)
    else:
        measure(settings, [each for _, each in timed])
    for method, each in timed:
        if each.row["wall_us"]:
            settings.steps_s[_kind(method, shape)] = shape.Nq, each.row["wall_us"] * 1e-6
    return rows
