"""losses.contrastive over process groups of gloo whose batches are small: each rank gathers all documents."""

import pytest
import torch
import torch.distributed as dist

from late_interaction._contrastive import whole
from late_interaction._contrastive.ring import Ring
from tests.support.groups import check, needs_gloo, on_ranks

pytestmark = needs_gloo


@pytest.mark.parametrize("kind", ["padded", "masked", "packed", "no queries"])
def test_gathered_documents(kind):
    """Small batches, whose documents fit on every rank, take one exchange instead of a ring."""
    check(on_ranks(3, "gradients", kind=kind, gathers=True), 3, kind)


@pytest.mark.parametrize("options", [
    {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"normalize": True},
], ids=str)  # fmt: skip
def test_options_of_gathered_documents(options):
    check(on_ranks(2, "gradients", gathers=True, **options), 2, **options)


@pytest.mark.parametrize("fewer", [0, 1])
def test_documents_that_take_too_much_memory_are_not_gathered(fewer):
    """Each of two ranks takes as much room as the larger shard's nine documents of 6 x 8 numbers."""
    given = {"gathers": not fewer, "most_bytes": 2 * 9 * 6 * 8 * 8 - fewer, "sizes": {"kept": 1 << 30}}
    check(on_ranks(2, "gradients", **given), 2)


def test_labels_of_gathered_documents():
    labels = [
        torch.tensor([8, 3, -100, 0, 1]),
        torch.tensor([1, 2, -100, 0, 4, 5, 7, 6]),
        torch.tensor([0, 3, 3]),
    ]
    check(on_ranks(3, "gradients", labels=labels, gathers=True), 3, labels=labels)


def test_a_rank_whose_documents_have_no_gradient():
    """Then they go round the ring, on every rank: a gradient comes home by an exchange of all."""
    for result in on_ranks(2, "one_without_gradient"):
        assert not isinstance(result, str), result


@pytest.mark.parametrize("what", ["documents", "gradients"])
def test_an_exchange_that_fails(what, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no answer")

    of = {"documents": "all_gather_into_tensor", "gradients": "all_to_all_single"}
    monkeypatch.setattr(dist, of[what], fails)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    ring = Ring("group", 1, 2, [1, 1], [1, 1], [(1, 2, 3)] * 2, caller="losses.contrastive")
    message = rf"^losses.contrastive: the exchange of {what} with .* ranks .* on rank 1: .*\(no answer\)"
    with pytest.raises(RuntimeError, match=message):
        if what == "documents":
            whole._gathered(torch.ones(1, 2, 3), ring.shapes, ring)
        else:
            whole._sent_home(torch.ones(2, 2, 3), ring)
