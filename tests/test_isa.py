"""Every instruction set that the CPU kernels are written for, where this CPU has it."""

import pytest
import torch

import late_interaction as li
from tests import ref
from tests.cases import QUANTIZED, call, inputs, mask, tokens, walk

CASES = list(walk(150))[3::5]


@pytest.fixture(params=["portable", "avx2", "avx512", "avx512_bf16"])
def isa(request):
    force = torch.ops.late_interaction.cpu_isa
    try:
        force(request.param)
    except RuntimeError as error:
        pytest.skip(f"this CPU or build has no {request.param}: {str(error).splitlines()[0]}")
    yield request.param
    force("")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_winners_and_gradients(isa, case):
    Q, D, q_mask, d_mask = inputs(case, "cpu")
    Q, D = Q.detach().requires_grad_(), D.detach().requires_grad_()
    reference, expected = ref.maxsim(Q, D, q_mask, d_mask, case.normalize)
    scores, winners = call(li.maxsim_with_winners, case, Q, D, q_mask, d_mask)
    limit = ref.tolerance(case.dtype)
    ref.assert_close(scores, reference, limit)
    ref.assert_winners_close(winners, expected, Q, D, limit, case.normalize)
    grad = torch.randn_like(scores)
    scores.backward(grad)
    for x, gradient in zip((Q, D), ref.gradients(grad, Q, D, winners, case.normalize), strict=True):
        ref.assert_close(x.grad, gradient, ref.GRAD_TOLERANCE[case.dtype], "gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype(isa, dtype):
    """33 query tokens, 70 document tokens and 130 dims: whole vectors and a rest of each."""
    Q, D = torch.randn(5, 33, 130).to(dtype), torch.randn(4, 70, 130).to(dtype)
    scores, winners = li.maxsim_with_winners(Q, D)
    expected, best = ref.maxsim(Q, D)
    ref.assert_close(scores, expected, ref.tolerance(dtype))
    ref.assert_winners_close(winners, best, Q, D, ref.tolerance(dtype), False)


@pytest.mark.parametrize("precision", ["highest", "high", "medium", "fp16"])
def test_float32_precisions(isa, precision):
    Q, D = torch.randn(5, 33, 130), torch.randn(4, 70, 130)
    scores = torch.ops.late_interaction.maxsim(Q, D, None, None, False, precision)
    ref.assert_close(scores, ref.maxsim(Q, D)[0], ref.tolerance(torch.float32, precision))


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("d", [1, 8, 37, 128])
def test_quantized_tokens(isa, dtype, d):
    Q, D = tokens((5, 33, d), dtype, "cpu", "sliced"), tokens((4, 70, d), dtype, "cpu", "transposed")
    scale_Q, scale_D, d_mask = torch.rand(5, 33), torch.rand(4, 70), mask((4, 70), "cpu", "holes")
    scores = torch.ops.late_interaction.maxsim_quantized(Q, D, scale_Q, scale_D, None, d_mask)
    expected = ref.maxsim(ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D), None, d_mask)[0]
    ref.assert_close(scores, expected, 5e-6)


def test_unknown():
    with pytest.raises(RuntimeError):
        torch.ops.late_interaction.cpu_isa("sse9")
    assert torch.ops.late_interaction.cpu_isa("") in ("portable", "avx2", "avx512", "avx512_bf16")
