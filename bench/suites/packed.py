"""Sequences of different lengths, packed or padded, and listed pairs of them, beside the peers."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import torch

import late_interaction as li
from bench.harness.inputs import draw_packed
from bench.harness.library import FLASH, LIK, OURS
from bench.harness.measuring import function
from bench.harness.planted import Planted, every_pair, gradients, plant
from bench.harness.shape import IN_BATCH, KD
from late_interaction._doctor.timing import sets_of_bytes

FORWARD, STEP = "forward", "forward + backward"
PADDED, PADDED_STEP = "padded", "padded, forward + backward"
DENSE = "dense call"
VARLEN, PAIRS = (FORWARD, STEP, PADDED, PADDED_STEP), (FORWARD, STEP, DENSE)
_PACKAGES = {OURS: "late_interaction", LIK: "late_interaction_kernels"}


def reference(Q, D, cu_q, cu_d):
    """Scores in float64, some documents of about one length at a time."""
    queries = torch.repeat_interleave(torch.arange(len(cu_q) - 1, device=Q.device), cu_q.diff())
    scores = torch.zeros(len(cu_q) - 1, len(cu_d) - 1, dtype=torch.float64, device=Q.device)
    rows, starts, lengths = Q.detach().double(), cu_d[:-1].long(), cu_d.diff().long()
    for some in lengths.argsort()[(lengths == 0).sum() :].split(128):
        last = lengths[some].unsqueeze(1) - 1
        token = torch.arange(int(last.max()) + 1, device=D.device).minimum(last)  # the last one again
        tokens = D.detach()[starts[some].unsqueeze(1) + token].double()
        best = (rows @ tokens.flatten(0, 1).t()).unflatten(1, token.shape).amax(-1)
        scores[:, some] = scores[:, some].index_add_(0, queries, best)
    return scores


def padded(tokens, cu_seqlens, longest, filler=2.0):
    """(packed sequences as [n, longest, d], lengths). Padding is not zero: a score with it is wrong."""
    lengths = cu_seqlens.diff()
    out = tokens.new_full((len(lengths), longest, tokens.shape[-1]), filler)
    out[torch.arange(longest, device=tokens.device) < lengths.unsqueeze(1)] = tokens
    return out, lengths


@dataclass(frozen=True)
class _Batch:
    """Packed sequences, several sets of tokens with the same lengths, and planted ones."""

    sets: list[tuple[torch.Tensor, torch.Tensor]]
    cu_q: torch.Tensor
    cu_d: torch.Tensor
    planted: Planted
    wanted: torch.Tensor  # fp64 scores of the first set, [queries, documents]

    @property
    def row(self):
        """Keys of its rows."""
        return {"tokens_q": len(self.sets[0][0]), "tokens_d": len(self.sets[0][1])}

    @property
    def longest(self):
        return {"max_seqlen_q": int(self.cu_q.diff().max()), "max_seqlen_d": int(self.cu_d.diff().max())}


def _draw(b, full=False):
    shape = dataclasses.replace(b.shape, Nd=b.shape.documents)
    draw = partial(draw_packed, shape, b.settings.device, b.settings.dtype, full)
    Q, D, cu_q, cu_d = draw()
    count = sets_of_bytes(Q.nbytes + D.nbytes, b.settings.cache_bytes)
    planted = plant(cu_q.diff().long(), cu_d.diff().long(), shape.d, b.settings.dtype)
    more = (draw()[:2] for _ in range(count - 1))
    return _Batch([(Q, D), *more], cu_q, cu_d, planted, reference(Q, D, cu_q, cu_d))


# ---- packed, and padded where each query has documents of its own ----


def _bound(impl, module, others, options):
    own = ".lik" if impl == OURS else ""
    f = function(f"{_PACKAGES[impl]}{own}.{module}", f"maxsim_{module}")
    return lambda Q, D: f(Q, D, *others, **options)


def _beside_lik(b, variants, make, sets, wanted, grad, known, **more):
    """Scores, and then steps, of ours and late-interaction-kernels."""
    impls = [OURS, *([LIK] if b.has(LIK) else [])]
    calls = {i: partial(make, i) for i in impls}
    (tensors, exact), pairs = known, [(x, grad) for x in sets]
    of = tensors, grad, exact
    forward = [b.forward(i, variants[0], f, sets, wanted, **more) for i, f in calls.items()]
    steps = [b.step(i, variants[1], f, pairs, wanted, of, **more) for i, f in calls.items()]
    return b.measure(forward) + b.measure(steps)


def _packed(b, batch):
    def make(impl):
        return _bound(impl, "varlen", (batch.cu_q, batch.cu_d), batch.longest)

    grad = torch.randn_like(batch.wanted, dtype=torch.float32)
    known = (batch.planted.Q, batch.planted.D), gradients(batch.planted, grad)
    return _beside_lik(b, (FORWARD, STEP), make, batch.sets, batch.wanted, grad, known, **batch.row)


def _padded(b, batch):
    shape = b.shape
    own_documents = (shape.Nq, shape.Nd)

    def form(Q, D, filler=2.0):
        documents = padded(D, batch.cu_d, shape.Ld, filler)[0].unflatten(0, own_documents)
        return padded(Q, batch.cu_q, shape.Lq, filler)[0], documents

    lengths = batch.cu_q.diff(), batch.cu_d.diff().unflatten(0, own_documents)
    wanted = batch.wanted.view(shape.Nq, *own_documents).diagonal().T
    grad = torch.randn_like(wanted, dtype=torch.float32).contiguous()
    of_Q, of_D = gradients(batch.planted, every_pair(dataclasses.replace(shape, layout=KD), grad))
    known = form(batch.planted.Q, batch.planted.D), form(of_Q, of_D, 0.0)  # padding has no gradient
    # maxsim_padded of late-interaction-kernels reads the longest lengths back on every call.
    more = {**batch.row, "capture": not b.has(LIK)}
    sets = [form(*x) for x in batch.sets]

    def make(impl):
        return _bound(impl, "padded", lengths, {})

    return _beside_lik(b, (PADDED, PADDED_STEP), make, sets, wanted, grad, known, **more)


def measure_varlen(b):
    """Queries of up to Lq tokens, documents of up to Ld, most of them short."""
    batch = _draw(b)
    rows = _packed(b, batch) if b.shape.layout == IN_BATCH else []
    return rows + (_padded(b, batch) if b.shape.layout == KD or b.shape.Nq == 1 else [])


# ---- listed pairs, and one query with documents in no order ----


def _draw_pairs(shape, device):
    """Distinct pairs in no order; every document occurs equally often."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(shape.Nd, generator=generator)
    place = torch.arange(shape.pairs)
    shift = torch.randint(shape.Nq, (shape.Nd,), generator=generator)
    pair_d = order[place % shape.Nd]
    pair_q = (shift[pair_d] + place // shape.Nd) % shape.Nq
    shuffle = torch.randperm(shape.pairs, generator=generator)
    return pair_q[shuffle].int().to(device), pair_d[shuffle].int().to(device)


def _direct(b, batch, more):
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(batch.cu_d) - 1, generator=generator).to(b.settings.device)
    starts, lengths = batch.cu_d[:-1][order].contiguous(), batch.cu_d.diff()[order].contiguous()
    others = starts, lengths, int(lengths.max())
    paths = {OURS: ("late_interaction.score_pairs", "rerank_direct")}
    if b.has(FLASH):
        paths[FLASH] = ("flash_maxsim", "flash_maxsim_rerank_direct")
    sets = [(*x, *others) for x in batch.sets]
    wanted = batch.wanted[0][order]
    return b.measure([
        b.forward(impl, FORWARD, partial(function, *path), sets, wanted, **more)
        for impl, path in paths.items()
    ])  # fmt: skip


