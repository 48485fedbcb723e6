"""Parts of the engine of the losses that no result shows: how large blocks are, which operators score and
differentiate them, and which pairs are listed."""

import math
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction import Tokens
from late_interaction._contrastive import arguments, blocks, call, forward, pair_list
from late_interaction._contrastive.kernels import Kernels, choose
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.pair_list import PairList
from late_interaction._contrastive.sequences import blocks_of, check_ends, even_blocks, part, with_bounds
from late_interaction._contrastive.softmax import RunningSoftmax
from tests.maxsim.test_call_edges import Called
from tests.support.contrastive import batch, small_blocks

MIB = 1 << 20
T = 0.3

# ---- sequences, and blocks of them ----


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("lengths", [
    [3] * 7, [1, 1, 1, 30, 1, 1, 1, 1], [0] * 9, [0, 0, 40, 0, 0, 0], [0, 1, 1, 0, 1, 0, 0, 0, 1], [2], [],
], ids=str)  # fmt: skip
def test_blocks_of_packed_sequences(lengths, most):
    """Each has about as many tokens as so many sequences of mean length, or is one sequence; and at most four
    times as many sequences."""
    bounds = tuple(accumulate(lengths, initial=0))
    x = with_bounds("x", Tokens.packed(torch.arange(2.0 * bounds[-1]).view(-1, 2), torch.tensor(bounds)))
    found = blocks_of(x, most)
    assert [i for a, b in found for i in range(a, b)] == list(range(len(lengths)))
    limit = max(1.0, most * sum(lengths) / max(len(lengths), 1))
    for a, b in found:
        assert b - a <= 4 * most and (b - a == 1 or sum(lengths[a:b]) <= limit)
        assert b == len(lengths) or b - a == 4 * most or sum(lengths[a : b + 1]) > limit
        own = part(x, (a, b))
        assert own.offsets.tolist() == [*own._bounds] == [n - bounds[a] for n in bounds[a : b + 1]]
        assert torch.equal(own.values, x.values[bounds[a] : bounds[b]])


@pytest.mark.parametrize("n", [0, 1, 5, 63, 64, 65, 126, 130, 190, 1000])
def test_blocks_of_about_equal_size_are_whole_tiles(n):
    for most in (1, 3, 64, 100, 120, 5000):
        found = even_blocks(n, most)
        assert [i for a, b in found for i in range(a, b)] == list(range(n))
        assert all(b - a <= most for a, b in found)
        assert len(found) < 2 or found[0][1] < 64 or found[0][1] % 32 == 0 or found[0][1] == most


def test_offsets_of_a_gpu_are_looked_at_on_the_host():
    for offsets in ((0, 4, 2), (0, 2, 7), (0, 2, 5), (-1, 2, 6), (1, 2, 6)):
        with pytest.raises(ValueError, match=r"Q\.offsets must"):
            check_ends("Q", torch.tensor(offsets, dtype=torch.int32), 6)


class Sequences:
    """What the size of a block follows from: padded sequences of so many bytes each."""

    is_packed, offsets = False, None

    def __init__(self, count, size, longest=1, on_gpu=False):
        self.count = count
        self.values = SimpleNamespace(
            is_cuda=on_gpu, device="cuda:0", itemsize=1, numel=lambda: count * size, shape=(count, longest)
        )

    def __len__(self):
        return self.count


def size(q, d, way="padded"):
    return blocks.block_sizes(Kernels(way, False, "highest"), q, d)


