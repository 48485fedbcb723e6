"""Steps on hidden states one by one, and what the driver decides for a GPU, seen on a CPU: hidden states in
its memory say that they are on a GPU, and the steps in plain PyTorch run. Chunks are of a few documents."""

from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction import plan
from late_interaction.ops.from_hidden import chunking, driver
from late_interaction.ops.from_hidden.chunking import Gpu
from late_interaction.ops.winners import widen
from tests.operators.test_fused_head import TOLERANCE, expected_gradients, inputs, projected
from tests.support import ref
from tests.support.cases import begun

OPS = torch.ops.late_interaction
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SHAPE = (2, 23, 3, 7, 16, 24)  # Nq, Nd, Lq, Ld, d, d_model
NEEDS = (True,) * 4


class OnGpu(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = property(lambda self: True)


@pytest.fixture
def small_caches(monkeypatch):
    """L2 caches hold three documents of SHAPE in half precision."""
    monkeypatch.setattr(driver, "gpu_of", lambda index: Gpu(1 << 10, 132))
    monkeypatch.setattr(chunking, "_CPU_CACHE", 1 << 10)


def check_gradients(Q, H, W, b, q_mask, d_mask, needs=NEEDS):
    scores, winners = driver.maxsim_from_hidden_winners(Q, H, W, b, q_mask, d_mask)
    ref.assert_close(driver.maxsim_from_hidden(Q, H, W, b, q_mask, d_mask), scores, 1e-6)
    grad = torch.randn_like(scores)
    got = driver.maxsim_from_hidden_backward(grad, Q, H, W, b, winners, True, "highest", *needs)
    wanted = expected_gradients(grad, Q, H, W, b, widen(winners, H.shape[1]), True)
    for g, w, need in zip(got, wanted, needs, strict=True):
        assert g.dtype == Q.dtype
        if need:
            ref.assert_close(g, w, 4 * TOLERANCE[Q.dtype])
        else:
            assert g.numel() == 0


@pytest.mark.parametrize("needs", [NEEDS, (True, False, False, False), (False, True, False, True)])
@pytest.mark.parametrize("where", [lambda H: H.as_subclass(OnGpu), lambda H: H], ids=["gpu", "cpu"])
@pytest.mark.parametrize("d_model", [24, 16, 15, 8])
@pytest.mark.parametrize("Nd", [23, 3])
@pytest.mark.parametrize("dtype", [BF16, F64])
def test_gradients_of_chunks(dtype, Nd, d_model, where, needs, small_caches):
    """Chunks of three documents, larger ones in the memory of gradients, and one of all documents."""
    Q, H, W, b, *masks = inputs((2, Nd, 3, 7, 16, d_model), dtype, "cpu", masks="holes")
    check_gradients(Q, where(H), W, b, *masks, needs)


@pytest.mark.parametrize("d_model", [64, 128])
def test_chunks_fill_whole_waves_of_a_gpu(monkeypatch, d_model):
    """Where scoring takes longest, as explain_plan says: 180 documents would fit, 48 more than there are
    multiprocessors."""
    monkeypatch.setattr(driver, "gpu_of", lambda index: Gpu(50 << 20, 132))
    monkeypatch.setattr(plan, "_l2_bytes", lambda: 50 << 20)
    Q, H, W = (torch.empty(x, dtype=BF16) for x in ((8, 32, 128), (1320, 1024, d_model), (128, d_model)))
    assert driver._head(H.as_subclass(OnGpu), W, None, Q, False, BF16, False).size == 132
    said = li.explain_plan(Q.shape, (1320, 1024, 128), d_model=d_model, sm=90, sm_count=132)
    assert "chunk      132 of 1320 documents in the forward" in said


# How hidden states lie: at addresses and strides that a kernel reads in place, and that are copied.
LAID = {
    "at 8 bytes": lambda H: begun(H, 4),
    "rows apart": lambda H: torch.nn.functional.pad(H, (0, 8))[..., :24],
    "rows apart by no whole vector": lambda H: torch.nn.functional.pad(H, (0, 4))[..., :24],
    "documents apart": lambda H: torch.nn.functional.pad(H, (0, 0, 0, 2))[:, :7],
    "turned": lambda H: H.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda H: H.repeat_interleave(2, -1)[..., ::2],
    "one number": lambda H: H[..., :1].expand(H.shape),
    "one document": lambda H: H[:1].expand(H.shape),
}


@pytest.mark.parametrize("where", [lambda H: H.as_subclass(OnGpu), lambda H: H], ids=["gpu", "cpu"])
@pytest.mark.parametrize("form", LAID)
def test_hidden_states_that_lie_otherwise(form, where, small_caches):
    Q, H, W, b, *masks = inputs(SHAPE, BF16, "cpu", masks="holes")
    check_gradients(Q, where(LAID[form](H)), W, b, *masks)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_projected_tokens_are_normalized_if_nothing_is_said(grad, autocast):
    Q, H, W, b, _, _ = inputs(SHAPE, F32, "cpu")
    W.requires_grad_(grad)
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        for op in (OPS.maxsim_from_hidden, lambda *args: OPS.maxsim_from_hidden_winners(*args)[0]):
            plain, said, other = (op(Q, H, W, b, None, None, *n) for n in ((), (True,), (False,)))
            assert torch.equal(plain, said) and not torch.allclose(plain, other)
            assert plain.requires_grad == grad


def test_a_backward_under_another_autocast_multiplies_as_the_forward():
    """float16 of a forward stays float16 where autocast is to bfloat16: the gradient of float32 states."""
    Q, H, W = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 8), (5, 6, 16), (8, 16)))
    scores = OPS.maxsim_from_hidden(Q, H, W, None, None, None, True, "fp16").sum()
    outside = torch.autograd.grad(scores, (Q, H, W), retain_graph=True)
    with torch.autocast("cpu", dtype=BF16):
        inside = torch.autograd.grad(scores, (Q, H, W))
    assert all(map(torch.equal, inside, outside))


