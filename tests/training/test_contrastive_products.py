"""losses.contrastive of one token a side where weights come straight from the product, without scores:
against its definition in float64, on a GPU of compute capability 9.0."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import late_interaction as li
from late_interaction._contrastive import panels, single
from tests.support.calls import peak
from tests.support.contrastive import assert_close, batch, gradients, reference, waits_for_nothing

pytestmark = [pytest.mark.gpu, pytest.mark.native]
TOLERANCE = 1.2e-2  # of bf16 gradients; the loss and the gradient of the temperature are not rounded


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(panels, "_LEAST_PAIRS", 0)


def drawn(Nq=130, Nd=130, d=64, planted=1.0, norm=1.0):
    Q, D = batch(Nq, Nd, 1, 1, d, torch.float32, "cuda", planted)
    with torch.no_grad():
        Q, D = (norm * F.normalize(x, dim=-1) for x in (Q, D))
    return Q.bfloat16().requires_grad_(), D.bfloat16().requires_grad_()


def check(Q, D, temperature, leaves=None, **options):
    leaves = leaves or (Q, D)
    with mock.patch.object(single, "add_product_panels", wraps=single.add_product_panels) as taken:
        ours = gradients(li.losses.contrastive(Q, D, temperature=temperature, **options), leaves)
    assert taken.call_count == 1
    wanted = gradients(reference(Q, D, temperature, **options), leaves)
    assert_close(ours, wanted, TOLERANCE)
    for got, want in zip((ours[0], *ours[1]), (wanted[0], *wanted[1]), strict=True):
        if got.dim() == 0:  # of sums in float32 that are 1 and more
            torch.testing.assert_close(got.double(), want.double(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("d", [8, 72, 256, 320, 512, 520, 1024])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (127, 127), (129, 1000), (1000, 3000), (700, 20_000)])
def test_sizes(sizes, d):
    temperature = torch.tensor(0.3, device="cuda", requires_grad=True)
    Q, D = drawn(*sizes, d, planted=0.3)
    check(Q, D, temperature, (Q, D, temperature))


@pytest.mark.parametrize("sizes", [(300_000, 50), (50, 300_000)])
def test_many_rows_and_many_columns(sizes):
    Q, D = drawn(*sizes, 16, planted=0.0)
    check(Q, D, 0.3, labels=torch.arange(sizes[0], device="cuda") % sizes[1])


@pytest.mark.parametrize("temperature", [0.005, 0.07, 1.0])
@pytest.mark.parametrize("norm", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("planted", [0.0, 0.3])
def test_temperatures_and_norms(planted, norm, temperature):
    check(*drawn(300, 700, 192, planted, norm), temperature)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1), (0, 2), (0, 1, 2)])
def test_some_gradients_alone(wanted, labelled, reduction):
    Q, D = drawn(300, 500, planted=0.3)
    leaves = Q, D, torch.tensor(0.1, device="cuda", requires_grad=True)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in wanted)
    labels = torch.randint(0, 500, (300,), device="cuda")
    labels[::7] = -100
    labels = labels if labelled else None
    check(Q, D, leaves[2], [leaves[i] for i in wanted], labels=labels, reduction=reduction)


def test_rows_alike_and_labels_far_below():
    Q, D = drawn(300, 500)
    with torch.no_grad():
        D[100:300], Q[20:90] = D[5].clone(), Q[3].clone()
        D[0], D[400] = -Q[0], Q[0]
    for temperature in (0.5, 0.05, 0.005):
        check(Q, D, temperature)


def test_panels(monkeypatch):
    """Gradients of the documents add up over panels of queries, of whole tiles."""
    monkeypatch.setattr(panels, "_WEIGHT_BYTES", 1)
    monkeypatch.setattr(panels, "_LEAST_ROWS", 300)
    temperature = torch.tensor(0.05, device="cuda", requires_grad=True)
    Q, D = drawn(1000, 1200, planted=0.3)
    check(Q, D, temperature, (Q, D, temperature))
    check(Q, D, temperature, (Q, D, temperature), labels=torch.arange(1000, device="cuda").flip(0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_left_out_may_hold_anything(value):
    Q, D = drawn(300, 300)
    labels = torch.arange(300, device="cuda")
    labels[5] = -100
    with torch.no_grad():
        clean = Q.clone().requires_grad_()
        Q[5, 0, 3] = value
    ours, wanted = (
        gradients(li.losses.contrastive(x, D, temperature=0.1, labels=labels), (x, D)) for x in (Q, clean)
    )
    assert_close(ours, wanted)
    loss = li.losses.contrastive(Q, D, temperature=0.1)
    assert loss.isnan() and all(x.isnan().any() for x in torch.autograd.grad(loss, (Q, D)))


def test_again_and_in_a_graph():
    Q, D = drawn(900, 900, 512, 0.3)
    temperature = torch.tensor(0.05, device="cuda", requires_grad=True)

    def step():
        return gradients(li.losses.contrastive(Q, D, temperature=temperature), (Q, D, temperature))

    runs = [step() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runs.append(step())
    graph.replay()
    for loss, found in runs[1:]:
        assert torch.equal(loss, runs[0][0]) and all(map(torch.equal, found, runs[0][1]))


def test_the_host_waits_for_nothing():
    Q, D = drawn(300, 300)
    labels = torch.randperm(300, device="cuda")

    def step():
        torch.autograd.grad(li.losses.contrastive(Q, D, temperature=0.1, labels=labels), (Q, D))

    waits_for_nothing(step)


def test_autocast():
    """float32 inputs multiply in bf16, and their gradients come in float32."""
    Q, D = (x.detach().float().requires_grad_() for x in drawn(300, 300, planted=0.3))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        check(Q, D, 0.1)


def test_memory():
    """256 MiB of weights, and what is as large as the inputs: docs/large_batches.md."""
    Q, D = drawn(16384, 16384, 128)
    first = li.losses.contrastive(Q[:64], D[:64], temperature=0.1)  # takes cuBLAS its workspace
    torch.autograd.grad(first, (Q, D))
    beside = peak(lambda: torch.autograd.grad(li.losses.contrastive(Q, D, temperature=0.1), (Q, D)))
    assert beside <= (256 << 20) + 4 * D.numel() + 4 * 2 * Q.numel() + (8 << 20)


def elsewhere():
    Q, D = drawn()
    yield "smoothing", (Q, D), {"label_smoothing": 0.1}
    yield "both directions", (Q, D), {"symmetric": True}
    yield "a loss for each query", (Q, D), {"reduction": "none"}
    yield "float32", (Q.float(), D.float()), {}
    yield "float16", (Q.half(), D.half()), {}
    yield "rows of no whole 16 bytes", (Q[..., :60], D[..., :60]), {}


def test_calls_that_compute_scores():
    for name, (Q, D), options in elsewhere():
        with mock.patch.object(single, "add_product_panels") as taken:
            li.losses.contrastive(Q, D, temperature=0.1, **options).sum().backward()
        assert not taken.called, name


def test_small_batches_compute_scores(monkeypatch):
    monkeypatch.undo()
    Q, D = drawn(2048, 2048)
    with mock.patch.object(single, "add_product_panels") as taken:
        li.losses.contrastive(Q, D, temperature=0.1)
    assert not taken.called
