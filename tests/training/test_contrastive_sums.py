"""Running sums of the contrastive loss, the weights from them and lists of pairs, by themselves."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction._contrastive import tail, whole
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.panels.scores import Batch
from late_interaction._contrastive.problem import KEPT_BYTES, KEPT_BYTES_WITH_LIST, LIST_BYTES
from late_interaction._contrastive.softmax import RunningSoftmax, SoftmaxWeights
from late_interaction._contrastive.tail import PairList
from tests.support.contrastive import batch, gradients

LIKE = torch.ones((), dtype=torch.float64)


def test_sums_of_nothing():
    sums = RunningSoftmax.empty(3, LIKE, torch.float64, moment=True, total=True)
    for _ in range(2):
        assert not sums.weight.any() and not sums.moment.any() and not sums.total.any()
        assert sums.target.isnan().all() and (sums.log_sum() < -1e29).all()
        sums.add(1, torch.empty(2, 0, dtype=torch.float64))  # no further logits
    sums.add(0, torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float64))
    torch.testing.assert_close(sums.log_sum(), torch.full((3,), math.log(math.e + math.e**2)).double())


@pytest.mark.parametrize("some_ignored", [True, False])
def test_weights_of_rows_that_are_left_out(some_ignored):
    """They are 0, whatever their logits are; NaN stays where no row is left out."""
    factor = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.0])
    x = SoftmaxWeights(torch.ones(5), factor / 4, factor, some_ignored)
    logits = torch.tensor([[3.0, 1.0], [2.0, 0.5]])
    ignored = torch.full((1, 2), torch.nan)
    wanted = (logits - 1).exp() * (factor[1:3] / 4).unsqueeze(1)
    of_nan = torch.zeros(1, 2) if some_ignored else ignored
    whole_block = torch.cat((ignored, logits, logits[:1], ignored))
    found = x.of_block(0, whole_block)
    wanted = torch.cat((of_nan, wanted, (logits[:1] - 1).exp() / 2, of_nan))
    torch.testing.assert_close(found, wanted, equal_nan=True)
    rows = torch.arange(5)
    pairs, factors = x.of_pairs(rows, whole_block[:, 0])
    torch.testing.assert_close(pairs, wanted[:, 0], equal_nan=True)
    assert torch.equal(factors, factor)


# ---- panels of one token a side ----


def test_scores_of_a_last_panel_lie_in_the_buffer():
    Q, D = torch.randn(7, 4), torch.randn(5, 4)
    batch = Batch(None, None, Q, D, torch.ones(()))  # type: ignore[arg-type]
    buffer = batch.buffer([(0, 3), (3, 6), (6, 7)])
    assert buffer.shape == (3, 64)  # rows begin at whole lines
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch's, of an output that had to be resized
        scores = batch.score((6, 7), buffer)
    assert scores.shape == (1, 5) and scores.data_ptr() == buffer.data_ptr()
    torch.testing.assert_close(scores, Q[6:] @ D.t())


# ---- lists of pairs ----


def panel(rows, columns, marked):
    marks = torch.zeros(rows, columns, dtype=torch.bool)
    marks.view(-1)[:marked] = True
    return marks, torch.arange(float(rows * columns)).view(rows, columns)


def add(pairs, marks, logits, rows, block):
    pairs.add_panel(marks, logits, rows, [block])
    pairs.finish()


@pytest.mark.parametrize("alone", [False, True])
def test_panels_that_are_listed(alone):
    """Each pair once, with the numbers of its row and column; in int32, as twelve bytes a pair allow, where
    further panels may come."""
    for count in (1, 2, 3):
        pairs = PairList(alone=alone)
        for i in range(count):
            add(pairs, *panel(3, 4, 3), (3 * i, 3 * i + 3), (5, 9))
        rows, columns, logits = pairs.tensors(torch.ones(1))
        assert rows.tolist() == [3 * i for i in range(count) for _ in range(3)]
        assert columns.tolist() == [5, 6, 7] * count and logits.tolist() == [0, 1, 2] * count
        assert rows.dtype is columns.dtype is (torch.int64 if alone else torch.int32)
    if not alone:
        assert pairs.capacity == LIST_BYTES // (rows.itemsize + columns.itemsize + logits.itemsize)


@pytest.mark.parametrize(
    ("shape", "marked", "listed"),
    [
        ((10, 2), 10, True),
        ((10, 2), 11, False),
        ((2, 10), 2, True),
        ((2, 10), 3, False),
        ((50, 50), 100, True),
        ((50, 50), 101, False),
    ],
)
def test_a_panel_with_a_pair_for_each_row_is_listed(shape, marked, listed):
    """Or with 4 % of its pairs; any other one goes by blocks."""
    pairs = PairList()
    add(pairs, *panel(*shape, marked), (0, shape[0]), (4, 4 + shape[1]))
    assert pairs.total == (marked if listed else 0)
    assert pairs.dense == (set() if listed else {((0, shape[0]), 4)})


@pytest.mark.parametrize(("capacity", "listed"), [(6, 6), (5, 3)])
def test_a_list_takes_as_many_pairs_as_it_has_room_for(capacity, listed):
    pairs = PairList(capacity=capacity)
    for i in range(2):
        add(pairs, *panel(3, 4, 3), (3 * i, 3 * i + 3), (0, 4))
    assert pairs.total == listed


def sums_of(log_sums):
    found = RunningSoftmax.empty(len(log_sums), LIKE, torch.float64, moment=False, total=False)
    found.add(0, torch.tensor(log_sums, dtype=torch.float64).unsqueeze(1))
    return found


@pytest.mark.parametrize(("below", "marked"), [(0.0, True), (5e-4, True), (2e-3, False)])
@pytest.mark.parametrize("by_columns", [False, True])
def test_marks_are_by_sums_and_the_logits_of_labels(by_columns, below, marked):
    """A pair counts by the bound of its row or of its column: the log-sum-exp so far or the label's logit,
    whichever is larger, times the threshold. A hair below it, too: another kernel may round the logit up."""
    share, classes = 0.5, 4
    log_sums, of_labels = [0.0, 1.0, -1.0], torch.tensor([0.5, torch.nan, -2.0]).double()
    bounds = torch.tensor([0.5, 1.0, -1.0]).double() + math.log(share / classes)
    high = torch.full((3,), 9.0).double()
    p = SimpleNamespace(tail=share, classes=classes, column_classes=classes, labels=Labels(None))
    if by_columns:
        sums, labels_logits = (sums_of([8.0] * 3), sums_of(log_sums)), (high, of_labels)
        logits = (bounds - below).expand(3, 3)
    else:
        sums, labels_logits = (sums_of(log_sums), None), (of_labels, None)
        logits = (bounds - below).unsqueeze(1).expand(3, 3)
    marks = tail.mark(p, logits.contiguous(), sums, labels_logits, ((0, 3), (0, 3)), False)
    assert marks.tolist() == [[marked] * 3] * 3


def test_the_budget_of_a_gpu_that_lists_pairs():
    budgets = whole.KEPT_BYTES["cuda"], whole.KEPT_BYTES_WITH_LIST
    assert tuple(whole.default_budget("cuda", listed) for listed in (False, True)) == budgets


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_precision_that_is_named_holds_under_autocast(device, kept):
    Q, D = batch(9, 9, dtype=torch.float32, device=device)
    found = []
    for enabled in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            loss = li.losses.contrastive(Q, D, temperature=0.3, precision="highest", kept_bytes=kept)
            found.append(gradients(loss, (Q, D)))
    assert torch.equal(found[0][0], found[1][0]) and all(map(torch.equal, found[0][1], found[1][1]))


def test_what_is_kept_is_documented():
    """``kept_bytes=None``: 512 MiB for all pairs, or 64 with a tail; a list of pairs takes 32 more."""
    assert KEPT_BYTES == {"cuda": 2**29, "cpu": 2**29}
    assert (KEPT_BYTES_WITH_LIST, LIST_BYTES) == (2**26, 2**25)
    text = " ".join(li.losses.contrastive.__doc__.split())
    assert "None: 512 MiB for all pairs (on a GPU with a ``tail`` 64 MiB)" in text