@pytest.mark.parametrize(("on_gpu", "shares"), [(True, (32, 12, 72)), (False, (4, 12, 32))])
def test_what_a_block_takes(on_gpu, shares, monkeypatch):
    """MiB of queries, of documents, and of what is kept of pairs: 2 bytes a query token and 8 a score."""
    monkeypatch.setattr(blocks, "_whole_wave", lambda documents, d: documents)
    many, kib = 10**6, 1 << 10
    assert size(Sequences(many, 16 * kib, 0, on_gpu), Sequences(16, 0))[0] == shares[0] * 64
    assert size(Sequences(16, 0, 0, on_gpu), Sequences(many, 16 * kib))[1] == shares[1] * 64
    pairs = shares[2] * MIB // (2 * 252 + 8)
    assert size(Sequences(64, 1, 252, on_gpu), Sequences(many, 1)) == (64, pairs // 64)
    assert size(Sequences(many, 1, 252, on_gpu), Sequences(64, 1)) == (pairs // 16, 16)
    assert size(Sequences(many, 1 << 30, 252, on_gpu), Sequences(many, 1 << 30)) == (16, 16)
    of_product = size(Sequences(9, 4, 1, on_gpu), Sequences(9, 4), "matrix")
    assert all(n & (n - 1) == 0 and n >= 1024 for n in of_product)


@pytest.mark.parametrize(("documents", "longest", "wanted", "processors"), [
    (263, 180, 263, 132),  # less than a wave
    (264, 180, 256, 132), (300, 180, 256, 132), (528, 1, 512, 132), (131, 181, 131, 132),
    (163, 181, 128, 132), (300, 300, 256, 132), (230, 180, 224, 114),
])  # fmt: skip
def test_documents_of_a_block_fill_whole_waves(documents, longest, wanted, processors, monkeypatch):
    """Each multiprocessor has two documents or a long one; in whole tiles of 32."""
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(blocks.torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(blocks, "_CUDA_SHARES", (4, 4 * documents, 1 << 30))
    monkeypatch.setattr(blocks, "_LEAST", 1)
    assert size(Sequences(1, 4, 1, True), Sequences(10**6, 4, longest, True)) == (1, wanted)


@pytest.mark.parametrize(
    ("queries", "lengths"), [(1, [4]), (2, [2, 2]), (3, [1, 1, 2]), (9, [1] * 4), (0, [4])]
)
def test_runs_of_blocks_hold_no_more_logits_than_a_panel(queries, lengths, monkeypatch):
    monkeypatch.setattr(blocks, "_PANEL", 12)
    given = [(3, 5), (5, 8), (8, 11), (11, 12)]
    runs = blocks.panels(given, queries)
    assert [len(run) for run in runs] == lengths and [x for run in runs for x in run] == given
    assert blocks.panels([], queries) == []


def test_hard_negatives_of_a_block_take_16_MiB():
    q, h = (
        Tokens(torch.empty(10**4, 1, 8, device="meta")),
        Tokens(torch.empty(4 * 10**4, 1, 4096, device="meta")),
    )
    found = forward.own_blocks(SimpleNamespace(q=q, h=h, each=4))
    assert found[0][0] == (0, 256) and found[0][3] == (0, 1024) and found[-1][0][1] == 10**4


# ---- which operators ----


def test_the_way_follows_the_tokens_and_precision():
    one = Tokens(torch.zeros(2, 1, 4))
    assert choose(one, True, False, "highest").way == "matrix"
    assert choose(one, True, True, "highest").way == "padded"
    assert choose(one, False, False, "highest").way == "padded"
    assert choose(one.pack(), True, False, "highest").way == "packed"
    torch.set_float32_matmul_precision("high")
    assert choose(one, True, False, "highest").way == "padded"
    assert all(choose(one, True, False, x).way == "matrix" for x in ("high", "medium", "fp16"))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert choose(one.to(dtype), True, False, "highest").way == "matrix"


def test_precision_of_each_dtype():
    torch.set_float32_matmul_precision("high")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert arguments._precision(None, torch.ones(2, dtype=dtype)) == "highest"
    one = torch.ones(2)
    assert arguments._precision(None, one) == "high" and arguments._precision("highest", one) == "highest"
    for dtype, wanted in ((torch.bfloat16, "medium"), (torch.float16, "fp16")):
        with torch.autocast("cpu", dtype=dtype):
            assert arguments._precision(None, one) == wanted
            assert arguments._precision("highest", one) == "highest"


@pytest.mark.parametrize(("options", "dtype", "name"), [
    ({}, torch.float32, "maxsim_backward_into_"), ({}, torch.bfloat16, "maxsim_backward_into_"),
    ({}, torch.float16, "maxsim_backward"), ({"normalize": True}, torch.bfloat16, "maxsim_backward"),
    ({"packed": True}, torch.bfloat16, "maxsim_varlen_backward_into_"),
    ({"packed": True}, torch.float16, "maxsim_varlen_backward"),
    ({"tail": 0.1}, torch.float32, "maxsim_pairs_packed_backward"),
])  # fmt: skip
def test_which_operator_differentiates_blocks(options, dtype, name):
    """On the CPU gradients of float16 are scaled, and have a copy of their own."""
    Q, D = batch(4, 6, dtype=dtype)
    q = Tokens(Q).pack() if options.get("packed") else Q
    given = {key: x for key, x in options.items() if key != "packed"}
    with small_blocks(), Called() as called:
        li.losses.contrastive(q, D, temperature=T, **given).backward()
    names = {x.removesuffix("_no_autograd") for x in called.names if "backward" in x}
    assert names == {name}


@pytest.mark.parametrize("learns", [False, True])
def test_a_batch_that_is_kept_whole_finds_winners_for_a_backward_alone(learns):
    Q, D = batch(3, 4)
    with Called() as called, torch.set_grad_enabled(learns):
        li.losses.contrastive(Q, D, temperature=T, kept_bytes=1 << 20)
    assert [name.removesuffix("_no_autograd") for name in called.names] == ["maxsim" + "_winners" * learns]


def test_queries_that_are_left_out_have_no_listed_pairs():
    """A query has its label and its hardest negative, unless it is left out."""
    Q, D = batch(6, 6)
    labels = torch.tensor([0, 1, -100, 3, 4, 5])
    with small_blocks(), Called() as called:
        li.losses.pairwise(Q, D, labels, temperature=T).backward()
    assert sum(x["pair_q"].numel() for x in called.arguments if "grad_scores" in x) == 10


def test_what_is_kept_is_documented():
    """``kept_bytes=None``: 512 MiB for all pairs, or 64 with a tail; a list of pairs takes 32 more."""
    assert call.KEPT_BYTES == {"cuda": 2**29, "cpu": 2**29}
    assert (call.KEPT_BYTES_WITH_LIST, pair_list.LIST_BYTES) == (2**26, 2**25)
    assert [call.default_budget("cuda", listed) for listed in (False, True)] == [2**29, 2**26]
    text = " ".join(li.losses.contrastive.__doc__.split())
    assert "None: 512 MiB for all pairs (on a GPU with a ``tail`` 64 MiB)" in text


# ---- lists of pairs ----


def panel(rows, columns, marked):
    marks = torch.zeros(rows, columns, dtype=torch.bool)
    marks.view(-1)[:marked] = True
    return marks, torch.arange(float(rows * columns)).view(rows, columns)


@pytest.mark.parametrize("alone", [False, True])
def test_panels_that_are_listed(alone):
    """Each pair once, with the numbers of its row and column; in int32 where further panels may come."""
    pairs = PairList(alone=alone)
    for i in range(3):
        pairs.add_panel(*panel(3, 4, 3), (3 * i, 3 * i + 3), [(5, 9)])
    pairs.finish()
    rows, columns, logits = pairs.tensors(torch.ones(1))
    assert rows.tolist() == [0] * 3 + [3] * 3 + [6] * 3
    assert columns.tolist() == [5, 6, 7] * 3 and logits.tolist() == [0, 1, 2] * 3
    assert rows.dtype is columns.dtype is (torch.int64 if alone else torch.int32)
    assert [len(x) for x in PairList().tensors(torch.ones(2))] == [0, 0, 0]


@pytest.mark.parametrize(("shape", "marked", "listed"), [
    ((10, 2), 10, True), ((10, 2), 11, False), ((2, 10), 2, True), ((2, 10), 3, False),
    ((50, 50), 100, True), ((50, 50), 101, False),
])  # fmt: skip
def test_a_panel_with_a_pair_for_each_row_is_listed(shape, marked, listed):
    """Or with 4 % of its pairs, as long as the list has room; any other one goes by blocks."""
    for capacity in (marked, marked - 1):
        pairs = PairList(capacity=capacity)
        pairs.add_panel(*panel(*shape, marked), (0, shape[0]), [(4, 4 + shape[1])])
        pairs.finish()
        fits = listed and capacity == marked
        assert pairs.total == (marked if fits else 0)
        assert pairs.dense == (set() if fits else {((0, shape[0]), 4)})


def sums_of(log_sums):
    found = RunningSoftmax.empty(len(log_sums), torch.ones(()), torch.float64, moment=False, total=False)
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
    given = SimpleNamespace(tail=share, classes=classes, column_classes=classes, labels=Labels(None))
    logits = (bounds - below).unsqueeze(1).expand(3, 3)
    sums, labels_logits = (sums_of(log_sums), None), (of_labels, None)
    if by_columns:
        high = torch.full((3,), 9.0).double()
        sums, labels_logits, logits = (sums_of([8.0] * 3), sums[0]), (high, of_labels), logits.t()
    marks = pair_list.mark(given, logits.contiguous(), sums, labels_logits, ((0, 3), (0, 3)), False)
    assert marks.tolist() == [[marked] * 3] * 3


def test_a_row_without_logits_has_a_low_sum():
    sums = sums_of([0.0, 0.0])
    empty = RunningSoftmax.empty(2, torch.ones(()), torch.float64, moment=True, total=True)
    empty.add(0, torch.empty(2, 0, dtype=torch.float64))
    assert (empty.log_sum() < -1e29).all()
    empty.add(0, torch.zeros(2, 1, dtype=torch.float64))
    torch.testing.assert_close(empty.log_sum(), sums.log_sum())
