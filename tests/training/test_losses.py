"""Laws of every loss over a batch: its definition in float64, in blocks forced small, and what autograd,
autocast, torch.compile and a GPU ask of it."""

import copy
import inspect
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import late_interaction as li
from late_interaction._contrastive.kernels import Kernels
from tests.support.contrastive import (
    Made,
    assert_close,
    assert_same,
    batch,
    gpu_bytes_beside,
    gradients,
    logits,
    own,
    reference,
    small_blocks,
    waits_for_nothing,
)
from tests.training.test_labels import of_lists

T = 0.7
LENGTHS = ([5, 0, 3, 9, 1, 4, 4, 2], [7, 30, 0, 2, 1, 12, 5, 8, 3], [1, 4, 0, 2, 5, 3, 2, 2] * 2)
# Functions, and the options that make them losses of their own. Single: of one token a side, which go by
# panels of one product instead of blocks.
KINDS = {
    "contrastive": (li.losses.contrastive, {}),
    "smoothed": (li.losses.contrastive, {"label_smoothing": 0.1}),
    "symmetric": (li.losses.contrastive, {"symmetric": True}),
    "single": (li.losses.contrastive, {}),
    "single, symmetric": (li.losses.contrastive, {"symmetric": True, "label_smoothing": 0.1}),
    **{name: (getattr(li.losses, name), {}) for name in ("pairwise", "sigmoid", "recall")},
}
SEVERAL = [kind for kind in KINDS if "single" not in kind]
FUNCTIONS = {name: partial(function, **options) for name, (function, options) in KINDS.items()}
every = pytest.mark.parametrize("kind", KINDS)
# No two queries of a symmetric loss share a document here (test_labels.py has those that do).
one_way = pytest.mark.parametrize("kind", [kind for kind in KINDS if "symmetric" not in kind])


def definition(kind, Q, D, T, labels=None, H=None, masks=(None, None, None), normalize=False,
               reduction="mean", bias=0.0, **others):  # fmt: skip
    """In float64, from all scores at once."""
    function, options = KINDS[kind]
    if function is li.losses.contrastive:
        options = {"smoothing" if k == "label_smoothing" else k: x for k, x in options.items()}
        return reference(Q, D, T, labels, H, masks, normalize, reduction=reduction, **options)
    S = logits(Q, D, T, H, masks, normalize) + bias
    each = list(S.new_zeros(len(S)))
    for i, j in enumerate(range(len(S)) if labels is None else labels.tolist()):
        if j >= 0:
            each[i] = of_lists(kind, S[i, j : j + 1], torch.cat((S[i, :j], S[i, j + 1 :])), **others)
    each = torch.stack(each)
    if reduction == "mean":
        return each.sum() / (len(each) if labels is None else (labels >= 0).sum())
    return each.sum() if reduction == "sum" else each


def drawn(kind, Nq, Nd, device, dtype=torch.float64, d=8, lengths=(5, 7)):
    return batch(Nq, Nd, *((1, 1) if "single" in kind else lengths), d, dtype, device)


def both(kind, device, Nq=10, Nd=13, kept=0, H=False, each=3, masks=(None, None, None), side=3, **options):
    """Loss and gradients of Q, D, hard negatives, temperature and bias: by blocks, and by definition."""
    Q, D = drawn(kind, Nq, Nd, device)
    leaves, negatives, T_ = [Q, D], None, T
    if H:
        negatives = torch.randn(Nq, each, 4, 8, dtype=torch.float64, device=device, requires_grad=True)
        leaves.append(negatives)
    if kind != "recall":
        T_ = torch.tensor(T, dtype=torch.float64, device=device, requires_grad=True)
        leaves.append(T_)
    if kind == "sigmoid":
        options["bias"] = torch.tensor(-0.3, dtype=torch.float64, device=device, requires_grad=True)
        leaves.append(options["bias"])
    with small_blocks(side, kept=kept):
        loss = FUNCTIONS[kind](
            li.Tokens(Q, masks[0]), li.Tokens(D, masks[1]), hard_negatives=own(negatives, masks[2]),
            temperature=T_, **options,
        )  # fmt: skip
        ours = gradients(loss, leaves)
    return ours, gradients(definition(kind, Q, D, T_, H=negatives, masks=masks, **options), leaves)


@every
@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_its_definition(kind, device, reduction, kept):
    assert_close(*both(kind, device, reduction=reduction, kept=kept))


