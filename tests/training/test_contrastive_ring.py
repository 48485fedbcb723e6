"""The ring of processes by itself: what a rank tells and learns, and what it exchanges with whom."""

from types import SimpleNamespace

import pytest
import torch

from late_interaction import _group
from late_interaction._contrastive import ring as rings
from late_interaction._contrastive import whole
from late_interaction._contrastive.ring import Ring


def exchanged_by(ring, monkeypatch):
    """The transfers that a ring begins from here on, as (direction, rank of the world, tag, tensor)."""
    begun = []
    monkeypatch.setattr(rings.dist, "get_global_rank", lambda group, rank: 10 + rank)
    monkeypatch.setattr(rings.dist, "P2POp", lambda op, x, peer, group, tag: (op.__name__, peer, tag, x))
    monkeypatch.setattr(rings.dist, "batch_isend_irecv", lambda ops: begun.append(ops) or [])
    return begun


@pytest.mark.parametrize(("rank", "ahead", "to", "source"), [
    (0, 1, 11, 13), (3, 1, 10, 12), (1, -1, 10, 12), (0, -3, 11, 13), (2, 2, 10, 10),
])  # fmt: skip
def test_the_ranks_that_an_exchange_is_with(rank, ahead, to, source, monkeypatch):
    """Four ranks. The n-th tensor has tag n on both sides, also where one side sends none of it."""
    ring = Ring("group", rank, 4, [1] * 4, [1] * 4, caller="loss")
    begun = exchanged_by(ring, monkeypatch)
    out, into = [torch.ones(2), torch.ones(0), torch.ones(3)], [torch.ones(0), torch.ones(4), torch.ones(1)]
    found = ring.exchange(out, into, "documents", ahead)
    assert [[x[:3] for x in ops] for ops in begun] == [
        [("isend", to, 0), ("irecv", source, 1), ("isend", to, 2), ("irecv", source, 2)]
    ]
    assert [x.numel() for *_, x in begun[0]] == [2, 4, 3, 1]
    assert found.wait() is into and found.leaving is out
    ring.exchange([torch.ones(0)], [torch.ones(0)], "documents", ahead)
    assert len(begun) == 1  # nothing to send or to receive


def fails(*_, **__):
    raise RuntimeError("no answer")


def passed_on(ring):
    ring.exchange([torch.ones(2)], [torch.ones(2)], "documents", 1).wait()


@pytest.mark.parametrize(("function", "stand_in", "what", "call"), [
    ("batch_isend_irecv", fails, "documents", passed_on),
    ("batch_isend_irecv", lambda _: [SimpleNamespace(wait=fails)], "documents", passed_on),
    ("all_gather_into_tensor", fails, "documents",
     lambda ring: whole._gathered(torch.ones(1, 2, 3), ring.shapes, ring)),
    ("all_to_all_single", fails, "gradients", lambda ring: whole._sent_home(torch.ones(2, 2, 3), ring)),
    ("all_gather_into_tensor", fails, "sizes",
     lambda ring: _group.exchanged_facts("loss", "group", [1.0], torch.device("cpu"))),
])  # fmt: skip
def test_an_exchange_that_fails_says_so(function, stand_in, what, call, monkeypatch):
    """As it begins, and as it is waited for."""
    ring = Ring("group", 1, 2, [1, 1], [1, 1], [(1, 2, 3)] * 2, caller="loss")
    exchanged_by(ring, monkeypatch)
    monkeypatch.setattr(_group.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(_group.dist, "get_rank", lambda *_: 1)
    monkeypatch.setattr(_group.dist, function, stand_in)
    message = rf"^loss: the exchange of {what} with the other ranks .* on rank 1: .*\(no answer\)"
    with pytest.raises(RuntimeError, match=message):
        call(ring)


# ---- groups ----


@pytest.mark.parametrize(("config", "serves"), [
    ("cpu:gloo,cuda:gloo", True), ("cpu:gloo,cuda:nccl", True), ("cuda:nccl,cpu:gloo", True),
    ("cuda:nccl", False), ("cuda:cpu", False),
])  # fmt: skip
def test_whether_tensors_on_the_cpu_can_be_exchanged(config, serves, monkeypatch):
    monkeypatch.setattr(_group.dist, "get_backend_config", lambda group: config)
    assert _group._serves_cpu("group") == serves


@pytest.mark.parametrize("available", [True, False])
def test_what_is_no_group(available, monkeypatch):
    """Also where PyTorch has no distributed package."""
    if not available:
        monkeypatch.setattr(_group.dist, "is_available", lambda: False)
    for group in (5, "world", object()):
        with pytest.raises(TypeError, match=r"group must be a torch\.distributed process group or None, got"):
            _group.position(group)


def test_a_group_that_this_process_is_not_in(monkeypatch):
    monkeypatch.setattr(_group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(_group.dist, "get_world_size", lambda group: 3)
    for rank in (-1, 0, 2):
        monkeypatch.setattr(_group.dist, "get_rank", lambda group=None, rank=rank: rank)
        if rank >= 0:
            assert _group.position(_group.dist.GroupMember.NON_GROUP_MEMBER) == (rank, 3)
            continue
        with pytest.raises(ValueError, match="group must hold this process"):
            _group.position(_group.dist.GroupMember.NON_GROUP_MEMBER)
