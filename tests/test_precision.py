"""How float32 multiplies: PyTorch's switches, our keyword, and the error that each may have."""

import subprocess
import sys

import pytest
import torch

import late_interaction as li
from tests import ref

OPS = torch.ops.late_interaction


def problem(device, d=128, dtype=torch.float32):
    Q, D = torch.randn(9, 33, d, device=device), torch.randn(7, 130, d, device=device)
    return tuple(torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in (Q, D))


@pytest.mark.parametrize("d", [24, 128, 768])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high", "medium", "fp16"])
def test_error_level(precision, normalize, d, device):
    Q, D = problem(device, d)
    scores, winners = ref.maxsim(Q, D, normalize=normalize)
    out, kept = OPS.maxsim_winners(Q, D, None, None, normalize, precision)
    limit = ref.tolerance(torch.float32, precision)
    ref.assert_close(out, scores, limit)
    ref.assert_winners_close(kept, winners, Q, D, limit)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_keyword_and_the_switch_say_the_same(precision, device):
    Q, D = problem(device)
    explicit = li.maxsim(Q, D, precision=precision)
    torch.set_float32_matmul_precision(precision)
    assert torch.equal(li.maxsim(Q, D), explicit)
    torch.set_float32_matmul_precision("medium" if precision == "highest" else "highest")
    assert torch.equal(li.maxsim(Q, D, precision=precision), explicit)


@pytest.mark.gpu
def test_each_level_is_worth_its_name():
    Q, D = problem("cuda", 768)
    exact = ref.maxsim(Q, D)[0]
    highest, high, medium = (
        ref.relative_error(li.maxsim(Q, D, precision=p), exact) for p in ("highest", "high", "medium")
    )
    assert highest < high / 10 and high < medium
    einsum = torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)
    assert highest <= 2 * ref.relative_error(einsum, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_other_dtypes_multiply_as_they_are(dtype, precision, device):
    Q, D = problem(device, dtype=dtype)
    assert torch.equal(li.maxsim(Q, D, precision=precision), li.maxsim(Q, D))
    ref.assert_close(li.maxsim(Q, D, precision=precision), ref.maxsim(Q, D)[0], ref.tolerance(dtype))


@pytest.mark.parametrize("backward", ["lowmem", "unified"])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_gradients_are_float32_whatever_the_precision(precision, backward, device):
    Q, D = (x.requires_grad_() for x in problem(device))
    scores, winners = li.maxsim_with_winners(Q, D, precision=precision, backward=backward)
    grad = torch.randn_like(scores)
    scores.backward(grad)
    for name, x, expected in zip("QD", (Q, D), ref.gradients(grad, Q, D, winners), strict=True):
        assert x.grad.dtype == torch.float32
        ref.assert_close(x.grad, expected, 1e-6, f"grad_{name}")


@pytest.mark.parametrize("scale", [1e-18, 1e-3, 1e3, 1e18])
def test_float32_keeps_its_range(scale, device):
    # Narrowing float32 to float16 would overflow or vanish here.
    Q, D = problem(device)
    scores, _ = ref.maxsim(Q * scale, D)
    for precision in ("highest", "high", "medium"):
        ref.assert_close(
            li.maxsim(Q * scale, D, precision=precision), scores, ref.tolerance(torch.float32, precision)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normalize_survives_any_length(dtype, device):
    Q, D = problem(device, dtype=dtype)
    scale = torch.logspace(-8, 8, 33, device=device).view(1, -1, 1).to(dtype)
    Q = Q * scale
    scores, winners = ref.maxsim(Q, D, normalize=True)
    out, found = li.maxsim_with_winners(Q, D, normalize=True)
    ref.assert_close(out, scores, ref.tolerance(dtype))
    ref.assert_winners_close(found, winners, Q, D, ref.tolerance(dtype), normalize=True)


@pytest.mark.parametrize(("new", "old"), [("ieee", "highest"), ("tf32", "high")])
def test_the_newer_switches(new, old):
    # In a process of its own: PyTorch does not go back from the newer switches to the older ones.
    code = f"""
import torch
if not hasattr(torch.backends, "fp32_precision"):
    raise SystemExit
import late_interaction as li
Q, D = torch.randn(3, 5, 64), torch.randn(4, 7, 64)
expected = li.maxsim(Q, D, precision={old!r})
torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = {new!r}
assert torch.equal(li.maxsim(Q, D), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
