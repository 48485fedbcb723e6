"""What the driver of hidden states decides for a GPU, seen on a CPU: hidden states in its memory say that
they are on a GPU, and the steps in plain PyTorch run. Chunks are of a few documents."""

import types

import pytest
import torch

from late_interaction.ops.from_hidden import chunking, driver, fallback
from late_interaction.ops.from_hidden.chunking import Gpu, Sizes
from late_interaction.ops.winners import widen
from tests import ref
from tests.operators.test_fused_head import TOLERANCE, expected_gradients, inputs

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SHAPE = (2, 23, 3, 7, 16, 24)  # Nq, Nd, Lq, Ld, d, d_model
NEEDS = (True,) * 4


class OnGpu(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = property(lambda self: True)


class Watched:
    """The operators, and the names and arguments of those that were called. Some may be replaced."""

    def __init__(self, **replaced):
        self.calls, self.replaced = [], replaced

    def __getattr__(self, name):
        op = self.replaced.get(name) or getattr(torch.ops.late_interaction, name).default

        def call(*args):
            self.calls.append((name, args))
            return op(*args)

        return types.SimpleNamespace(default=call)

    def of(self, name):
        return [args for called, args in self.calls if called == name]


@pytest.fixture
def watched(monkeypatch):
    """L2 caches hold three documents of SHAPE in half precision."""
    monkeypatch.setattr(driver, "gpu_of", lambda index: Gpu(1 << 10, 132))
    monkeypatch.setattr(chunking, "_CPU_CACHE", 1 << 10)
    monkeypatch.setattr(driver, "operators", Watched())
    return driver.operators


@pytest.fixture
def projections(monkeypatch):
    """Views of the rows and hidden states of each projection by plain PyTorch, as they were given."""
    seen = []

    def project_rows(rows, hidden, *args):
        seen.append((rows.view_as(rows), hidden))
        return fallback.project_rows(rows, hidden, *args)

    monkeypatch.setattr(driver, "project_rows", project_rows)
    return seen


def on_gpu(H):
    return H.as_subclass(OnGpu)


def head(H, d=16, backward=True, need_grad_H=True, dtype=BF16):
    W, Q = torch.zeros(d, H.shape[2], dtype=dtype), torch.zeros(2, 3, d, dtype=dtype)
    return driver._head(H, W, None, Q, True, dtype, backward, need_grad_H)


def aligned(*shape, offset=0, dtype=BF16):
    """Zeros of which the first lies so many elements behind whole 64 bytes."""
    count = torch.Size(shape).numel()
    flat = torch.zeros(count + 64, dtype=dtype)
    start = -flat.data_ptr() % 64 // dtype.itemsize + offset
    return flat[start : start + count].view(shape)


# ---- which hidden states are read in place, and by which kernel ----


@pytest.mark.parametrize(
    ("H", "in_place", "kernel"),
    [
        (aligned(5, 7, 24), True, True),
        (aligned(5, 7, 24, offset=8), True, True),
        (aligned(5, 7, 24, offset=16), True, True),
        (aligned(5, 7, 24, offset=4), True, False),  # not on whole 16 bytes
        (aligned(5, 7, 32)[..., :24], True, True),  # rows apart
        (aligned(5, 7, 28)[..., :24], True, False),
        (aligned(5, 8, 28)[..., :24], True, False),
        (aligned(5, 9, 24)[:, :7], False, True),  # documents apart: converted
        (aligned(2, 9, 24)[:, :7], False, True),
        (aligned(1, 9, 28)[:, :7, :24], True, False),  # one document is not apart
        (aligned(5, 24, 7).transpose(1, 2), False, True),
        (aligned(5, 7, 48)[..., ::2], False, True),
        (aligned(5, 7, 1).expand(5, 7, 24), False, True),
        (aligned(1, 7, 24).expand(5, 7, 24), False, True),
        (aligned(5, 7, 24, offset=4, dtype=F32), False, True),
        (aligned(5, 7, 20), True, False),  # no whole vectors
    ],
)
def test_where_hidden_states_lie(H, in_place, kernel, watched):
    found = head(on_gpu(H))
    assert (found.in_place, found.wgrad_kernel) == (in_place, kernel)
    assert not head(H).wgrad_kernel and head(H).in_place == in_place


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("H", "converted"), [(aligned(5, 7, 24), 0), (aligned(5, 9, 24)[:, :7], 4), (aligned(5, 7, 20), 4)]
)
def test_what_a_chunk_is_planned_from(H, converted, backward, watched, monkeypatch):
    asked = []
    monkeypatch.setattr(driver, "chunk_size", lambda *args: asked.append(args) or 5)
    converted = converted if backward else 2 * (not head(H).in_place)
    head(on_gpu(H), backward=backward)
    assert asked[-1] == (Sizes(5, 7, 16, H.shape[2], 2, 6), converted, Gpu(1 << 10, 132), backward)
    head(H, backward=backward)
    assert asked[-1][2] is None


