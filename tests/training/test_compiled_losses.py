"""Losses of a batch and of each query's own documents under torch.compile: whole graphs, two for all sizes,
with the values and gradients of eager calls."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

import late_interaction as li
from tests.support.calls import needs_compiler
from tests.support.groups import needs_gloo

BATCH = {name: getattr(li.losses, name) for name in ("contrastive", "pairwise", "sigmoid", "recall")}
every = pytest.mark.parametrize("name", BATCH)
pytestmark = pytest.mark.usefixtures("nothing_compiled")


def leaf(*shape, device="cpu", dtype=torch.float32):
    return normalize(torch.randn(*shape), dim=-1).to(device, dtype).requires_grad_()


whole = partial(torch.compile, backend="aot_eager", fullgraph=True)


def compare(function, leaves, compiled=None, tolerance=1e-5):
    """An eager call and a compiled one of the same leaves, by default as a whole graph."""
    found = []
    for f in (function, compiled or whole(function)):
        loss = f(*leaves)
        weights = torch.linspace(-1.0, 2.0, loss.numel(), device=loss.device).view(loss.shape)
        found.append([loss, *torch.autograd.grad((loss * (weights if loss.dim() else 3.0)).sum(), leaves)])
    for got, wanted in zip(*found[::-1], strict=True):
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def forms(device):
    """{name: (the loss of leaves by a function, leaves of queries and documents)}."""
    on = {"device": device}
    mask, d_mask = (torch.rand(*shape, **on) < 0.8 for shape in ((6, 4), (9, 7)))
    mask[:, 0] = d_mask[:, 0] = True
    labels = torch.tensor([3, 0, -100, 8, 1, 2], **on)
    both = torch.tensor([[3, 0], [0, -100], [-100, -100], [8, 7], [1, 4], [2, 5]], **on)
    pairs = torch.tensor([0, 1, 1, 3], **on), torch.tensor([3, 0, 2, 8], **on)
    exclude = torch.rand(6, 9, **on) < 0.2
    kept = torch.rand(6, 2, **on) < 0.7

    def split(x, lengths):
        return [tokens[:n] for tokens, n in zip(x, lengths, strict=True)]

    def lists(f, Q, D):
        return f(split(Q, [4, 1, 3, 2, 4, 4]), split(D, [7, 2, 3, 4, 5, 6, 7, 1, 2]))

    def tokens(f, Q, D):
        return f(li.Tokens(Q, mask), li.Tokens(D, d_mask))

    def negatives(f, Q, D, H):
        return f(Q, D, labels, hard_negatives=H, candidate_mask=kept)

    plain = leaf(6, 4, 8, **on), leaf(9, 7, 8, **on)
    return {
        "padded": (lambda f, Q, D: f(Q, D), plain),
        "masked": (tokens, plain),
        "lists": (lists, plain),
        "normalized lists": (lambda f, Q, D: lists(partial(f, normalize=True), Q, D), plain),
        "negatives": (negatives, (*plain, leaf(6, 2, 5, 8, **on))),
        "labels": (lambda f, Q, D: f(Q, D, labels, reduction="sum", precision="highest"), plain),
        "several labels": (lambda f, Q, D: f(Q, D, both, normalize=True), plain),
        "pairs": (lambda f, Q, D: f(Q, D, labels=pairs, exclude=exclude, exclude_above=0.5), plain),
        "rows": (lambda f, Q, D: f(Q, D, labels, reduction="none"), plain),
        "masked rows": (lambda f, Q, D: tokens(partial(f, reduction="none"), Q, D), plain),
        "single tokens": (lambda f, Q, D: f(Q[:, :1], D[:, :1], temperature=0.3), plain),
    }


@every
@pytest.mark.parametrize("form", forms("cpu"))
def test_equals_the_eager_loss(name, form, device):
    function, leaves = forms(device)[form]
    loss = partial(function, BATCH[name])
    compare(loss, leaves)


@every
def test_numbers_that_are_learned(name, device):
    module = getattr(li.losses, name.title())
    module = module() if name == "recall" else module(learnable=True, temperature=0.5)
    module = module.to(device)
    leaves = leaf(6, 4, 8, device=device), leaf(9, 7, 8, device=device)

    def loss(*tensors):
        return module(*tensors[:2])

    compare(loss, (*leaves, *module.parameters()))


@pytest.mark.parametrize(("name", "options"), [
    *(("contrastive", {"label_smoothing": 0.0, **x}) for x in (
        {"tail": 0.1}, {"kept_bytes": 0}, {"symmetric": True},
    )),
    ("recall", {"k": range(1, 4)}),
])  # fmt: skip
def test_options(name, options):
    compare(partial(BATCH[name], **options), (leaf(6, 4, 8), leaf(6, 7, 8)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast(dtype, device):
    leaves = leaf(6, 4, 8, device=device, dtype=dtype), leaf(9, 7, 8, device=device)

    def loss(Q, D):
        with torch.autocast(device, torch.bfloat16):
            return li.losses.contrastive(Q, D, temperature=0.3)

    compare(loss, leaves, tolerance=2e-2)


def test_without_gradients():
    Q, D = leaf(6, 4, 8), leaf(9, 7, 8)
    compiled = whole(li.losses.contrastive)
    with torch.no_grad():
        got = compiled(Q, D)
    assert not got.requires_grad
    torch.testing.assert_close(got, li.losses.contrastive(Q, D))
    (grad,) = torch.autograd.grad(compiled(Q, D.detach()), Q)
    torch.testing.assert_close(grad, torch.autograd.grad(li.losses.contrastive(Q, D), Q)[0])


def of_own(loss, Q, D):
    count = D.shape[0] * D.shape[1]
    return loss(Q, D, torch.arange(count, dtype=torch.float32, device=D.device).view(D.shape[:2]) / count)


OTHERS = {
    "distill_kl_div": (partial(of_own, li.losses.distill_kl_div), True),
    "margin_mse": (partial(of_own, li.losses.margin_mse), True),
    "DistillKLDiv": (partial(of_own, li.losses.DistillKLDiv()), True),
    "smooth_maxsim": (li.smooth_maxsim, False),
    "xtr_scores": (lambda Q, D: li.xtr_scores(Q, D, 3), False),
    "xtr_scores of own": (lambda Q, D: li.xtr_scores(Q, D, 3), True),
    "maxsim_pairs": (lambda Q, D: li.maxsim_pairs(Q, D[: len(Q)]), False),
    **{name: (function, False) for name, function in BATCH.items()},
}


@pytest.mark.parametrize("name", OTHERS)
def test_two_graphs_serve_all_sizes(name):
    function, own = OTHERS[name]
    compiled = whole(function)
    for i in range(4):
        D = leaf(4 + i, 3 + i, 7 + i, 8) if own else leaf(6 + i, 7 + i, 8)
        compare(function, (leaf(4 + i, 5 + i, 8), D), compiled, tolerance=1e-4)
    assert counters["stats"]["unique_graphs"] <= 2


@needs_compiler
@pytest.mark.parametrize("name", ["contrastive", "distill_kl_div", "smooth_maxsim"])
def test_inductor(name, device):
    function, own = OTHERS[name]
    Q, D = leaf(4, 5, 8, device=device), leaf(*([4, 3] if own else [6]), 7, 8, device=device)
    compare(function, (Q, D), torch.compile(function, fullgraph=True), tolerance=1e-4)


@every
@pytest.mark.parametrize("reduction, again", [("mean", 0), ("none", 1)])
def test_scores_are_computed_once(name, reduction, again):
    """The loss is a node of the forward alone, with its gradients, unless each query has its own factor."""
    calls = []

    def compiler(graph, _):
        calls.append(sum("batch_loss" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    loss = torch.compile(BATCH[name], backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    loss(leaf(4, 3, 8), leaf(5, 6, 8), reduction=reduction).sum().backward()
    assert calls == [1, again]


@every
def test_flops_of_a_compiled_loss(name):
    loss, found = BATCH[name], []
    for function in (loss, torch.compile(loss, backend="aot_eager")):  # which leaves such a mode alone
        Q, D = leaf(4, 3, 8), leaf(5, 6, 8)
        with FlopCounterMode(display=False) as counter:
            function(Q, D).backward()
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0


# ---- what is not traced ----


@every
def test_lists_of_labels_break_the_graph(name):
    Q, D = leaf(4, 3, 8), leaf(5, 6, 8)

    def loss(Q, D):
        return BATCH[name](Q * 2, D, [[0], [1, 2], [], [3]]) * 3

    compare(loss, (Q, D), torch.compile(loss, backend="aot_eager"))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="lists of labels and a generator are read"):
        whole(loss)(Q, D)


@needs_gloo
@every
def test_a_group_breaks_the_graph(name):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loss = partial(BATCH[name], group=dist.group.WORLD)
        leaves = leaf(4, 3, 8), leaf(5, 6, 8)
        scaled = [lambda Q, D, loss=loss: loss(Q * 2, D) * 3 for _ in range(2)]
        compare(scaled[0], leaves, torch.compile(scaled[0], backend="aot_eager"))
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="a loss with group= talks to other processes"):
            whole(scaled[1])(*leaves)
    finally:
        dist.destroy_process_group()


@every
def test_bad_arguments_raise_as_in_eager_calls(name):
    Q, D = leaf(4, 3, 8), leaf(5, 6, 8)
    compiled = torch.compile(BATCH[name], backend="aot_eager")
    with pytest.raises(ValueError, match="temperature must be above 0"):
        compiled(Q, D, temperature=-1.0)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 5\)"):
        compiled(Q, D, torch.tensor([0, 1, 2, 9]))
    with pytest.raises((TypeError, ValueError), match="Q and D must share"):
        compiled(Q, D[..., :5])


@every
def test_no_double_backward(name):
    Q, D = leaf(4, 3, 8), leaf(5, 6, 8)
    loss = whole(BATCH[name])(Q, D)
    with pytest.raises(RuntimeError):
        (grad,) = torch.autograd.grad(loss, Q, create_graph=True)
        grad.sum().backward()


@every
def test_numbers_keep_the_precision_of_float64_tokens(name):
    Q, D = leaf(4, 3, 8, dtype=torch.float64), leaf(5, 6, 8, dtype=torch.float64)
    options = {"temperature": 0.3} | ({"bias": -0.1} if name == "sigmoid" else {})
    loss = partial(BATCH[name], **options)
    compare(loss, (Q, D), tolerance=1e-14)
