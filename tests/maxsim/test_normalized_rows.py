"""Rows whose norm overflows or is not finite, on every device."""

import pytest
import torch

import late_interaction as li
from tests.support import ref


def overflowing(dtype, device):
    """Q and D with some rows whose norms overflow in `dtype`."""
    torch.manual_seed(0)
    huge = 1e160 if dtype == torch.float64 else 1e19
    Q, D = torch.randn(5, 33, 40, device=device), torch.randn(6, 70, 40, device=device)
    Q, D = Q.to(dtype), D.to(dtype)
    Q[0, 1], Q[3, :], D[1, 3], D[2, 5:], D[4] = -huge, huge * Q[3].sign(), huge, -huge, huge * D[4].sign()
    return Q, D


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", ["in-batch", "pairs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_whose_norm_overflows_counts_as_zeros(dtype, layout, masked, device):
    """As torch.nn.functional.normalize returns it, and never as NaN."""
    Q, D = overflowing(dtype, device)
    Q, D = (Q, D[:5]) if layout == "pairs" else (Q, D)
    d_mask = torch.rand(D.shape[:2], device=device) < 0.7 if masked else None
    zeros = [torch.nn.functional.normalize(x, dim=-1).abs().amax(-1, keepdim=True) == 0 for x in (Q, D)]
    assert zeros[0][3].all() and zeros[1][4].all() and not zeros[0][1].any()
    units = [ref.unit(x.double()).masked_fill(zero, 0) for x, zero in zip((Q, D), zeros, strict=True)]
    expected, _ = ref.maxsim(*units, None, d_mask)
    expected = expected.diagonal() if layout == "pairs" else expected
    Q.requires_grad_()
    D.requires_grad_()
    score = li.maxsim_pairs if layout == "pairs" else li.maxsim
    scores = score(Q, D, d_mask=d_mask, normalize=True)
    ref.assert_close(scores.detach(), expected, ref.tolerance(dtype))
    scores.sum().backward()
    assert Q.grad.isfinite().all() and D.grad.isfinite().all()
    assert Q.grad[3].abs().max() == 0 and D.grad[4].abs().max() == 0 and Q.grad[1].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_that_is_not_finite_is_no_row_of_zeros(dtype, device):
    Q, D = overflowing(dtype, device)
    D[1, 3, 2], Q[2, 7, 5] = torch.inf, -torch.inf
    scores = li.maxsim(Q, D, normalize=True)
    assert scores[:, 1].isnan().all() and scores[2].isnan().all()
    assert scores[[0, 1, 3, 4]][:, [0, 2, 3, 4, 5]].isfinite().all()
