"""losses.contrastive over process groups of gloo, against one process that has the whole batch."""

import numpy as np
import pytest
import torch

import late_interaction as li
from tests.support.contrastive import small_blocks
from tests.support.groups import check, joined, labels_of_all, needs_gloo, on_ranks, one_process, succeeded
from tests.support.ring_worker import LABELS, T, negatives_of, shards

pytestmark = needs_gloo


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["padded", "ragged", "masked", "mixed", "packed", "single", "no queries"])
def test_equals_one_process(world, kind):
    check(on_ranks(world, "gradients", kind=kind), world, kind)


def test_half_precision():
    ranks = succeeded(on_ranks(2, "gradients", kind="half"))
    loss, grads_q, grads_d, *_ = one_process(2, "half")
    assert ranks[0][0][0] == pytest.approx(loss.item(), rel=1e-5)
    for place, wanted in ((0, grads_q), (1, grads_d)):
        got = torch.cat([torch.from_numpy(result[0][1][place]) for result in ranks])
        torch.testing.assert_close(got, torch.stack(wanted).double(), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize(("given", "wanted"), [
    ({"scale_by_world": True}, {"scale": 2.0}),
    # Both keep the documents of the other one for the backward, or neither: those of the second rank alone
    # are below 3,200 bytes.
    *(({"last_bytes": n}, {}) for n in (0, 3200)),
    *(({"last_bytes": n, "tail": 1e-9}, {"tolerance": 1e-7}) for n in (0, 3200)),
    # On each the documents of both take as much room as twice the nine of 6 x 8 numbers of the larger shard.
    ({"most_bytes": 2 * 9 * 6 * 8 * 8, "gathers": True, "sizes": {"kept": 1 << 30}}, {}),
    ({"most_bytes": 2 * 9 * 6 * 8 * 8 - 1, "gathers": False, "sizes": {"kept": 1 << 30}}, {}),
], ids=str)  # fmt: skip
def test_two_ranks_equal_one_process(given, wanted):
    check(on_ranks(2, "gradients", **given), 2, **wanted)


ONE_PANEL = {"side": 64, "panel": 64}


@pytest.mark.parametrize("options", [{"world": 2}, {"world": 2, "last_bytes": 0}, {"world": 3}], ids=str)
def test_panels_that_are_held(options):
    """One panel a shard: it is listed by the sums of all shards, and the host does not look for what
    counts."""
    world = options.pop("world")
    given = {"tail": 0.3, "sizes": ONE_PANEL} | options
    with small_blocks():
        check(on_ranks(world, "gradients", **given), world, tail=0.3)
    for forward, backward in on_ranks(world, "gradients", watch=True, **given):
        assert "nonzero" not in (*forward, *backward)
    for _, backward in on_ranks(world, "gradients", watch=True, tail=0.3):  # of several panels
        assert "nonzero" in backward
    if world == 3:  # of room for 80 logits; the panels of a rank have 105, 168 and 63 together
        found = on_ranks(3, "gradients", watch=True, held_bytes=80 * 8, **given)
        assert ["nonzero" in backward for _, backward in found] == [True, True, False]


SCORES, WINNERS, OF_PACKED = "maxsim", "maxsim_winners", "maxsim_varlen"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("kind", "tail", "wanted"), [
    ("padded", 0.0, SCORES), ("ragged", 0.0, SCORES), ("masked", 0.0, SCORES),
    ("padded", 0.3, SCORES), ("ragged", 0.3, SCORES),
    ("masked", 0.3, OF_PACKED), ("mixed", 0.3, OF_PACKED),  # pairs of a list are scored as packed tokens
])  # fmt: skip
def test_padded_tokens_stay_padded(world, kind, tail, wanted):
    """The same operators on every rank, those of padded tokens unless a tail meets a mask of any rank."""
    for forward, backward in on_ranks(world, "gradients", kind=kind, tail=tail, watch=True):
        assert wanted in forward
        assert any("varlen" in x for x in forward) == (wanted == OF_PACKED)
        assert not any("varlen" in x for x in backward)
        listed = any("pairs_packed" in x for x in backward)
        assert listed == (tail > 0) and (WINNERS in backward) != listed


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["padded", "mixed", "packed"])
def test_winners_that_stay(world, kind):
    """The ring keeps the winners of a batch that is small enough, each shard's its own."""
    given = {"kind": kind, "sizes": {"kept": 1 << 30}}
    check(on_ranks(world, "gradients", **given), world, kind)
    for forward, backward in on_ranks(world, "gradients", watch=True, **given):
        assert any("winners" in x for x in forward) and not any("winners" in x for x in backward)