def measure_pairs(b):
    shape = b.shape
    batch = _draw(b, shape.even)
    more = {**batch.row, "pairs": shape.pairs}
    if shape.Nq == 1:
        return _direct(b, batch, more)
    pair_q, pair_d = _draw_pairs(shape, b.settings.device)
    listed = pair_q.long(), pair_d.long()
    wanted = batch.wanted[listed]
    grad = torch.randn_like(wanted, dtype=torch.float32)
    of_pairs = grad.new_zeros(shape.Nq, shape.Nd)
    of_pairs[listed] = grad

    def make(impl):
        f = function(f"{_PACKAGES[impl]}.score_pairs", "score_pairs_packed")
        return lambda Q, D: f(Q, D, batch.cu_q, batch.cu_d, pair_q, pair_d, **batch.longest)

    known = (batch.planted.Q, batch.planted.D), gradients(batch.planted, of_pairs)
    rows = _beside_lik(b, (FORWARD, STEP), make, batch.sets, wanted, grad, known, **more)
    if shape.pairs == shape.Nq * shape.Nd and shape.even:  # the same scores by a dense call
        dense = [(Q.view(shape.q_shape), D.view(shape.d_shape)) for Q, D in batch.sets]
        rows += b.measure([b.forward(OURS, DENSE, lambda: li.maxsim, dense, batch.wanted, **more)])
    return rows
