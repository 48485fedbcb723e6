"""Dense batches: the scores, the steps and the backwards of every library, and the options of our forward."""

from functools import cache, partial

import torch

import late_interaction as li
from bench.harness.inputs import SKEWED, SKEWED_UP_TO, UNIFORM, draw_winners
from bench.harness.library import EINSUM, OURS, Implementation, UnsupportedError
from bench.harness.measuring import Timed, measure_one_by_one
from bench.harness.parity import GRADIENTS, misplaced_winners, reference_gradients, reference_scores
from bench.harness.planted import known_step
from bench.harness.shape import IN_BATCH, itemsize
from bench.peers.implementations import Compiled, similarity_einsum
from late_interaction._doctor.ceilings import float32_products

WINNER_KINDS = (UNIFORM, SKEWED)
MAX_SIMILARITY_BYTES = 40e9


# ---- every library, one after the other ----


def measure(b, op, winners=(None,)):
    """Every implementation on one shape, each with each of its gradient strategies."""
    rows = []
    for kind in winners:
        if kind != SKEWED or b.shape.Ld <= SKEWED_UP_TO:
            rows += measure_one_by_one(b.settings, _every_library(b, op, kind))
    return rows


def _every_library(b, op, kind):
    settings, shape = b.settings, b.shape
    sets = b.sets(op=op, winners=kind if op == "fwd+bwd" else None)
    first, tokens, steps = sets[0], [x.tokens for x in sets], [x.step for x in sets]
    if op == "bwd":
        for x in sets:
            x.winners = draw_winners(shape, kind or UNIFORM, settings.device)
        wanted = reference_gradients(shape, *first.tokens, first.grad_scores, first.winners)
    else:
        exact, winners = reference_scores(shape, *first.tokens)
    known = known_step(shape, first.grad_scores, settings.dtype) if op == "fwd+bwd" else None
    for impl in settings.implementations:
        if isinstance(impl, Compiled) and not shape.compiled:
            continue
        for strategy in impl.backwards if op != "fwd" else (None,):
            score = cache(partial(_score, b, impl, strategy, op != "fwd"))
            more = {"winners": kind, "backward": strategy}
            if op == "fwd":
                yield b.forward(impl.name, None, score, tokens, exact, **more)
            elif known:
                timed = b.step(impl.name, None, score, steps, exact, known, **more)
                timed.check = _with_winners(b, impl, first, winners, timed.check)
                yield timed
            elif type(impl).backward is not Implementation.backward:
                calls = partial(_backwards, shape, impl, strategy, sets)
                row = b.row(impl.name, op, input_sets=len(sets), **more)
                yield Timed(row, calls, wanted, tolerance=GRADIENTS)


def _score(b, impl, strategy, train):
    size = b.shape.similarities * itemsize(b.settings.dtype)
    if impl.builds_similarities and size > MAX_SIMILARITY_BYTES:
        raise UnsupportedError(f"the similarity tensor alone takes {size / 1e9:.0f} GB")
    return impl.score(b.shape, strategy, train)


def _backwards(shape, impl, strategy, sets):
    return [impl.backward(shape, strategy, x) for x in sets]


def _with_winners(b, impl, x, winners, check):
    """The check of gradients, behind one of the winners where these are returned."""

    def both(row, out):
        with torch.no_grad():
            found = impl.winners(b.shape, x)
        if found is not None:
            row["winners_wrong"] = misplaced_winners(b.shape, *x.tokens, found, winners)
        check(row, out)

    return both


# ---- what each option of a forward costs ----

PLAIN, WINNERS, D_MASK, MASKS, NORMALIZE, FP16 = "plain", "winners", "d_mask", "masks", "normalize", "fp16"
WEIGHTS = "q_weights"
VARIANTS = (PLAIN, WINNERS, D_MASK, MASKS, WEIGHTS, NORMALIZE, FP16)
KEPT = 0.8  # share of tokens that a mask keeps, at random


