"""losses.contrastive of one token a side over process groups of gloo, against one process."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import late_interaction as li
from late_interaction._contrastive import panels, single_shards
from tests.support import ring_worker
from tests.support.contrastive import reference
from tests.support.groups import check, needs_gloo, on_ranks, one_process, succeeded
from tests.support.ring_worker import LABELS

pytestmark = needs_gloo


def by_shards(rank, world, products=False, **arguments):
    """What ring_worker.gradients does, by this way; products: weights straight from the product."""
    fused = panels.takes_product if not products else lambda batch: True
    with (
        mock.patch.object(single_shards, "loss", wraps=single_shards.loss) as taken,
        mock.patch.object(single_shards, "takes_product", fused),
    ):
        found = ring_worker.gradients(rank, world, **arguments)
    assert taken.called
    return found


def on_shards(world, **arguments):
    return on_ranks(world, f"{__name__}.by_shards", **arguments)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["ones", "ones, no queries"])
def test_equals_one_process(world, kind):
    check(on_shards(world, kind=kind), world, kind)


@pytest.mark.parametrize(("world", "given", "wanted"), [
    *((3, options, options) for options in (
        {"reduction": "sum"}, {"reduction": "none"}, {"normalize": True}, {"labels": LABELS},
        {"labels": LABELS, "reduction": "none"},
    )),
    (2, {"scale_by_world": True}, {"scale": 2.0}),
    *((2, {"last_bytes": n}, {}) for n in (0, 1 << 20)),  # other documents stay, or come again
    *((2, {"sizes": {"side": side}}, {}) for side in (1, 2, 64)),
], ids=str)  # fmt: skip
def test_options(world, given, wanted):
    check(on_shards(world, kind="ones", **given), world, "ones", **wanted)


@pytest.mark.parametrize("kind", ["ones bf16", "ones fp16", "ones fp32"])
@pytest.mark.parametrize("world", [1, 3])
def test_precision(kind, world):
    near(on_shards(world, kind=kind), world, kind, 1e-5 if kind.endswith("32") else 0.02)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_straight_from_the_product(world, labelled):
    """Blocks without labels lack a scale of each row, relative to a block's own sums."""
    labels = [*LABELS, torch.tensor([6, 5, 4, 3, 2, 1])] if labelled else None
    ranks = on_shards(world, kind="ones bf16", products=True, labels=labels)
    near(ranks, world, "ones bf16", 0.02, labels=labels)


def near(ranks, world, kind, tolerance, **options):
    """Compare with float64 embeddings of one process, relative to the largest entry."""
    loss, grads_q, grads_d, _, grad_T = one_process(world, kind, **options)
    results = [result[0] for result in succeeded(ranks)]
    for value, _ in results:
        assert value == pytest.approx(loss.item(), rel=1e-5)
    for place, wanted in ((0, grads_q), (1, grads_d)):
        got = torch.cat([torch.from_numpy(grads[place]) for _, grads in results])
        want = torch.stack(wanted).double()
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * want.abs().max().item())
    assert sum(grads[2] for _, grads in results) == pytest.approx(grad_T.item(), rel=1e-4, abs=1e-6)


# ---- on a GPU ----


def on_one_gpu(rank, world, planted, temperature, labelled, norm):
    """Differences of the loss and of gradients from float64, over the largest value."""
    torch.manual_seed(0)
    Q, D = (norm * torch.nn.functional.normalize(torch.randn(n, 1, 192), dim=-1) for n in (700, 900))
    D[:700] += planted * Q
    leaves = [x.cuda().bfloat16().requires_grad_() for x in (Q, D)]
    labels = torch.arange(700, device="cuda") if labelled else None
    if labelled:
        labels[::5] = -100
    T = torch.tensor(temperature, device="cuda", requires_grad=True)
    panels._LEAST_PAIRS = 0
    with mock.patch.dict(single_shards._SIDE, {"cuda": 256}):
        loss = li.losses.contrastive(*leaves, labels, temperature=T, group=dist.group.WORLD)
        ours = [loss.detach(), *torch.autograd.grad(loss, [*leaves, T])]
    wanted = reference(*leaves, T, labels)
    wanted = [wanted.detach(), *torch.autograd.grad(wanted, [*leaves, T])]
    pairs = zip(ours, wanted, strict=True)
    return [float((got.double() - want).abs().max() / want.double().abs().max()) for got, want in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize(("planted", "temperature", "norm"), [
    (0.5, 0.07, 1.0), (0.0, 1.0, 1.0), (0.3, 0.005, 1.0), (0.0, 0.05, 30.0),
])  # fmt: skip
def test_blocks_on_a_gpu(planted, temperature, norm, labelled):
    given = {"planted": planted, "temperature": temperature, "labelled": labelled, "norm": norm}
    (errors,) = succeeded(on_ranks(1, f"{__name__}.on_one_gpu", **given))
    assert errors[0] < 1e-3 and max(errors[1:3]) < 1.2e-2 and errors[3] < 1e-2


# ---- sums of several blocks ----


@pytest.mark.parametrize("inverse", [1.0, 50.0, 1000.0])
def test_merged_sums_are_those_of_all_columns(inverse):
    torch.manual_seed(0)
    scores = torch.randn(7, 60, dtype=torch.float64)
    parts = []
    for part in scores.split(20, 1):
        reference = part.amax(1) - 300 / inverse  # far below the maximum
        moved = part - reference.unsqueeze(1)
        e = (moved * inverse).exp()
        parts.append(torch.stack((reference, e.sum(1), (e * moved).sum(1), part.sum(1))))
    reference, weight, moment, total = single_shards._merged(parts, torch.tensor(inverse).double())
    assert (weight <= len(parts) * single_shards._LARGE).all()
    torch.testing.assert_close(weight.log() + reference * inverse, (scores * inverse).logsumexp(1))
    mean = ((scores * inverse).softmax(1) * scores).sum(1)
    torch.testing.assert_close(reference + moment / weight, mean)
    torch.testing.assert_close(total, scores.sum(1))


def test_sums_over_nothing_merge_with_any():
    none = torch.tensor([[torch.finfo(torch.float32).min], [0.0], [0.0], [0.0]])
    some = torch.tensor([[3.0], [2.0], [-0.5], [7.0]])
    inverse = torch.tensor(20.0)
    torch.testing.assert_close(single_shards._merged([none, some], inverse), some)
    torch.testing.assert_close(single_shards._merged([none, none], inverse), none)
