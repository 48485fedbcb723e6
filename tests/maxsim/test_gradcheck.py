"""float64 gradients against finite differences."""

import pytest
import torch

import late_interaction as li


@pytest.mark.parametrize("backward", ["auto", "lowmem", "unified"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("layout", ["in-batch", "KD", "pairs"])
def test_gradcheck(layout, normalize, backward, device):
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)

    Q = leaf(3, 4, 5)
    D = {"in-batch": leaf(2, 6, 5), "KD": leaf(3, 2, 6, 5), "pairs": leaf(3, 6, 5)}[layout]
    q_mask = torch.rand(3, 4, device=device) < 0.8
    d_mask = torch.rand(D.shape[:-1], device=device) < 0.8
    d_mask.view(-1, 6)[0] = False
    function = li.maxsim_pairs if layout == "pairs" else li.maxsim

    def score(Q, D):
        return function(Q, D, q_mask, d_mask, normalize=normalize, backward=backward)

    # On a GPU the atomics of unified add in any order.
    assert torch.autograd.gradcheck(score, (Q, D), nondet_tol=1e-12)


def test_gradcheck_of_the_recomputing_op(device):
    Q = torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
    D = torch.randn(3, 5, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda Q, D: torch.ops.late_interaction.maxsim(Q, D, None, None, True), (Q, D), nondet_tol=1e-12
    )
