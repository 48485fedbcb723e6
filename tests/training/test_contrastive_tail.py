"""tail=: pairs of negligible softmax weight are left out of the backward, and no others."""

import pytest
import torch
import torch.nn.functional as F

import late_interaction as li
from late_interaction._contrastive import backward, blocks
from late_interaction._contrastive.cross_entropy import CrossEntropy
from tests.support.contrastive import assert_close, batch, gradients, logits, reference, small_blocks

T = 0.1
TAIL = 2**-4


@pytest.fixture(autouse=True, params=[None, 5], ids=["one-call", "five-pairs-a-call"])
def pairs_of_a_call(request, monkeypatch):
    """A list whose pairs fit one call has gradients of its own way."""
    if request.param:
        monkeypatch.setattr(blocks, "_WINNER_BYTES", 4 * 4 * request.param)


def thresholded(Q, D, share, labels, symmetric=False, H=None, masks=(None, None, None), temperature=T):
    """The loss, and gradients of Q and D without the pairs whose weight is below the threshold."""
    S = logits(Q, D, 1.0, H, masks)
    own = labels >= 0
    classes = S.shape[1]
    weights = (S / temperature).softmax(1).detach()
    target = F.one_hot(labels.clamp_min(0), classes).bool() & own[:, None]
    counts = (weights >= share / classes) | target
    counts[:, len(D) :] = True  # hard negatives are never left out
    if symmetric:
        columns = (S[own][:, : len(D)] / temperature).softmax(0).detach() if own.all() else None
        assert columns is not None
        both = counts | (columns >= share / len(Q))
        grad = (both * (weights - target.double()) + both * (columns - target.double())) / 2 / len(Q)
    else:
        grad = counts * (weights - target.double()) * own[:, None] / own.sum()
    leaves = [Q, D] if H is None else [Q, D, H]
    return torch.autograd.grad((grad / temperature * S).sum(), leaves)


def counted(monkeypatch):
    """The lists of pairs of each forward that follows."""
    found, save = [], CrossEntropy.save
    monkeypatch.setattr(CrossEntropy, "save", lambda sums: (found.extend(sums.found), save(sums))[1])
    return found


def check(Q, D, labels=None, symmetric=False, H=None):
    """Compare with the loss by definition, and its gradients without the pairs below the threshold."""
    leaves = [x for x in (Q, D, H) if x is not None]
    options = {"labels": labels, "symmetric": symmetric}
    with small_blocks(4):
        loss = li.losses.contrastive(Q, D, temperature=T, tail=TAIL, hard_negatives=H, **options)
        ours = gradients(loss, leaves)
    wanted = reference(Q, D, T, H=H, **options).detach()
    labels = torch.arange(len(Q), device=Q.device) if labels is None else labels
    assert_close(ours, (wanted, thresholded(Q, D, TAIL, labels, symmetric, H)))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("planted", [0.0, 1.0, 3.0])
def test_exactly_the_pairs_above_the_threshold(device, monkeypatch, planted, symmetric):
    lists = counted(monkeypatch)
    check(*batch(30, 30, 4, 6, 16, device=device, planted=planted), symmetric=symmetric)
    assert not lists[0].dense and 30 <= lists[0].total < 30 * 30


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("H", [False, True])
def test_one_panel(device, monkeypatch, symmetric, H):
    """All scores pass at once: the list waits for the backward, twice where that runs twice, and what was
    marked is what counts."""
    monkeypatch.setattr("late_interaction._contrastive.pair_list._DENSE_SHARE", 1.0)
    Q, D = batch(30, 30, 4, 6, 16, device=device, planted=1.0)
    leaves, given = [Q, D], {}
    if H:
        leaves.append(torch.randn(30, 2, 5, 16, dtype=Q.dtype, device=device).requires_grad_())
        given["hard_negatives"] = leaves[2]
    lists = counted(monkeypatch)
    loss = li.losses.contrastive(Q, D, temperature=T, tail=TAIL, symmetric=symmetric, kept_bytes=0, **given)
    assert lists[0].alone and lists[0].last is not None and not lists[0].rows
    found = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(loss, leaves)))
    labels = torch.arange(30, device=device)
    hard = leaves[2] if H else None
    if H and symmetric:  # by the same list in several panels
        with small_blocks(4):
            again = li.losses.contrastive(Q, D, temperature=T, tail=TAIL, symmetric=True, **given)
            wanted = torch.autograd.grad(again, leaves)
    else:
        wanted = thresholded(Q, D, TAIL, labels, symmetric, hard)
    exact = reference(Q, D, T, H=hard, symmetric=symmetric).detach()
    assert_close((loss.detach(), found), (exact, wanted))


def test_labels_and_queries_left_out(device):
    Q, D = batch(20, 24, 4, 6, 16, device=device)
    labels = torch.randint(0, 24, (20,), device=device)
    labels[[3, 11]] = -100
    check(Q, D, labels)


def test_a_document_whose_label_is_the_first_query(device):
    """Its column begins with the logit of that query's label, not with the larger one of another query's."""
    Q, D = batch(30, 30, 4, 6, 16, device=device, planted=0.0)
    with torch.no_grad():
        D[1] *= 3
        D[2:] *= torch.linspace(0.5, 2, 28, dtype=D.dtype, device=device).view(-1, 1, 1)
    labels = torch.arange(30, device=device)
    labels[0], labels[5] = 5, 0
    check(Q, D, labels, symmetric=True)


