"""Losses of queries with several positives or fewer candidates, of documents that queries share, and of pairs
that are left out as negatives, against plain sums over each query's own lists in float64."""

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
forms = pytest.mark.parametrize("form", ["mean", "softmax"])
lengths = pytest.mark.parametrize("L", [(5, 7), (1, 1)], ids=str)
LISTS = [[0], [3, 1], [2, 7, 4], [], [0, 3], [8], [6, 0, 1, 5]]  # of 7 queries among 9 documents
OUT = [[1, 2], [], [0, 8], [4], [7, 6, 5], [0], [3]]


def of_lists(
    kind, positives, negatives, form="mean", smoothing=0.0, k=(1, 2, 4, 8, 16), rank_temperature=1.0
):
    """The loss of one query, from the logits of its positives and negatives."""
    every = torch.cat((positives, negatives))
    if kind == "contrastive":
        each = every.logsumexp(0) - (positives.mean() if form == "mean" else positives.logsumexp(0))
        return each.lerp((every.logsumexp(0) - every).mean(), smoothing) if smoothing else each
    if kind == "pairwise":
        if not len(negatives):
            return 0.0 * positives.sum()
        label = positives if form == "mean" else positives.logsumexp(0)
        hardest = negatives[negatives.argmax()]  # one of equals: max would share the gradient among them
        return F.softplus(hardest - label).mean()
    if kind == "sigmoid":
        return F.softplus(-positives).sum() + F.softplus(negatives).sum()
    k, found = torch.tensor(k, dtype=every.dtype, device=every.device), []
    for i in range(len(positives)):
        others = torch.cat((every[:i], every[i + 1 :]))
        ahead = torch.sigmoid(others - positives[i]).sum()
        found.append(1 - torch.sigmoid((k - 1 - ahead) / rank_temperature).mean())
    return torch.stack(found).mean()


def definition(kind, S, hit, own=None, has=None, out=None, reduction="mean", symmetric=False, **options):
    """``S``: logits of all pairs, ``own``: of hard negatives; ``hit``, ``out``: pairs that are positives, and
    that are left out; ``has``: which hard negatives there are."""
    own = S.new_empty(len(S), 0) if own is None else own
    has = torch.ones_like(own, dtype=torch.bool) if has is None else has
    out = torch.zeros_like(hit) if out is None else out
    sides = [(S, hit, out, own)] + ([(S.t(), hit.t(), out.t(), S.t()[:, :0])] if symmetric else [])
    losses = []
    for logits, hits, left_out, more in sides:
        found = torch.zeros_like(logits[:, 0])
        for i in hits.any(1).nonzero().flatten().tolist():
            mine = more[i][has[i]] if more is own else more[i]
            others = torch.cat((logits[i][~hits[i] & ~left_out[i]], mine))
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


def made(device, lists=LISTS, Nd=9, H=True, L=(5, 7), planted=1.0):
    """Queries, documents and hard negatives; and positives."""
    tokens = batch(len(lists), Nd, *L, device=device, planted=planted)
    if H:
        tokens += (
            torch.randn(len(lists), 3, L[1], 8, dtype=tokens[0].dtype, device=device, requires_grad=True),
        )
    return tokens, hits_of(lists, Nd, device)


def which(device, queries=7):
    """Hard negatives that there are: none of one query, all of another."""
    found = torch.rand(queries, 3, device=device) < 0.6
    found[0], found[1] = False, True
    return found


def loss_of(kind, tokens, labels=None, packed=False, **options):
    q, d, *h = (li.Tokens(x.flatten(0, -3)).pack() for x in tokens) if packed else tokens
    options = {"temperature": T, **options} | ({"hard_negatives": h[0]} if h else {})
    return getattr(li.losses, kind)(q, d, labels, **options)


def both(kind, tokens, hit, labels, packed=False, has=None, out=None, ours=None, **options):
    """Loss and gradients of the tokens and the temperature: of the library, and by definition. ours: further
    options of the library."""
    T_, leaves = T, list(tokens)
    if kind != "recall":
        T_ = torch.tensor(T, dtype=tokens[0].dtype, device=tokens[0].device, requires_grad=True)
        leaves.append(T_)
    names = {"form": "multi_positive", "smoothing": "label_smoothing"}
    given = {names.get(k, k): x for k, x in options.items()} | (ours or {})
    given |= {} if has is None else {"candidate_mask": has}
    found = gradients(loss_of(kind, tokens, labels, packed, temperature=T_, **given), leaves)
    S, own = (maxsim_reference(tokens[0], x) / T_ for x in (*tokens[1:], tokens[0][:, None][:, :0])[:2])
    return found, gradients(definition(kind, S, hit, own, has, out, **options), leaves)


