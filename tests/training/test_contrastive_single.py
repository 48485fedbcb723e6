"""losses.contrastive of one token a side against its definition in float64: panels of scores, the two ways to
the gradients, and which calls go there."""

from unittest import mock

import pytest
import torch

import late_interaction as li
from late_interaction._contrastive import panels, single
from tests.support.calls import peak
from tests.support.contrastive import Made, assert_close, batch, gradients, reference, small_blocks

T = 0.3
# Exact on the CPU; a GPU's float64 goes by blocks, so float32 is what its operators are tried with.
EXACT = {"cpu": (torch.float64, 1e-9), "cuda": (torch.float32, 3e-5)}


def drawn(device, Nq=13, Nd=13, d=8, dtype=None, planted=1.0):
    """Queries, documents and a temperature, as leaves."""
    dtype = dtype or EXACT[device][0]
    Q, D = batch(Nq, Nd, 1, 1, d, dtype, device, planted)
    sums = torch.float64 if dtype is torch.float64 else torch.float32
    return Q, D, torch.tensor(T, dtype=sums, device=device, requires_grad=True)


def both(
    device, leaves, side=3, kept=0, labels=None, symmetric=False, smoothing=0.0, reduction="mean", wanted=None
):
    Q, D, temperature = leaves
    leaves = wanted or leaves
    options = {"labels": labels, "symmetric": symmetric, "reduction": reduction}
    with small_blocks(side, kept=kept), mock.patch.object(single, "loss", wraps=single.loss) as taken:
        ours = li.losses.contrastive(Q, D, temperature=temperature, label_smoothing=smoothing, **options)
        ours = gradients(ours, leaves)
    # Documents that queries may share are smoothed by blocks.
    assert taken.call_count == (not (symmetric and smoothing and labels is not None))
    wanted = reference(Q, D, temperature, smoothing=smoothing, **options)
    return ours, gradients(wanted, leaves)


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("side", [3, 100])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_equals_cross_entropy(device, symmetric, reduction, smoothing, labelled, side, kept):
    labels = None
    if labelled:
        labels = torch.randperm(13, device=device)
        labels[[2, 7]] = -100
    options = {"labels": labels, "symmetric": symmetric, "smoothing": smoothing, "reduction": reduction}
    ours, wanted = both(device, drawn(device), side, kept, **options)
    assert_close(ours, wanted, EXACT[device][1])


def test_a_float16_gradient_of_zero(device):
    Q, D, temperature = drawn(device, 20, 20, 16, torch.float16)
    loss = li.losses.contrastive(Q, D, temperature=temperature, reduction="none")
    for grad in torch.autograd.grad((loss * 0).sum(), (Q, D)):
        assert not grad.any()


@pytest.mark.parametrize("sizes", [(1, 1), (1, 9), (40, 6), (7, 300), (130, 257)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sizes(device, reduction, sizes):
    labels = torch.arange(sizes[0], device=device) % sizes[1]  # which queries may share
    ours, wanted = both(device, drawn(device, *sizes), 32, labels=labels, reduction=reduction)
    assert_close(ours, wanted, EXACT[device][1])


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(device, dtype, symmetric):
    leaves = drawn(device, 70, 70, 64, dtype)
    ours, wanted = both(device, leaves, 32, symmetric=symmetric)
    assert ours[0].dtype is torch.float32 and [x.dtype for x in ours[1]] == [dtype, dtype, torch.float32]
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]
    assert_close(ours, wanted, tolerance)
    assert_close((ours[0], ours[1][2:]), (wanted[0], wanted[1][2:]), 2e-5)  # which nothing rounds


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_gradient_that_is_no_power_of_two(device, symmetric):
    """It is no factor that bfloat16 rounds: nothing is off by a common factor."""
    Q, D, temperature = drawn(device, 64, 64, 64, torch.bfloat16)

    def of(scale):
        loss = li.losses.contrastive(Q, D, temperature=temperature, symmetric=symmetric)
        return torch.autograd.grad(scale * loss, (Q, D))

    scale = 1.5 + 2**-8  # halfway between two numbers of bfloat16, 0.0026 of it apart from either
    for one, other in zip(of(1.0), of(256 * scale), strict=True):
        ratio = (other.double() * one.double()).sum() / one.double().square().sum() / 256
        assert abs(ratio - scale) < 1e-3


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_float16_keeps_small_weights(device, scale, symmetric):
    Q, D, temperature = drawn(device, 64, 64, 16, torch.float16, planted=0.0)
    loss = li.losses.contrastive(Q, D, temperature=temperature, symmetric=symmetric, reduction="sum")
    ours = torch.autograd.grad(scale * loss, (Q, D))
    wanted = reference(Q, D, temperature, symmetric=symmetric, reduction="sum")
    for got, want in zip(ours, torch.autograd.grad(wanted, (Q, D)), strict=True):
        # What float16 cannot hold in the result itself is lost: its least step is 6e-8.
        torch.testing.assert_close(got.double() / scale, want.double(), rtol=0.01, atol=0.01 + 3e-8 / scale)


def test_float16_keeps_weights_of_a_mean_over_many_queries(device):
    """Those of 600 queries with 600 documents are below 1e-6, where float16 has steps of 6e-8."""
    Q, D, _ = drawn(device, 600, 600, 8, torch.float16, planted=0.0)
    with torch.no_grad():
        D[..., 0] += 8  # which the weights of a row take away again, if they add up to what the label's is
    ours = gradients(li.losses.contrastive(Q, D, temperature=4.0), (Q, D))
    assert_close(ours, gradients(reference(Q, D, 4.0), (Q, D)), 2e-2)


def test_a_gradient_of_minus_1(device):
    """It is no gradient of 0, whose queries are left out."""
    Q, D, _ = drawn(device)
    ours = li.losses.contrastive(Q, D, temperature=1.0, reduction="none")
    found = torch.autograd.grad(-ours.sum(), (Q, D))
    wanted = reference(Q, D, 1.0, reduction="none")
    assert_close((ours, found), (wanted, torch.autograd.grad(-wanted.sum(), (Q, D))), EXACT[device][1])


def test_precision_where_losses_are_small(device):
    """Logits of hundreds: one log-sum-exp in float32 would be off by more than the loss of some rows."""
    Q, D, _ = drawn(device, 20, 20, 64, torch.float32, planted=3.0)
    with torch.no_grad():
        Q[..., 0] = D[..., 0] = 10.0
    loss = li.losses.contrastive(Q, D, temperature=T, reduction="none")
    wanted = reference(Q, D, T, reduction="none")
    assert 0 < wanted.min() < 1e-3 < wanted.max()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2], [1, 2]])
