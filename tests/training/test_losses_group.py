"""losses.pairwise, losses.sigmoid and losses.recall over process groups of gloo, against one process."""

import numpy as np
import pytest
import torch

from tests.support.groups import check, needs_gloo, on_ranks, succeeded

pytestmark = needs_gloo

every = pytest.mark.parametrize("name", ["pairwise", "sigmoid", "recall"])
OURS = {"numbers": False}


@every
@pytest.mark.parametrize("kind", ["padded", "masked", "packed", "single", "no queries"])
def test_equals_one_process(name, kind):
    check(on_ranks(3, "losses", of=name, kind=kind), 3, kind, of=name, **OURS)


@every
def test_options(name):
    labels = [torch.tensor(x) for x in ([8, 0, -100, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7], [3, -100, 0])]
    ranks = on_ranks(3, "losses", of=name, labels=labels, reduction="none")
    check(ranks, 3, of=name, labels=labels, reduction="none", **OURS)
    check(on_ranks(2, "losses", of=name, hard=True), 2, of=name, hard=True, **OURS)


@every
def test_the_same_bits_on_every_run(name):
    for first, second in succeeded(on_ranks(2, "losses", of=name, runs=2)):
        assert np.array_equal(first[0], second[0])
        assert all(map(np.array_equal, first[1], second[1]))


def test_ranks_that_call_two_losses():
    for result, name in zip(on_ranks(2, "other_losses"), ("losses.sigmoid", "losses.pairwise"), strict=True):
        message = (
            f"ValueError: {name}: every rank of the group must have the same loss, got losses.sigmoid on rank"
        )
        assert result.startswith(message), result