# ---- several positives ----


@every
@keeps
@forms
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_several_positives_and_fewer_candidates(kind, kept, reduction, form, packed, device):
    tokens, hit = made(device)
    options = {"form": form} if kind in ("contrastive", "pairwise") else {}
    for has in (None, which(device)):
        with small_blocks(kept=kept):
            assert_close(*both(kind, tokens, hit, LISTS, packed, has, reduction=reduction, **options))


@every
def test_spellings_of_labels(kind, device):
    """Lists, padded with -100, pairs in any order, and the same document again are one thing."""
    tokens, hit = made(device, H=False)
    pairs = hit.nonzero(as_tuple=True)
    again = padded([x + x[:1] for x in LISTS], device)
    mixed = torch.randperm(len(pairs[0]), device=device)
    with small_blocks():
        wanted = gradients(loss_of(kind, tokens, LISTS), tokens)
        for labels in (padded(LISTS, device), again.int(), pairs, tuple(x[mixed] for x in pairs)):
            assert_close(gradients(loss_of(kind, tokens, labels), tokens), wanted, 1e-14)
        flat = torch.tensor([x[0] if x else -100 for x in LISTS], device=device)
        losses = [loss_of(kind, tokens, x) for x in ([x[:1] for x in LISTS], flat, flat.unsqueeze(1))]
        assert losses[0] == losses[1] == losses[2]
        assert loss_of(kind, tokens, [[]] * 7, reduction="sum") == 0


@keeps
@forms
@lengths
@pytest.mark.parametrize("options", [
    {"symmetric": True}, {"smoothing": 0.2}, {"symmetric": True, "smoothing": 0.2},
    {"symmetric": True, "reduction": "none"}, {"ours": {"tail": 1e-9}},
    {"symmetric": True, "ours": {"tail": 1e-9}},
], ids=str)  # fmt: skip
def test_options_of_the_cross_entropy(form, options, kept, L, device):
    out = hits_of(OUT, 9, device)
    options = options | {"ours": {"exclude": OUT} | options.get("ours", {})}
    for lists in (LISTS, [[i] for i in range(7)]):
        tokens, hit = made(device, lists, L=L)
        labels = lists if lists is LISTS else None
        with small_blocks(kept=kept):
            found = both(
                "contrastive", tokens, hit, labels, False, which(device), out & ~hit, form=form, **options
            )
            assert_close(*found, 1e-7)


@forms
@pytest.mark.parametrize("tail", [0.3, 0.6])
def test_a_tail_leaves_out_no_positive(form, tail, device):
    (Q, D), hit = made(device, H=False)
    S = maxsim_reference(Q, D) / 0.3
    loss = definition("contrastive", S, hit, form=form)
    (weights,) = torch.autograd.grad(loss, S, retain_graph=True)
    kept = hit | S.softmax(1).ge(tail / 9)
    assert not kept.all()
    wanted = loss.detach(), torch.autograd.grad(S, (Q, D), weights * kept)
    with small_blocks():
        ours = loss_of("contrastive", (Q, D), LISTS, temperature=0.3, tail=tail, multi_positive=form)
        assert_close(gradients(ours, (Q, D)), wanted)


@keeps
@forms
@lengths
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_document_that_queries_share(form, kept, L, reduction, device):
    """Captions of an image, in both directions, with images that have none."""
    images = [0, 0, 3, 2, 0, 2, 5]
    options = {"reduction": reduction, "form": form, "symmetric": True}
    tokens, hit = made(device, [[x] for x in images], 6, False, L)
    labels = torch.tensor(images, device=device)
    for smoothing in (0.0, 0.1):
        with small_blocks(kept=kept):
            assert_close(*both("contrastive", tokens, hit, labels, smoothing=smoothing, **options))
    tokens, hit = made(device, [[i] for i in range(4)], 6, False, L)  # more documents than queries
    with small_blocks(kept=kept):
        assert_close(*both("contrastive", tokens, hit, None, **options))