def test_some_gradients_alone(device, wanted, symmetric):
    leaves = drawn(device)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in wanted)
    ours, expected = (
        gradients(loss, [leaves[i] for i in wanted])
        for loss in (
            li.losses.contrastive(*leaves[:2], temperature=leaves[2], symmetric=symmetric),
            reference(*leaves, symmetric=symmetric),
        )
    )
    assert_close(ours, expected, EXACT[device][1])


LAUNCH = 65535 * 8  # rows of scores that the operators take at once


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_queries_than_a_launch_takes(reduction):
    leaves = Q, D, temperature = drawn("cuda", LAUNCH + 1000, 3, 4)
    labels = torch.arange(len(Q), device="cuda") % 3
    options = {"labels": labels, "reduction": reduction}
    ours = gradients(li.losses.contrastive(Q, D, temperature=temperature, **options), leaves)
    assert_close(ours, gradients(reference(Q, D, temperature, **options), leaves), 3e-4)


# ---- what is computed, and kept ----


@pytest.fixture
def scored():
    """Counts how often a panel is scored, of 3 of 13 queries."""
    score = panels.Batch.score
    with (
        small_blocks(),
        mock.patch.object(panels.Batch, "score", autospec=True, side_effect=score) as counted,
    ):
        yield counted


@pytest.mark.parametrize(
    "options, kept, passes",
    [
        ({}, 0, 1),  # the forward has the gradients
        ({"reduction": "sum"}, 0, 1),
        ({"symmetric": True}, 0, 2),
        ({"reduction": "none"}, 0, 2),
        # Rows of 13 scores are 64 apart: in float64, or twice what float32 takes.
        ({"symmetric": True}, 8 * 13 * 64, 1),
        ({"reduction": "none"}, 4 * 13 * 64 - 1, 2),
    ],
)
def test_how_often_scores_are_computed(device, options, kept, passes):
    leaves = drawn(device)
    score = panels.Batch.score
    with small_blocks(), mock.patch.object(panels.Batch, "score", autospec=True, side_effect=score) as scored:
        loss = li.losses.contrastive(*leaves[:2], temperature=leaves[2], kept_bytes=kept, **options)
        gradients(loss, leaves)
    assert scored.call_count == 5 * passes  # panels of 3 of the 13 queries


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_one_gradient_takes_scores_once(device, scored, wanted):
    """With the loss, or of the temperature from its sums."""
    leaves = drawn(device)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i == wanted)
    li.losses.contrastive(*leaves[:2], temperature=leaves[2]).backward()
    assert scored.call_count == 5


def test_memory_is_that_of_a_panel(device):
    """No tensor of all pairs, forward or backward."""
    Q, D, temperature = drawn(device, 512, 512, 4, torch.float32)
    with small_blocks(32), Made() as made:
        for symmetric in (False, True):
            li.losses.contrastive(Q, D, temperature=temperature, symmetric=symmetric).backward()
    assert max(made.bytes) == 64 * 512 * 4  # of weights: twice the rows of a panel of scores


@pytest.mark.gpu
def test_memory_on_a_gpu():
    """Beside inputs and gradients: two panels, and the documents' gradient in float32, which is held beside
    the result as the queries' is."""
    Q, D, _ = drawn("cuda", 16384, 16384, 128, torch.bfloat16)
    li.losses.contrastive(Q[:64], D[:64], temperature=T).backward()  # the workspace of cuBLAS
    Q.grad = D.grad = None
    beside = peak(lambda: torch.autograd.grad(li.losses.contrastive(Q, D, temperature=T), (Q, D)))
    assert beside <= (392 << 20) + 4 * D.numel() + 4 * 2 * Q.numel()


# ---- which calls ----


def elsewhere(device):
    Q, D, _ = drawn(device)
    yield "a mask", (li.Tokens(Q, torch.ones(13, 1, dtype=torch.bool, device=device)), D), {}
    yield "hard negatives", (Q, D), {"hard_negatives": D.detach().unsqueeze(1)}
    yield "tail", (Q, D), {"tail": 2**-10}
    yield "longer documents", (Q, torch.cat((D, D), 1)), {}
    yield "packed", (li.Tokens(Q).pack(), D), {}
    yield "no queries", (Q[:0], D), {"labels": torch.empty(0, dtype=torch.long, device=device)}
    if device == "cuda":
        yield "float64", (Q.double(), D.double()), {}


def test_calls_that_go_by_blocks(device):
    for name, tokens, options in elsewhere(device):
        with mock.patch.object(single, "loss") as taken:
            li.losses.contrastive(*tokens, temperature=T, **options)
        assert not taken.called, name
