"""Blocks of the contrastive loss by themselves: their sizes, and how kernels score and differentiate one."""

from types import SimpleNamespace

import pytest
import torch

from late_interaction._contrastive import blocks
from late_interaction._contrastive.blocks import Kernels
from late_interaction._contrastive.tokens import Tokens
from tests.maxsim.test_call_edges import Called
from tests.support.contrastive import batch

MIB = 1 << 20


class Sequences:
    """What the size of a block follows from."""

    def __init__(self, count, mean_bytes, longest=1, on_gpu=False):
        self.count, self.mean_bytes, self.longest = count, mean_bytes, longest
        self.values = SimpleNamespace(is_cuda=on_gpu)

    def __len__(self):
        return self.count


def size(q, d, way="padded"):
    return blocks.block_sizes(Kernels(way, False, "highest"), q, d)


# ---- how large ----


@pytest.mark.parametrize(("on_gpu", "shares"), [(True, (32, 12, 72)), (False, (4, 12, 32))])
def test_what_a_block_takes(on_gpu, shares, monkeypatch):
    """MiB of queries, of documents, and of what is kept of pairs: 2 bytes a query token and 8 a score."""
    monkeypatch.setattr(blocks, "_whole_wave", lambda documents, d: documents)
    many, kib = 10**6, 1 << 10
    assert size(Sequences(many, 16 * kib, 0, on_gpu), Sequences(16, 0))[0] == shares[0] * 64
    assert size(Sequences(16, 0, 0, on_gpu), Sequences(many, 16 * kib))[1] == shares[1] * 64
    pairs = shares[2] * MIB // (2 * 252 + 8)
    assert size(Sequences(64, 1, 252, on_gpu), Sequences(many, 1)) == (64, pairs // 64)
    assert size(Sequences(many, 1, 252, on_gpu), Sequences(64, 1)) == (pairs // 16, 16)
    assert size(Sequences(many, 1 << 30, 252, on_gpu), Sequences(many, 1 << 30)) == (16, 16)


@pytest.mark.parametrize(("documents", "longest", "wanted", "processors"), [
    (263, 180, 263, 132),  # less than a wave
    (264, 180, 256, 132),
    (300, 180, 256, 132),
    (528, 1, 512, 132),
    (131, 181, 131, 132),
    (163, 181, 128, 132),
    (300, 300, 256, 132),
    (230, 180, 224, 114),
])  # fmt: skip
def test_documents_of_a_block_fill_whole_waves(documents, longest, wanted, processors, monkeypatch):
    """Each multiprocessor has two documents or a long one; in whole tiles of 32."""
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(blocks.torch.cuda, "get_device_properties", lambda device: properties)
    d = Sequences(10**6, 4, longest, True)
    d.values.device = "cuda:0"
    assert blocks._whole_wave(documents, d) == wanted
    monkeypatch.setattr(blocks, "_CUDA_SHARES", (4, 4 * documents, 1 << 30))
    monkeypatch.setattr(blocks, "_LEAST", 1)
    assert size(Sequences(1, 4, 1, True), d) == (1, wanted)


@pytest.mark.parametrize(("q", "d", "wanted"), [
    (Sequences(50, 10, 3), Sequences(70, 5), (10, 7)),
    (Sequences(50, 4, 3), Sequences(70, 2), (23, 3)),  # not (25, 2), of 1000 / 14 pairs
    (Sequences(12, 4, 3), Sequences(70, 2), (12, 5)),
    (Sequences(12, 4, 0), Sequences(70, 2), (12, 10)),
    (Sequences(5, 4, 3), Sequences(70, 2), (5, 14)),
    (Sequences(5, 4, 3), Sequences(70, 20), (5, 3)),
    (Sequences(50, 50, 3), Sequences(70, 20), (3, 3)),
    (Sequences(50, 4, 3), Sequences(5, 2), (23, 3)),
    (Sequences(50, 4, 2), Sequences(5, 2), (25, 3)),
    (Sequences(0, 4, 3), Sequences(0, 2), (1, 1)),
    (Sequences(200, 0, 0), Sequences(1, 2), (100, 1)),  # sequences of no token
    (Sequences(1, 2, 0), Sequences(200, 0), (1, 60)),
    (Sequences(200, 0.5, 0), Sequences(1, 2), (100, 1)),
    (Sequences(1, 2, 0), Sequences(200, 0.5), (1, 60)),
    (Sequences(1, 2, 0), Sequences(200, 1.5), (1, 40)),
])  # fmt: skip
def test_sizes_of_blocks(q, d, wanted, monkeypatch):
    """Blocks hold 100 bytes of queries, 60 of documents and 1000 of pairs."""
    monkeypatch.setattr(blocks, "_CPU_SHARES", (100, 60, 1000))
    monkeypatch.setattr(blocks, "_LEAST", 3)
    assert size(q, d) == wanted


def test_blocks_of_a_product_are_whole_tiles():
    sizes = [size(Sequences(9, 4, 1, on_gpu), Sequences(9, 4), "matrix") for on_gpu in (True, False)]
    assert all(n & (n - 1) == 0 and n >= 1024 for found in sizes for n in found)
    assert sizes[0] > sizes[1]  # a GPU's are larger


def test_a_panel_holds_four_million_logits():
    found = blocks.panels([(i, i + 64) for i in range(0, 4096, 64)], 4096)
    assert [len(run) for run in found] == [16] * 4


def test_runs_of_single_documents():
    """Each has more logits than a panel."""
    single = [(0, 1), (1, 2), (2, 3)]
    assert blocks.panels(single, 8 << 20) == [[x] for x in single]


# ---- how a block is scored ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["highest", "high", "medium", "fp16"])
def test_rows_multiply_in_the_dtype_that_precision_names(precision, dtype):
    half = {"medium": torch.bfloat16, "fp16": torch.float16}
    wanted = half.get(precision, dtype) if dtype is torch.float32 else dtype
    rows = Kernels("matrix", False, precision).rows(Tokens(torch.ones(3, 1, 4, dtype=dtype)))
    assert rows.dtype is wanted and rows.shape == (3, 4)


@pytest.mark.parametrize("setting", ["highest", "high"])
def test_half_precision_needs_no_setting_for_a_product(setting):
    torch.set_float32_matmul_precision(setting)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        one = Tokens(torch.zeros(2, 1, 4, dtype=dtype))
        assert blocks.choose(one, True, False, "highest").way == "matrix"
    one = Tokens(torch.zeros(2, 1, 4))
    for precision in ("medium", "fp16", "high"):
        assert blocks.choose(one, True, False, precision).way == "matrix"


@pytest.mark.parametrize("side", ["query", "document"])
def test_a_masked_token_scores_zero_with_one_that_is_not_finite(side):
    (Q, D), off = (x.detach() for x in batch(2, 2, 1, 1)), torch.tensor([[False], [True]])
    (D if side == "query" else Q)[0] = float("inf")
    masks = (off, None) if side == "query" else (None, off)
    q, d = (Tokens(x, mask) for x, mask in zip((Q, D), masks, strict=True))
    kernels = Kernels("matrix", False, "highest")
    scores, winners = kernels.scores_and_winners(q, d)
    for found in (scores, kernels.scores(q, d)):
        assert found[0, 0] == 0 and found.isnan().sum() == 1
    assert winners.numel() == 0


# ---- how a block is differentiated ----

WAYS = ["padded", "normalized", "packed", "matrix"]


def block_of(way, dtype):
    """Kernels, queries and documents; scores' gradient and winners."""
    length = 1 if way == "matrix" else 5
    q, d = (Tokens(x.detach()) for x in batch(4, 6, length, length, 8, dtype))
    kernels = Kernels("padded" if way == "normalized" else way, way == "normalized", "highest")
    if way == "packed":
        q, d = q.as_packed(), d.as_packed()
    scores, winners = kernels.scores_and_winners(q, d)
    return kernels, q, d, torch.randn_like(scores), winners


def sums_of(x):
    return torch.zeros(x.values.shape, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_written_at_once(way, dtype):
    """It is what would be added, rounded. Weights far below the least number of float16 are kept until
    then."""
    kernels, q, d, grad, winners = block_of(way, dtype)
    grad = 1e-3 * grad
    added, q_sums, again = sums_of(d), sums_of(q), sums_of(q)
    kernels.add_gradients(grad, q, d, winners, q_sums, added, None)
    written = torch.empty_like(d.values)
    kernels.add_gradients(grad, q, d, winners, again, None, written)
    assert added.any() and torch.equal(q_sums, again)
    torch.testing.assert_close(written, added.to(dtype), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_float16_cannot_hold(way, scale):
    kernels, q, d, grad, winners = block_of(way, torch.float16)
    found = []
    for factor in (1.0, scale):
        found.append([sums_of(q), sums_of(d)])
        kernels.add_gradients(factor * grad, q, d, winners, *found[-1], None)
    for one, small in zip(*found, strict=True):
        assert one.any()
        torch.testing.assert_close(small / scale, one, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("begun", [False, True])
def test_weights_of_listed_pairs_that_float16_cannot_hold(begun):
    kernels, q, d, _, _ = block_of("packed", torch.float16)
    pairs = [torch.arange(4, dtype=torch.int32) for _ in range(2)]
    inputs = (q.values, d.values, q.offsets, d.offsets, *pairs)
    _, winners = blocks._ops.maxsim_pairs_packed_winners.default(*inputs, q.longest, "highest")
    grad, found, scale = torch.randn(4), [], 1e-9
    for factor in (1.0, scale):
        found.append([sums_of(q), sums_of(d)])
        if begun:
            kernels.listed_gradients(factor * grad, inputs, winners, (True, True), found[-1])
        else:
            kernels.add_listed_gradients(factor * grad, inputs, winners, found[-1])
    for one, small in zip(*found, strict=True):
        assert one.any()
        torch.testing.assert_close(small / scale, one, rtol=1e-2, atol=1e-3)


def test_gradients_of_half_precision_are_scaled_to_one():
    within = blocks._within_range
    for grad in (torch.tensor([[-4e-9]]), torch.tensor([[2e-9, -8e-9], [0.0, 1e-9]])):
        scaled, peak = within(grad, torch.float16)
        assert scaled.abs().amax() == 1 and torch.equal(peak, grad.abs().amax())
        torch.testing.assert_close(scaled * peak, grad)
        assert within(grad, torch.bfloat16) == (grad, None)
    nothing = torch.empty(0, 3)
    assert within(nothing, torch.float16) == (nothing, None)
    scaled, peak = within(torch.zeros(2, 2), torch.float16)
    assert not scaled.any() and peak > 0


@pytest.mark.parametrize(("way", "dtype", "name"), [
    ("padded", torch.float32, "maxsim_backward_into_"), ("padded", torch.bfloat16, "maxsim_backward_into_"),
    ("padded", torch.float16, "maxsim_backward"), ("normalized", torch.bfloat16, "maxsim_backward"),
    ("packed", torch.bfloat16, "maxsim_varlen_backward_into_"),
    ("packed", torch.float16, "maxsim_varlen_backward"),
])  # fmt: skip
def test_which_operator_differentiates_blocks(way, dtype, name):
    """On the CPU gradients of float16 are scaled, and have a copy of their own."""
    kernels, q, d, grad, winners = block_of(way, dtype)
    with Called() as called:
        kernels.add_gradients(grad, q, d, winners, sums_of(q), sums_of(d), None)
    assert [x.removesuffix("_no_autograd") for x in called.names if "backward" in x] == [name]


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("way", ["padded", "normalized", "packed"])
def test_no_gradient_that_nobody_needs(way, needs, monkeypatch):
    kernels, q, d, grad, winners = block_of(way, torch.float32)
    given = []

    def call(name):
        ours = getattr(torch.ops.late_interaction, name).default
        return SimpleNamespace(default=lambda *args: given.append(args) or ours(*args))

    names = ("maxsim_backward_into_", "maxsim_backward", "maxsim_varlen_backward_into_")
    monkeypatch.setattr(blocks, "_ops", SimpleNamespace(**{name: call(name) for name in names}))
    sums = [sums_of(x) if n else None for x, n in zip((q, d), needs, strict=True)]
    kernels.add_gradients(grad, q, d, winners, *sums, None)
    (args,) = given
    if way == "padded":  # grad_Q is scratch memory of the operator, and grad_D is not written
        assert (args[5].numel() > 0, args[10] is not None) == needs and args[6].numel() == 0
    elif way == "packed":
        assert tuple(x is not None for x in args[-2:]) == needs
    else:
        assert args[-2:] == needs
    assert all(x is None or x.any() for x in sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("each", [1, 2])
def test_gradients_of_hard_negatives(form, dtype, needs, each):
    """Those of all pairs, each with its own query, whatever their scale."""
    kernels, q, h, grad, _ = block_of("padded", dtype)
    h = Tokens(torch.cat((h.values, h.values[:2]))[: 4 * each])  # of 4 queries
    grad = 1e-2 * grad[:, :each]
    if form == "packed":
        kernels, q, h = Kernels("packed", False, "highest"), q.as_packed(), h.as_packed()
    scores, winners = kernels.own_scores(q, h, each)
    Q, H = (x.values.double().view(-1, 5, 8).requires_grad_() for x in (q, h))
    wanted = torch.einsum("qsd,qktd->qkst", Q, H.unflatten(0, (4, each))).amax(-1).sum(-1)
    torch.testing.assert_close(scores.double(), wanted, rtol=0, atol=1e-5)
    of_q, of_h = torch.autograd.grad(wanted, (Q, H), grad.double())
    q_sums = sums_of(q) if needs[0] else None
    found = kernels.own_gradients(grad, q, h, winners, q_sums, needs[1])
    tolerance = {"rtol": 2e-3, "atol": 2e-5}
    if needs[0]:
        torch.testing.assert_close(q_sums.double().view_as(of_q), of_q, **tolerance)
    if needs[1]:
        assert found.shape == h.values.shape and found.dtype is dtype
        torch.testing.assert_close(found.double().view_as(of_h), of_h, **tolerance)
