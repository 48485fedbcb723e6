"""The ring of processes by itself: what a rank tells and learns, and what it exchanges with whom."""

from types import SimpleNamespace

import pytest
import torch

from late_interaction import Tokens, _group
from late_interaction._contrastive import ring as rings
from late_interaction._contrastive.ring import Ring
from late_interaction._contrastive.sequences import with_bounds


@pytest.mark.parametrize("count", [0, 1, 2, 99])
def test_no_number_of_queries_says_that_a_process_refused(count):
    _group.check_refused("loss", [[float(count), -1.0]])
    with pytest.raises(RuntimeError, match=r"^loss: rank 0, 2 of the group refused its arguments"):
        _group.check_refused("loss", [[float(_group.REFUSED)], [float(count)], [float(_group.REFUSED)]])


@pytest.mark.parametrize(
    ("rank", "bounds", "told"), [(0, (0, 2, 3), [0, 2, 3, 0]), (1, (0, 4, 4, 9), [0, 4, 4, 9])]
)
def test_offsets_of_all_processes(rank, bounds, told, monkeypatch):
    """Shards of 2 and 3 packed documents. A mask that padded ones had does not travel with them."""
    own = with_bounds("D", Tokens.packed(torch.ones(bounds[-1], 8), torch.tensor(bounds)))
    ring = Ring("group", rank, 2, [1, 1], [2, 3], [(2, 3, 8), (3, 4, 8)], masked=True, caller="loss")

    def exchanged(caller, group, facts, device):
        assert (caller, group, facts, device.type) == ("loss", "group", told, "cpu")
        return [[0.0, 2.0, 3.0, 0.0], [0.0, 4.0, 4.0, 9.0]]

    monkeypatch.setattr(rings, "exchanged_facts", exchanged)
    found = ring.with_packed(own)
    assert [bounds for _, bounds in found.packed] == [(0, 2, 3), (0, 4, 4, 9)]
    assert [offsets.tolist() for offsets, _ in found.packed] == [[0, 2, 3], [0, 4, 4, 9]]
    assert found.shapes == [(3, 8), (9, 8)] and found.largest_shard == 72 and not found.masked
    assert all(offsets.dtype == torch.int32 for offsets, _ in found.packed)


def test_options_are_compared_as_they_are(monkeypatch):
    """Not by sums, nor rounded. Only where they differ all processes exchange them."""
    same = {"loss": "losses.recall", "temperature": 0.1, "d": 128}
    exchanged = []

    def check(*given):
        of_all = [_group.Agreed(same | {"k": k}) for k in given]
        texts = [[float(x) for x in of._text] for of in of_all]
        most = max(map(len, texts))

        def exchange(caller, group, facts, device):
            assert facts == texts[0] + [0.0] * (most - len(texts[0]))
            exchanged.append(caller)
            return [text + [0.0] * (most - len(text)) for text in texts]

        monkeypatch.setattr(_group, "exchanged_facts", exchange)
        of_all[0].check("losses.recall", "group", [of.facts() for of in of_all], torch.device("cpu"))

    check((2, 3), (2, 3), (2, 3))
    assert not exchanged
    message = r"^losses.recall: every rank of the group must have the same k, got \(2, 3\) on rank 0, 2,"
    with pytest.raises(ValueError, match=message + r" \(1, 4\) on rank 1$"):
        check((2, 3), (1, 4), (2, 3))
    with pytest.raises(ValueError, match=r"got 1.0 on rank 0, 1.0000000000000002 on rank 1"):
        check(1.0, 1.0 + 2**-52)


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


@pytest.mark.parametrize("masked", [True, False])
def test_what_goes_to_the_next_rank(masked, monkeypatch):
    """Documents, their mask where any rank has one, and their extra numbers, in the sizes of who sends."""
    shapes, (values, extra) = [(2, 3, 8), (4, 3, 8), (1, 3, 8)], (torch.randn(2, 3, 8), torch.randn(5, 2))
    ring = Ring("group", 0, 3, [1] * 3, [2, 4, 1], shapes, masked=masked)
    begun = exchanged_by(ring, monkeypatch)
    steps = ring.shards(Tokens(values, None), extra)
    owner, documents, travelled = next(steps)
    assert owner == 0 and documents.values is values and travelled is extra
    sent, received = ([x for way, *_, x in begun[0] if way == kind] for kind in ("isend", "irecv"))
    assert [x[:3] for x in begun[0]] == [
        (way, peer, tag) for tag in range(2 + masked) for way, peer in (("isend", 11), ("irecv", 12))
    ]
    assert torch.equal(sent[0], values) and torch.equal(sent[-1], extra)
    assert [tuple(x.shape) for x in received] == [(1, 3, 8), *[(1, 3)] * masked, (5, 1)]
    received[0].fill_(7), received[-1].fill_(9)
    if masked:
        assert sent[1].dtype == torch.uint8 and sent[1].eq(1).all() and sent[1].shape == (2, 3)
        received[1].copy_(torch.tensor([[1, 0, 1]]))
    owner, documents, travelled = next(steps)
    assert owner == 2 and documents.values is received[0] and travelled is received[-1]
    assert (documents.mask.tolist() == [[True, False, True]]) if masked else documents.mask is None
    owner, documents, _ = next(steps)
    assert owner == 1 and documents.values.shape == (4, 3, 8) and len(begun) == 2
    assert next(steps, None) is None and len(begun) == 2