@pytest.mark.parametrize(("world", "name", "options"), [
    (2, "gradients", {"kind": "half"}), (3, "gradients", {"kind": "half"}),
    (2, "gradients", {"kind": "half", "tail": 1e-3, "sizes": ONE_PANEL}),
    (3, "gradients", {"kind": "half", "gathers": True, "scale_by_world": True}),
    (3, "gradients", {"symmetric": True, "own_group": True}),
    *((2, "losses", {"of": of}) for of in ("pairwise", "sigmoid", "recall")),
    (3, "tests.training.test_contrastive_shards.by_shards", {"kind": "ones bf16"}),
], ids=str)  # fmt: skip
def test_the_same_bits_on_every_run(world, name, options):
    for (loss, grads), (again, grads_again) in succeeded(on_ranks(world, name, runs=2, **options)):
        assert np.array_equal(loss, again) and all(map(np.array_equal, grads, grads_again))


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_without_queries_has_hard_negatives_of_none(packed):
    ranks = succeeded(on_ranks(2, "no_queries", packed=packed))
    (_, D0, _), (Q, D1, H) = (result[1] for result in ranks)
    parts = [[x.values for x in part] for part in shards(2, "padded")]
    leaves = [parts[1][0], torch.cat([part[1] for part in parts]), negatives_of(1, len(parts[1][0]))]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    labels = torch.arange(len(leaves[0])) + len(D0)
    loss = li.losses.contrastive(*leaves[:2], labels, hard_negatives=leaves[2], temperature=T)
    wanted = torch.autograd.grad(loss, leaves)
    assert all(abs(result[0] - loss.item()) < 1e-9 for result in ranks)
    for got, want in zip((Q, np.concatenate((D0, D1)), H), wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want)


@pytest.mark.parametrize("name", ["contrastive", "recall"])
def test_a_rank_whose_queries_have_no_tokens(name):
    ranks = succeeded(on_ranks(2, "no_tokens", loss=name))
    parts = shards(2, "padded")
    Q, D = (torch.cat([part[i].values[:, :1] for part in parts]).detach().requires_grad_() for i in (0, 1))
    own = [len(q) for q, _ in parts]
    kept = (torch.arange(len(Q)) < own[0]).unsqueeze(1)
    loss = getattr(li.losses, name)(li.Tokens(Q, kept), D, labels_of_all(2), temperature=T)
    loss.backward()
    assert all(abs(result[0] - loss.item()) < 1e-9 for result in ranks)
    torch.testing.assert_close(torch.from_numpy(ranks[0][1][0]), Q.grad[: own[0]])
    torch.testing.assert_close(torch.from_numpy(np.concatenate([x[1][1] for x in ranks])), D.grad)


def test_two_losses_in_one_backward():
    _, grads_q, grads_d, *_ = one_process(2)
    ranks = succeeded(on_ranks(2, "accumulated"))
    got = torch.cat([torch.from_numpy(result[0][1][0]) for result in ranks])
    torch.testing.assert_close(got, 2 * torch.stack(grads_q))
    got = torch.cat([torch.from_numpy(result[0][1][1]) for result in ranks])
    torch.testing.assert_close(got, 2 * torch.stack(grads_d))


def test_under_distributed_data_parallel():
    """DDP averages: with scale_by_world the encoder's gradient is that of one process."""
    torch.manual_seed(1)
    encoder = torch.nn.Linear(8, 8, bias=False).double()
    queries, documents = joined(2)
    loss = li.losses.contrastive(
        encoder(torch.stack(queries)), encoder(torch.stack(documents)), labels_of_all(2), temperature=T
    )
    loss.backward()
    for result in succeeded(on_ranks(2, "data_parallel")):
        torch.testing.assert_close(torch.from_numpy(result[0][1][0]), encoder.weight.grad)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_ends(when):
    """Every other rank gets one clear error within the group's timeout."""
    for result in on_ranks(3, "one_ends", timeout=10, missing=1, when=when)[:2]:
        assert result.startswith("RuntimeError: losses.contrastive: the exchange of"), result
        assert "with the other ranks of the group failed on rank" in result.splitlines()[0]


# ---- small batches, whose documents fit on every rank ----


@pytest.mark.parametrize("options", [
    *({"kind": kind} for kind in ("padded", "masked", "packed", "no queries")), {"labels": LABELS},
    {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"normalize": True},
], ids=str)  # fmt: skip
def test_gathered_documents(options):
    """They take one exchange instead of a ring."""
    check(on_ranks(3, "gradients", gathers=True, **options), 3, **options)


def test_a_rank_whose_documents_have_no_gradient():
    """Then they go round the ring, on every rank: a gradient comes home by an exchange of all."""
    succeeded(on_ranks(2, "one_without_gradient"))


# ---- losses of rows ----


every = pytest.mark.parametrize("name", ["pairwise", "sigmoid", "recall"])
OURS = {"numbers": False}


@every
@pytest.mark.parametrize("kind", ["padded", "masked", "packed", "single", "no queries"])
def test_losses_of_rows_equal_one_process(name, kind):
    check(on_ranks(3, "losses", of=name, kind=kind), 3, kind, of=name, **OURS)


@pytest.mark.parametrize("name", ["contrastive", "pairwise", "sigmoid", "recall"])
def test_labels_and_hard_negatives(name):
    options = {"of": name, "labels": LABELS, "reduction": "none"}
    check(on_ranks(3, "losses", **options), 3, **options, **OURS)
    check(on_ranks(2, "losses", of=name, hard=True), 2, of=name, hard=True, **OURS)
