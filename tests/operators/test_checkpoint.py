"""Gradients under torch.utils.checkpoint, which gives out the tensors that a backward saved only once."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import late_interaction as li
from late_interaction.score_pairs import score_pairs_packed
from tests.support.packed import scored

CU_Q, CU_D = torch.arange(4, dtype=torch.int32) * 4, torch.arange(5, dtype=torch.int32) * 6
PAIRS = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([3, 1, 1], dtype=torch.int32)


def packed(function, *indices):
    def scores(Q, D, weights):
        places = [x.to(Q.device) for x in (CU_Q, CU_D, *indices)]
        return function(Q.flatten(0, 1), D.flatten(0, 1), *places, q_weights=weights.flatten())

    return scores


FUNCTIONS = {
    "maxsim": lambda Q, D, _: li.maxsim(Q, D),
    "lowmem": lambda Q, D, _: li.maxsim(Q, D, normalize=True, backward="lowmem"),
    "recompute": lambda Q, D, _: li.maxsim(Q, D, winners="recompute"),
    "weighted": lambda Q, D, weights: li.maxsim(Q, D, q_weights=weights),
    "weighted recompute": lambda Q, D, weights: li.maxsim(Q, D, q_weights=weights, winners="recompute"),
    "winners": lambda Q, D, _: li.maxsim_with_winners(Q, D)[0],
    "pairs": lambda Q, D, weights: li.maxsim_pairs(Q, D[:3], q_weights=weights),
    "varlen": packed(scored),
    "score_pairs": packed(score_pairs_packed, *PAIRS),
    "smooth": lambda Q, D, _: li.smooth_maxsim(Q, D),
    "xtr": lambda Q, D, weights: li.xtr_scores(Q, D, 5, q_weights=weights),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_checkpoint_changes_no_gradient(name, deterministic, device):
    values = [torch.randn(3, 4, 8), torch.randn(4, 6, 8), torch.rand(3, 4)]
    torch.use_deterministic_algorithms(deterministic, warn_only=True)  # cuBLAS would refuse
    for wanted in itertools.product((False, True), repeat=3):
        plain, again = (
            [x.clone().to(device).requires_grad_(y) for x, y in zip(values, wanted, strict=True)]
            for _ in range(2)
        )
        scores = FUNCTIONS[name](*plain)
        if not scores.requires_grad:
            continue
        scores.sum().backward()
        checkpoint(FUNCTIONS[name], *again, use_reentrant=False).sum().backward()
        for x, y in zip(plain, again, strict=True):
            assert (x.grad is None) == (y.grad is None)
            assert x.grad is None or torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-5)
