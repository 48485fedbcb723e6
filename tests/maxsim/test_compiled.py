"""What torch.compile makes of a loss around maxsim: one graph each way, which holds our operator and the loss
alone, few guards, and nothing that keeps it from a CUDA graph."""

import re
from collections import Counter
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import get_first_incompatible_cudagraph_node, run_and_get_code
from torch.nn.functional import cross_entropy

import late_interaction as li
from tests.limits.test_bad_input import KD, MASKS, RANKS, TOKENS, D, Q
from tests.support.calls import needs_compiler, refused

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def loss_of(scores, labels):
    return cross_entropy(scores / 0.05, labels)


def loss_of_pairs(scores, labels):
    return (scores / 0.05).mean()


def losses():
    """{name: (loss of tokens and labels, the same loss of scores and labels, shape of D without d)}."""

    def loss(of_scores, function=li.maxsim, masked=False, **options):
        def of_tokens(Q, D, labels, q_mask, d_mask):
            masks = (q_mask, d_mask) if masked else ()
            return of_scores(function(Q, D, *masks, **options), labels)

        return of_tokens, of_scores

    return {
        "in-batch": (*loss(loss_of), (4, 7)),
        "masked": (*loss(loss_of, masked=True), (4, 7)),
        "normalized": (*loss(loss_of, normalize=True), (4, 7)),
        "recompute": (*loss(loss_of, winners="recompute"), (4, 7)),
        "KD": (*loss(loss_of, masked=True), (4, 6, 7)),
        "pairs": (*loss(loss_of_pairs, li.maxsim_pairs), (4, 7)),
        "pairs, masked": (*loss(loss_of_pairs, li.maxsim_pairs, masked=True), (4, 7)),
    }


LOSSES = losses()
# What a graph calls of maxsim: in the forward and in the backward.
WAYS = "_winners_no_autograd", "_backward_no_autograd"


def batch(shape, device="cpu", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    Q, D = (torch.randn(*s, 8, generator=generator) for s in ((4, 5), shape))
    masks = (torch.rand(x.shape[:-1], generator=generator) < 0.8 for x in (Q, D))
    Q, D = (x.to(device, dtype).requires_grad_() for x in (Q, D))
    return Q, D, torch.arange(4, device=device), *(m.to(device) for m in masks)


def graphs_of(function, args):
    """The forward graph of a compiled call, which must be whole, and the backward graph if there is one."""
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )
    loss = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)
    if loss.requires_grad:
        loss.backward()
    return graphs


def nodes(graph):
    names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return Counter(name for name in names if "getitem" not in name)


@pytest.mark.parametrize("name", LOSSES)
def test_the_graphs_are_those_of_the_loss_and_one_operator(name):
    of_tokens, of_scores, shape = LOSSES[name]
    args = batch(shape)
    scores = of_tokens(*args).new_zeros(shape[:-1] if name == "KD" else (4,) if "pairs" in name else (4, 4))
    theirs = graphs_of(of_scores, (scores.requires_grad_(), args[2]))
    ours = graphs_of(of_tokens, args)
    ways = ("_no_autograd", "_backward_recompute") if name == "recompute" else WAYS
    with torch.no_grad():
        torch._dynamo.reset()
        (alone,), (of_scores_alone,) = graphs_of(of_tokens, args), graphs_of(of_scores, (scores, args[2]))
    ours, theirs, ways = [*ours, alone], [*theirs, of_scores_alone], (*ways, "_no_autograd")
    for mine, other, way in zip(ours, theirs, ways, strict=True):
        operator = f"late_interaction.maxsim{way}.default"
        assert nodes(mine) == nodes(other) + Counter([operator])
        assert not any(
            node.target._schema.is_mutable for node in mine.graph.nodes if operator in str(node.target)
        )


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_keeps_the_graphs_from_a_cuda_graph(name, device):
    """No node that waits for the device, no size that depends on data, no tensor of another device."""
    of_tokens, _, shape = LOSSES[name]
    for graph in graphs_of(of_tokens, batch(shape, device)):
        assert get_first_incompatible_cudagraph_node(graph) is None
        values = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        assert tensors and all(x.device.type == device for x in tensors)


@pytest.mark.parametrize("name", ["in-batch", "masked", "normalized", "KD", "pairs", "pairs, masked"])
def test_guards_are_few(name):
    """A call checks them all. Those that do not name this package are the tensors' and PyTorch's own."""
    seen = []

    def look(guards):
        seen.extend(guard.name for guard in guards)
        return [True] * len(guards)

    of_tokens, _, shape = LOSSES[name]
    options = {"guard_filter_fn": look}
    torch.compile(of_tokens, backend="eager", fullgraph=True, options=options)(*batch(shape))
    assert seen
    ours = [guard for guard in seen if "late_interaction" in guard]
    assert not any("_checks" in guard or "norm_warning" in guard or "looked" in guard for guard in seen), ours
    assert len(ours) <= 16, ours


