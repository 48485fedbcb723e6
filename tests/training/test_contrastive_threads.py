"""losses.contrastive over a group whose processes are threads of this one. Results are compared as in
test_contrastive_group.py."""

import threading
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction import _group
from late_interaction._contrastive import arguments, whole
from late_interaction._contrastive import ring as rings
from late_interaction._contrastive.ring import Ring
from tests.support.contrastive import small_blocks
from tests.support.groups import check
from tests.support.ring_worker import LABELS, T, loss_of, shards


class Group:
    """What threads give to each other, all of them as often as the others."""

    def __init__(self, world):
        self.world, self.own, self.failed = world, threading.local(), False
        self.rounds, self.changed = defaultdict(dict), threading.Condition()

    def gathered(self, x):
        """What every rank gives, in the order of ranks. Waits as long as no rank has failed."""
        self.own.round = getattr(self.own, "round", 0) + 1
        with self.changed:
            given = self.rounds[self.own.round]
            given[self.own.rank] = x
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.failed or len(given) == self.world, timeout=100)
        assert len(given) == self.world, "another rank has failed"
        return [given[rank] for rank in range(self.world)]

    def exchange(self, ring, leaving, arriving, what, ahead=1):
        of_all = self.gathered((what, [x.clone() for x in leaving]))
        arrived, sent = of_all[(ring.rank - ahead) % self.world]
        assert arrived == what
        for into, x in zip(arriving, sent, strict=True):
            assert into.shape == x.shape
            into.copy_(x)
        return SimpleNamespace(wait=lambda: arriving)

    def fail(self):
        with self.changed:
            self.failed = True
            self.changed.notify_all()


@pytest.fixture
def on_threads(monkeypatch):
    """What work(rank, group) returned, or raised, in a thread for each rank."""
    monkeypatch.setattr(rings, "position", lambda group: (group.own.rank, group.world))
    for module in (rings, _group):
        monkeypatch.setattr(
            module, "exchanged_facts", lambda caller, group, facts, device: group.gathered(facts)
        )
    monkeypatch.setattr(
        rings, "gathered", lambda caller, group, x, what: torch.stack(group.gathered(x.clone()))
    )
    monkeypatch.setattr(Ring, "exchange", lambda ring, *given: ring.group.exchange(ring, *given))
    monkeypatch.setattr(whole, "_MOST_BYTES", 0)

    def run(world, work, **sizes):
        group, found = Group(world), [None] * world

        def of_rank(rank):
            group.own.rank = rank
            try:
                found[rank] = work(rank, group)
            except Exception as error:
                found[rank] = error
                group.fail()

        threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in range(world)]
        with small_blocks(**sizes):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
        return found

    return run


def step(batch, group, labels=None, **options):
    """Loss and gradients of a rank, as tests.support.ring_worker.gradients has them."""
    loss, leaves = loss_of(*batch, group=group, labels=labels, **options)
    total = loss
    if loss.dim():
        total = (loss * torch.linspace(-1, 2, len(loss), dtype=loss.dtype)).sum()
    grads = torch.autograd.grad(total, leaves)
    return [(loss.detach().double().numpy(), [g.double().numpy() for g in grads])]


def checked(on_threads, world, kind="padded", tolerance=1e-9, labels=None, sizes=None, **options):
    batches = shards(world, kind, symmetric=options.get("symmetric", False))

    def work(rank, group):
        return step(batches[rank], group, labels and labels[rank], **options)

    ranks = on_threads(world, work, **(sizes or {}))
    for result in ranks:
        if isinstance(result, Exception):
            raise result
    given = options if labels is None else options | {"labels": labels}
    check(ranks, world, kind, tolerance=tolerance, **given)


KINDS = ["padded", "ragged", "masked", "mixed", "packed", "single", "no queries"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [
    {"symmetric": True, "label_smoothing": 0.1}, {"symmetric": True, "reduction": "none"},
    {"label_smoothing": 0.1}, {"symmetric": True}, *({"kind": kind} for kind in KINDS),
], ids=str)  # fmt: skip
def test_equals_one_process(on_threads, options, world):
    checked(on_threads, world, **options)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["padded", "masked", "mixed", "packed"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"side": 64, "panel": 64}], ids=["panels", "one-panel"])