@every
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_labels_and_queries_that_are_left_out(kind, device, kept):
    shared = [3, 3, 0, -100, 3, 12, 1, -100, 0, 5]
    own_each = [3, 8, 0, -100, 4, 12, 1, -100, 10, 5]
    labels = torch.tensor(own_each if "symmetric" in kind else shared, device=device)
    for reduction in ("mean", "sum", "none"):
        assert_close(*both(kind, device, labels=labels, reduction=reduction, kept=kept))


@every
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_hard_negatives(kind, device, kept):
    assert_close(*both(kind, device, H=True, kept=kept))
    masks = (None, None, torch.rand(10, 3, 4, device=device) < 0.6)
    assert_close(*both(kind, device, H=True, kept=kept, masks=masks, labels=torch.arange(10, device=device)))
    assert_close(*both(kind, device, H=True, kept=kept, normalize=True))


@every
@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("normalize", [False, True])
def test_masks_and_empty_documents(kind, device, normalize, kept):
    Lq, Ld = (1, 1) if "single" in kind else (5, 7)
    q_mask, d_mask = torch.rand(10, Lq, device=device) < 0.7, torch.rand(13, Ld, device=device) < 0.6
    d_mask[[0, 5]] = False
    q_mask[3] = False
    assert_close(*both(kind, device, masks=(q_mask, d_mask, None), normalize=normalize, kept=kept))


@every
@pytest.mark.parametrize("sizes", [(1, 1), (1, 9), (3, 3), (7, 40), (40, 40)])
def test_sizes(kind, device, sizes):
    assert_close(*both(kind, device, *sizes))


@one_way
def test_more_queries_than_documents(kind, device):
    labels = torch.arange(40, device=device) % 6
    assert_close(*both(kind, device, 40, 6, labels=labels))
    assert_close(*both(kind, device, 40, 6, labels=labels, H=True))


@every
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_packed(kind, device, reverse, normalize):
    """The padded batch of the same sequences, with masks."""
    lengths = (LENGTHS[1][:8], LENGTHS[0], LENGTHS[2]) if reverse else LENGTHS
    parts = [[torch.randn(n, 8, dtype=torch.float64, device=device) for n in x] for x in lengths]
    leaves = [torch.cat(x).requires_grad_() for x in parts]
    offsets = [li.Tokens.from_list(x).offsets for x in parts]
    q, d, h = tokens = [li.Tokens.packed(x, cu) for x, cu in zip(leaves, offsets, strict=True)]
    (Q, q_mask), (D, d_mask), (H, h_mask) = ((y.values, y.mask) for y in (x.to_padded() for x in tokens))
    masks, H = (q_mask, d_mask, h_mask.unflatten(0, (8, 2))), H.unflatten(0, (8, 2))
    wanted = gradients(definition(kind, Q, D, T, H=H, masks=masks, normalize=normalize), leaves)
    for kept in (0, 1 << 20):
        with small_blocks(kept=kept):
            loss = FUNCTIONS[kind](q, d, hard_negatives=h, temperature=T, normalize=normalize)
            assert_close(gradients(loss, leaves), wanted, 1e-8)


@every
@pytest.mark.parametrize(("queries", "each"), [(1, 3), (1, 1), (4, 1), (4, 0), (1, 0)])
def test_packed_hard_negatives_are_those_of_the_padded_form(kind, queries, each, device):
    Q, D = batch(queries, 5, 3, 3, device=device)
    H = torch.randn(queries, each, 3, 8, dtype=torch.float64, device=device, requires_grad=True)
    found = []
    for q, h in ((Q, H), (li.Tokens(Q).pack(), H), (Q, own(H).pack())):
        with small_blocks():
            found.append(gradients(FUNCTIONS[kind](q, D, hard_negatives=h, temperature=T), (Q, D, H)))
    for other in found[1:]:
        assert_close(other, found[0])