@pytest.mark.parametrize(("size", "alias", "whole"), [(4, True, False), (5, False, True), (6, False, True)])
def test_chunks_alias_gradients_if_there_are_several(size, alias, whole, watched, monkeypatch):
    monkeypatch.setattr(driver, "chunk_size", lambda *_: size)
    H = aligned(5, 7, 24)
    found = head(on_gpu(H))
    assert (found.alias_into_grad, found.whole) == (alias, whole)
    assert found.largest == (4 if alias else size)
    assert not head(on_gpu(H), need_grad_H=False).alias_into_grad
    assert not head(H).alias_into_grad
    assert not head(on_gpu(aligned(5, 9, 24)[:, :7])).alias_into_grad
    assert not head(on_gpu(aligned(5, 7, 20))).alias_into_grad
    W, Q = torch.zeros(16, 24, dtype=BF16), torch.zeros(2, 3, 16, dtype=BF16)
    assert not driver._head(on_gpu(H), W, None, Q, True, BF16, False).alias_into_grad


def test_the_largest_chunk_leaves_little_beside_it(watched, monkeypatch):
    assert head(on_gpu(aligned(23, 7, 24))).largest == 23 * 24 // (16 + 24)
    monkeypatch.setattr(chunking, "_MOST_BESIDE", 500)  # flags and norms of 7 tokens, winners of 6
    assert head(on_gpu(aligned(23, 7, 24))).largest == 500 // (5 * 7 + 4 * 6)


def test_memory_for_the_gradient_of_the_weights(watched, monkeypatch):
    asked = []
    monkeypatch.setattr(driver, "weight_grad_splits", lambda *args: asked.append(args) or 3)
    assert driver._parts(head(aligned(5, 7, 24)), True, F32).shape == (1, 16, 24) and not asked
    assert driver._parts(head(on_gpu(aligned(23, 7, 24))), True, F32).shape == (3, 16, 24)
    assert driver._parts(head(on_gpu(aligned(2, 7, 24))), True, F32).shape == (3, 16, 24)
    assert asked == [(16, 24, 3 * 7, 132), (16, 24, 2 * 7, 132)]
    assert driver._parts(head(aligned(5, 7, 24)), False, F32).shape == (0,)


def test_hidden_states_are_copied_only_where_rows_need_it(watched):
    H = aligned(5, 7, 32)[..., :24]
    for documents, hidden in head(H).chunks():
        assert hidden.data_ptr() == H[documents].data_ptr() and hidden.stride() == (32, 1)
    for _, hidden in head(aligned(5, 24, 7).transpose(1, 2)).chunks():
        assert hidden.is_contiguous()


# ---- the forward ----


