"""The steps on hidden states in plain PyTorch, one by one."""

import pytest
import torch

from late_interaction.ops.from_hidden import fallback
from tests import ref
from tests.operators.test_fused_head import projected

F64 = torch.float64


def test_norms_of_rows_are_given_where_there_are_any():
    hidden, W = torch.randn(5, 8), torch.randn(4, 8) / 1e3  # short rows
    rows = torch.empty(5, 4)
    assert fallback.project_rows(rows, hidden, W, None, None, False).shape == (0,)
    inverse = fallback.project_rows(rows, hidden, W, None, None, True)
    exact = projected(hidden, W, None, False)
    torch.testing.assert_close(inverse, (1 / exact.norm(dim=1)).float())
    torch.testing.assert_close(rows, ref.unit(exact).float())


@pytest.mark.parametrize("wrong", ["strided", "short", "long"])
@pytest.mark.parametrize("name", ["grad_Q", "grad_D", "sums", "d_sums"])
def test_gradients_are_written_to_contiguous_memory(name, wrong, device):
    Q, D = torch.randn(2, 3, 4, device=device), torch.randn(5, 6, 4, device=device)
    scores, winners = torch.ops.late_interaction.maxsim_winners(Q, D, None, None)
    out = {"grad_Q": torch.empty_like(Q), "grad_D": torch.empty_like(D), "sums": torch.empty_like(Q)}
    if name == "d_sums":
        out |= {"grad_D": D.new_empty(0), "d_sums": torch.empty_like(D)}
    strided = torch.empty(*out[name].shape[:2], 8, device=device)[..., ::2]
    out[name] = {"strided": strided, "short": out[name][1:], "long": out[name].repeat(2, 1, 1)}[wrong]
    args = (scores, Q, D, None, winners, out["grad_Q"], out["grad_D"], out["sums"], True, True)
    with pytest.raises(RuntimeError, match=f"late_interaction: {name} must be contiguous"):
        torch.ops.late_interaction.maxsim_backward_into_(*args, out.get("d_sums"))


@pytest.mark.parametrize(("besides", "d"), [("grad_D", 4), ("grad_D", 1), ("inverse", 4)])
def test_sums_of_documents_come_alone(besides, d, device):
    Q, D = torch.randn(2, 3, d, device=device), torch.randn(1, 1, d, device=device)
    scores, winners = torch.ops.late_interaction.maxsim_winners(Q, D, None, None)
    grad_D = torch.empty_like(D) if besides == "grad_D" else D.new_empty(0)
    inverse = torch.ones(1, device=device) if besides == "inverse" else None
    outputs = torch.empty_like(Q), grad_D, None, True, True, torch.zeros_like(D)
    with pytest.raises(RuntimeError, match="with d_sums, grad_D must have no elements and inverse"):
        torch.ops.late_interaction.maxsim_backward_into_(scores, Q, D, inverse, winners, *outputs)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradients_of_one_number(sign):
    Q, D = torch.full((1, 1, 1), 2.0 * sign), torch.full((1, 1, 1), 3.0)
    winners = torch.zeros(1, 1, 1, dtype=torch.int16)
    grad_Q, grad_D = torch.empty_like(Q), torch.empty_like(D)
    fallback.maxsim_backward_into(torch.ones(1, 1), Q, D, None, winners, grad_Q, grad_D, None, True, True)
    assert (grad_Q.item(), grad_D.item()) == (3.0, 2.0 * sign)


@pytest.mark.parametrize(("inverse", "constant"), [(1e12, True), (999999999999.5, False), (1.0, False)])
def test_a_norm_below_epsilon_is_a_constant(inverse, constant):
    """So that the gradient along the row counts; it is of one sign in every dim."""
    Q, D = torch.tensor([[[-3.0, -4.0]]], dtype=F64), torch.tensor([[[0.6, 0.8]]], dtype=F64)
    winners = torch.zeros(1, 1, 1, dtype=torch.int16)
    norms, grad_Q, grad_D = torch.tensor([inverse], dtype=F64), torch.empty_like(Q), torch.empty_like(D)
    one = torch.ones(1, 1, dtype=F64)
    fallback.maxsim_backward_into(one, Q, D, norms, winners, grad_Q, grad_D, None, True, True)
    # The gradient of the unit row is Q, along the row itself.
    torch.testing.assert_close(grad_D, inverse * Q if constant else torch.zeros_like(Q), rtol=0, atol=0.1)


def test_one_split_holds_the_sum():
    grad, hidden, active = torch.randn(5, 3), torch.randn(5, 4), torch.tensor([1, 0, 1, 1, 0]).bool()
    partials = torch.full((3, 3, 4), float("nan"))
    hidden[~active] = float("nan")
    fallback.wgrad_splitk(partials, grad, hidden, active, True)
    wanted = grad[active].t() @ hidden[active]
    torch.testing.assert_close(partials[0], wanted)
    assert not partials[1:].any()
    partials[1:] = 7.0
    fallback.wgrad_splitk(partials, grad, hidden, active, False)
    torch.testing.assert_close(partials[0], 2 * wanted)
    assert bool((partials[1:] == 7).all())