def test_hard_negatives_are_never_left_out(device):
    H = torch.randn(12, 2, 5, 16, dtype=torch.float64, device=device, requires_grad=True)
    check(*batch(12, 12, 4, 6, 16, device=device), H=H)


def test_normalize(device):
    Q, D = batch(14, 14, 4, 6, 16, device=device)
    with small_blocks(4):
        ours = gradients(li.losses.contrastive(Q, D, temperature=T, tail=TAIL, normalize=True), (Q, D))
        units = [F.normalize(x.detach(), dim=-1).requires_grad_() for x in (Q, D)]
        wanted = gradients(li.losses.contrastive(*units, temperature=T, tail=TAIL), units)
        through = torch.autograd.grad([F.normalize(x, dim=-1) for x in (Q, D)], (Q, D), wanted[1])
    assert_close(ours, (wanted[0], through))


def test_packed(device):
    lengths = [3, 1, 4, 2, 6, 0, 5, 2, 3, 4]
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    D = torch.randn(sum(lengths), 16, dtype=torch.float64, device=device, requires_grad=True)
    Q = (D + 0.3 * torch.randn_like(D)).detach().requires_grad_()
    q, d = li.Tokens.packed(Q, cu), li.Tokens.packed(D, cu)
    with small_blocks(3):
        exact, ours, rough = (
            gradients(li.losses.contrastive(q, d, temperature=T, tail=tail), (Q, D))
            for tail in (0.0, 1e-12, 0.5)
        )
    assert_close(ours, exact)
    assert not torch.equal(rough[1][0], exact[1][0])


@pytest.mark.parametrize("tail", [2**-10, 2**-4, 0.5])
@pytest.mark.parametrize("planted", [0.0, 1.0])
def test_the_error_is_bounded(device, planted, tail):
    """Each query's token by tail / T times its share of the loss times the longest document token; all
    document tokens together by the same over all query tokens."""
    Q, D = batch(64, 64, 4, 6, 16, device=device, planted=planted)
    with small_blocks(8):
        exact = gradients(li.losses.contrastive(Q, D, temperature=T), (Q, D))
        ours = gradients(li.losses.contrastive(Q, D, temperature=T, tail=tail), (Q, D))
    off_Q, off_D = ((a - b).norm(dim=-1) for a, b in zip(ours[1], exact[1], strict=True))
    bound = tail / T / 64
    assert off_Q.max() <= bound * D.norm(dim=-1).max() * (1 + 1e-9)
    assert off_D.sum() <= bound * Q.norm(dim=-1).sum() * (1 + 1e-9)
    if tail == 0.5:
        assert off_Q.max() > 0  # something was left out


def test_loss_and_temperature_stay_exact(device):
    Q, D = batch(20, 20, device=device)
    temperature = torch.tensor(T, dtype=torch.float64, device=device, requires_grad=True)
    found = []
    for tail in (0.0, 0.9):
        with small_blocks(4):
            loss = li.losses.contrastive(Q, D, temperature=temperature, tail=tail)
            found.append((loss, *torch.autograd.grad(loss, temperature)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("many_queries", [False, True])
@pytest.mark.parametrize("listed", [0, 40, 300])
def test_a_list_that_is_full(device, monkeypatch, listed, many_queries):
    """Panels that found no room go by blocks, exactly; the others by the list."""
    Q, D = batch(60 if many_queries else 30, 30, 4, 6, 16, device=device, planted=0.3)
    labels = torch.arange(len(Q), device=device) % 30
    lists = counted(monkeypatch)
    with small_blocks(4, panel=4, listed=listed):
        ours = gradients(li.losses.contrastive(Q, D, temperature=T, tail=1e-9, labels=labels), (Q, D))
    assert lists[0].dense and lists[0].total <= listed
    assert (lists[0].total > 0) == (listed > 0)
    exact = gradients(reference(Q, D, T, labels=labels), (Q, D))
    assert_close(ours, exact, 1e-6)


def test_nan_is_not_negligible(device):
    Q, D = batch(9, 9, device=device)
    with torch.no_grad():
        Q[4, 1, 2] = float("nan")
    with small_blocks():
        loss = li.losses.contrastive(Q, D, temperature=T, tail=TAIL)
        grad_Q, grad_D = torch.autograd.grad(loss, (Q, D))
    assert loss.isnan() and grad_Q.isnan().any() and grad_D.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(device, dtype):
    Q, D = batch(33, 33, 8, 20, 32, dtype, device, planted=0.3)
    with small_blocks(8):
        ours = gradients(li.losses.contrastive(Q, D, temperature=0.3, tail=2**-12), (Q, D))
    tolerance = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert_close(ours, gradients(reference(Q, D, 0.3), (Q, D)), tolerance)


@pytest.mark.parametrize("by_documents", [False, True])
def test_pairs_of_a_row_stay_in_their_order(by_documents):
    """Sums of their gradients have the same bits on every run."""
    keys, others = torch.arange(99) % 3, torch.arange(99).flip(0)
    pairs = (others, keys, torch.arange(99.0)) if by_documents else (keys, others, torch.arange(99.0))
    chunks = backward._Chunks.of(pairs, [(0, 1), (1, 3)], by_documents)
    assert chunks.begins == [0, 33, 99]
    wanted = torch.cat([torch.arange(99)[keys == key] for key in range(3)])
    for found, given in zip(chunks.pairs, pairs, strict=True):
        assert torch.equal(found, given[wanted])
