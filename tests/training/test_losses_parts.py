"""losses.pairwise, losses.sigmoid and losses.recall from inside: options, work, and pairs of a shard."""

from types import SimpleNamespace

import pytest
import torch

import late_interaction as li
from late_interaction._contrastive import backward, blocks, forward, own_options
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.row_losses import row_function
from late_interaction._contrastive.row_losses.pairwise import Pairwise
from late_interaction._contrastive.row_losses.rows import RowWeights
from tests.support.contrastive import assert_close, batch, gradients, small_blocks
from tests.training.test_losses import FUNCTIONS, T, both, every


def recorded(monkeypatch, where, name, seen):
    ours = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **given: seen.append(args) or ours(*args, **given))


# ---- options ----


@pytest.mark.parametrize("bias", [10**400, float("-inf"), float("inf"), float("nan")], ids=str)
def test_a_bias_is_finite(bias):
    with pytest.raises(ValueError, match="bias must be finite, got"):
        li.losses.sigmoid(*batch(2, 3), temperature=T, bias=bias)


def test_ranks_stay_integers_that_float64_counts():
    most = 1 << 53  # from here on it leaves out every second one
    assert own_options.ranks([1, most - 1, most, most + 1, 10**400]) == (1, most - 1, most, most, most)


# ---- the work of a call ----


@every
@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("each", [0, 2])
def test_hard_negatives_are_scored_where_there_are_any(kind, kept, each, monkeypatch):
    Q, D = batch(4, 5)
    H = torch.randn(4, each, 3, 8, dtype=Q.dtype, requires_grad=True)
    scored, passed, differentiated, positives = [], [], [], []
    recorded(monkeypatch, blocks.Kernels, "own_scores", scored)
    recorded(monkeypatch, forward, "score_own", passed)
    recorded(monkeypatch, backward, "add_own_gradients", differentiated)
    recorded(monkeypatch, forward, "own_logits", positives)
    with small_blocks(kept=kept):
        loss = FUNCTIONS[kind](Q, D, temperature=T, hard_negatives=H)
        (grad,) = torch.autograd.grad(loss, H)
    assert grad.shape == H.shape and bool(scored) == bool(each)
    assert len(passed) == len(differentiated) == (each > 0 and not kept)
    assert len(positives) == (kind == "recall" and not kept)  # which must know them before it begins


@every
@pytest.mark.parametrize("wanted", ["Q", "D", "H"])
def test_work_for_gradients_that_nobody_needs(kind, wanted, monkeypatch):
    Q, D = batch(4, 4)
    leaves = {"Q": Q, "D": D, "H": torch.randn(4, 2, 3, 8, dtype=Q.dtype)}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    sums, own, found, ours = [], [], [], row_function._gradients_of_blocks
    recorded(monkeypatch, row_function, "sums_of_queries", sums)
    recorded(monkeypatch, backward, "add_own_gradients", own)
    monkeypatch.setattr(
        row_function, "_gradients_of_blocks", lambda *args: found.append(ours(*args)) or found[-1]
    )
    with small_blocks():
        loss = FUNCTIONS[kind](Q, D, temperature=T, hard_negatives=leaves["H"])
        torch.autograd.grad(loss, leaves[wanted])
    assert [args[-2:] for args in sums] == [(wanted == "Q", wanted == "D")]
    assert [(args[-2] is not None, args[-1]) for args in own] == (
        [(wanted == "Q", wanted == "H")] if wanted in "QH" else []
    )
    assert [x is not None for x in found[0]] == [*(name == wanted for name in "QDH"), False, False]


@pytest.mark.parametrize("learns", ["T", "bias"])
def test_numbers_that_are_learned_alone_have_no_gradients_of_tokens(learns, monkeypatch):
    Q, D = (x.detach() for x in batch(4, 4))
    H = torch.randn(4, 2, 3, 8, dtype=Q.dtype)
    numbers = {"T": torch.tensor(T).double(), "bias": torch.tensor(-0.3).double()}
    numbers[learns].requires_grad_()
    found, ours = [], row_function._gradients_of_blocks
    monkeypatch.setattr(
        row_function, "_gradients_of_blocks", lambda *args: found.append(ours(*args)) or found[-1]
    )
    with small_blocks():
        loss = li.losses.sigmoid(Q, D, temperature=numbers["T"], bias=numbers["bias"], hard_negatives=H)
        (grad,) = torch.autograd.grad(loss, numbers[learns])
    assert grad.isfinite() and [x is not None for x in found[0]] == [False] * 3 + [
        learns == "T",
        learns == "bias",
    ]


