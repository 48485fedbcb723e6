"""Whatever a mask leaves out has no effect: NaN and infinities behind masks and in the weights of masked
tokens, in every function that takes masks, forward and backward."""

import pytest
import torch

import late_interaction as li
from late_interaction import codecs, fused_head, reference
from late_interaction.score_pairs import score_pairs_packed
from tests.support.packed import offsets

B, Lq, Ld, d = 4, 5, 6, 8
Q_MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
D_MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
Q_LENGTHS, D_LENGTHS = torch.tensor([3, 1, 0, 5]), torch.tensor([4, 0, 6, 1])
VALUES = [torch.nan, torch.inf, -torch.inf]
HEAD = torch.linspace(-1, 1, d * d).view(d, d)


def q_mask(Q):
    return Q_MASK.to(Q.device)


def d_mask(D):
    return D_MASK.to(D.device)


def of_own(D):
    """Four documents of each query, or their masks."""
    return D.expand(B, *D.shape)


def dense(function, own=False, weighted=False, **options):
    def score(Q, D, W):
        documents, mask = (of_own(D), of_own(d_mask(D))) if own else (D, d_mask(D))
        weights = {"q_weights": W} if weighted else {}
        found = function(Q, documents, q_mask=q_mask(Q), d_mask=mask, **weights, **options)
        return found[0] if isinstance(found, tuple) else found

    return score


def loss(function, negatives=False, **options):
    def score(Q, D, W):
        documents = li.Tokens(D, d_mask(D))
        beside = {"hard_negatives": documents} if negatives else {}  # one more of each query
        return function(li.Tokens(Q, q_mask(Q)), documents, **beside, **options)

    return score


def distilled(function, **options):
    teacher = torch.linspace(-1, 1, B * B).view(B, B)

    def score(Q, D, W):
        own = li.Tokens(of_own(D).flatten(0, 1), of_own(d_mask(D)).flatten(0, 1))
        return function(li.Tokens(Q, q_mask(Q)), own, teacher.to(Q), **options)

    return score


def hidden(**options):
    def score(Q, D, W):
        # The head passes its gradient on to the weights: what masks leave out would send 0 * NaN.
        head = HEAD.to(Q) + W.masked_fill(~q_mask(Q), 0.0).sum()
        return fused_head.maxsim_from_hidden(Q, D, head, None, d_mask(D), q_mask=q_mask(Q), **options)

    return score


T = {"temperature": 0.5}
FUNCTIONS = {
    "maxsim": dense(li.maxsim),
    "maxsim, normalized": dense(li.maxsim, normalize=True, mean=True),
    "maxsim, winners found again": dense(li.maxsim, winners="recompute"),
    "maxsim, unified": dense(li.maxsim, backward="unified"),
    "maxsim, of own": dense(li.maxsim, own=True),
    "maxsim, weighted": dense(li.maxsim, weighted=True),
    "maxsim, weighted and normalized": dense(li.maxsim, weighted=True, normalize=True, mean=True),
    "maxsim, weighted, winners found again": dense(li.maxsim, weighted=True, winners="recompute"),
    "maxsim, weighted, unified": dense(li.maxsim, weighted=True, backward="unified"),
    "maxsim, weighted, of own": dense(li.maxsim, own=True, weighted=True),
    "maxsim_with_winners": dense(li.maxsim_with_winners),
    "maxsim_pairs": dense(li.maxsim_pairs),
    "maxsim_pairs, weighted": dense(li.maxsim_pairs, weighted=True, mean=True),
    "smooth_maxsim": dense(li.smooth_maxsim),
    "smooth_maxsim, normalized": dense(li.smooth_maxsim, normalize=True),
    "smooth_maxsim_pairs": dense(li.smooth_maxsim_pairs),
    "maxsim_from_hidden": hidden(),
    "maxsim_from_hidden, of queries too": hidden(project_Q=True),
    "maxsim_reference": dense(reference.maxsim_reference),
    "maxsim_reference, normalized": dense(reference.maxsim_reference, normalize=True),
    "smooth_maxsim_reference": dense(reference.smooth_maxsim_reference, normalize=True),
    "losses.contrastive": loss(li.losses.contrastive, **T),
    "losses.contrastive, by blocks": loss(li.losses.contrastive, kept_bytes=0, symmetric=True, **T),
    "losses.contrastive, of listed pairs": loss(li.losses.contrastive, True, kept_bytes=0, tail=0.01, **T),
    "losses.contrastive, normalized": loss(li.losses.contrastive, True, normalize=True, **T),
    "losses.contrastive, normalized, of listed pairs": loss(
        li.losses.contrastive, normalize=True, kept_bytes=0, tail=0.01, **T
    ),
    "losses.pairwise": loss(li.losses.pairwise, True),
    "losses.sigmoid": loss(li.losses.sigmoid, True, **T),
    "losses.recall": loss(li.losses.recall, True, k=2, **T),
    "losses.distill_kl_div": distilled(li.losses.distill_kl_div, normalize_scores=True),
    "losses.margin_mse": distilled(li.losses.margin_mse, normalize=True),
}
for k in (1, 7, 13, 23):
    for rule in ("paper", "pylate"):
        FUNCTIONS |= {
            f"xtr_scores, {k}, {rule}": dense(li.xtr_scores, k=k, rule=rule),
            f"xtr_scores, {k}, {rule}, weighted": dense(li.xtr_scores, weighted=True, k=k, rule=rule),
            f"xtr_scores_reference, {k}, {rule}": dense(
                reference.xtr_scores_reference, weighted=True, k=k, rule=rule
            ),
        }


