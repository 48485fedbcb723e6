"""Losses of queries with several positives, of documents that queries share, and of pairs that are left out
as negatives, against plain sums over each query's own lists in float64."""

import pytest
import torch
import torch.nn.functional as F

import late_interaction as li
from late_interaction.reference import maxsim_reference
from tests.support.contrastive import Made, assert_close, assert_same, batch, gradients, small_blocks
from tests.support.groups import check, needs_gloo, on_ranks

T = 0.7
every = pytest.mark.parametrize("kind", ["contrastive", "pairwise", "sigmoid", "recall"])
keeps = pytest.mark.parametrize("kept", [0, 1 << 20])
LISTS = [[0], [3, 1], [2, 7, 4], [], [0, 3], [8], [6, 0, 1, 5]]  # of 7 queries among 9 documents


def of_lists(kind, positives, negatives, form="mean", smoothing=0.0):
    """The loss of one query, from the logits of its positives and negatives."""
    every = torch.cat((positives, negatives))
    if kind == "contrastive":
        each = every.logsumexp(0) - (positives.mean() if form == "mean" else positives.logsumexp(0))
        return each.lerp((every.logsumexp(0) - every).mean(), smoothing) if smoothing else each
    if kind == "pairwise":
        if not len(negatives):
            return 0.0 * positives.sum()
        label = positives if form == "mean" else positives.logsumexp(0)
        return F.softplus(negatives.max() - label).mean()
    if kind == "sigmoid":
        return F.softplus(-positives).sum() + F.softplus(negatives).sum()
    k, found = torch.tensor([1.0, 2, 4, 8, 16], dtype=every.dtype, device=every.device), []
    for i in range(len(positives)):
        others = torch.cat((every[:i], every[i + 1 :]))
        found.append(1 - torch.sigmoid(k - 1 - torch.sigmoid(others - positives[i]).sum()).mean())
    return torch.stack(found).mean()


def definition(kind, S, hit, own=None, out=None, reduction="mean", symmetric=False, **options):
    """``S``: logits of all pairs, ``own``: of hard negatives; ``hit``, ``out``: pairs that are positives, and
    that are left out."""
    own = S.new_empty(len(S), 0) if own is None else own
    out = torch.zeros_like(hit) if out is None else out & ~hit
    sides = [(S, hit, out, own)] + ([(S.t(), hit.t(), out.t(), S.t()[:, :0])] if symmetric else [])
    losses = []
    for logits, hits, left_out, more in sides:
        found = torch.zeros_like(logits[:, 0])
        for i in hits.any(1).nonzero().flatten().tolist():
            others = torch.cat((logits[i][~hits[i] & ~left_out[i]], more[i]))
            found[i] = of_lists(kind, logits[i][hits[i]], others, **options)
        losses.append((found, hits.any(1).sum()))
    if reduction == "none":
        rows = losses[0][0]
        if symmetric:
            rows = (rows + (hit * losses[1][0]).sum(1) / hit.sum(1).clamp_min(1)) / 2
        return rows
    return torch.stack([x.sum() / (n if reduction == "mean" else 1) for x, n in losses]).mean()


def hits_of(lists, documents, device="cpu"):
    found = torch.zeros(len(lists), documents, dtype=torch.bool, device=device)
    for row, documents in zip(found, lists, strict=True):
        row[documents] = True
    return found


def padded(lists, device="cpu"):
    most = max(map(len, lists))
    return torch.tensor([[*x, *[-100] * (most - len(x))] for x in lists], device=device)


def made(device, lists=LISTS, Nd=9, H=False, L=(5, 7), planted=1.0):
    Q, D = batch(len(lists), Nd, *L, device=device, planted=planted)
    H = torch.randn(len(lists), 2, 6, 8, dtype=Q.dtype, device=device, requires_grad=True) if H else None
    return Q, D, H, hits_of(lists, Nd, device)


def both(kind, tokens, hit, labels, reduction="mean", packed=False, out=None, ours=None, **options):
    """Loss and gradients of the tokens, the temperature and the bias: of the library, and by definition.
    ours: further options of the library."""
    Q, D, H = tokens
    T_ = T
    leaves = [x for x in (Q, D, H) if x is not None]
    if kind != "recall":
        T_ = torch.tensor(T, dtype=Q.dtype, device=Q.device, requires_grad=True)
        leaves.append(T_)
    q, d, h = (li.Tokens(x.flatten(0, -3)).pack() if packed and x is not None else x for x in tokens)
    smoothing = {"label_smoothing": options["smoothing"]} if "smoothing" in options else {}
    given = {("multi_positive" if k == "form" else k): x for k, x in options.items() if k != "smoothing"}
    given |= {"hard_negatives": h, "temperature": T_, "reduction": reduction, **smoothing, **(ours or {})}
    loss = getattr(li.losses, kind)(q, d, labels, **given)
    found = gradients(loss, leaves)
    own = None if H is None else maxsim_reference(Q, H) / T_
    S = maxsim_reference(Q, D) / T_
    return found, gradients(definition(kind, S, hit, own, out, reduction, **options), leaves)


