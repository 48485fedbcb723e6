"""Results lie where the inputs do, whatever torch.set_default_device says. "meta" stands for another device:
a tensor that is made without a device has no values there, so that what it meets fails or has none either."""

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves as leaves

import late_interaction as li
from late_interaction import Corpus


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, 8, generator=generator), dim=-1)


Q, D = tokens(3, 5), tokens(6, 7, seed=1)
D_MASK = torch.arange(7) < torch.tensor([7, 3, 0, 1, 6, 7])[:, None]
CU_Q, CU_D = torch.arange(4, dtype=torch.int32) * 5, torch.arange(7, dtype=torch.int32) * 7
FLAT_Q, FLAT_D = Q.flatten(0, 1), D.flatten(0, 1)


def with_gradients(function, *leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    result = function(*leaves)
    return result, *torch.autograd.grad(result.sum(), leaves)


def loss(**options):
    def run(Q, D):
        return li.losses.contrastive(Q, D, temperature=0.3, **options)

    return lambda: with_gradients(run, Q, D)


def of_a_corpus(folder):
    with Corpus.create(folder, d=8) as builder:
        builder.add(list(D), ids=[f"d{i}" for i in range(6)])
    found = Corpus.open(folder).search(Q, 4)
    return tuple(x for x in found if isinstance(x, torch.Tensor))


CALLS = {
    "maxsim": lambda: with_gradients(lambda Q, D: li.maxsim(Q, D, None, D_MASK), Q, D),
    "normalized": lambda: with_gradients(lambda Q, D: li.maxsim(Q, D, normalize=True), Q, D),
    "recompute": lambda: with_gradients(lambda Q, D: li.maxsim(Q, D, winners="recompute"), Q, D),
    "mean": lambda: li.maxsim(Q, D, None, D_MASK, mean=True),
    "winners": lambda: li.maxsim_with_winners(Q, D, None, D_MASK),
    "pairs": lambda: with_gradients(li.maxsim_pairs, Q, D[:3]),
    "varlen": lambda: with_gradients(lambda Q, D: li.lik.maxsim_varlen(Q, D, CU_Q, CU_D), FLAT_Q, FLAT_D),
    "search": lambda: tuple(li.search(Q, D, 4, d_mask=D_MASK)),
    "xtr": lambda: with_gradients(lambda Q, D: li.xtr_scores(Q, D, 9), Q, D),
    "smooth": lambda: with_gradients(li.smooth_maxsim, Q, D),
    "ward": lambda: leaves(li.pool_tokens(li.Tokens(D, D_MASK), 2)),
    "k-means": lambda: leaves(li.pool_tokens(li.Tokens(D, D_MASK), 2, method="kmeans")),
    "MUVERA": lambda: li.Muvera(8, 3, 4, 4).encode_documents(li.Tokens(D, D_MASK)),
    "explain": lambda: li.explain(Q, D, None, D_MASK),
    "loss": loss(),
    "loss, symmetric": lambda: with_gradients(
        lambda Q, D: li.losses.contrastive(Q, D, temperature=0.3, symmetric=True), Q, D[:3]
    ),
    "loss, tail": loss(tail=2**-10, kept_bytes=0),
    "loss, blocks": loss(kept_bytes=0),
    "loss, one token": lambda: with_gradients(
        lambda Q, D: li.losses.contrastive(Q, D, temperature=0.3), Q[:, :1], D[:, :1]
    ),
}


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [x for part in result for x in tensors(part)]
    if hasattr(result, "__dict__"):
        return tensors(list(vars(result).values()))
    return []


@pytest.mark.parametrize("name", CALLS)
def test_another_default_device(name):
    wanted = tensors(CALLS[name]())
    with torch.device("meta"):
        got = tensors(CALLS[name]())
    assert len(got) == len(wanted) > 0
    for mine, other in zip(got, wanted, strict=True):
        assert mine.device.type == "cpu"
        np.testing.assert_array_equal(mine.detach().numpy(), other.detach().numpy())


def test_a_corpus_with_another_default_device(tmp_path):
    wanted = of_a_corpus(tmp_path / "a")
    with torch.device("meta"):
        got = of_a_corpus(tmp_path / "b")
    assert len(got) == len(wanted) > 0
    for mine, other in zip(got, wanted, strict=True):
        assert mine.device.type == "cpu" and torch.equal(mine, other)
