"""pairwise_loss, sigmoid_loss and recall_loss over process groups of gloo, against one process."""

import numpy as np
import pytest
import torch

import late_interaction as li
from tests.ring_worker import T, queries_of, shards
from tests.training.test_contrastive_group import joined, on_ranks, pytestmark, sequences

__all__ = ["pytestmark"]  # skips all of it where there is no gloo

NAMES = ["pairwise_loss", "sigmoid_loss", "recall_loss"]
every = pytest.mark.parametrize("name", NAMES)


def one_process(name, world, kind="padded", labels=None, hard=False, **options):
    """The same batch in one process: loss and gradients of each query, document and hard negative."""
    queries, documents = joined(world, kind)
    leaves = [x.detach().requires_grad_() for x in (*queries, *documents)]
    Q, cu_q = li.varlen.pack_sequences(leaves[: len(queries)])
    D, cu_d = li.varlen.pack_sequences(leaves[len(queries) :])
    begin, own, negatives = 0, [], []
    for rank, (_, D_, o) in enumerate(shards(world, kind)):
        n = queries_of(rank, kind)
        mine = torch.arange(n) if labels is None else labels[rank].clone()
        own.append(torch.where(mine < 0, mine, mine + begin))
        begin += len(sequences(D_, o.get("cu_seqlens_d"), None))
        seeded = torch.Generator().manual_seed(rank)
        negatives.append(torch.randn(n, 2, 3, 8, dtype=torch.float64, generator=seeded))
    offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d}
    if hard:
        H = torch.cat(negatives).flatten(0, 2).requires_grad_()
        leaves.append(H)
        offsets |= {"hard_negatives": H, "cu_seqlens_h": torch.arange(2 * len(queries) + 1) * 3}
    loss = getattr(li, name)(Q, D, temperature=T, labels=torch.cat(own), **offsets, **options)
    total = loss
    if loss.dim():
        counts = [queries_of(rank, kind) for rank in range(world)]
        total = (loss * torch.cat([torch.linspace(-1, 2, n, dtype=torch.float64) for n in counts])).sum()
    grads = torch.autograd.grad(total, leaves)
    return loss.detach(), grads[: len(queries)], grads[len(queries) : len(queries) + len(documents)], grads


def check(ranks, name, world, kind="padded", hard=False, **options):
    loss, grads_q, grads_d, grads = one_process(name, world, kind, hard=hard, **options)
    for result in ranks:
        assert not isinstance(result, str), result
    close = {"rtol": 0, "atol": 1e-9}
    losses = [torch.from_numpy(np.asarray(r[0][0])) for r in ranks]
    if loss.dim():
        torch.testing.assert_close(torch.cat(losses), loss, **close)
    else:
        for got in losses:
            torch.testing.assert_close(got, loss, **close)
    found_q, found_d, found_h = [], [], []
    for result, (_, _, o) in zip(ranks, shards(world, kind), strict=True):
        Q, D, *H = (torch.from_numpy(x) for x in result[0][1])
        found_q += sequences(Q, o.get("cu_seqlens_q"), None)
        found_d += sequences(D, o.get("cu_seqlens_d"), o.get("d_mask"))
        found_h += [x.flatten(0, 2) for x in H]
    for found, wanted in ((found_q, grads_q), (found_d, grads_d)):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, **close)
    if hard:
        torch.testing.assert_close(torch.cat(found_h), grads[-1], **close)


@every
@pytest.mark.parametrize("kind", ["padded", "masked", "packed", "single", "no queries"])
def test_equals_one_process(name, kind):
    check(on_ranks(3, "losses", of=name, kind=kind), name, 3, kind)


@every
def test_options(name):
    labels = [torch.tensor(x) for x in ([8, 0, -100, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7], [3, -100, 0])]
    ranks = on_ranks(3, "losses", of=name, labels=labels, reduction="none")
    check(ranks, name, 3, labels=labels, reduction="none")
    check(on_ranks(2, "losses", of=name, hard=True), name, 2, hard=True)


@every
def test_the_same_bits_on_every_run(name):
    for result in on_ranks(2, "losses", of=name, runs=2):
        assert not isinstance(result, str), result
        first, second = result
        assert np.array_equal(first[0], second[0])
        assert all(map(np.array_equal, first[1], second[1]))


def test_ranks_that_call_two_losses():
    for result, name in zip(on_ranks(2, "other_losses"), ("sigmoid_loss", "pairwise_loss"), strict=True):
        message = (
            f"ValueError: {name}: every rank of the group must have the same loss, got sigmoid_loss on rank"
        )
        assert result.startswith(message), result