@every
def test_more_queries_than_documents_whose_scores_are_kept(kind, device):
    labels = torch.arange(40, device=device) % 6
    for H in (False, True):
        assert_close(*both(kind, device, 40, 6, kept=1 << 20, labels=labels, H=H))


@every
@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize(("named", "precision"), [(None, "medium"), ("highest", "highest"), ("high", "high")])
def test_autocast_names_a_precision_unless_the_caller_does(kind, named, precision, kept):
    """The same bits as with that precision, in the dtype of the inputs."""
    Q, D = batch(9, 9, dtype=torch.float32)
    with small_blocks(kept=kept):
        wanted = gradients(FUNCTIONS[kind](Q, D, temperature=T, precision=precision), (Q, D))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = gradients(FUNCTIONS[kind](Q, D, temperature=T, precision=named), (Q, D))
    assert torch.equal(ours[0], wanted[0]) and all(map(torch.equal, ours[1], wanted[1]))


# ---- pairs of a shard ----


def test_the_hardest_negatives_of_a_shard():
    """Documents 4 to 8 of all; a column that there is, and 0, for a negative of another shard."""
    pull = torch.tensor([0.25, 0.5, 0.75, 0.125, 1.0])
    sums = {"pull": pull, "place": torch.tensor([4, 8, 3, 9, -1])}
    rows, columns, amount = Pairwise(False).pairs(sums, None, (4, 9))
    assert rows.tolist() == [0, 1, 2, 3, 4] and columns.tolist() == [0, 4, 0, 0, 0]
    assert amount.tolist() == [0.25, 0.5, 0, 0, 0]
    for labels, own in ((None, [0, 1, 2, 3, 4]), (torch.tensor([3, -100, 0, 1, 2]), [3, 0, 0, 1, 2])):
        found = Pairwise(False).pairs(sums, Labels(labels), (4, 9))
        assert found[0].tolist() == 2 * rows.tolist() and found[1].tolist() == columns.tolist() + own
        assert torch.equal(found[2], torch.cat((amount, -pull)))


def test_the_hardest_negative_in_a_block_of_a_shard():
    """Documents 3 to 5 of a shard that begins with document 4 of all."""
    p = SimpleNamespace(temperature=2.0, labels=Labels(None), classes=20, each=2)
    sums = {"pull": torch.tensor([0.5, 0.25, 1.0]), "place": torch.tensor([8, 6, 9])}
    weights = RowWeights(p, Pairwise(False), sums, torch.tensor([2.0, 4.0, 8.0]), 4, False)
    assert weights.of_block(torch.zeros(2, 3), (1, 3), (3, 6)).tolist() == [[0, 0, 0], [0, 0, 8]]
    assert weights.of_block(torch.zeros(1, 3), (0, 1), (3, 6)).tolist() == [[0, 1, 0]]
    assert weights.of_block(torch.zeros(2, 3), (0, 2), (0, 3)).tolist() == [[0, 0, 0], [0, 0, 1]]


def test_amounts_of_zero_do_not_count():
    """Queries that are left out, or whose hardest negative is elsewhere; unless all listed pairs count."""
    p = SimpleNamespace(labels=Labels(None))
    weights = RowWeights(p, Pairwise(False), {}, torch.tensor([2.0, 0.0, -1.0]), 0, True)
    rows, logits = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0.0, 0.5, torch.nan, 1.0, torch.nan])
    amount, counts = weights.of_pairs(rows, rows, logits, False)
    assert amount[:4].tolist() == [0, 1, 0, -1] and amount[4].isnan()
    assert counts.tolist() == [False, True, False, True, True]
    assert weights.of_pairs(rows, rows, logits, True)[1] is None