@every
def test_the_same_bits_on_every_run(kind, device):
    lists = [[i % 20, (7 * i) % 20, 3] for i in range(40)]
    tokens = batch(40, 20, 8, 20, 32, torch.float32, device)
    options = {"symmetric": True, "multi_positive": "softmax"} if kind == "contrastive" else {}
    with small_blocks(8):
        runs = [gradients(loss_of(kind, tokens, lists, **options), tokens) for _ in range(3)]
    for run in runs[1:]:
        assert_same(run, runs[0])


@every
def test_no_tensor_of_all_pairs(kind):
    Q, D = batch(128, 128, 2, 2, 2, torch.float32)
    lists = [[i, (i + 1) % 128] for i in range(128)]
    with small_blocks(16), Made() as made:
        loss_of(kind, (Q, D), lists, exclude=lists, exclude_above=0.1).backward()
    assert max(made.elements) <= max(Q.numel(), 10 * 128, 17 * 16 * 8)


@every
def test_modules_take_labels(kind, device):
    tokens, _ = made(device)
    options = {"multi_positive": "softmax"} if kind in ("contrastive", "pairwise") else {}
    module = getattr(li.losses, kind.capitalize())(exclude_above=0.1, **options).to(device)
    more = {"hard_negatives": tokens[2], "candidate_mask": which(device), "exclude": OUT}
    wanted = loss_of(kind, tokens, LISTS, temperature=1.0, exclude_above=0.1, **options, **more)
    torch.testing.assert_close(module(*tokens[:2], LISTS, **more), wanted)


# ---- fewer candidates ----


@every
@keeps
def test_a_hard_negative_that_no_query_has(kind, kept, device):
    """The same as without it."""
    (Q, D, H), _ = made(device, [[i] for i in range(7)])
    has = torch.tensor([True, False, True], device=device).expand(7, 3)
    with small_blocks(kept=kept):
        found = gradients(loss_of(kind, (Q, D, H), candidate_mask=has.int()), (Q, D, H))
        short = gradients(loss_of(kind, (Q, D, H[:, [0, 2]])), (Q, D, H))
    assert_close(found, short, 1e-12)


@every
@keeps
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_what_is_left_out_reaches_nothing(kind, kept, packed, normalize, device):
    (Q, D, H), _ = made(device, [[i] for i in range(7)])
    has, found = which(device), []
    for value in (0.0, torch.nan, torch.inf):
        held = H.detach().masked_fill(~has[..., None, None], value).requires_grad_()
        with small_blocks(kept=kept):
            loss = loss_of(kind, (Q, D, held), None, packed, candidate_mask=has, normalize=normalize)
            found.append(gradients(loss, (Q, D, held)))
    assert not found[1][1][2][~has].any() and all(g.isfinite().all() for g in found[1][1])
    for other in found[1:]:
        assert_same(other, found[0])


@every
@keeps
def test_a_hard_negative_without_tokens_is_none(kind, kept, device):
    """Masked, of length 0, or left out by name."""
    (Q, D, H), _ = made(device, [[i] for i in range(7)])
    has, flat = which(device), H.flatten(0, 1)
    masked = li.Tokens(flat, has.flatten().unsqueeze(1).expand(-1, 7))
    cut = [x if keep else x[:0] for x, keep in zip(flat, has.flatten(), strict=True)]
    with small_blocks(kept=kept):
        named = gradients(loss_of(kind, (Q, D, H), candidate_mask=has), (Q, D, H))
        for h in (masked, cut):
            assert_close(gradients(loss_of(kind, (Q, D), hard_negatives=h), (Q, D, H)), named)


# ---- pairs that are left out ----


@every
@keeps
@pytest.mark.parametrize("spelling", ["lists", "padded", "pairs", "mask"])
def test_pairs_that_are_left_out(kind, kept, spelling, device):
    tokens, hit = made(device)
    out = hits_of(OUT, 9, device)
    out[1, 3] = True  # a positive, which stays
    lists = [row.nonzero().flatten().tolist() for row in out]
    pairs = out.nonzero(as_tuple=True)
    given = {"lists": lists, "padded": padded(lists, device), "pairs": pairs, "mask": out}[spelling]
    with small_blocks(kept=kept):
        assert_close(*both(kind, tokens, hit, LISTS, out=out & ~hit, ours={"exclude": given}))


