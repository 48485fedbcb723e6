"""Scores and losses of Tokens and lists: alike in every layout, and as of plain PyTorch."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import late_interaction as li
from late_interaction import Tokens, reference
from tests.support.calls import waiting_for_nothing
from tests.support.ref import unit
from tests.support.token_forms import (
    D_MODEL,
    FORMS,
    LENGTHS,
    PAIRS,
    assert_scores_and_gradients,
    expected,
    leaves,
    padded,
    sequences,
    with_holes,
)


def of_padded(function, *args, **options):
    """A function of lists, by one of padded tokens and their masks."""

    def scores(queries, documents):
        q, d = (Tokens.from_list(x).to_padded() for x in (queries, documents))
        return function(q.values, d.values, *args, q.mask, d.mask, **options)

    return scores


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"normalize": True}, {"mean": True}, {"winners": "recompute"}])
def test_layouts_give_the_same_scores_and_gradients(options, case, first, second, device):
    queries, documents = (sequences(lengths, device) for lengths in LENGTHS[case])

    def want(queries, documents):
        if "normalize" in options:
            queries, documents = ([unit(x) for x in xs] for xs in (queries, documents))
        scores = expected(queries, documents)
        counts = torch.tensor([[max(len(q), 1)] for q in queries], device=device)
        return scores / counts if "mean" in options else scores

    def diagonal(queries, documents):
        return want(queries, documents).diagonal()

    n, forms = min(len(queries), len(documents)), (first, second)
    assert_scores_and_gradients(partial(li.maxsim, **options), want, queries, documents, *forms)
    pairs = partial(li.maxsim_pairs, **options)
    assert_scores_and_gradients(pairs, diagonal, queries[:n], documents[:n], *forms)
    with torch.no_grad():
        got = li.maxsim(FORMS[first](queries), FORMS[second](documents), **options)
    torch.testing.assert_close(got, want(queries, documents))


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("case", LENGTHS)
def test_the_smooth_maximum(case, first, second, device):
    queries, documents = (sequences(lengths, device) for lengths in LENGTHS[case])
    smooth, ours = of_padded(reference.smooth_maxsim_reference, tau=0.5), partial(li.smooth_maxsim, tau=0.5)
    assert_scores_and_gradients(ours, smooth, queries, documents, first, second)


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("rule", ["paper", "pylate"])
def test_xtr(rule, first, second, device):
    queries, documents = sequences([3, 1, 5], device), sequences([7, 1, 4, 20], device)
    xtr = of_padded(reference.xtr_scores_reference, 9, rule=rule)
    ours = partial(li.xtr_scores, k=9, rule=rule)
    assert_scores_and_gradients(ours, xtr, queries, documents, first, second)
    weights = torch.rand(9, device=device, dtype=torch.float64)
    padded_weights = Tokens.packed(weights[:, None], Tokens.from_list(queries).offsets).to_padded()
    got = li.xtr_scores(Tokens.from_list(queries), documents, 9, rule=rule, q_weights=weights)
    want = li.xtr_scores(padded(queries), documents, 9, rule=rule, q_weights=padded_weights.values[..., 0])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", ["packed", "padded", "holes"])
def test_weights_of_query_tokens(first, second, mean, device):
    queries, documents = (sequences(lengths, device) for lengths in LENGTHS["nasty"])
    of_each = [torch.randn(len(q), device=device, dtype=torch.float64) for q in queries]
    of_each[3][2] = 0
    q = FORMS[first](queries)
    if q.is_packed:
        weights = torch.cat(of_each)
    else:
        weights = torch.full(q.mask.shape, float("nan"), dtype=torch.float64, device=device)
        weights[q.mask] = torch.cat(of_each)
    weights.requires_grad_()
    want = expected(queries, documents, of_each)
    if mean:
        counts = [max(int((w != 0).sum()), 1) for w in of_each]
        want = want / torch.tensor(counts, device=device).unsqueeze(1)
    got = li.maxsim(q, FORMS[second](documents), q_weights=weights, mean=mean)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    alone = torch.autograd.functional.jacobian(
        lambda w: expected(queries, documents, w.split([len(q) for q in queries])).sum(), torch.cat(of_each)
    )
    if not mean:
        grad = weights.grad if q.is_packed else weights.grad[q.mask]
        torch.testing.assert_close(grad, alone)
    got = li.maxsim_pairs(q, FORMS[second](documents), q_weights=weights, mean=mean)
    torch.testing.assert_close(got, want.diagonal())


def test_each_query_meets_its_own_documents(device):
    queries, own = sequences([3, 0, 5], device), sequences([7, 1, 4, 65, 0, 2], device)
    d = padded(own)
    values, mask = d.values.unflatten(0, (3, 2)), d.mask.unflatten(0, (3, 2))
    want = expected(queries, own)[[0, 0, 1, 1, 2, 2], range(6)].view(3, 2)
    for form in FORMS.values():
        torch.testing.assert_close(li.maxsim(form(queries), values, d_mask=mask), want)
        got = li.maxsim(form(queries), values, d_mask=mask, mean=True)
        torch.testing.assert_close(got, want / torch.tensor([[3], [1], [5]], device=device))
    none = torch.zeros(3, 0, 4, D_MODEL, dtype=torch.float64, device=device)
    assert li.maxsim(queries, none).shape == (3, 0)


def test_a_tensor_of_one_sequence_has_no_dim_of_its_own(device):
    q, documents = *sequences([5], device), sequences([7, 0, 3], device)
    want = expected([q], documents)
    torch.testing.assert_close(li.maxsim(q, documents), want[0])
    torch.testing.assert_close(li.maxsim(documents, q), expected(documents, [q])[:, 0])
    torch.testing.assert_close(li.maxsim(q, padded(documents)), want[0])
    kept = torch.tensor([True, False, True, True, False], device=device)
    torch.testing.assert_close(li.maxsim(q, documents, kept), expected([q[kept]], documents)[0])
    scores, winners = li.maxsim_with_winners(q, documents)
    torch.testing.assert_close(scores, want[0])
    assert winners.shape == (3, 5)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_winners(first, second, device):
    queries, documents = (sequences(lengths, device) for lengths in LENGTHS["nasty"])
    q, d = FORMS[first](queries), FORMS[second](documents)
    scores, winners = li.maxsim_with_winners(q, d)
    torch.testing.assert_close(scores, expected(queries, documents))
    padded_q, padded_d = (isinstance(x, Tokens) and not x.is_packed for x in (q, d))
    assert winners.dtype == torch.int32
    for i, j in itertools.product(range(len(queries)), range(len(documents))):
        if len(documents[j]):
            want = (queries[i] @ documents[j].T).argmax(1)
            want = d.mask[j].nonzero().squeeze(1)[want] if padded_d else want
        else:
            want = torch.full((len(queries[i]),), -1, device=device)
        if padded_q:
            assert bool((winners[i, j][~q.mask[i]] == -1).all())
            got = winners[i, j][q.mask[i]]
        else:
            begin = sum(map(len, queries[:i]))
            got = winners[j, begin : begin + len(queries[i])]
        assert got.tolist() == want.tolist()


def test_nothing_is_left_of_a_batch_that_is_masked_as_a_whole(device):
    values = torch.full((2, 5, D_MODEL), float("nan"), device=device)
    dead = Tokens(values.requires_grad_(), torch.zeros(2, 5, dtype=torch.bool, device=device))
    alive = Tokens.from_list(sequences([3, 4], device, torch.float32))
    for q, d in ((dead, alive), (alive, dead), (dead, dead)):
        scores = li.maxsim(q, d)
        assert scores.tolist() == [[0, 0], [0, 0]]
        scores.sum().backward()
        assert li.maxsim_pairs(q, d).tolist() == [0, 0]
        assert li.maxsim(q, d, normalize=True, mean=True).tolist() == [[0, 0], [0, 0]]
    assert not values.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype, device):
    queries, documents = (sequences(lengths, device, dtype) for lengths in LENGTHS["nasty"])
    want = expected([q.double() for q in queries], [d.double() for d in documents])
    for first, second in PAIRS:
        got = li.maxsim(FORMS[first](queries), FORMS[second](documents))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.sampled_from(PAIRS),
)
def test_ragged_lengths(q_lengths, d_lengths, forms):
    queries, documents = sequences(q_lengths, d=8), sequences(d_lengths, d=8)
    assert_scores_and_gradients(li.maxsim, expected, queries, documents, *forms)


@pytest.mark.gpu
def test_scores_of_tokens_on_a_gpu_wait_for_nothing():
    queries, documents = (sequences(lengths, "cuda", torch.float32) for lengths in LENGTHS["nasty"])
    packed = [Tokens.from_list(x) for x in (queries, documents)]
    padded_ = [with_holes(x) for x in (queries, documents)]
    with waiting_for_nothing():
        for x in packed:
            Tokens.packed(x.values, x.offsets)
        for x in padded_:
            Tokens(x.values, x.mask)
        for q, d in itertools.product((packed[0], padded_[0]), (packed[1], padded_[1])):
            q.values.requires_grad_()
            li.maxsim(q, d).sum().backward()
            li.maxsim_pairs(q, d).sum().backward()
            li.smooth_maxsim(q, d).sum().backward()


# ---- losses ----

LOSSES = {
    "contrastive": li.losses.contrastive,
    "contrastive with a tail": lambda *x, **y: li.losses.contrastive(*x, tail=1e-4, normalize=True, **y),
    "pairwise": li.losses.pairwise,
    "sigmoid": li.losses.sigmoid,
    "recall": lambda *x, **y: li.losses.recall(*x, temperature=0.5, **y),
}


@pytest.mark.parametrize("negatives", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_every_layout(loss, negatives, device):
    lengths = [3, 2, 5, 1], [7, 1, 65, 3], [2, 3, 4, 1, 9, 2, 1, 1][: 8 * negatives]
    given = [torch.nn.functional.normalize(x, dim=-1) for n in lengths for x in sequences(n, device)]
    found = []
    for first, second in [("padded", "padded"), *PAIRS]:
        xs = leaves(given)
        beside = {"hard_negatives": FORMS[second](xs[8:])} if negatives else {}
        value = LOSSES[loss](FORMS[first](xs[:4]), FORMS[second](xs[4:8]), **beside)
        value.backward()
        found.append((value.detach(), [x.grad for x in xs]))
    q, d = xs[:4], xs[4:8]
    for value, grads in found[1:]:
        torch.testing.assert_close(value, found[0][0])
        torch.testing.assert_close(grads, found[0][1])
    if loss == "contrastive" and not negatives:
        want = torch.nn.functional.cross_entropy(expected(q, d), torch.arange(4, device=device))
        torch.testing.assert_close(found[0][0], want)


@pytest.mark.parametrize("loss", [li.losses.distill_kl_div, li.losses.margin_mse])
def test_distillation_of_every_layout(loss, device):
    lengths = [3, 2, 5], [7, 1, 65, 3, 0, 2]
    given = [torch.nn.functional.normalize(x, dim=-1) for n in lengths for x in sequences(n, device)]
    teacher = torch.randn(3, 2, device=device, dtype=torch.float64)
    scores = expected(given[:3], given[3:])[[0, 0, 1, 1, 2, 2], range(6)].view(3, 2)
    if loss is li.losses.margin_mse:
        each = (scores.diff(dim=1) - teacher.diff(dim=1)).square().squeeze(1)
    else:
        target = teacher.log_softmax(1)
        each = (target.exp() * (target - scores.log_softmax(1))).sum(1)
    want = [*each[:2].tolist(), 0.0]  # the last query has one document
    found = []
    for first, second in PAIRS:
        xs = leaves(given)
        value = loss(FORMS[first](xs[:3]), FORMS[second](xs[3:]), teacher, reduction="none")
        value.sum().backward()
        assert value.flatten().tolist() == pytest.approx(want)
        found.append([x.grad for x in xs])
    for grads in found[1:]:
        torch.testing.assert_close(grads, found[0])
    with pytest.raises(ValueError, match="D must hold as many documents for each of the 3 queries, got 5"):
        loss(given[:3], given[4:], teacher)


def test_losses_take_tensors_beside_tokens(device):
    q, documents, h = *sequences([6], device), sequences([7, 1], device), torch.randn(2, 3, 4, D_MODEL)
    q, h = q.view(2, 3, D_MODEL), h.to(q)
    kept = torch.tensor([[True, True, False], [True, False, True]], device=device)
    d = padded(documents)
    want = li.losses.contrastive(li.Tokens(q, kept), d, hard_negatives=h)
    for form in FORMS.values():
        got = li.losses.contrastive(li.Tokens(q, kept), form(documents), hard_negatives=h)
        torch.testing.assert_close(got, want)
    module = li.losses.Contrastive()
    torch.testing.assert_close(module(li.Tokens(q, kept), documents, hard_negatives=h), want.squeeze())


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (
            r"hard_negatives must hold as many .* 2 queries, got 3",
            lambda q, m: {"hard_negatives": [*q, q[0]]},
        ),
        (r"Q must be \[B, L, d\], Tokens or a list, got \[4, 24\]", lambda q, m: {"Q": m, "D": q}),
    ],
)
def test_arguments_of_losses_that_do_not_fit(words, call):
    q = Tokens.from_list(sequences([2, 4], dtype=torch.float32))
    with pytest.raises(ValueError, match=words):
        li.losses.contrastive(**{"Q": q, "D": q} | call(q, torch.ones(4, D_MODEL)))
