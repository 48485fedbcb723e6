"""losses.contrastive over a group whose processes are threads of this one, which exchange tensors through
queues. Results are compared as in test_contrastive_group.py."""

import threading
from queue import Empty, Queue
from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction import _group
from late_interaction._contrastive import arguments, whole
from late_interaction._contrastive import ring as rings
from late_interaction._contrastive.ring import Ring
from tests.support.contrastive import gradients, reference, small_blocks
from tests.support.groups import check, labels_of_all
from tests.support.ring_worker import T, loss_of, shards


class Group:
    """What threads exchange: numbers of all with all, and tensors of one with another."""

    def __init__(self, world):
        self.world, self.own, self.failed = world, threading.local(), False
        self.mail, self.free = {}, threading.Lock()

    def box(self, what, source, to):
        with self.free:  # one for both of them
            return self.mail.setdefault((what, source, to), Queue())

    def send(self, what, to, x):
        self.box(what, self.own.rank, to).put(x)

    def receive(self, what, source):
        """Waits for what was sent, as long as no rank has failed."""
        while True:
            failed = self.failed
            try:
                return self.box(what, source, self.own.rank).get(timeout=0.2)
            except Empty:
                assert not failed, "another rank has failed"

    def gathered(self, x):
        for rank in range(self.world):
            self.send("gathered", rank, x)
        return [self.receive("gathered", rank) for rank in range(self.world)]

    def exchange(self, ring, leaving, arriving, what, ahead=1):
        to, source = ((ring.rank + move) % self.world for move in (ahead, -ahead))
        self.send(what, to, [x.clone() for x in leaving])

        def wait():
            for into, x in zip(arriving, self.receive(what, source), strict=True):
                assert into.shape == x.shape
                into.copy_(x)
            return arriving

        return SimpleNamespace(wait=wait)


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
                group.failed = True

        threads = [
            threading.Thread(target=of_rank, args=(rank,), name=str(rank), daemon=True)
            for rank in range(world)
        ]
        with small_blocks(**sizes):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
        return found

    return run


def step(batch, group, labels=None, weight=True, **options):
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


@pytest.mark.parametrize("kind", ["padded", "ragged", "masked", "mixed", "packed", "single", "no queries"])
@pytest.mark.parametrize("world", [2, 3])
def test_equals_one_process(on_threads, world, kind):
    checked(on_threads, world, kind)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [
    {"symmetric": True, "label_smoothing": 0.1}, {"symmetric": True, "reduction": "none"},
    {"label_smoothing": 0.1}, {"symmetric": True},
], ids=str)  # fmt: skip
def test_options(on_threads, options, world):
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
    labels = [torch.tensor(x) for x in ([8, 0, -100, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7], [3, -100, 0])]
    checked(on_threads, 3, labels=labels)


@pytest.mark.parametrize("world", [2, 3])
def test_hard_negatives(on_threads, world):
    """As many for each query on every rank; a rank without queries has none."""
    batches = shards(world, "padded")
    negatives = [torch.randn(len(Q), 2, 3, 8, dtype=Q.dtype) for Q, _ in batches]

    def work(rank, group):
        Q, D = (x.values for x in batches[rank])
        leaves = [x.clone().requires_grad_() for x in (Q, D, negatives[rank])]
        loss = li.losses.contrastive(*leaves[:2], temperature=T, hard_negatives=leaves[2], group=group)
        return gradients(loss, leaves)

    ranks = on_threads(world, work)
    sides = ([x.values for x in side] for side in zip(*batches, strict=True))
    leaves = [torch.cat(x).requires_grad_() for x in (*sides, negatives)]
    labels = labels_of_all(world)
    loss, wanted = gradients(reference(*leaves[:2], T, labels=labels, H=leaves[2]), leaves)
    for found, _ in ranks:
        torch.testing.assert_close(found, loss)
    for place, want in enumerate(wanted):
        torch.testing.assert_close(torch.cat([found[place] for _, found in ranks]), want)


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