# What the short way of a traced call (late_interaction/_scoring/traced.py) leaves to the checks: calls of
# functions, the error, and words of its message.
REFUSED = {
    **{name: (li.maxsim, tokens, {}, error, words) for name, (tokens, error, words) in TOKENS.items()},
    **{name: (li.maxsim, tokens, {}, ValueError, words) for name, (tokens, words) in RANKS.items()},
    **{
        f"{name} mask": (li.maxsim, (Q, D, *masks), {}, error, words)
        for name, (masks, error, words) in MASKS.items()
    },
    **{
        f"normalize={x}": (li.maxsim, (Q, D), {"normalize": x}, TypeError, ["normalize", "be True or False"])
        for x in (1, None)
    },
    "pairs": (li.maxsim_pairs, (Q, D), {}, ValueError, ["maxsim_pairs needs"]),
    "pairs of one's own": (li.maxsim_pairs, (Q, KD), {}, ValueError, ["maxsim_pairs needs"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_compiled_call_refuses_as_an_eager_one(name):
    function, args, options, error, words = REFUSED[name]
    refused(error, words, torch.compile(function, backend="eager"), *args, **options)


@pytest.mark.parametrize("grad", [False, True])
def test_what_the_short_way_leaves_to_the_checks(grad, device):
    """2-D inputs, integer masks and options that are no defaults, in one graph too."""
    Q, D, _, q_mask, d_mask = batch((4, 7), device)

    def calls(Q, D):
        return (
            li.maxsim(Q[0], D),
            li.maxsim(Q, D[0], q_mask.int()),
            li.maxsim(Q, D, None, d_mask.int(), backward="lowmem"),
            li.maxsim(Q, D, precision="highest"),
            li.maxsim(Q, D, q_mask, mean=True),
            li.maxsim(Q, D, q_weights=q_mask.float()),
            li.maxsim_pairs(Q, D, q_mask.int(), backward="unified"),
        )

    with torch.set_grad_enabled(grad):
        got = torch.compile(calls, backend="aot_eager", fullgraph=True)(Q, D)
        expected = calls(Q, D)
    torch.testing.assert_close(got, expected)
    assert all(x.requires_grad is grad for x in got)
    if grad:
        got, expected = (torch.autograd.grad(sum(x.sum() for x in y), (Q, D)) for y in (got, expected))
        torch.testing.assert_close(got, expected)


@needs_compiler
def test_inductor_adds_one_call_each_way(device):
    """The operator's; the loss takes no more kernels than without it. Of both ways together: one that runs in
    the backward without the operator may run in the forward with it."""
    of_tokens, of_scores, shape = LOSSES["in-batch"]
    args = batch(shape, device)

    def codes(function, *args):
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        return run_and_get_code(lambda: compiled(*args).backward())[1]

    def launches(codes):
        return sum(len(re.findall(r"^ +(?:cpp_\w+\(|triton_\w+\.run\()", x, re.MULTILINE)) for x in codes)

    with torch._inductor.config.patch(force_disable_caches=True):
        theirs = codes(of_scores, torch.zeros(4, 4, device=device, requires_grad=True), args[2])
        ours = codes(of_tokens, *args)
    assert 0 < launches(ours) <= launches(theirs)
    for mine, way in zip(ours, WAYS, strict=True):
        assert re.findall(r"= torch\.ops\.([\w.]+)\(", mine) == [f"late_interaction.maxsim{way}.default"]


# ---- what is not traced ----


@pytest.mark.parametrize(
    "function", [li.losses.contrastive, li.losses.pairwise, li.losses.sigmoid, li.losses.recall]
)
@pytest.mark.parametrize("listed, graphs, frames", [(False, 1, 1), (True, 2, 3)])
def test_nothing_below_a_blockwise_loss_is_compiled(function, listed, graphs, frames):
    """It is an operator of the graph, or breaks it. Either way it runs no frame of Dynamo's."""
    Q, D, labels, *_ = batch((4, 7))
    labels = [[i] for i in range(4)] if listed else labels

    def loss(Q, D):
        return function(Q * 2, D, labels=labels, temperature=0.5) * 3

    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        got = torch.compile(loss, backend="eager")(Q, D)
        assert (counters["stats"]["unique_graphs"], counters["frames"]["total"]) == (graphs, frames)
        got, expected = (torch.autograd.grad(x, (Q, D)) for x in (got, loss(Q, D)))
        torch.testing.assert_close(got, expected)


# ---- CUDA graphs ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["in-batch", "masked", "KD", "pairs"])
def test_reduce_overhead_captures_both_ways(name, dtype):
    of_tokens, _, shape = LOSSES[name]
    compiled = torch.compile(of_tokens, fullgraph=True, dynamic=False, mode="reduce-overhead")
    # Triton and PyTorch round exp and log each in their own way; a temperature of 0.05 multiplies that by 20.
    close = partial(torch.testing.assert_close, rtol=2e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    counters.clear()
    for seed in range(5):
        args = batch(shape, "cuda", dtype, seed)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(*args)
        grads = [x.clone() for x in torch.autograd.grad(got, args[:2])]
        expected = of_tokens(*args)
        close(got, expected)
        close(grads, list(torch.autograd.grad(expected, args[:2])))
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
def test_a_loss_is_graphed_without_a_compiler():
    of_tokens, _, shape = LOSSES["masked"]
    _, _, labels, *masks = args = batch(shape, "cuda")

    def loss(Q, D):
        return of_tokens(Q, D, labels, *masks)

    graphed = torch.cuda.make_graphed_callables(loss, args[:2])
    for seed in range(1, 4):
        tokens = batch(shape, "cuda", seed=seed)[:2]
        got = torch.autograd.grad(graphed(*tokens), tokens)
        torch.testing.assert_close(got, torch.autograd.grad(loss(*tokens), tokens))