# ---- steps ----


def test_norms_of_rows_are_given_where_there_are_any():
    hidden, W = torch.randn(5, 8), torch.randn(4, 8) / 1e3  # short rows
    rows = torch.empty(5, 4)
    assert OPS.project_rows_(rows, hidden, W, None, None, False).shape == (0,)
    inverse = OPS.project_rows_(rows, hidden, W, None, None, True)
    exact = projected(hidden, W, None, False)
    torch.testing.assert_close(inverse, (1 / exact.norm(dim=1)).float())
    torch.testing.assert_close(rows, ref.unit(exact).float())


@pytest.mark.parametrize(("besides", "d"), [("grad_D", 4), ("grad_D", 1), ("inverse", 4)])
def test_sums_of_documents_come_alone(besides, d, device):
    Q, D = torch.randn(2, 3, d, device=device), torch.randn(1, 1, d, device=device)
    scores, winners = OPS.maxsim_winners(Q, D, None, None)
    grad_D = torch.empty_like(D) if besides == "grad_D" else D.new_empty(0)
    inverse = torch.ones(1, device=device) if besides == "inverse" else None
    outputs = torch.empty_like(Q), grad_D, None, True, True, torch.zeros_like(D)
    with pytest.raises(RuntimeError, match="with d_sums, grad_D must have no elements and inverse"):
        OPS.maxsim_backward_into_(scores, Q, D, inverse, winners, *outputs)


@pytest.mark.parametrize(("inverse", "constant"), [(1e12, True), (999999999999.5, False), (1.0, False)])
def test_a_norm_below_epsilon_is_a_constant(inverse, constant):
    """So that the gradient along the row counts; it is of one sign in every dim."""
    Q, D = torch.tensor([[[-3.0, -4.0]]], dtype=F64), torch.tensor([[[0.6, 0.8]]], dtype=F64)
    winners = torch.zeros(1, 1, 1, dtype=torch.int16)
    norms, grad_Q, grad_D = torch.tensor([inverse], dtype=F64), torch.empty_like(Q), torch.empty_like(D)
    one = torch.ones(1, 1, dtype=F64)
    OPS.maxsim_backward_into_(one, Q, D, norms, winners, grad_Q, grad_D, None, True, True)
    # The gradient of the unit row is Q, along the row itself.
    torch.testing.assert_close(grad_D, inverse * Q if constant else torch.zeros_like(Q), rtol=0, atol=0.1)


def test_parts_of_the_gradient_of_the_weights_add_up():
    grad, hidden, active = torch.randn(5, 3), torch.randn(5, 4), torch.tensor([1, 0, 1, 1, 0]).bool()
    parts = torch.full((3, 3, 4), float("nan"))
    hidden[~active] = float("nan")
    wanted = grad[active].t() @ hidden[active]
    for times, fresh in ((1, True), (2, False)):
        OPS.wgrad_splitk_(parts, grad, hidden, active, fresh)
        torch.testing.assert_close(parts.sum(0), times * wanted)


@pytest.mark.parametrize(("d", "d_model", "splits"), [(128, 256, 132), (128, 1024, 33), (200, 700, 22)])
def test_the_gradient_of_the_weights_fills_a_gpu_once(d, d_model, splits):
    """A split has a block for every 128 x 256 weights; without many tokens there is one split."""
    assert chunking.weight_grad_splits(d, d_model, 1 << 20, 132) == splits
    assert chunking.weight_grad_splits(d, d_model, 256, 132) == 1


class Kernels:
    """The operators of a GPU that projects and scores few query tokens in one pass."""

    can_project_rows = SimpleNamespace(default=lambda *_: True)

    def __init__(self):
        self.calls = []
        self.project_scores = SimpleNamespace(default=lambda *args: self.calls.append(args) or args[0].sum())

    def __getattr__(self, name):
        return getattr(OPS, name)


@pytest.mark.parametrize(
    ("Nq", "Lq", "dtype", "once"),
    [(2, 32, BF16, True), (64, 1, torch.float16, True), (65, 1, BF16, False), (2, 0, BF16, False),
     (2, 3, F64, False)],
)  # fmt: skip
def test_one_kernel_projects_and_scores_few_query_tokens(Nq, Lq, dtype, once, monkeypatch, small_caches):
    Q, H, W, b, *masks = inputs((Nq, 4, Lq, 7, 16, 24), dtype, "cpu", masks="holes")
    assert driver._head(H, W, b, Q, False, dtype, False).size <= 4
    kernels = Kernels()
    monkeypatch.setattr(driver, "operators", kernels)
    driver._forward(Q, H, W, b, *masks, False, "highest")
    assert len(kernels.calls) == once
    if once:
        assert torch.equal(kernels.calls[0][1], H.flatten(0, 1)) and kernels.calls[0][-2:] == (7, False)
