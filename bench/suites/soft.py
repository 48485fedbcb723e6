"""Training steps of XTR scores and of the smooth maximum, beside the step of `maxsim` on the same inputs.

`xtr_scores` stands beside Sentence Transformers' grid of all similarities, `smooth_maxsim` beside PyTorch's
own: all similarities by one einsum, `logsumexp`, and autograd. Scores of the inputs that are timed are
compared with exact ones; those of XTR and their gradients also on planted inputs, whose selection no
rounding moves; gradients of the smooth maximum on a corner of the inputs, with those of float64. The grid is
of bfloat16: on random inputs rounding moves tokens over the threshold, and a document of one selected token
may lose it.
"""

from functools import partial

import torch

import late_interaction as li
from bench.harness.inputs import Inputs
from bench.harness.library import EINSUM, OURS, SENTENCE_TRANSFORMERS, training_step
from bench.harness.measuring import refuse
from bench.harness.parity import GRADIENTS, SCORES, reference_scores, worst_error
from bench.harness.planted import known_step
from bench.harness.xtr import exact_scores, plant_selection

MAXSIM = "maxsim"


def _maxsim(b, sets):
    known = known_step(b.shape, sets[0].grad_scores, b.settings.dtype)
    wanted = reference_scores(b.shape, *sets[0].tokens)[0]
    return b.step(OURS, MAXSIM, lambda: li.maxsim, [x.step for x in sets], wanted, known)


def _step(score, x):
    leaves = tuple(t.detach().requires_grad_() for t in x.tokens)
    return training_step(score, leaves, x.grad_scores)()


# ---- XTR ----

SELECTED = (32, 256)  # similarities that a query token selects
XTR = (MAXSIM, *(f"k = {k}" for k in SELECTED))
XTR_PEERS = (SENTENCE_TRANSFORMERS,)  # which no other suite measures
# Limits of relative error: of scores on random inputs, of all results on planted ones. Gradients of the grid
# are products over all tokens of the other side, of which cuBLAS may round partial sums to bfloat16.
LIMITS = {OURS: (SCORES, GRADIENTS), SENTENCE_TRANSFORMERS: (0.3, 1e-2)}


def grid_scores(Q, D, k):
    """Scores ``[Nq, Nd]``, float32, of ``Q [Nq, Lq, d]`` and ``D [Nd, Ld, d]``; products and selection are of
    the inputs' dtype. Written out from Sentence Transformers 6.2, without what it does about masks:
    `sentence_transformers.multi_vector_encoder.scoring.xtr.xtr_scores`."""
    (Nq, Lq, d), (Nd, Ld) = Q.shape, D.shape[:2]
    grid = (Q.reshape(Nq * Lq, d) @ D.reshape(Nd * Ld, d).T).view(Nq, Lq, Nd * Ld)
    values, tokens = grid.topk(min(k, Nd * Ld), dim=-1, sorted=False)
    kept = grid.fill_(torch.finfo(grid.dtype).min).scatter_(-1, tokens, values)
    selected = torch.zeros(Nq, Lq, Nd, dtype=torch.bool, device=Q.device).scatter_(-1, tokens // Ld, True)
    maxima = kept.view(Nq, Lq, Nd, Ld).max(dim=-1).values.float().masked_fill(~selected, 0.0)
    return maxima.sum(dim=1) / selected.float().sum(dim=1).clamp_(min=1)


def _xtr(b, impl, k, sets, wanted, known):
    (tolerance, limit), (inputs, results) = LIMITS[impl], known

    def make():
        return partial(partial(li.xtr_scores, rule="paper") if impl == OURS else grid_scores, k=k)

    def check(row, _):
        refuse(row, worst_error(_step(make(), inputs), results), limit)

    steps = [x.step for x in sets]
    timed = b.step(impl, f"k = {k}", make, steps, wanted, ((), None, ()), tolerance=tolerance)
    timed.check = check
    return timed


def measure_xtr(b):
    sets = b.sets()
    # The grid goes with PyTorch's own operators.
    impls = [OURS, *([SENTENCE_TRANSFORMERS] if b.has(EINSUM) else [])]
    timed = [_maxsim(b, sets)]
    for k in SELECTED:
        wanted = exact_scores(*sets[0].tokens, k)
        known = plant_selection(b.shape, k, sets[0].grad_scores, b.settings.dtype)
        timed += [_xtr(b, impl, k, sets, wanted, known) for impl in impls]
    return b.measure(timed)


# ---- the smooth maximum ----

TAU = 0.1
SMOOTH = (MAXSIM, f"tau = {TAU}")
# Limits of gradients' relative error. Autograd rounds the similarities' to bfloat16, and sums of them.
SMOOTH_LIMITS = {OURS: GRADIENTS, EINSUM: 1e-2}
_CORNER = (4, 8)  # queries and documents whose gradients are compared


def smooth_by_einsum(Q, D):
    similarities = torch.einsum("isd,jtd->ijst", Q, D)
    return similarities.float().div(TAU).logsumexp(-1).sum(-1).mul(TAU)


def exact_smooth(Q, D):
    """[Nq, Nd] in float64, a document at a time."""
    rows = Q.flatten(0, 1).double()
    found = [(rows @ document.double().t()).div(TAU).logsumexp(-1).mul(TAU) for document in D]
    return torch.stack(found, 1).unflatten(0, Q.shape[:2]).sum(1)


def measure_smooth(b):
    sets = b.sets()
    (Q, D), (q, n) = sets[0].tokens, _CORNER
    corner = Inputs(Q[:q], D[:n], sets[0].grad_scores[:q, :n].contiguous())
    wide = Inputs(*(x.double() for x in (*corner.tokens, corner.grad_scores)))
    known = (corner.tokens, corner.grad_scores, _step(exact_smooth, wide)[1:])
    wanted, steps = exact_smooth(Q, D), [x.step for x in sets]
    ways = {OURS: partial(li.smooth_maxsim, tau=TAU), **({EINSUM: smooth_by_einsum} if b.has(EINSUM) else {})}
    return b.measure([_maxsim(b, sets)] + [
        b.step(impl, SMOOTH[1], lambda f=f: f, steps, wanted, known, limit=SMOOTH_LIMITS[impl])
        for impl, f in ways.items()
    ])  # fmt: skip