def test_the_same_positive_twice(device):
    """It is no negative of itself: 0.693 less."""
    Q, D = (x.detach()[[0, 0]] for x in batch(2, 2, device=device, planted=9.0))
    assert float(li.losses.contrastive(Q, D)) == pytest.approx(0.6931, abs=1e-4)
    for options in ({"exclude": [[1], [0]]}, {"labels": [[0, 1], [0, 1]], "multi_positive": "softmax"},
                    {"exclude_above": 0.1}):  # fmt: skip
        assert li.losses.contrastive(Q, D, **options) == 0


@every
@keeps
@pytest.mark.parametrize("margin", [0.0, 0.4, -0.3])
@pytest.mark.parametrize("lists", [LISTS, [[i] for i in range(7)]], ids=["several", "one"])
def test_documents_that_score_above_a_margin(kind, kept, margin, lists, device):
    """GISTEmbed's filter by an absolute margin, from the lowest-scored positive as in hard_negatives."""
    tokens, hit = made(device, lists, planted=0.3)
    S, own = (maxsim_reference(tokens[0], x) for x in tokens[1:])
    limit = S.masked_fill(~hit, torch.inf).amin(1, keepdim=True) - margin
    out, has = S.gt(limit) & ~hit, own.le(limit)
    assert out.any() and not has.all()
    with small_blocks(kept=kept):
        found = gradients(loss_of(kind, tokens, lists, exclude_above=margin), tokens)
    assert_close(found, gradients(definition(kind, S / T, hit, own / T, has, out), tokens))
    if kind == "contrastive":
        options = {"symmetric": True, "ours": {"exclude_above": margin, "exclude": OUT}}
        with small_blocks(kept=kept):
            both_out = (out | hits_of(OUT, 9, device)) & ~hit
            assert_close(*both(kind, tokens[:2], hit, lists, out=both_out, **options))


# ---- groups ----


@needs_gloo
@pytest.mark.parametrize("world", [2, 3])
def test_groups(world):
    """Shards are uneven, padded and packed."""
    lists = [[0, 8], [], [3, 1], [8], [5]], [[i, 7 - i] for i in range(8)], [[0], [2, 1], [0]]
    given = {"labels": [padded(x) for x in lists], "hard": True, "reduction": "none"}
    for kind, name, options in (
        ("padded", "contrastive", {"multi_positive": "softmax"}), ("masked", "recall", {}),
        ("packed", "sigmoid", {}), ("packed", "pairwise", {}),
    ):  # fmt: skip
        ranks = on_ranks(world, "losses", of=name, kind=kind, **given, **options)
        check(ranks, world, kind, of=name, numbers=False, **given, **options)


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
    a, b, c = every.split((5, 8, 3))
    excluded = [a, b.nonzero(as_tuple=True), padded([x.nonzero().flatten().tolist() for x in c])]
    options = {"symmetric": True} if symmetric else {"label_smoothing": 0.1}
    check(on_ranks(3, "gradients", excluded=excluded, **options), 3, exclude=every, **options)
    ranks = on_ranks(2, "gradients", exclude_above=0.5, kind="masked", **options)
    check(ranks, 2, "masked", exclude_above=0.5, **options)
    for message in on_ranks(3, "gradients", excluded=[None, [[21]] + [[]] * 7, None]):
        assert message.startswith("ValueError: losses.contrastive: exclude must speak of the 21 documents of")
        assert "got 21 on rank 1" in message


@pytest.mark.parametrize("packed", [True, False])
def test_a_candidate_mask_of_no_queries(packed):
    """As a process of a group may have it, whose hard negatives do not say how many each query has."""
    values = torch.zeros(*(0,) if packed else (0, 4), 8)
    H = li.Tokens.packed(values, torch.zeros(1, dtype=torch.int32)) if packed else li.Tokens(values)
    mask = torch.ones(0, 2, dtype=torch.bool)
    options = {"hard_negatives": H, "candidate_mask": mask, "reduction": "none"}
    assert li.losses.contrastive(torch.randn(0, 2, 8), torch.randn(5, 4, 8), **options).shape == (0,)
    with pytest.raises(ValueError, match=r"candidate_mask must be \[B, K\] = \[0, 0\], got \[1, 2\]"):
        options["candidate_mask"] = torch.ones(1, 2).bool()
        li.losses.contrastive(torch.randn(0, 2, 8), torch.randn(5, 4, 8), **options)