def test_tail(on_threads, kind, world, symmetric, sizes):
    checked(on_threads, world, kind, 1e-7, tail=1e-9, symmetric=symmetric, sizes=sizes)
    # The same pairs are left out as in one process, whose blocks keep all: compared with its own list.
    with small_blocks(**sizes):
        checked(on_threads, world, kind, tail=0.3, symmetric=symmetric, sizes=sizes)


def test_labels_are_of_the_own_documents(on_threads):
    checked(on_threads, 3, labels=LABELS)


@pytest.mark.parametrize(("queries", "each", "fits"), [
    ((2, 2), (2, 2), True), ((2, 2), (2, 3), False), ((2, 0), (2, 0), True), ((0, 2), (0, 3), True),
])  # fmt: skip
def test_ranks_agree_on_the_number_of_hard_negatives(on_threads, queries, each, fits):
    def work(rank, group):
        n, k = queries[rank], each[rank]
        H = torch.randn(n, k, 3, 8)
        return li.losses.contrastive(
            torch.randn(n, 3, 8), torch.randn(4, 3, 8), temperature=T, hard_negatives=H, group=group
        )

    for result in on_threads(2, work):
        if fits:
            assert result.isfinite()
        else:
            assert isinstance(result, ValueError)
            assert "must have the same number of hard negatives, got 2 on rank 0, 3 on rank 1" in str(result)


ONES = torch.ones(2, 3, 8)
LEARNED = torch.tensor(0.5, requires_grad=True)
LOSSES = li.losses.contrastive, li.losses.pairwise, li.losses.sigmoid, li.losses.recall
# A loss, or one of each process; what differs; the values of it; and what is said of them.
OF_RANKS = [
    (li.losses.recall, "k", ((2, 3), (1, 4)), "(2, 3) on rank 0, (1, 4) on rank 1"),
    (li.losses.recall, "k", (5, (5, 5)), "(5,) on rank 0, (5, 5) on rank 1"),
    (li.losses.recall, "rank_temperature", (1.0, 2.0), "1.0 on rank 0, 2.0 on rank 1"),
    (li.losses.sigmoid, "bias", (-10.0, -9.0), "-10.0 on rank 0, -9.0 on rank 1"),
    (li.losses.pairwise, "precision", ("high", None), "high on rank 0, highest on rank 1"),
    (li.losses.sigmoid, "normalize", (True, False), "True on rank 0, False on rank 1"),
    (li.losses.recall, "scale_by_world", (True, False), "True on rank 0, False on rank 1"),
    (li.losses.contrastive, "symmetric", (True, False), "True on rank 0, False on rank 1"),
    (li.losses.contrastive, "label_smoothing", (0.0, 0.1), "0.0 on rank 0, 0.1 on rank 1"),
    (li.losses.contrastive, "tail", (0.0, 0.5), "0.0 on rank 0, 0.5 on rank 1"),
    (li.losses.contrastive, "reduction", ("mean", "sum"), "mean on rank 0, sum on rank 1"),
    (li.losses.sigmoid, "bias", (torch.tensor(1.5), 1.0), "1.5 on rank 0, 1.0 on rank 1"),
    *((f, "temperature", (0.5, torch.tensor(0.25)), "0.5 on rank 0, 0.25 on rank 1") for f in LOSSES),
    (partial(li.losses.contrastive, symmetric=True), "temperature", (torch.tensor(0.5), LEARNED),
     "0.5 on rank 0, 0.5, which requires a gradient on rank 1"),
    (li.losses.contrastive, "d", (ONES, ONES[..., :7]), "8 on rank 0, 7 on rank 1"),
    (li.losses.contrastive, "dtype", (ONES, ONES.double()), "float32 on rank 0, float64 on rank 1"),
    (li.losses.contrastive, "form of documents", (ONES, li.Tokens(ONES).pack()),
     "padded on rank 0, packed on rank 1"),
    ((li.losses.sigmoid, li.losses.pairwise), "loss", (ONES, ONES),
     "losses.sigmoid on rank 0, losses.pairwise on rank 1"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "what", "values", "shown"), OF_RANKS)