def _holes(tokens):
    """A random mask in which every row keeps a token."""
    mask = torch.rand(tokens.shape[:-1], device=tokens.device) < KEPT
    mask[..., 0] = True
    return mask


def measure_variants(b):
    """Our plain bf16 call, and the same call with saved winners, masks, weights, normalization and fp16."""
    winners_op = torch.ops.late_interaction.maxsim_winners.default
    sets = b.sets(torch.bfloat16)
    masks = [(_holes(x.Q), _holes(x.D)) for x in sets]
    weights = [0.5 + torch.rand(x.Q.shape[:-1], device=x.Q.device) for x in sets]
    first, (q_mask, d_mask) = sets[0], masks[0]
    plain, winners = reference_scores(b.shape, *first.tokens)

    def wanted(*options, **more):
        return reference_scores(b.shape, *first.tokens, *options, **more)[0]

    def check_winners(row, out):
        row["winners_wrong"] = misplaced_winners(b.shape, first.Q, first.D, out[1], winners)

    def one(variant, f, exact, options=(), **more):
        inputs = [(*x.tokens, *own) for x, own in zip(sets, options or [()] * len(sets), strict=True)]
        return b.forward(OURS, variant, lambda: f, inputs, exact, dtype=torch.bfloat16, **more)

    timed = [
        one(PLAIN, li.maxsim, plain),
        one(WINNERS, winners_op, plain, [(None, None)] * len(sets), check=check_winners),
        one(D_MASK, li.maxsim, wanted(None, d_mask), [(None, d) for _, d in masks]),
        one(MASKS, li.maxsim, wanted(q_mask, d_mask), masks),
        one(WEIGHTS, _weighted, wanted(weights[0]), [(w,) for w in weights]),
        one(NORMALIZE, partial(li.maxsim, normalize=True), wanted(normalize=True)),
    ]
    halves = b.sets(torch.float16)
    exact = reference_scores(b.shape, *halves[0].tokens)[0]
    inputs = [x.tokens for x in halves]
    return b.measure([*timed, b.forward(OURS, FP16, lambda: li.maxsim, inputs, exact, dtype=torch.float16)])


def _weighted(Q, D, weights):
    return li.maxsim(Q, D, q_weights=weights)


# ---- float32 inputs ----

HIGH, HIGHEST = "high", "highest"
CHUNK_BYTES = 1 << 31  # float32 similarities in memory at a time


def chunked_einsum(Q, D, layout):
    """MaxSim in float32 as PyTorch users write it, in chunks whose similarities fit CHUNK_BYTES: chunks of
    documents, or of queries if each has its own documents."""
    others = Q.shape[0] if layout == IN_BATCH else D.shape[1:-2].numel()
    step = max(1, CHUNK_BYTES // (4 * others * Q.shape[1] * D.shape[-2]))
    parts = [(Q, part) for part in D.split(step)]
    if layout != IN_BATCH:
        parts = list(zip(Q.split(step), D.split(step), strict=True))
    scores = [torch.einsum(similarity_einsum(layout), q, d).amax(-1).sum(-1) for q, d in parts]
    return torch.cat(scores, 1 if layout == IN_BATCH else 0)


def measure_fp32(b):
    """Our "high" beside cuBLAS in TF32, our "highest" beside PyTorch's float32 einsum, with the error of each
    against fp64."""
    sets = [x.tokens for x in b.sets(torch.float32)]
    wanted = reference_scores(b.shape, *sets[0])[0]
    calls = (
        (EINSUM, HIGHEST, partial(chunked_einsum, layout=b.shape.layout)),
        (OURS, HIGHEST, partial(li.maxsim, precision=HIGHEST)),
        (OURS, HIGH, partial(li.maxsim, precision=HIGH)),
    )
    with float32_products(HIGHEST):
        return b.measure([
            b.forward(impl, variant, lambda f=f: f, sets, wanted, dtype=torch.float32)
            for impl, variant, f in calls
        ])  # fmt: skip