@every
@pytest.mark.parametrize("normalize", [False, True])
def test_one_token_a_side(kind, device, normalize):
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
        Q, D = batch(20, 23, 1, 1, 32, dtype, device)
        with small_blocks(6):
            ours = gradients(FUNCTIONS[kind](Q, D, temperature=T, normalize=normalize), (Q, D))
        wanted = gradients(definition(kind, Q, D, T, normalize=normalize), (Q, D))
        assert_close(ours, wanted, tolerance)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(kind, device, dtype):
    Q, D = drawn(kind, 33, 35, device, dtype, 32, (8, 20))
    wanted = gradients(definition(kind, Q, D, T), (Q, D))
    tolerance = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for kept in (0, 1 << 20):
        with small_blocks(8, kept=kept):
            ours = gradients(FUNCTIONS[kind](Q, D, temperature=T), (Q, D))
        assert ours[0].dtype is torch.float32 and ours[1][0].dtype is dtype
        assert_close(ours, wanted, tolerance)


@every
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_gradcheck(kind, device, kept):
    Q, D = drawn(kind, 4, 5, device, d=5, lengths=(3, 4))
    H = [torch.randn(4, 2, 3, 5, dtype=Q.dtype, device=device, requires_grad=True)] * (kind in SEVERAL)
    numbers = [torch.tensor(x, dtype=torch.float64, device=device) for x in (0.7, -0.5)]
    names = ["temperature", "bias"][: {"sigmoid": 2, "recall": 0}.get(kind, 1)]
    numbers = [x.requires_grad_() for x in numbers[: len(names)]]

    def loss(Q, D, *others):
        given = {"temperature": 0.7} | dict(zip(names, others[len(H) :], strict=True))
        given |= {"hard_negatives": others[0]} if H else {}
        return FUNCTIONS[kind](Q, D, **given)

    with small_blocks(2, kept=kept):
        assert torch.autograd.gradcheck(loss, (Q, D, *H, *numbers))


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize(
    "kind, learns",
    [
        *((kind, "tokens") for kind in KINDS),
        *((kind, "temperature") for kind in KINDS if kind != "recall"),
        ("sigmoid", "bias"),
    ],
)  # fmt: skip
def test_numbers_that_are_learned_alone_or_not_at_all(kind, learns, labelled, kept, device):
    """What is not learned is a number, not a tensor."""
    Q, D = (x.requires_grad_(learns == "tokens") for x in drawn(kind, 10, 13, device))
    options = {"reduction": "sum"} | ({"bias": -0.3} if kind == "sigmoid" else {})
    if labelled:
        options["labels"] = torch.arange(10, device=device).flip(0)
        options["labels"][3] = -100
    numbers = {"temperature": T, **options}
    leaves = (Q, D)
    if learns != "tokens":
        learned = torch.tensor(numbers[learns], dtype=torch.float64, device=device, requires_grad=True)
        numbers[learns], leaves = learned, (learned,)
    with small_blocks(kept=kept):
        ours = gradients(FUNCTIONS[kind](Q, D, **numbers), leaves)
    T_ = numbers.pop("temperature")
    assert_close(ours, gradients(definition(kind, Q, D, T_, **numbers), leaves))


@every
@pytest.mark.parametrize("wanted", ["Q", "D", "H"])
def test_one_gradient_alone(kind, device, wanted):
    for Nq in (5,) if "symmetric" in kind else (20, 5):
        Q, D = drawn(kind, Nq, 6, device)
        labels = torch.arange(Nq, device=device) % 6
        H = torch.randn(Nq, 2, 3, 8, dtype=torch.float64, device=device)
        leaves = {"Q": Q, "D": D, "H": H}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name == wanted)
        with small_blocks():
            loss = FUNCTIONS[kind](Q, D, temperature=T, hard_negatives=H, labels=labels)
            ours = gradients(loss, [leaves[wanted]])
        expected = definition(kind, Q, D, T, H=H, labels=labels)
        assert_close(ours, gradients(expected, [leaves[wanted]]))


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_on_every_run(kind, device, dtype):
    Q, D = drawn(kind, 40, 40, device, dtype, 32, (8, 20))
    with torch.no_grad():  # one token of a document wins nearly always
        D[:, 0] *= 4
    for options in ({}, {"tail": 2**-6}) if kind in ("contrastive", "symmetric") else ({},):
        with small_blocks(8):
            runs = [gradients(FUNCTIONS[kind](Q, D, temperature=T, **options), (Q, D)) for _ in range(3)]
        for run in runs[1:]:
            assert_same(run, runs[0])


