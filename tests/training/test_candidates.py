"""Losses of queries that have fewer candidates than there is room for, against each query's own list."""

import pytest
import torch
import torch.nn.functional as F

import late_interaction as li
from late_interaction.reference import maxsim_reference
from tests.support.contrastive import assert_close, assert_same, batch, gradients, small_blocks

T = 0.7
LOSSES = ("contrastive", "pairwise", "sigmoid", "recall")
every = pytest.mark.parametrize("kind", LOSSES)
keeps = pytest.mark.parametrize("kept", [0, 1 << 20])
forms = pytest.mark.parametrize("packed", [False, True])


def scores_of(Q, D):
    return maxsim_reference(Q, D) / T


def of_list(kind, positive, negatives, smoothing=0.0):
    """The loss of one query with a positive and a list of negatives, written plainly."""
    every = torch.cat((positive.view(1), negatives))
    if kind == "contrastive":
        log = every.log_softmax(0)
        return -(1 - smoothing) * log[0] - smoothing * log.mean()
    if kind == "pairwise":
        return F.softplus(negatives.max() - positive) if len(negatives) else 0.0 * positive
    if kind == "sigmoid":
        return F.softplus(-positive) + F.softplus(negatives).sum()
    ahead = torch.sigmoid(negatives - positive).sum()
    return 1 - torch.stack([torch.sigmoid(k - 1 - ahead) for k in (1, 2, 4, 8, 16)]).mean()


def made(device, Nq=7, K=4):
    Q, D = batch(Nq, Nq, device=device)
    H = torch.randn(Nq, K, 6, 8, dtype=torch.float64, device=device, requires_grad=True)
    kept = torch.rand(Nq, K, device=device) < 0.6
    kept[0], kept[1] = False, True
    return Q, D, H, kept


def loss_of(kind, Q, D, H, packed, **options):
    if packed:
        Q, D, H = (li.Tokens(x.flatten(0, -3)).pack() for x in (Q, D, H))
    return getattr(li.losses, kind)(Q, D, hard_negatives=H, temperature=T, **options)


@every
@keeps
@forms
def test_hard_negatives_that_are_left_out_are_those_of_a_shorter_list(kind, kept, packed, device):
    Q, D, H, has = made(device)
    S, own, loss = scores_of(Q, D), scores_of(Q, H), []
    for i in range(len(Q)):
        others = torch.cat((S[i, :i], S[i, i + 1 :], own[i][has[i]]))
        loss.append(of_list(kind, S[i, i], others))
    wanted = gradients(torch.stack(loss), (Q, D, H))
    with small_blocks(kept=kept):
        for mask in (has, has.int()):
            found = loss_of(kind, Q, D, H, packed, candidate_mask=mask, reduction="none")
            assert_close(gradients(found, (Q, D, H)), wanted)


@every
@keeps
def test_one_that_no_query_has(kind, kept, device):
    """The same as without it."""
    Q, D, H, has = made(device)
    has[:] = torch.tensor([True, True, False, True], device=device)
    with small_blocks(kept=kept):
        found = gradients(loss_of(kind, Q, D, H, False, candidate_mask=has), (Q, D, H))
        short = gradients(loss_of(kind, Q, D, H[:, [0, 1, 3]], False), (Q, D, H))
    assert_close(found, short, 1e-12)


@every
@keeps
@forms
@pytest.mark.parametrize("normalize", [False, True])
def test_what_they_hold_reaches_nothing(kind, kept, packed, normalize, device):
    Q, D, H, has = made(device)
    found = []
    for value in (0.0, torch.nan, torch.inf):
        held = H.detach().masked_fill(~has[..., None, None], value).requires_grad_()
        with small_blocks(kept=kept):
            loss = loss_of(kind, Q, D, held, packed, candidate_mask=has, normalize=normalize)
            found.append(gradients(loss, (Q, D, held)))
    assert not found[1][1][2][~has].any() and all(g.isfinite().all() for g in found[1][1])
    for other in found[1:]:
        assert_same(other, found[0])


@every
@keeps
def test_one_without_tokens_is_none(kind, kept, device):
    """Masked, of length 0, or left out by name."""
    Q, D, H, has = made(device)
    of_tokens = li.Tokens(H.flatten(0, 1), has.flatten().unsqueeze(1).expand(-1, 6))
    cut = [x if keep else x[:0] for x, keep in zip(H.flatten(0, 1), has.flatten(), strict=True)]
    with small_blocks(kept=kept):
        named = gradients(loss_of(kind, Q, D, H, False, candidate_mask=has), (Q, D, H))
        for h in (of_tokens, cut):
            loss = getattr(li.losses, kind)(Q, D, hard_negatives=h, temperature=T)
            assert_close(gradients(loss, (Q, D, H)), named)


@keeps
@pytest.mark.parametrize("options", [
    {"label_smoothing": 0.2}, {"label_smoothing": 0.2, "symmetric": True}, {"symmetric": True},
    {"tail": 1e-9},
])  # fmt: skip
def test_with_options_of_the_cross_entropy(options, kept, device):
    Q, D, H, has = made(device)
    learned = torch.tensor(T, dtype=torch.float64, device=device, requires_grad=True)
    leaves, smoothing = (Q, D, H, learned), options.get("label_smoothing", 0.0)
    S, own = (maxsim_reference(Q, x) / learned for x in (D, H))
    wanted = []
    for i in range(len(Q)):
        others = torch.cat((S[i, :i], S[i, i + 1 :], own[i][has[i]]))
        each = of_list("contrastive", S[i, i], others, smoothing)
        if options.get("symmetric"):
            back = torch.cat((S[:i, i], S[i + 1 :, i]))
            each = (each + of_list("contrastive", S[i, i], back, smoothing)) / 2
        wanted.append(each)
    with small_blocks(kept=kept):
        found = li.losses.contrastive(
            Q, D, hard_negatives=H, temperature=learned, candidate_mask=has, reduction="none", **options
        )
        assert_close(gradients(found, leaves), gradients(torch.stack(wanted), leaves), 1e-7)


@every
def test_gradcheck(kind, device):
    Q, D, H, has = made(device, 4, 3)
    for kept in (0, 1 << 20):
        with small_blocks(2, kept=kept):
            assert torch.autograd.gradcheck(
                lambda *x: loss_of(kind, *x, False, candidate_mask=has), (Q, D, H)
            )


def refusals():
    H = torch.randn(4, 2, 5, 8)
    yield ValueError, r"candidate_mask must be \[B, K\] = \[4, 2\]", H, torch.ones(4, 3).bool()
    yield TypeError, "candidate_mask must be", H, [[True, True]] * 4
    yield TypeError, "candidate_mask must be", H, torch.ones(4, 2)
    yield ValueError, "candidate_mask must be None without hard_negatives", None, torch.ones(4, 0).bool()


@pytest.mark.parametrize(("error", "message", "H", "mask"), list(refusals()))
def test_refusals(error, message, H, mask):
    Q = torch.randn(4, 3, 8)
    with pytest.raises(error, match=message):
        li.losses.sigmoid(Q, Q, hard_negatives=H, candidate_mask=mask)