def test_what_ranks_differ_in(on_threads, function, what, values, shown):
    """Every one of them says what it is, and who has what."""

    functions = function if isinstance(function, tuple) else (function, function)

    def work(rank, group):
        if what in ("d", "dtype", "form of documents", "loss"):
            return functions[rank](values[rank], values[rank], temperature=T, group=group)
        return function(ONES, ONES, **{"temperature": T, "group": group, what: values[rank]})

    said = f"every rank of the group must have the same {what}, got {shown}"
    names = [getattr(f, "func", f).__name__ for f in functions]
    wanted = [(ValueError, f"losses.{name}: {said}") for name in names]
    assert [(type(x), str(x)) for x in on_threads(2, work)] == wanted


@pytest.mark.parametrize(("function", "option"), [
    (li.losses.contrastive, "temperature"), (li.losses.sigmoid, "temperature"), (li.losses.sigmoid, "bias"),
])  # fmt: skip
def test_numbers_that_are_not_waited_for(on_threads, monkeypatch, function, option):
    """Those of a GPU: where ranks have different ones the loss is NaN on each."""
    monkeypatch.setattr(arguments, "has_values_on_cpu", lambda x: False)
    monkeypatch.setattr(
        arguments, "gathered", lambda caller, group, x, what: torch.stack(group.gathered(x.clone()))
    )

    def work(others):
        def of_rank(rank, group):
            numbers = {"temperature": 0.5} | ({"bias": 1.0} if function is li.losses.sigmoid else {})
            numbers[option] += others * rank
            numbers = {k: torch.tensor(x, requires_grad=True) for k, x in numbers.items()}
            loss = function(torch.ones(2, 3, 8), torch.ones(2, 3, 8), group=group, **numbers)
            return loss, *torch.autograd.grad(loss, list(numbers.values()))

        return of_rank

    assert all(x.isfinite() for found in on_threads(2, work(0)) for x in found)
    assert all(found[0].isnan() for found in on_threads(2, work(1)))


def test_what_one_rank_refuses(on_threads):
    def work(rank, group):
        Q, D = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        return li.losses.contrastive(Q, D, temperature=T if rank else -1.0, group=group)

    refused, told = on_threads(2, work)
    assert isinstance(refused, ValueError) and "temperature must be above 0" in str(refused)
    assert isinstance(told, RuntimeError) and "rank 0 of the group refused its arguments" in str(told)


@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_a_query_that_is_left_out_has_no_effect_on_any_rank(on_threads, function):
    """Whatever it holds."""
    batches = shards(2, "padded")

    def work(value):
        def of_rank(rank, group):
            Q, D = (x.values.clone() for x in batches[rank])
            Q[2] = value
            labels = torch.arange(len(Q)).index_fill(0, torch.tensor(2), -100)
            leaves = [x.requires_grad_() for x in (Q, D)]
            loss = function(*leaves, temperature=T, labels=labels, group=group)
            return loss, *torch.autograd.grad(loss, leaves)

        return of_rank

    dirty, clean = (on_threads(2, work(value)) for value in (torch.nan, 1.0))
    for one, other in zip(dirty, clean, strict=True):
        assert all(map(torch.equal, one, other)) and all(x.isfinite().all() for x in one)


def test_a_document_that_is_no_label(on_threads):
    """NaN of a query that is left out makes the columns of the others NaN, not the weights of this one."""
    batches = shards(2, "padded", symmetric=True)
    batches[0][0].values[2, 0, 0] = torch.nan
    labels = [torch.tensor([0, 1, -100, 3, 4]), torch.arange(8)]

    def work(rank, group):
        Q, D = batches[rank]
        loss, leaves = loss_of(Q, D, labels=labels[rank], symmetric=True, group=group)
        return torch.autograd.grad(loss, leaves)[1]

    grad, other = on_threads(2, work)
    assert grad[2, :, 1:].isfinite().all() and grad[2, :, 1:].any()
    assert all(x.isnan().any(2).any(1).all() for x in (other, grad[:2], grad[3:]))