@one_way
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_nan_makes_its_rows_nan(kind, device, kept):
    Q, D = drawn(kind, 9, 9, device, torch.float32)
    with torch.no_grad():
        Q[4, 0, 2] = float("nan")
    with small_blocks(kept=kept):
        loss = FUNCTIONS[kind](Q, D, temperature=T, reduction="none")
        assert loss.isnan().tolist() == [i == 4 for i in range(9)]
        labels = torch.arange(9, device=device)
        labels[4] = -100
        loss = FUNCTIONS[kind](Q, D, temperature=T, labels=labels)
    torch.testing.assert_close(loss.double(), definition(kind, Q, D, T, labels=labels), rtol=1e-5, atol=1e-6)
    assert loss.isfinite()


NUMBERS = {
    "contrastive": (li.losses.contrastive, {}),
    "contrastive, none": (li.losses.contrastive, {"reduction": "none"}),
    "contrastive, smoothed": (li.losses.contrastive, {"label_smoothing": 0.1}),
    "contrastive, tail": (li.losses.contrastive, {"tail": 1e-6}),
    "contrastive, symmetric": (li.losses.contrastive, {"symmetric": True}),
    "contrastive, symmetric, none": (li.losses.contrastive, {"symmetric": True, "reduction": "none"}),
    "pairwise": (li.losses.pairwise, {}),
    "sigmoid": (li.losses.sigmoid, {"bias": -1.0}),
    "recall": (li.losses.recall, {"k": (1, 2)}),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", ["padded", "packed", "single", "negatives", "normalized"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_query_that_is_left_out_has_no_effect(device, name, form, value):
    """No bit depends on what it holds, nor its hard negatives, however much is kept. Documents of a symmetric
    loss are compared with such a query still, but not with its hard negatives."""
    function, options = NUMBERS[name]
    options = options | {"labels": torch.tensor([0, -100, 2, 5, -100, 1], device=device)}
    out = options["labels"] < 0
    Q, D = (x.detach() for x in batch(6, 6, *((1, 1) if form == "single" else (3, 4)), device=device))
    H = torch.randn(6, 2, 4, 8, dtype=Q.dtype, device=device)
    T = torch.tensor(0.7, dtype=Q.dtype, device=device, requires_grad="recall" not in name)

    def results(value, kept):
        q = Q if value is None or "symmetric" in name else Q.masked_fill(out.view(-1, 1, 1), value)
        h = H if value is None else H.masked_fill(out.view(-1, 1, 1, 1), value)
        leaves = [x.clone().requires_grad_() for x in (q, D, h)]
        inputs, given = leaves[:2], {"temperature": T, **options}
        if form == "packed":
            inputs = [li.Tokens(x).pack() for x in inputs]
        elif form in ("negatives", "normalized"):
            given |= {"hard_negatives": leaves[2], "normalize": form == "normalized"}
        with small_blocks(kept=kept, available=kept):
            loss = function(*inputs, **given).sum()
            leaves = [x for x in (*leaves, T) if x.requires_grad]
            return loss, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    for kept in (0, 600, 1 << 20):
        clean = results(None, kept)
        assert all(map(torch.equal, results(value, kept), clean))
        assert all(x.isfinite().all() for x in clean)
        assert "symmetric" in name or not clean[1][out].any()


@every
def test_double_backward_says_so(kind, device):
    Q, D = drawn(kind, 5, 5, device, torch.float32)
    for kept in (0, 1 << 20):
        with small_blocks(kept=kept):
            loss = FUNCTIONS[kind](Q, D, temperature=T)
            (grad,) = torch.autograd.grad(loss, Q, create_graph=True)
            if kept and KINDS[kind][0] is li.losses.contrastive and kind in SEVERAL:
                grad.sum().backward()  # PyTorch's cross entropy of scores
                continue
            name = KINDS[kind][0].__name__
            words = rf"double backward of losses\.{name} is not supported: differentiate a loss of late_inter"
            with pytest.raises(RuntimeError, match=words):
                grad.sum().backward()


@every
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_backward_again_with_a_retained_graph(kind, device, kept):
    Q, D = drawn(kind, 7, 7, device, torch.bfloat16)
    H = torch.randn(7, 2, 3, 8, dtype=Q.dtype, device=device, requires_grad=True)
    for leaves, options in (((Q, D), {}), ((Q, D, H), {"hard_negatives": H})):
        with small_blocks(kept=kept):
            loss = FUNCTIONS[kind](Q, D, temperature=T, **options)
            first = torch.autograd.grad(loss, leaves, retain_graph=True)
            second = torch.autograd.grad(loss, leaves)
        assert all(map(torch.equal, first, second))


@every
def test_without_gradients(kind, device):
    Q, D = drawn(kind, 9, 9, device)
    for kept in (0, 1 << 20):
        with torch.no_grad(), small_blocks(kept=kept):
            loss = FUNCTIONS[kind](Q, D, temperature=T)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, definition(kind, Q, D, T).detach())