def test_offsets_of_packed_documents_are_those_of_the_rank_they_came_from(monkeypatch):
    """With three ranks the one before the last is not the next one."""
    bounds = [(0, 2, 3), (0, 4), (0, 1, 1, 6)]
    packed = [(torch.tensor(x, dtype=torch.int32), x) for x in bounds]
    ring = Ring("group", 0, 3, [1] * 3, [2, 1, 3], [(x[-1], 8) for x in bounds], packed)
    exchanged_by(ring, monkeypatch)
    own = with_bounds("D", Tokens.packed(torch.randn(3, 8), packed[0][0]))
    extra = torch.randn(5, 2)
    for owner, (got, tokens, travelled) in zip((0, 2, 1), ring.shards(own, extra), strict=True):
        assert got == owner and tokens._bounds == bounds[owner] == tuple(tokens.offsets.tolist())
        assert tokens.values.shape == (bounds[owner][-1], 8)
        assert travelled.shape == (5, len(bounds[owner]) - 1)


@pytest.mark.parametrize("when", ["it begins", "it is waited for"])
def test_an_exchange_that_fails_says_so(when, monkeypatch):
    def fails(*_):
        raise RuntimeError("no answer")

    ring = Ring("group", 1, 2, [1, 1], [1, 1], caller="loss")
    exchanged_by(ring, monkeypatch)
    monkeypatch.setattr(rings.dist, "get_rank", lambda *_: 1)
    work = fails if when == "it begins" else lambda _: [SimpleNamespace(wait=fails)]
    monkeypatch.setattr(rings.dist, "batch_isend_irecv", work)
    message = r"^loss: the exchange of documents with the other ranks .* on rank 1: .*\(no answer\)"
    with pytest.raises(RuntimeError, match=message):
        ring.exchange([torch.ones(2)], [torch.ones(2)], "documents", 1).wait()


def test_one_process_exchanges_nothing(monkeypatch):
    ring, own, values = Ring.alone(3, 4, True), Tokens(torch.ones(4, 3, 8), None), torch.tensor([1.0, 2.0])
    begun = exchanged_by(ring, monkeypatch)
    assert list(ring.shards(own)) == [(0, own, None)] and ring.owner(0) == 0 == ring.rank
    assert (ring.queries, ring.documents, ring.wants, ring.world) == ([3], [4], [True], 1)
    assert ring.sums(values) is values and not begun


def test_sums_of_all_ranks(monkeypatch):
    values = torch.tensor([1.0, 2.0])
    monkeypatch.setattr(rings, "gathered", lambda caller, group, x, what: torch.stack((x, 10 * x)))
    assert Ring("group", 0, 2, [1, 1], [1, 1]).sums(values).tolist() == [11.0, 22.0]


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


def test_facts_that_a_process_does_not_have_agree_with_any():
    _group.check_alike("loss", {"first": [1, 1, None], "second": [None, 2, 2]})
    _group.check_alike("loss", {"first": [None, None]})
    message = r"^loss: every rank of the group must have the same second, got 2 on rank 0, 3, 3 on rank 2$"
    with pytest.raises(ValueError, match=message):
        _group.check_alike("loss", {"first": [1, 1, 1, None], "second": [2, None, 3, 2]})


@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
def test_values_of_all_processes(shape, monkeypatch):
    waited = []

    def gather(into, own, group, async_op):
        assert own.dim() == 1 and async_op and group == "group" and into.numel() == 3 * own.numel()
        return SimpleNamespace(
            wait=lambda: (into.copy_(torch.cat((own, 2 * own, 3 * own))), waited.append(0))
        )

    monkeypatch.setattr(_group.dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(_group.dist, "all_gather_into_tensor", gather)
    values = torch.randn(shape)
    found = _group.gathered("loss", "group", values, "sizes")
    assert torch.equal(found, torch.stack((values, 2 * values, 3 * values))) and waited == [0]


def test_values_that_cannot_be_gathered(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no answer")

    monkeypatch.setattr(_group.dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(_group.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(_group.dist, "all_gather_into_tensor", fails)
    message = r"^loss: the exchange of sizes with the other ranks .* on rank 1: .*\(no answer\)"
    with pytest.raises(RuntimeError, match=message):
        _group.exchanged_facts("loss", "group", [1.0], torch.device("cpu"))