@pytest.mark.parametrize(
    ("Nq", "Nd", "Lq", "dtype", "form", "winners", "wanted"),
    [
        (1, 4, 1, BF16, "contiguous", False, True),
        (2, 4, 3, torch.float16, "contiguous", False, True),
        (2, 4, 32, BF16, "contiguous", False, True),  # 64 query tokens, the most
        (64, 4, 1, BF16, "contiguous", False, True),
        (1, 4, 64, BF16, "contiguous", False, True),
        (5, 4, 13, BF16, "contiguous", False, False),
        (65, 4, 1, BF16, "contiguous", False, False),
        (1, 4, 65, BF16, "contiguous", False, False),
        (0, 4, 3, BF16, "contiguous", False, False),
        (2, 4, 0, BF16, "contiguous", False, False),
        (2, 0, 3, BF16, "contiguous", False, False),
        (2, 4, 3, F32, "contiguous", False, False),
        (2, 4, 3, F64, "contiguous", False, False),
        (2, 4, 3, BF16, "transposed", False, False),
        (2, 4, 3, BF16, "contiguous", True, False),
    ],
)
def test_one_kernel_projects_and_scores_few_query_tokens(
    Nq, Nd, Lq, dtype, form, winners, wanted, monkeypatch
):
    Q, H, W, b, q_mask, d_mask = inputs((Nq, Nd, Lq, 7, 16, 24), dtype, "cpu", masks="holes", form=form)
    marker = torch.zeros(Nq, Nd)
    watched = Watched(
        can_project_rows=lambda *_: True,
        project_scores=lambda *_: marker,
        project_rows_=fallback.project_rows,
    )
    monkeypatch.setattr(driver, "operators", watched)
    found = driver._forward(Q, H, W, b, q_mask, d_mask, False, "highest", winners)
    assert (found[0] is marker) == wanted
    if wanted:
        ((q, hidden, w, bias, *masks, Ld, normalize),) = watched.of("project_scores")
        assert torch.equal(q, Q) and torch.equal(hidden, H.flatten(0, 1)) and torch.equal(w, W)
        assert bias is b and masks[0] is q_mask and masks[1] is d_mask and (Ld, normalize) == (7, False)
    else:
        assert bool(watched.of("project_rows_")) == (Nd > 0)
    monkeypatch.setattr(driver, "operators", Watched(project_scores=None, can_project_rows=lambda *_: False))
    driver._forward(Q, H, W, b, q_mask, d_mask, False, "highest", winners)
    assert not driver.operators.of("project_scores")


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_scores_alone_have_no_winners(precision, watched):
    Q, H, W, b, q_mask, d_mask = inputs(SHAPE, F32, "cpu", masks="holes")
    scores = driver.maxsim_from_hidden(Q, H, W, b, q_mask, d_mask, True, precision)
    calls = watched.of("maxsim")
    assert len(calls) > 1 and not watched.of("maxsim_winners")
    for _, _, _, mask, *options in calls:
        assert mask.shape[0] <= 3 and options == ([] if precision == "highest" else [False, "high"])
    both = driver.maxsim_from_hidden_winners(Q, H, W, b, q_mask, d_mask, True, precision)
    assert torch.equal(both[0], scores) and len(watched.of("maxsim_winners")) == len(calls)


@pytest.mark.parametrize("Nd", [3, 23])
def test_rows_are_as_many_as_tokens(Nd, watched, projections):
    """And few enough that a buffer of hidden dims would have room for them."""
    Q, H, W, b, _, _ = inputs((2, Nd, 3, 7, 16, 40), BF16, "cpu")
    driver._forward(Q, H, W, b, None, None, True, "highest", True)
    assert sum(len(hidden) for _, hidden in projections) == Nd * 7
    assert all(rows.shape == (len(hidden), 16) for rows, hidden in projections)


# ---- the backward ----


@pytest.mark.parametrize("needs", [NEEDS, (True, False, False, False), (False, True, False, True)])
@pytest.mark.parametrize("where", [on_gpu, lambda H: H], ids=["gpu", "cpu"])
@pytest.mark.parametrize("d_model", [24, 16, 8])
@pytest.mark.parametrize("Nd", [23, 3])
@pytest.mark.parametrize("dtype", [BF16, F64])
def test_gradients_of_chunks(dtype, Nd, d_model, where, needs, watched):
    """Chunks of three documents, larger ones in the memory of gradients, and one of all documents."""
    Q, H, W, b, q_mask, d_mask = inputs((2, Nd, 3, 7, 16, d_model), dtype, "cpu", masks="holes")
    _, winners = driver.maxsim_from_hidden_winners(Q, H, W, b, q_mask, d_mask)
    grad = torch.randn(2, Nd, dtype=F64 if dtype == F64 else F32)
    got = driver.maxsim_from_hidden_backward(grad, Q, where(H), W, b, winners, True, "highest", *needs)
    wanted = expected_gradients(grad, Q, H, W, b, widen(winners, 7), True)
    for g, w, need in zip(got, wanted, needs, strict=True):
        assert g.dtype == dtype
        if need:
            ref.assert_close(g, w, 4 * TOLERANCE[dtype])
        else:
            assert g.numel() == 0
    summed = [args[7] is not None for args in watched.of("maxsim_backward_into_")]
    assert all(summed) == (needs[0] and len(summed) > 1) and any(summed) == all(summed)
    kernel = where is on_gpu and dtype == BF16 and needs[2]
    assert len(watched.of("wgrad_splitk_")) == kernel * len(summed)