@every
def test_checkpointing_and_autocast(kind, device):
    from torch.utils.checkpoint import checkpoint

    Q, D = drawn(kind, 9, 9, device, torch.float32)

    def loss(Q, D):
        return FUNCTIONS[kind](2 * Q, D, temperature=T)

    with small_blocks():
        plain = gradients(loss(Q, D), (Q, D))
        again = gradients(checkpoint(loss, Q, D, use_reentrant=False), (Q, D))
    assert_same(again, plain)
    for kept in (0, 1 << 20):
        with torch.autocast(device, dtype=torch.bfloat16), small_blocks(kept=kept):
            ours = gradients(loss(Q, D), (Q, D))
        assert ours[1][0].dtype is torch.float32
        assert_close(ours, plain, 0.1)


@every
def test_compiled_around_a_graph_break(kind, device):
    Q, D = drawn(kind, 6, 6, device, torch.float32)

    @torch.compile(backend="eager")
    def step(Q, D):
        return FUNCTIONS[kind](Q * 2, D, temperature=T) + 1

    assert_close(gradients(step(Q, D), (Q, D)), gradients(definition(kind, 2 * Q, D, T) + 1, (Q, D)), 1e-5)


@every
def test_inputs_that_are_not_contiguous(kind, device):
    Q, D = drawn(kind, 8, 8, device, torch.float32)
    strided = [x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for x in (Q, D)]
    with small_blocks():
        ours = gradients(FUNCTIONS[kind](*strided, temperature=T), strided)
    assert_close(ours, gradients(definition(kind, Q, D, T), (Q, D)), 2e-5)


@pytest.mark.parametrize("kind", SEVERAL)
def test_no_tensor_of_all_pairs(kind):
    Q, D = batch(128, 128, 2, 2, 2, torch.float32)
    with small_blocks(16), Made() as made:
        FUNCTIONS[kind](Q, D, temperature=T).backward()
    assert max(made.elements) <= max(Q.numel(), 5 * 128, 16 * 16 * 8)  # the surrogate has five ranks k


# ---- what is particular to one ----


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_equal_negatives_the_first_gets_the_gradient(device, kept):
    Q, D = batch(3, 12, device=device)
    with torch.no_grad():
        D[9] = D[5] = D[4] = 3 * Q[0, torch.arange(7) % 5]  # the hardest of query 0
    H = D[4:5].detach().repeat(3, 1, 1).unsqueeze(1).requires_grad_()
    with small_blocks(kept=kept):
        loss = li.losses.pairwise(Q, D, hard_negatives=H, reduction="none")
        grad, grad_H = torch.autograd.grad(loss[0], (D, H))
    assert grad.flatten(1).any(1).nonzero().flatten().tolist() == [0, 4] and not grad_H.any()


def test_pairwise_without_a_negative(device):
    Q, D = batch(3, 1, device=device)
    with small_blocks():
        loss = li.losses.pairwise(Q, D, labels=torch.zeros(3, dtype=torch.long, device=device))
        grads = torch.autograd.grad(loss, (Q, D))
    assert loss.item() == 0 and not any(g.any() for g in grads)


def test_pairwise_backward_scores_two_pairs_a_query(device, monkeypatch):
    Q, D = batch(40, 40, device=device)
    with small_blocks(8):
        loss = li.losses.pairwise(Q, D)
        monkeypatch.setattr(Kernels, "scores_and_winners", None)
        torch.autograd.grad(loss, (Q, D))


def test_sigmoid_where_pairs_are_far_apart(device):
    """The loss of confident pairs is small beside their logits, and not lost in the sum."""
    Q, D = batch(12, 12, 8, 10, 16, torch.float32, device, planted=6.0)
    for kept in (0, 1 << 20):
        with small_blocks(4, kept=kept):
            loss = li.losses.sigmoid(Q, D, temperature=0.2, bias=-133.0, reduction="none")
        wanted = definition("sigmoid", Q, D, 0.2, bias=-133.0, reduction="none")
        assert wanted.min() < 1e-3
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-3, atol=1e-15)