# ---- several positives ----


@every
@keeps
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", ["mean", "softmax"])
def test_several_positives(kind, kept, reduction, form, device):
    Q, D, H, hit = made(device, H=True)
    options = {"form": form} if kind in ("contrastive", "pairwise") else {}
    for packed in (False, True):
        with small_blocks(kept=kept):
            assert_close(*both(kind, (Q, D, H), hit, LISTS, reduction, packed, **options))


@every
def test_spellings_of_labels(kind, device):
    """Lists, padded with -100, pairs in any order, and the same document again are one thing."""
    Q, D, _, hit = made(device)
    pairs = hit.nonzero(as_tuple=True)
    again = padded([x + x[:1] for x in LISTS], device)
    mixed = torch.randperm(len(pairs[0]), device=device)
    with small_blocks():
        wanted = gradients(getattr(li.losses, kind)(Q, D, LISTS, temperature=T), (Q, D))
        for labels in (padded(LISTS, device), again.int(), pairs, tuple(x[mixed] for x in pairs)):
            loss = getattr(li.losses, kind)(Q, D, labels, temperature=T)
            assert_close(gradients(loss, (Q, D)), wanted, 1e-14)
        one = [[x[0]] if x else [] for x in LISTS]
        flat = torch.tensor([x[0] if x else -100 for x in LISTS], device=device)
        losses = [getattr(li.losses, kind)(Q, D, x, temperature=T) for x in (one, flat, flat.unsqueeze(1))]
        assert losses[0] == losses[1] == losses[2]
        assert getattr(li.losses, kind)(Q, D, [[]] * 7, temperature=T, reduction="sum") == 0


