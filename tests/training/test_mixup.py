"""Recall@k with similarity mixup against the equations of arXiv 2108.11179 in float64."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

import late_interaction as li
from late_interaction.reference import maxsim_reference
from tests.support.contrastive import Made, assert_close, assert_same, batch, gradients, small_blocks
from tests.training.test_labels import of_lists

T, K = 0.7, (1, 2, 4)
BLOCKS = pytest.mark.parametrize("kept", [0, 1 << 20], ids=["blocks", "whole"])
# Of 11 queries among 13 documents: four queries of four documents, three of one, two of two documents that
# lie in two groups of four, one of a document of the first four and another one, and one that is left out.
LABELS = [[0, 1, 2, 3]] * 4 + [[5], [5], [5], [8, 7]] + [[7, 8], [0, 9], []]


def pairs_of(classes, size):
    """Every two of a class within a group of ``size`` examples that follow one another, as the shares are
    drawn: group by group, by the second of them, then the first."""
    found = [(i, j) for i, j in combinations(range(len(classes)), 2) if i // size == j // size]
    return sorted(found, key=lambda pair: (pair[0] // size, pair[1], pair[0]))


def extended(classes, size, shares):
    """Rows that mix examples ``[examples + virtual, examples]``, and the classes of what they make."""
    rows, made = list(torch.eye(len(classes), dtype=torch.float64)), list(classes)
    for (i, j), share in zip(pairs_of(classes, size), shares.tolist(), strict=True):
        if classes[i] == classes[j]:
            rows.append(share * rows[i] + (1 - share) * rows[j])
            made.append(classes[i])
    return torch.stack(rows), made


def definition(S, labels, size, seed, own=None, reduction="mean", k=K):
    """The mean of ``1 - recall@k`` over queries and virtual ones, from the scores of all pairs divided by the
    temperature. ``own``: of hard negatives."""
    lists = [frozenset(x) for x in labels]
    of_queries = [x or object() for x in lists]  # what is left out is of no class
    of_documents = [
        frozenset(i for i, x in enumerate(lists) if d in x) or object() for d in range(S.shape[1])
    ]
    generator = torch.Generator().manual_seed(seed)
    counts = [len(pairs_of(x, size)) for x in (of_queries, of_documents)]
    shares = [torch.rand(n, dtype=torch.float64, generator=generator) for n in counts]
    A, q_classes = extended(of_queries, size, shares[0])
    B, _ = extended(of_documents, size, shares[1])
    S = A.to(S.device) @ S @ B.to(S.device).t()  # s(v, w) = the bilinear mix of the four originals' scores
    losses = []
    for i, x in enumerate(q_classes):
        if not isinstance(x, frozenset):
            continue
        hit = torch.tensor([row.nonzero()[0].item() in x for row in B], device=S.device)
        negatives = S[i][~hit] if own is None or i >= len(labels) else torch.cat((S[i][~hit], own[i]))
        losses.append(of_lists("recall", S[i][hit], negatives, k=k))
    found = torch.stack(losses)
    return found.mean() if reduction == "mean" else found.sum()


def both(device, labels=LABELS, size=4, kept=0, negatives=False, side=3, documents=13, L=(5, 7), **options):
    Q, D = batch(len(labels), documents, *L, device=device)
    leaves, H = [Q, D], None
    if negatives:
        H = torch.randn(len(labels), 2, 4, 8, dtype=torch.float64, device=device, requires_grad=True)
        leaves.append(H)
    with small_blocks(side, kept=kept):
        loss = li.losses.recall(
            Q, D, labels, k=K, temperature=T, mixup=size, hard_negatives=H,
            generator=torch.Generator().manual_seed(5), **options,
        )  # fmt: skip
        ours = gradients(loss, leaves)
    own = None if H is None else maxsim_reference(Q, H) / T
    wanted = definition(maxsim_reference(Q, D) / T, labels, size, 5, own, **options)
    return ours, gradients(wanted, leaves)


@BLOCKS
@pytest.mark.parametrize("size", [2, 3, 4, 20])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_the_equations_of_the_paper(device, size, reduction, kept):
    assert_close(*both(device, size=size, reduction=reduction, kept=kept))


@BLOCKS
def test_hard_negatives_rank_among_the_documents_of_real_queries(device, kept):
    assert_close(*both(device, negatives=True, kept=kept))


@BLOCKS
@pytest.mark.parametrize("side", [1, 2, 5, 40])
@pytest.mark.parametrize("L", [(5, 7), (1, 1)], ids=str)
def test_blocks_of_any_size_hold_whole_groups(device, side, L, kept):
    assert_close(*both(device, side=side, L=L, kept=kept))


def test_packed_sequences(device):
    Q = [torch.randn(n, 8, dtype=torch.float64, device=device) for n in (5, 1, 3, 9, 1, 4, 4, 2)]
    D = [torch.randn(n, 8, dtype=torch.float64, device=device) for n in (7, 30, 2, 1, 12, 5)]
    labels = [[i // 4, i // 4 + 2] for i in range(8)]
    with small_blocks(3):
        generator = torch.Generator().manual_seed(5)
        found = li.losses.recall(Q, D, labels, k=K, temperature=T, mixup=4, generator=generator)
    S = torch.stack([torch.stack([(q @ d.t()).amax(1).sum() for d in D]) for q in Q]) / T
    torch.testing.assert_close(found, definition(S, labels, 4, 5))


@BLOCKS
def test_a_class_of_one_member_makes_nothing(device, kept):
    Q, D = batch(6, 9, device=device)
    with small_blocks(3, kept=kept):
        plain = gradients(li.losses.recall(Q, D), [Q, D])
        for labels in (None, torch.arange(6, device=device), [[0], [1, 4], [2], [3], [5], [6]]):
            if isinstance(labels, list):
                plain = gradients(li.losses.recall(Q, D, labels), [Q, D])
            mixed = gradients(li.losses.recall(Q, D, labels, mixup=3), [Q, D])
            assert_close(mixed, plain)


def test_documents_that_share_a_part_of_their_queries_are_of_two_classes(device):
    Q, D = batch(4, 4, device=device)
    labels = [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert_close(
        gradients(li.losses.recall(Q, D, labels, mixup=4), [Q, D]),
        gradients(li.losses.recall(Q, D, labels), [Q, D]),
    )


@BLOCKS
def test_what_is_left_out_for_one_is_left_out_for_the_mix(device, kept):
    """Here a virtual query is the mix of two equal ones, and so has the loss of each."""
    Q, D = batch(3, 9, device=device)
    exclude = [[6], [7, 8], [1], [2, 0], [4], [5]]
    joined = [[6, 7, 8], [1, 2, 0], [4, 5]]
    labels = [[3], [3], [5], [5], [8], [8]]
    twice = Q.repeat_interleave(2, 0)
    with small_blocks(3, kept=kept):
        options = {"temperature": T, "reduction": "sum"}
        mixed = li.losses.recall(twice, D, labels, exclude=exclude, mixup=2, **options)
        plain = li.losses.recall(twice, D, labels, exclude=exclude, **options)
        virtual = li.losses.recall(Q, D, labels[::2], exclude=joined, **options)
        assert_close(gradients(mixed, [Q, D]), gradients(plain + virtual, [Q, D]))


def test_gradcheck(device):
    Q, D = batch(4, 4, 2, 3, 2, device=device)
    labels = [[0, 1], [0, 1], [2, 3], [2, 3]]

    def loss(Q, D):
        generator = torch.Generator().manual_seed(1)
        return li.losses.recall(Q, D, labels, mixup=2, temperature=T, generator=generator)

    with small_blocks(2):
        assert torch.autograd.gradcheck(loss, (Q, D))
    assert torch.autograd.gradcheck(loss, (Q, D))


@BLOCKS
def test_seeds(device, kept):
    Q, D = batch(8, 8, device=device)
    labels = [[i // 2] for i in range(8)]

    def step(**options):
        with small_blocks(3, kept=kept):
            return gradients(li.losses.recall(Q, D, labels, mixup=2, **options), [Q, D])

    def drawn_from(seed):
        return step(generator=torch.Generator().manual_seed(seed))

    assert_same(drawn_from(3), drawn_from(3))
    assert drawn_from(3)[0] != drawn_from(4)[0]
    torch.manual_seed(3)
    first, second = step(), step()
    assert first[0] != second[0]
    torch.manual_seed(3)
    assert_same(step(), first)
    of_module = li.losses.Recall(mixup=2, generator=torch.Generator().manual_seed(3))
    with small_blocks(3, kept=kept):
        assert_same(gradients(of_module(Q, D, labels), [Q, D]), drawn_from(3))


def test_a_nan_of_a_class_stays_with_the_loss(device):
    Q, D = batch(4, 4, device=device)
    with torch.no_grad():
        Q[3] = torch.nan
    loss = li.losses.recall(Q, D, [[0], [0], [1], []], mixup=2)  # the fourth query is left out
    assert all(x.isfinite().all() for x in gradients(loss, [Q, D])[1]) and loss.isfinite()
    assert li.losses.recall(Q, D, [[0], [0], [1], [1]], mixup=2).isnan()


def test_neither_scores_nor_their_mixes_are_stored(device):
    Q, D = (torch.randn(256, 2, 4, device=device, requires_grad=True) for _ in range(2))
    labels = torch.arange(256, device=device) // 4
    with small_blocks(32, panel=32), Made() as made:
        li.losses.recall(Q, D, labels, mixup=4).backward()
    assert max(made.elements) < 256 * 256 / 8


def test_a_virtual_query_ranks_its_documents_too():
    """Two queries of one document, by hand."""
    Q, D = torch.eye(2).unsqueeze(1), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.5, 0.5]]])
    S = Q[:, 0] @ D[:, 0].t()
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    rows = torch.stack([S[0], S[1], share * S[0] + (1 - share) * S[1]])
    ahead = (rows - rows[:, :1]).sigmoid()[:, 1:].sum(1)
    wanted = 1 - F.sigmoid(-ahead).mean()
    found = li.losses.recall(Q, D, [[0], [0]], k=1, mixup=2, generator=generator)
    torch.testing.assert_close(found, wanted)