OF_RANKS = {  # a loss, and the options in which two processes differ
    "k": (li.losses.recall, "k", ((2, 3), (1, 4)), "(2, 3) on rank 0, (1, 4) on rank 1"),
    "one k": (li.losses.recall, "k", (5, (5, 5)), "(5,) on rank 0, (5, 5) on rank 1"),
    "rank_temperature": (li.losses.recall, "rank_temperature", (1.0, 2.0), "1.0 on rank 0, 2.0 on rank 1"),
    "bias": (li.losses.sigmoid, "bias", (-10.0, -9.0), "-10.0 on rank 0, -9.0 on rank 1"),
    "precision": (li.losses.pairwise, "precision", ("high", None), "high on rank 0, highest on rank 1"),
    "normalize": (li.losses.sigmoid, "normalize", (True, False), "True on rank 0, False on rank 1"),
    "scale_by_world": (li.losses.recall, "scale_by_world", (True, False), "True on rank 0, False on rank 1"),
    "symmetric": (li.losses.contrastive, "symmetric", (True, False), "True on rank 0, False on rank 1"),
    "label_smoothing": (li.losses.contrastive, "label_smoothing", (0.0, 0.1), "0.0 on rank 0, 0.1 on rank 1"),
    "tail": (li.losses.contrastive, "tail", (0.0, 0.5), "0.0 on rank 0, 0.5 on rank 1"),
    "reduction": (li.losses.contrastive, "reduction", ("mean", "sum"), "mean on rank 0, sum on rank 1"),
    "a learned bias": (li.losses.sigmoid, "bias", (torch.tensor(1.5), 1.0), "1.5 on rank 0, 1.0 on rank 1"),
} | {
    f.__name__: (f, "temperature", (0.5, torch.tensor(0.25)), "0.5 on rank 0, 0.25 on rank 1")
    for f in (li.losses.contrastive, li.losses.pairwise, li.losses.sigmoid, li.losses.recall)
}  # fmt: skip


@pytest.mark.parametrize("name", OF_RANKS)
def test_an_option_in_which_ranks_differ(on_threads, name):
    """Every one of them says which it is, and who has what."""
    function, option, values, shown = OF_RANKS[name]

    def work(rank, group):
        Q, D = torch.ones(2, 3, 8), torch.ones(2, 3, 8)
        return function(Q, D, **{"temperature": T, "group": group, option: values[rank]})

    message = f"losses.{function.__name__}: every rank of the group must have the same {option}, got {shown}"
    assert [(type(x), str(x)) for x in on_threads(2, work)] == [(ValueError, message)] * 2


ONES = torch.ones(2, 3, 8)
OF_TOKENS = {  # what differs, the documents of two processes, and what is said of them
    "d": ((ONES, ONES[..., :7]), "8 on rank 0, 7 on rank 1"),
    "dtype": ((ONES, ONES.double()), "float32 on rank 0, float64 on rank 1"),
    "form of documents": ((ONES, li.Tokens(ONES).pack()), "padded on rank 0, packed on rank 1"),
}


@pytest.mark.parametrize("what", OF_TOKENS)
def test_documents_in_which_ranks_differ(on_threads, what):
    documents, shown = OF_TOKENS[what]

    def work(rank, group):
        return li.losses.contrastive(documents[rank], documents[rank], temperature=T, group=group)

    message = f"losses.contrastive: every rank of the group must have the same {what}, got {shown}"
    assert [(type(x), str(x)) for x in on_threads(2, work)] == [(ValueError, message)] * 2


def test_ranks_that_call_two_losses(on_threads):
    functions = li.losses.sigmoid, li.losses.pairwise
    found = on_threads(2, lambda rank, group: functions[rank](ONES, ONES, temperature=T, group=group))
    for error, function in zip(found, functions, strict=True):
        assert isinstance(error, ValueError) and str(error) == (
            f"losses.{function.__name__}: every rank of the group must have the same loss,"
            " got losses.sigmoid on rank 0, losses.pairwise on rank 1"
        )


def test_a_temperature_that_one_rank_learns(on_threads):
    """A symmetric loss exchanges sums for its gradient."""

    def work(rank, group):
        temperature = torch.tensor(0.5, requires_grad=rank == 1)
        Q = torch.ones(2, 3, 8)
        return li.losses.contrastive(Q, Q, temperature=temperature, symmetric=True, group=group)

    for result in on_threads(2, work):
        assert "the same temperature, got 0.5 on rank 0, 0.5, which requires a gradient on" in str(result)


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


@pytest.mark.parametrize("function", [f for f, *_ in OF_RANKS.values()][-4:], ids=lambda f: f.__name__)
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