def dirty_and_clean(value, dtype, device, q_mask=Q_MASK, d_mask=D_MASK):
    """Queries, documents and weights, with ``value`` and with 0 where masks leave them out."""
    found = []
    for shape, mask in (((B, Lq, d), q_mask), ((B, Ld, d), d_mask), ((B, Lq), q_mask)):
        x = torch.randn(shape, dtype=dtype, device=device)
        mask = (mask if x.dim() == 2 else mask.unsqueeze(-1)).to(device)
        found.append([x.masked_fill(~mask, fill).requires_grad_() for fill in (value, 0.0)])
    return zip(*found, strict=True)


def assert_alike(score, inputs):
    results = []
    for leaves in inputs:
        found = score(*leaves)
        grads = torch.autograd.grad(
            (found * torch.linspace(0.5, 2, found.numel(), device=found.device).view(found.shape)).sum(),
            leaves,
            materialize_grads=True,
            allow_unused=True,
        )
        results.append((found, *grads))
    (dirty, *of_dirty), (clean, *of_clean) = results
    assert dirty.isfinite().all()
    torch.testing.assert_close(dirty, clean, rtol=1e-5, atol=1e-6)
    for one, other in zip(of_dirty, of_clean, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    return of_clean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_masks_leave_out_has_no_effect(device, name, value, dtype):
    grad_Q, grad_D, _ = assert_alike(FUNCTIONS[name], dirty_and_clean(value, dtype, device))
    assert grad_Q.any() and not grad_Q[~Q_MASK].any() and not grad_D[~D_MASK].any()


def packed(function):
    """Tokens of no sequence lie behind the last one."""

    def score(Q, D, W):
        sides = (Q, Q_LENGTHS), (D, D_LENGTHS), (W, Q_LENGTHS)
        kept = [(x, _first(lengths, x.shape[1]).to(x.device)) for x, lengths in sides]
        rows = (torch.cat((x[mask], x[~mask])) for x, mask in kept)
        return function(*rows, *(offsets(x.tolist()).to(Q.device) for x in (Q_LENGTHS, D_LENGTHS)))

    return score


def _first(lengths, longest):
    return torch.arange(longest) < lengths.unsqueeze(1)


PAIRS = torch.arange(B, dtype=torch.int32)
PADDED = {
    "maxsim_padded": lambda Q, D, W: li.lik.maxsim_padded(
        Q, of_own(D), Q_LENGTHS.to(Q.device), D_LENGTHS.expand(B, B).to(Q.device)
    ),
    "maxsim, packed": packed(lambda Q, D, W, q, d: li.lik.maxsim_varlen(Q, D, q, d)),
    "score_pairs_packed": packed(
        lambda Q, D, W, q, d: score_pairs_packed(
            Q, D, q, d, PAIRS.to(Q.device), PAIRS.to(Q.device), q_weights=W
        )
    ),
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", PADDED)
def test_tokens_of_no_sequence_have_no_effect(device, name, value):
    masks = _first(Q_LENGTHS, Lq), _first(D_LENGTHS, Ld)
    grad_Q, grad_D, _ = assert_alike(PADDED[name], dirty_and_clean(value, torch.float32, device, *masks))
    assert grad_Q.any() and not grad_Q[~masks[0]].any() and not grad_D[~masks[1]].any()


def quantized(Q, D):
    """Scales of masked tokens are NaN where the tokens are not finite."""
    Q, D = li.Tokens(Q, q_mask(Q)), li.Tokens(D, d_mask(D))
    trained = codecs.Residual.train(D, 4)
    kinds = codecs.Int8(), codecs.Fp8(torch.float8_e5m2), codecs.Bits(1), codecs.Bits(4), trained
    for codec in kinds:
        yield li.maxsim(Q, codec.encode(D))
    yield li.maxsim(Q, codecs.Bits(1, scales=False).encode(D.pack()))
    yield li.maxsim(codecs.Int8().encode(Q), codecs.Int8().encode(D))
    yield trained.centroid_scores(torch.ones_like(Q.values), trained.encode(D))


def searches(Q, D):
    yield from li.search(Q, D, 3, q_mask=q_mask(Q), d_mask=d_mask(D))
    yield from li.search(Q, D, 3, q_mask=q_mask(Q), d_mask=d_mask(D), normalize=True)
    muvera = li.Muvera(d, repetitions=4)
    yield muvera.encode_queries(li.Tokens(Q, q_mask(Q)))
    yield muvera.encode_documents(li.Tokens(D, d_mask(D)))
    yield from li.search(Q, D, 2, q_mask=q_mask(Q), d_mask=d_mask(D), coarse=muvera, candidates=3)
    yield li.hard_negatives(
        Q, D, [[0], [1], [2], [3]], num_negatives=2, q_mask=q_mask(Q), d_mask=d_mask(D)
    ).indices


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("results", [quantized, searches])
def test_what_masks_leave_out_has_no_effect_on_results_without_gradients(device, results, value):
    (Q, D, _), (clean_Q, clean_D, _) = dirty_and_clean(value, torch.float32, device)
    with torch.no_grad():
        for one, other in zip(results(Q, D), results(clean_Q, clean_D), strict=True):
            torch.testing.assert_close(one, other)
