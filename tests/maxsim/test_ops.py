"""The operators as citizens of PyTorch: opcheck, compile, export, AOTInductor, CUDA graphs, autocast."""

import re
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.cpp_extension import CUDA_HOME

import late_interaction as li
from tests.support import ref
from tests.support.calls import Module, needs_compiler, waiting_for_nothing

OPS = torch.ops.late_interaction


def arguments(device, documents=(4,), masks=True, grad=True):
    Q = torch.randn(3, 5, 8, device=device, requires_grad=grad)
    D = torch.randn(*documents, 7, 8, device=device, requires_grad=grad)
    if not masks:
        return Q, D, None, None
    return Q, D, torch.rand(3, 5, device=device) < 0.8, torch.rand(D.shape[:-1], device=device) < 0.8


# ---- pairs: the dim N is left out ----


def paired_arguments(device, grad=True):
    Q, D, q_mask, d_mask = arguments(device, (3, 2), grad=False)
    return Q.requires_grad_(grad), D[:, 0].requires_grad_(grad), q_mask, d_mask[:, 0]


@pytest.mark.parametrize("backward", ["lowmem", "unified"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high", "medium", "fp16"])
@pytest.mark.parametrize("shape", [(3, 5, 7, 8), (2, 33, 130, 128), (5, 32, 90, 96), (1, 300, 40, 64)])
def test_pairs_are_documents_of_each_query(shape, precision, normalize, backward, device):
    B, Lq, Ld, d = shape
    dtype = torch.float32 if precision != "highest" else torch.bfloat16
    Q, D = (torch.randn(B, L, d, device=device, dtype=dtype) for L in (Lq, Ld))
    # The same values at strides that no fresh tensor has.
    D = torch.stack((D, D), dim=2).flatten(2)[..., :d]
    q_mask, d_mask = torch.rand(B, Lq, device=device) < 0.8, torch.rand(B, Ld, device=device) < 0.8
    options = (normalize, precision, backward)
    scores, winners = OPS.maxsim_winners(Q, D, q_mask, d_mask, *options, True)
    wanted, won = OPS.maxsim_winners(Q, D[:, None], q_mask, d_mask[:, None], *options)
    assert torch.equal(scores, wanted[:, 0]) and torch.equal(winners, won[:, 0])
    assert torch.equal(OPS.maxsim(Q, D, q_mask, d_mask, *options, True), wanted[:, 0])
    grad = torch.randn(2 * B, device=device)[::2]
    got = OPS.maxsim_backward(grad, Q, D, winners, normalize, backward, True, True, True)
    grad_Q, grad_D = OPS.maxsim_backward(grad[:, None], Q, D[:, None], won, normalize, backward)
    torch.testing.assert_close(got, (grad_Q, grad_D[:, 0]))
    again = OPS.maxsim_backward_recompute(grad, Q, D, q_mask, d_mask, *options, True, True, True)
    torch.testing.assert_close(again, got)


def test_what_pairs_must_be(device):
    Q, D, q_mask, d_mask = paired_arguments(device, grad=False)
    scores, winners = OPS.maxsim_winners(Q, D, q_mask, d_mask, paired=True)
    for args, message in [
        ((Q, D[:2], None, None), "needs Nq = 3, got 2"),
        ((Q, D[:, None], None, None), r"D must be \[Nq, Ld, d\]"),
        ((Q, D, None, d_mask[:, None]), "d_mask must have the shape"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            OPS.maxsim(*args, paired=True)
    with pytest.raises(RuntimeError, match=r"grad_scores must be \[3\]"):
        OPS.maxsim_backward(scores[:, None], Q, D, winners, paired=True)
    with pytest.raises(RuntimeError, match=r"winners must be a contiguous \[3, 5\]"):
        OPS.maxsim_backward(scores, Q, D, winners[:, None], paired=True)
    with pytest.raises(RuntimeError, match="at least 1"):
        OPS.maxsim(Q[..., :0], D[..., :0], None, None)


# ---- torch.compile ----


@pytest.fixture
def compiled_calls(nothing_compiled):
    return CompileCounterWithBackend("aot_eager")


@pytest.mark.parametrize("layout", ["in-batch", "KD", "pairs"])
def test_compile_with_dynamic_shapes(layout, compiled_calls, device):
    def loss(Q, D, q_mask, d_mask):
        function = li.maxsim_pairs if layout == "pairs" else li.maxsim
        scores = function(Q, D, q_mask, d_mask, normalize=True)
        return scores.square().mean() + scores.logsumexp(-1).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=compiled_calls)
    for Nq, N, Lq, Ld, d in [(3, 4, 5, 7, 8), (5, 2, 9, 12, 16), (4, 6, 11, 130, 24), (7, 3, 64, 33, 40)]:
        shape = {"in-batch": (N,), "KD": (Nq, N), "pairs": (Nq,)}[layout]
        Q = torch.randn(Nq, Lq, d, device=device, requires_grad=True)
        D = torch.randn(*shape, Ld, d, device=device, requires_grad=True)
        masks = torch.rand(Q.shape[:-1], device=device) < 0.8, torch.rand(D.shape[:-1], device=device) < 0.8
        got = torch.autograd.grad(compiled(Q, D, *masks), (Q, D))
        expected = torch.autograd.grad(loss(Q, D, *masks), (Q, D))
        torch.testing.assert_close(got, expected)
    assert compiled_calls.frame_count == 1, f"{compiled_calls.frame_count} compilations for one function"


def test_compile_automatic_dynamic_shapes(compiled_calls, device):
    # Without dynamic=True, PyTorch compiles for one shape first and for all of them at the second.
    compiled = torch.compile(li.maxsim, fullgraph=True, backend=compiled_calls)
    for n in (3, 4, 5, 6, 70, 300):
        Q, D = torch.randn(n, n + 1, 8, device=device), torch.randn(n + 2, n + 3, 8, device=device)
        torch.testing.assert_close(compiled(Q, D), li.maxsim(Q, D))
    assert compiled_calls.frame_count == 2


def test_compile_reads_the_precision_switch(compiled_calls, device):
    Q, D = torch.randn(3, 33, 128, device=device), torch.randn(4, 65, 128, device=device)
    compiled = torch.compile(lambda Q, D: li.maxsim(Q, D), fullgraph=True, backend=compiled_calls)
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        assert torch.equal(compiled(Q, D), li.maxsim(Q, D, precision=precision))


def test_compile_under_autocast(compiled_calls, device):
    Q, D, q_mask, d_mask = arguments(device)

    def step(Q, D):
        with torch.autocast(device, dtype=torch.bfloat16):
            scores = li.maxsim(Q, D, q_mask, d_mask)
            exact = li.maxsim(Q, D, q_mask, d_mask, precision="highest")
        return scores, exact

    got, expected = torch.compile(step, fullgraph=True, backend=compiled_calls)(Q, D), step(Q, D)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
    got, expected = (torch.autograd.grad(a.sum() + 2 * b.sum(), (Q, D)) for a, b in (got, expected))
    torch.testing.assert_close(got, expected)


def test_compile_in_inference_mode(compiled_calls, device):
    Q, D, q_mask, d_mask = arguments(device, grad=False)
    with torch.inference_mode():
        got = torch.compile(li.maxsim, fullgraph=True, backend=compiled_calls)(Q, D, q_mask, d_mask)
        assert torch.equal(got, li.maxsim(Q, D, q_mask, d_mask))


# ---- export ----


def both(Q, D, d_mask):
    scores, winners = li.maxsim_with_winners(Q, D, None, d_mask, normalize=True)
    return scores + li.maxsim(Q, D, None, d_mask), winners


def drawn(device, Nq, Lq, Nd, Ld):
    Q, D = torch.randn(Nq, Lq, 8, device=device), torch.randn(Nd, Ld, 8, device=device)
    return Q, D, torch.rand(Nd, Ld, device=device) < 0.8


def exported(device):
    dim = torch.export.Dim
    Nq, Lq, Nd, Ld = dim("Nq"), dim("Lq"), dim("Nd"), dim("Ld", max=30000)
    shapes = ({0: Nq, 1: Lq}, {0: Nd, 1: Ld}, {0: Nd, 1: Ld})
    return torch.export.export(Module(both), drawn(device, 3, 5, 4, 7), dynamic_shapes=shapes)


def test_export(device):
    program = exported(device)
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"late_interaction.maxsim.default", "late_interaction.maxsim_winners.default"} <= targets
    args = drawn(device, 6, 33, 2, 70)
    torch.testing.assert_close(program.module()(*args), both(*args))


# A package of x * 2, made and loaded: does AOTInductor itself work here? It may end the process that tries.
TRY_AOT_INDUCTOR = """
import sys, torch
class Twice(torch.nn.Module):
    def forward(self, x):
        return x * 2
x = torch.ones(3, device=sys.argv[2])
path = torch._inductor.aoti_compile_and_package(torch.export.export(Twice(), (x,)), package_path=sys.argv[1])
torch._inductor.aoti_load_package(path)(x)
"""


@needs_compiler
@pytest.mark.gpu
@pytest.mark.skipif(CUDA_HOME is None, reason="AOTInductor for a GPU needs the CUDA toolkit")
def test_aot_inductor(tmp_path):
    """On a GPU; tokens/test_aot_inductor.py has the CPU."""
    attempt = [sys.executable, "-c", TRY_AOT_INDUCTOR, str(tmp_path / "twice.pt2"), "cuda"]
    try:
        loads = subprocess.run(attempt, capture_output=True, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        loads = False
    if not loads:
        pytest.skip("AOTInductor cannot load a package of x * 2 for a GPU on this machine")
    program = exported("cuda")
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "scores.pt2"))
    args = drawn("cuda", 6, 33, 2, 70)
    got = torch._inductor.aoti_load_package(path)(*args)
    torch.testing.assert_close(tuple(got), both(*args))


# ---- CUDA graphs and streams ----


@pytest.mark.gpu
def test_no_hidden_synchronization():
    Q = torch.randn(9, 33, 128, device="cuda", requires_grad=True)
    D = torch.randn(7, 300, 128, device="cuda", requires_grad=True)
    li.maxsim(Q, D).sum().backward()
    with waiting_for_nothing():
        for backward in ("lowmem", "unified"):
            li.maxsim(Q, D, normalize=True, backward=backward).sum().backward()
        li.search(Q, D, 3, chunk_bytes=2 * D[0].nbytes)


# ---- autocast ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["public", "maxsim", "maxsim_winners"])
def test_autocast_keeps_float32_and_multiplies_in_half(op, dtype, device):
    Q = torch.randn(5, 33, 128, device=device, requires_grad=True)
    D = torch.randn(4, 65, 128, device=device, requires_grad=True)
    precision = "medium" if dtype == torch.bfloat16 else "fp16"
    with torch.autocast(device, dtype=dtype):
        if op == "public":
            scores = li.maxsim(Q, D)
        else:
            scores = getattr(OPS, op)(Q, D, None, None)
            scores = scores if op == "maxsim" else scores[0]
        grads = torch.autograd.grad(scores.sum(), (Q, D))
    expected = OPS.maxsim_winners(Q, D, None, None, False, precision)[0]
    assert scores.dtype == torch.float32 and all(g.dtype == torch.float32 for g in grads)
    ref.assert_close(scores, expected.detach().double(), 1e-6)
    for a, b in zip(grads, torch.autograd.grad(expected.sum(), (Q, D)), strict=True):
        ref.assert_close(a, b.double(), 1e-6)
    error = ref.relative_error(scores, ref.maxsim(Q, D)[0])
    assert error < ref.tolerance(torch.float32, precision)
    assert device == "cpu" or error > 1e-6  # a CPU may well multiply more exactly than it is asked to


def test_autocast_casts_mixed_inputs(device):
    Q = torch.randn(5, 33, 24, device=device, requires_grad=True)
    D = torch.randn(4, 65, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        scores = li.maxsim(Q, D)
    assert torch.equal(scores, li.maxsim(Q.bfloat16(), D))
    grad_Q, grad_D = torch.autograd.grad(scores.sum(), (Q, D))
    assert grad_Q.dtype == torch.float32 and grad_D.dtype == torch.bfloat16
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(TypeError, match="share a dtype"):
        li.maxsim(Q.double(), D)


def test_autocast_leaves_float64_alone(device):
    Q, D = (torch.randn(2, 3, 8, device=device, dtype=torch.float64) for _ in range(2))
    with torch.autocast(device, dtype=torch.bfloat16):
        found = li.maxsim(Q, D)
    assert torch.equal(found, OPS.maxsim(Q, D, None, None, False, "highest"))


def test_backward_inside_and_outside_autocast_agree(device):
    Q, D, q_mask, d_mask = arguments(device)
    for op in (OPS.maxsim, li.maxsim):
        with torch.autocast(device, dtype=torch.bfloat16):
            scores = op(Q, D, q_mask, d_mask)
            inside = torch.autograd.grad(scores.sum(), (Q, D), retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(scores.sum(), (Q, D)), inside)


# ---- modes and transforms ----


def test_a_step_of_pairs_is_one_node(device):
    """Views in between would cost as much of the host's time again."""
    Q, D, *_ = paired_arguments(device)
    scores = li.maxsim_pairs(Q, D)  # its node lives as long
    assert {type(node).__name__ for node, _ in scores.grad_fn.next_functions if node is not None} <= {
        "AccumulateGrad",
        "SelectBackward0",
    }


@pytest.mark.parametrize("winners", ["save", "recompute"])
@pytest.mark.parametrize("masks", [False, True])
def test_saved_for_the_backward(masks, winners, device):
    # What the memory of a training step consists of: the inputs themselves, and two bytes a winner if saved.
    Q, D, q_mask, d_mask = arguments(device, masks=masks)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        li.maxsim(Q, D, q_mask, d_mask, normalize=True, winners=winners)
    more = [torch.int16] if winners == "save" else [torch.bool, torch.bool] * masks
    assert [x.dtype for x in saved] == [torch.float32, torch.float32, *more]
    for kept, given in zip(saved, (Q, D, q_mask, d_mask) if winners == "recompute" else (Q, D), strict=False):
        assert kept.data_ptr() == given.data_ptr()


class Logged(torch.Tensor):
    """A subclass that sees every operator called on it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_sees_the_operator(device):
    Q, D, *_ = arguments(device)
    Logged.seen = []
    li.maxsim(Q.detach().as_subclass(Logged).requires_grad_(), D)
    assert any("late_interaction.maxsim_winners" in call for call in Logged.seen)


@pytest.mark.parametrize(
    "q_shape, d_shape, paired",
    [
        ((5, 8), (4, 7, 8), False),
        ((3, 5, 8), (1, 3, 4, 7, 8), False),
        ((3, 5, 8), (7, 8), True),
        ((3, 5, 8), (3, 4, 7, 8), True),
    ],
)
def test_ranks_are_checked_without_values(q_shape, d_shape, paired):
    Q, D = (torch.empty(shape, device="meta") for shape in (q_shape, d_shape))
    wanted = "Q must be [Nq, Lq, d]" if Q.dim() == 2 else "D must be [Nd, Ld, d] or [Nq, K, Ld, d]"
    wanted = "D must be [Nq, Ld, d]" if paired else wanted
    with pytest.raises(RuntimeError, match=f"late_interaction: {re.escape(wanted)}, got rank"):
        OPS.maxsim(Q, D, None, None, paired=paired)