def test_recall_counts_ranks_where_sigmoids_are_steps(device):
    """With small temperatures the surrogate is recall@k itself."""
    Q, D = batch(30, 30, device=device, planted=0.3)
    with small_blocks(8):
        for k in (1, 3, 10):
            loss = li.losses.recall(Q, D, k=k, temperature=1e-6, rank_temperature=1e-3, reduction="none")
            S = logits(Q, D, 1.0)
            ranks = 1 + (S.diagonal().unsqueeze(1) < S).sum(1)
            kept = ranks != k  # sigmoid(0) is a half
            assert torch.equal(loss[kept].round() == 0, (ranks < k)[kept])
    assert_close(*both("recall", device, k=(2, 5), rank_temperature=0.5))
    assert_close(*both("recall", device, k=range(1, 4)))


# ---- modules, signatures, refusals ----


@pytest.mark.parametrize("learnable", [True, False])
def test_modules(device, learnable):
    Q, D = batch(8, 8, dtype=torch.float32, device=device)
    q_mask = torch.rand(8, 5, device=device) < 0.8
    modules = (
        ("contrastive", li.losses.Contrastive(temperature=T, learnable=learnable, normalize=True), {}),
        ("pairwise", li.losses.Pairwise(temperature=T, learnable=learnable, normalize=True), {}),
        ("sigmoid", li.losses.Sigmoid(temperature=T, bias=-2.0, learnable=learnable, normalize=True),
         {"bias": -2.0}),
        ("recall", li.losses.Recall(temperature=T, k=(1, 3), normalize=True), {"k": (1, 3)}),
    )  # fmt: skip
    for kind, module, options in modules:
        module = pickle.loads(pickle.dumps(module)).to(device)
        q = li.Tokens(Q, q_mask)
        ours = gradients(module(q, D), (Q, D))
        plain = getattr(li.losses, kind)(q, D, temperature=T, normalize=True, **options)
        assert_close(ours, gradients(plain, (Q, D)), 1e-5)
        names = {"sigmoid": ["log_temperature", "bias"], "recall": []}.get(kind, ["log_temperature"])
        assert [name for name, _ in module.named_parameters()] == (names if learnable else [])
        assert "normalize=True" in repr(module)


@pytest.mark.parametrize(("function", "module"), [
    (li.losses.contrastive, li.losses.Contrastive),
    (li.losses.pairwise, li.losses.Pairwise),
    (li.losses.sigmoid, li.losses.Sigmoid),
    (li.losses.recall, li.losses.Recall),
])  # fmt: skip
def test_a_module_and_its_function_have_the_same_options(function, module):
    ours = inspect.signature(module).parameters
    theirs = inspect.signature(function).parameters
    inputs = {"labels", "hard_negatives", "candidate_mask", "exclude"}
    assert inputs < set(theirs) and set(inspect.signature(module.forward).parameters) > inputs
    assert set(ours) - {"learnable"} == set(theirs) - inputs - {"Q", "D"}
    for name in set(ours) - {"learnable"}:
        assert ours[name].default == theirs[name].default
        assert ours[name].kind is theirs[name].kind


def test_what_modules_begin_with():
    pairwise, sigmoid = li.losses.Pairwise(), li.losses.Sigmoid()
    assert not [*pairwise.parameters(), *sigmoid.parameters()] and sigmoid.bias.item() == 0.0
    assert pairwise.temperature.item() == sigmoid.temperature.item() == 1.0


MODULES = {
    li.losses.Contrastive: {"learnable": True},
    li.losses.Pairwise: {"learnable": True},
    li.losses.Sigmoid: {"learnable": True},
    li.losses.Recall: {},
}