def test_chunks_in_the_memory_of_later_gradients(watched, projections):
    """As many documents as those behind them have memory for, then the three that a buffer holds."""
    Q, H, W, b, _, _ = inputs(SHAPE, BF16, "cpu")
    _, winners = driver.maxsim_from_hidden_winners(Q, H, W, b, None, None)
    projections.clear()
    grad_H = driver.maxsim_from_hidden_backward(torch.ones(2, 23), Q, on_gpu(H), W, b, winners)[1]
    assert [len(hidden) // 7 for _, hidden in projections] == [13, 6, 3, 1]
    inside = [rows.data_ptr() - grad_H.data_ptr() for rows, _ in projections]
    assert inside == [2 * 24 * 7 * start for start in (0, 13, 19, 22)]  # in their own gradients
    targets = [args[6].data_ptr() - grad_H.data_ptr() for args in watched.of("maxsim_backward_into_")]
    assert targets[:2] == [2 * 24 * 7 * start for start in (13, 19)]
    assert not any(0 <= x < grad_H.nbytes for x in targets[2:])


@pytest.mark.parametrize(
    ("d_model", "states", "apart"),
    [(24, BF16, True), (16, BF16, True), (15, BF16, False), (8, F32, True), (7, F32, False)],
)
def test_projected_tokens_of_one_chunk_lie_in_the_gradient_if_they_fit(d_model, states, apart, watched):
    """One launch computes both gradients where tokens and their gradients lie apart."""
    Q, H, W, b, _, _ = inputs((2, 3, 3, 7, 16, d_model), BF16, "cpu")
    H = H.to(states)
    _, winners = driver.maxsim_from_hidden_winners(Q, H, W, b, None, None)
    for need_grad_H in (True, False):
        needs = (True, need_grad_H, True, True)
        watched.calls.clear()
        grads = driver.maxsim_from_hidden_backward(
            torch.ones(2, 3), Q, H, W, b, winners, True, "highest", *needs
        )
        ((_, _, unit, _, _, _, grad_D, *_),) = watched.of("maxsim_backward_into_")
        assert (unit.data_ptr() != grad_D.data_ptr()) == (apart and need_grad_H)
        assert (unit.data_ptr() == grads[1].data_ptr()) == (apart and need_grad_H)


def test_the_plan_of_a_backward_is_one_of_the_backward(watched, monkeypatch):
    asked = []
    monkeypatch.setattr(driver, "chunk_size", lambda *args: asked.append(args[1:]) or 5)
    Q, H, W, b, _, _ = inputs((2, 5, 3, 7, 16, 24), F64, "cpu")
    _, winners = driver.maxsim_from_hidden_winners(Q, H, W, b, None, None)
    driver.maxsim_from_hidden(Q, H, W, b, None, None)
    driver.maxsim_from_hidden_backward(torch.ones(2, 5, dtype=F64), Q, H, W, b, winners)
    assert asked == [(0, None, False), (0, None, False), (8, None, True)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_projected_tokens_are_normalized_if_nothing_is_said(grad, autocast):
    Q, H, W, b, _, _ = inputs(SHAPE, F32, "cpu")
    W.requires_grad_(grad)
    ops = torch.ops.late_interaction
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        for op in (ops.maxsim_from_hidden, lambda *args: ops.maxsim_from_hidden_winners(*args)[0]):
            plain, said, other = (op(Q, H, W, b, None, None, *n) for n in ((), (True,), (False,)))
            assert torch.equal(plain, said) and not torch.allclose(plain, other)
            assert plain.requires_grad == grad


def test_every_gradient_is_wanted_if_none_is_named():
    """Shapes of fake tensors are those of real ones."""
    Q, H, W, b, _, _ = inputs(SHAPE, F32, "cpu")
    scores, winners = torch.ops.late_interaction.maxsim_from_hidden_winners(Q, H, W, b, None, None)
    for device in ("meta", "cpu"):
        args = (x.to(device) for x in (scores, Q, H, W, b, winners))
        grads = torch.ops.late_interaction.maxsim_from_hidden_backward(*args)
        assert [g.shape for g in grads] == [x.shape for x in (Q, H, W, b)]


def test_a_backward_under_another_autocast_multiplies_as_the_forward():
    """float16 of a forward stays float16 where autocast is to bfloat16: the gradient of float32 states."""
    Q, H, W = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 8), (5, 6, 16), (8, 16)))
    scores = torch.ops.late_interaction.maxsim_from_hidden(Q, H, W, None, None, None, True, "fp16").sum()
    outside = torch.autograd.grad(scores, (Q, H, W), retain_graph=True)
    with torch.autocast("cpu", dtype=BF16):
        inside = torch.autograd.grad(scores, (Q, H, W))
    assert all(map(torch.equal, inside, outside))