@keeps
@pytest.mark.parametrize("form", ["mean", "softmax"])
@pytest.mark.parametrize("options", [
    {"symmetric": True}, {"smoothing": 0.2}, {"symmetric": True, "smoothing": 0.2},
    {"symmetric": True, "reduction": "none"}, {"ours": {"tail": 1e-9}},
    {"symmetric": True, "ours": {"tail": 1e-9}},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("L", [(5, 7), (1, 1)], ids=str)
def test_options_of_the_cross_entropy(form, options, kept, L, device):
    Q, D, _, hit = made(device, L=L)
    with small_blocks(kept=kept):
        assert_close(*both("contrastive", (Q, D, None), hit, LISTS, form=form, **options), 1e-7)


@keeps
@pytest.mark.parametrize("form", ["mean", "softmax"])
@pytest.mark.parametrize("L", [(5, 7), (1, 1)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_document_that_queries_share(form, kept, L, reduction, device):
    """Captions of an image, in both directions, with images that have none."""
    images = [0, 0, 3, 2, 0, 2, 5]
    Q, D, _, hit = made(device, [[x] for x in images], 6, L=L)
    for smoothing in (0.0, 0.1):
        with small_blocks(kept=kept):
            found = both(
                "contrastive", (Q, D, None), hit, torch.tensor(images, device=device), reduction, form=form,
                symmetric=True, smoothing=smoothing,
            )  # fmt: skip
            assert_close(*found)
    with small_blocks(kept=kept):  # more documents than queries, which are their own
        Q, D, _, hit = made(device, [[i] for i in range(4)], 6, L=L)
        assert_close(*both("contrastive", (Q, D, None), hit, None, reduction, form=form, symmetric=True))


@every
def test_the_same_bits_on_every_run(kind, device):
    lists = [[i % 20, (7 * i) % 20, 3] for i in range(40)]
    Q, D = batch(40, 20, 8, 20, 32, torch.float32, device)
    options = {"symmetric": True, "multi_positive": "softmax"} if kind == "contrastive" else {}
    with small_blocks(8):
        runs = [
            gradients(getattr(li.losses, kind)(Q, D, lists, temperature=T, **options), (Q, D))
            for _ in range(3)
        ]
    for run in runs[1:]:
        assert_same(run, runs[0])


@every
def test_no_tensor_of_all_pairs(kind):
    Q, D = batch(128, 128, 2, 2, 2, torch.float32)
    lists = [[i, (i + 1) % 128] for i in range(128)]
    with small_blocks(16), Made() as made:
        getattr(li.losses, kind)(Q, D, lists, temperature=T).backward()
    assert max(made.elements) <= max(Q.numel(), 10 * 128, 17 * 16 * 8)


@every
def test_nan_makes_its_rows_nan(kind, device):
    Q, D, _, _ = made(device)
    with torch.no_grad():
        Q[4, 1, 2] = torch.nan
    for kept in (0, 1 << 20):
        with small_blocks(kept=kept):
            loss = getattr(li.losses, kind)(Q, D, LISTS, temperature=T, reduction="none")
            assert loss.isnan().tolist() == [i == 4 for i in range(7)]


@every
def test_modules_take_labels(kind, device):
    Q, D, H, _ = made(device, H=True)
    module = {"contrastive": li.losses.Contrastive, "pairwise": li.losses.Pairwise}.get(kind)
    options = {} if module is None else {"multi_positive": "softmax"}
    module = module or {"sigmoid": li.losses.Sigmoid, "recall": li.losses.Recall}[kind]
    more = {"hard_negatives": H, "candidate_mask": torch.ones(7, 2, device=device).bool()}
    got = module(**options).to(device)(Q, D, LISTS, **more)
    torch.testing.assert_close(got, getattr(li.losses, kind)(Q, D, LISTS, **more, **options))


# ---- pairs that are left out ----


OUT = [[1, 2], [], [0, 8], [4], [7, 6, 5], [0], [3]]  # of the 7 queries


@every
@keeps
@pytest.mark.parametrize("spelling", ["lists", "padded", "pairs", "mask"])
def test_pairs_that_are_left_out(kind, kept, spelling, device):
    Q, D, H, hit = made(device, H=True)
    out = hits_of(OUT, 9, device)
    out[1, 3] = True  # a positive, which stays
    lists = [row.nonzero().flatten().tolist() for row in out]
    pairs = out.nonzero(as_tuple=True)
    given = {"lists": lists, "padded": padded(lists, device), "pairs": pairs, "mask": out}[spelling]
    for reduction in ("mean", "none"):
        with small_blocks(kept=kept):
            assert_close(*both(kind, (Q, D, H), hit, LISTS, reduction, out=out, ours={"exclude": given}))


@keeps
@pytest.mark.parametrize("options", [
    {"symmetric": True}, {"symmetric": True, "smoothing": 0.2}, {"ours": {"tail": 1e-9}},
    {"symmetric": True, "ours": {"tail": 1e-9}},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("L", [(5, 7), (1, 1)], ids=str)
def test_pairs_that_are_left_out_of_both_directions(options, kept, L, device):
    Q, D, _, hit = made(device, [[i] for i in range(7)], L=L)
    out = torch.rand(7, 9, device=device) < 0.3
    ours = {"exclude": out} | options.get("ours", {})
    for labels in (None, torch.arange(7, device=device)):
        with small_blocks(kept=kept):
            found = both("contrastive", (Q, D, None), hit, labels, out=out, **options | {"ours": ours})
            assert_close(*found, 1e-7)


def test_the_same_positive_twice(device):
    """It is no negative of itself: 0.693 less."""
    Q, D = batch(2, 2, device=device, planted=9.0)
    Q, D = (x.detach()[[0, 0]] for x in (Q, D))
    assert li.losses.contrastive(Q, D) == pytest.approx(0.6931, abs=1e-4)
    for options in ({"exclude": [[1], [0]]}, {"labels": [[0, 1], [0, 1]], "multi_positive": "softmax"},
                    {"exclude_above": 0.1}):  # fmt: skip
        assert li.losses.contrastive(Q, D, **options) == 0


@every
@keeps
@pytest.mark.parametrize("margin", [0.0, 0.4, -0.3])
@pytest.mark.parametrize("lists", [LISTS, [[i] for i in range(7)]], ids=["several", "one"])
def test_documents_that_score_above_a_margin(kind, kept, margin, lists, device):
    """GISTEmbed's filter by an absolute margin, from the lowest-scored positive as in hard_negatives."""
    Q, D, H, hit = made(device, lists, H=True, planted=0.3)
    S, own = maxsim_reference(Q, D), maxsim_reference(Q, H)
    limit = S.masked_fill(~hit, torch.inf).amin(1, keepdim=True) - margin
    out, has = limit < S, own <= limit
    assert (out & ~hit).any() and not has.all()
    ours = {"exclude_above": margin, "temperature": T}
    with small_blocks(kept=kept):
        loss = getattr(li.losses, kind)(Q, D, lists, hard_negatives=H, **ours)
        found = gradients(loss, (Q, D, H))
    wanted = definition(kind, S / T, hit, (own / T).masked_fill(~has, -torch.inf), out)
    assert_close(found, gradients(wanted, (Q, D, H)))
    if kind == "contrastive" and margin > 0:
        options = {"symmetric": True, "ours": {"exclude_above": margin, "exclude": OUT}}
        with small_blocks(kept=kept):
            found = both(kind, (Q, D, None), hit, lists, out=out | hits_of(OUT, 9, device), **options)
            assert_close(*found)


# ---- groups ----


@needs_gloo
@pytest.mark.parametrize("world", [2, 3])
def test_groups(world):
    """Of uneven shards, padded and packed."""
    labels = [
        padded(x)
        for x in ([[0, 8], [], [3, 1], [8], [5]], [[i, 7 - i] for i in range(8)], [[0], [2, 1], [0]])
    ]
    for kind, name, options in (
        ("padded", "contrastive", {"multi_positive": "softmax"}), ("masked", "recall", {}),
        ("packed", "sigmoid", {}), ("packed", "pairwise", {}),
    ):  # fmt: skip
        ranks = on_ranks(
            world, "losses", of=name, kind=kind, labels=labels, hard=True, reduction="none", **options
        )
        check(
            ranks, world, kind, of=name, labels=labels, hard=True, reduction="none", numbers=False, **options
        )


@needs_gloo
def test_documents_that_queries_of_a_rank_share():
    labels = [torch.tensor(x) for x in ([0, 0, 1, 4, 4], [7, 0, 1, 1, 1, -100, 0, 2], [2, 2, 0])]
    for options in ({}, {"multi_positive": "softmax", "label_smoothing": 0.1}, {"reduction": "none"}):
        options = options | {"symmetric": True}
        check(on_ranks(3, "gradients", labels=labels, **options), 3, labels=labels, **options)


@needs_gloo
@pytest.mark.parametrize("symmetric", [False, True])
def test_groups_leave_out_documents_of_all_ranks(symmetric):
    every = torch.rand(16, 16 if symmetric else 21, generator=torch.Generator().manual_seed(3)) < 0.3
    masks = list(every.split((5, 8, 3)))
    excluded = [
        masks[0],
        masks[1].nonzero(as_tuple=True),
        padded([x.nonzero().flatten().tolist() for x in masks[2]]),
    ]
    options = {"symmetric": True} if symmetric else {"label_smoothing": 0.1}
    ranks = on_ranks(3, "gradients", excluded=excluded, **options)
    check(ranks, 3, exclude=every, **options)
    ranks = on_ranks(2, "gradients", exclude_above=0.5, kind="masked", **options)
    check(ranks, 2, "masked", exclude_above=0.5, **options)
    for message in on_ranks(3, "gradients", excluded=[None, [[21]] + [[]] * 7, None]):
        assert message.startswith(
            "ValueError: losses.contrastive: exclude must speak of the 21 documents of all ranks"
        )
        assert "got 21 on rank 1" in message


# ---- refusals ----


def refusals():
    yield ValueError, r"labels must lie in \[0, 5\), .* labels\[1, 1\] = 5", [[0], [1, 5], [2]], {}
    yield ValueError, r"labels must lie in \[0, 5\), .* labels\[2, 0\] = -1", [[0], [1], [-1]], {}
    yield ValueError, "labels must hold a list for each of the 3 queries, got 2", [[0], [1]], {}
    yield TypeError, "labels must hold a list of ints for each query, got", [[0], [1], [1.5]], {}
    yield ValueError, r"labels must be \[3\] or \[3, P\], got \[2, 2\]", torch.zeros(2, 2).long(), {}
    pairs = torch.tensor([0, 3]), torch.tensor([0, 1])
    yield ValueError, r"labels must name queries in \[0, 3\), got .* labels\[0\]\[1\] = 3", pairs, {}
    yield ValueError, r"labels as pairs must be two tensors \[n\]", (pairs[0], pairs[1][:1]), {}
    yield TypeError, "labels must be int64", (pairs[0], pairs[1].float()), {}
    yield TypeError, "labels must be a torch.Tensor, two of them", 3, {}
    yield ValueError, r"exclude must lie in \[0, 5\)", None, {"exclude": [[0], [1], [5]]}
    yield ValueError, r"exclude must be \[Nq, Nd\] = \[3, 5\]", None, {"exclude": torch.ones(3, 4).bool()}
    yield TypeError, "exclude must be int64", None, {"exclude": torch.ones(3, 5)}
    yield TypeError, "exclude_above must be a float", None, {"exclude_above": True}
    yield ValueError, "exclude_above must be finite", None, {"exclude_above": float("inf")}
    yield ValueError, "multi_positive must be one of", None, {"multi_positive": "all"}


@pytest.mark.parametrize(("error", "message", "labels", "options"), list(refusals()))
def test_refusals(error, message, labels, options):
    with pytest.raises(error, match=message):
        li.losses.contrastive(torch.randn(3, 2, 8), torch.randn(5, 4, 8), labels, **options)