@pytest.mark.parametrize("module", MODULES)
def test_a_saved_number_without_dims_is_loaded(module):
    """What is learned has the shape [1], which FSDP2 wants."""
    loss_fn = torch.nn.ModuleDict({"loss": module(**MODULES[module])})
    saved = {name: torch.tensor(-2.0) for name in loss_fn.state_dict()}
    loss_fn.load_state_dict(saved)
    assert saved and all(torch.equal(x, torch.tensor([-2.0])) for x in loss_fn.state_dict().values())
    assert loss_fn.load_state_dict({}, strict=False).missing_keys == list(saved)


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.parametrize("module", MODULES)
def test_copies_of_a_module_share_its_group(module):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loss_fn = module(**MODULES[module], normalize=True, group=dist.group.WORLD)
        Q, D = batch(4, 4, dtype=torch.float32, device="cpu")
        wanted = loss_fn(Q, D)
        averaged = torch.optim.swa_utils.AveragedModel(loss_fn)
        averaged.update_parameters(loss_fn)
        for copied in (copy.copy(loss_fn), copy.deepcopy(torch.nn.ModuleList([loss_fn]))[0], averaged):
            torch.testing.assert_close(copied(Q, D), wanted)
        own = copy.deepcopy(loss_fn).log_temperature
        assert own is not loss_fn.log_temperature and torch.equal(own, loss_fn.log_temperature)
        with pytest.raises(TypeError, match=r"a loss with group= cannot be pickled: .* state_dict\(\)"):
            pickle.dumps(loss_fn)
    finally:
        dist.destroy_process_group()


@every
def test_no_queries(kind, device):
    Q, D = drawn(kind, 0, 4, device)
    labels = torch.empty(0, dtype=torch.long, device=device)
    for kept in (0, 1 << 20):
        with small_blocks(kept=kept):
            loss = FUNCTIONS[kind](Q, D, labels, temperature=T, reduction="sum")
            (grad,) = torch.autograd.grad(loss, D)
            assert loss.item() == 0 and not grad.any()
            assert FUNCTIONS[kind](Q, D, temperature=T).isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pairwise"])
@pytest.mark.parametrize("labelled", [False, True])
def test_the_host_waits_for_nothing(kind, labelled):
    Q, D = drawn(kind, 64, 64, "cuda", torch.bfloat16, 32)
    labels = torch.randperm(64, device="cuda") if labelled else None
    temperature = T if kind == "recall" else torch.tensor(T, device="cuda", requires_grad=True)
    leaves = (Q, D) if kind == "recall" else (Q, D, temperature)

    def step():
        for reduction in ("mean", "none") if kind == "single" else ("mean",):
            loss = FUNCTIONS[kind](Q, D, labels, temperature=temperature, reduction=reduction)
            torch.autograd.grad(loss.sum(), leaves)

    with small_blocks(16):
        waits_for_nothing(step)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, options",
    [("contrastive", {"tail": 2**-10}), *((x, {}) for x in ("contrastive", "pairwise", "sigmoid", "recall"))],
)
def test_memory_on_a_gpu(kind, options):
    """Beside inputs and gradients, 128 MiB and a float32 copy of the smaller gradient."""
    Q, D = batch(4096, 4096, 32, 64, 128, torch.bfloat16, "cuda", planted=2.0)
    loss = partial(FUNCTIONS[kind], temperature=0.05, **options)
    beside = gpu_bytes_beside(lambda: torch.autograd.grad(loss(Q, D), (Q, D)))
    assert beside <= (128 << 20) + 4 * min(Q.numel(), D.numel())


law = settings(
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@law
@given(
    st.sampled_from(SEVERAL), st.integers(1, 12), st.integers(1, 12), st.integers(0, 4), st.integers(0, 5),
    st.integers(1, 6), st.integers(1, 5), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_every_shape(device, kind, Nq, Nd, Lq, Ld, d, side, masked, seed):
    torch.manual_seed(seed)
    Nq = min(Nq, Nd) if kind == "symmetric" else Nq
    Q, D = batch(Nq, Nd, Lq, Ld, d, device=device)
    labels = torch.randperm(Nd)[:Nq] if kind == "symmetric" else torch.randint(0, Nd, (Nq,))
    labels = labels.to(device)
    masks = (None, None, None)
    if masked:
        masks = (torch.rand(Nq, Lq, device=device) < 0.7, torch.rand(Nd, Ld, device=device) < 0.7, None)
    with small_blocks(side):
        loss = FUNCTIONS[kind](li.Tokens(Q, masks[0]), li.Tokens(D, masks[1]), labels, temperature=T)
        ours = gradients(loss, (Q, D))
    if kind == "pairwise" and Nd > 1:  # rounding decides between negatives that are equal
        S = logits(Q, D, T, None, masks).scatter(1, labels.unsqueeze(1), -torch.inf)
        top = S.topk(2, 1).values
        if bool(((top[:, 0] - top[:, 1]) < 1e-9).any()):
            return
    assert_close(ours, gradients(definition(kind, Q, D, T, labels=labels, masks=masks), (Q, D)))
