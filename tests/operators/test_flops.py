"""What FlopCounterMode counts of calls: products of two numbers and their additions, forward and backward."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import late_interaction as li
from late_interaction.fused_head import maxsim_from_hidden
from late_interaction.score_pairs import score_pairs_packed
from tests.support.operator_calls import CALLS, NOT_HERE, Given, operators

Nq, Lq, Nd, Ld, K, d, d_model = 4, 5, 6, 7, 3, 8, 10
IN_BATCH = 2 * Nq * Lq * Nd * Ld * d  # of the similarities
GATHERED = 2 * Nq * Lq * Nd * d  # of a gradient, from winners

# A traced loss, which FlopCounterMode has Dynamo leave alone, so that it calls the others.
# They move, sort, select, normalize, exponentiate or answer questions, and multiply no matrices; those
# of clusters and groups multiply as many as they find that they need.
WITHOUT_PRODUCTS = {
    "batch_loss",
    *("ward_labels", "kmeans_labels", "ward_cut_", "xtr_select_in_groups_"),
    *("xtr_select_", "plaid_approx_score", "l2_normalize_rows_", "argmax_mask", "quantize_rows_"),
    *("scale_rows_", "softmax_row_sums", "softmax_rows_", "softmax_sums_", "softmax_weights_"),
    *("select_best", "pack_found", "add_checksum_", "merge_found", "send_bytes_"),
    *("can_project_rows", "can_softmax_product_rows", "cpu_isa", "cuda_capability", "forced_plan"),
    *("explain_plan", "explain_packed_plan", "explain_residual_plan"),
}


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def flops(function, *args):
    """What a call counts, and what its backward does."""
    counter = FlopCounterMode(display=False)
    with counter:
        result = function(*args)
    forward = counter.get_total_flops()
    if not result.requires_grad:
        return forward
    with counter:
        result.sum().backward()
    return forward, counter.get_total_flops()


def test_every_operator_has_a_formula_or_multiplies_nothing():
    counted = {name for name in operators() if getattr(torch.ops.late_interaction, name) in flop_registry}
    assert counted | WITHOUT_PRODUCTS == set(operators())
    assert not counted & WITHOUT_PRODUCTS


@pytest.mark.parametrize("name", sorted(set(operators()) - WITHOUT_PRODUCTS - NOT_HERE))
def test_formulas_take_the_arguments_of_their_operators(name):
    """Those of a GPU's operators too, which are not called."""
    for call in CALLS[name]:
        generator = torch.Generator().manual_seed(0)
        values = [x.make(x.sizes, "cpu", generator) if isinstance(x, Given) else x for x in call]
        count = flop_registry[getattr(torch.ops.late_interaction, name)](*values, out_val=None)
        assert isinstance(count, int) and count > 0


Q, D, OWN, PAIRED = leaf(Nq, Lq, d), leaf(Nd, Ld, d), leaf(Nq, K, Ld, d), leaf(Nq, Ld, d)
LISTS = [leaf(n, d) for n in (3, 5)], [leaf(n, d) for n in (2, 7, 4)]
OFFSETS, LISTED = (torch.tensor([0, 3, 8]), torch.tensor([0, 2, 9, 13])), torch.tensor([[1, 0, 1], [1, 2, 0]])
OF_LISTED = [(5, 7), (3, 4), (5, 2)]  # lengths
PAIRS = 2 * Nq * Lq * Ld * d
PROJECTED = 2 * Nd * Ld * d_model * d
COUNTS = [
    (li.maxsim, (Q.detach(), D.detach()), IN_BATCH),
    (li.maxsim, (Q, D), (IN_BATCH, 2 * GATHERED)),
    (li.maxsim, (Q, D.detach()), (IN_BATCH, GATHERED)),
    (li.maxsim, (Q.detach(), D), (IN_BATCH, GATHERED)),
    (li.maxsim, (Q[0], D), (IN_BATCH // Nq, 2 * GATHERED // Nq)),
    *((partial(li.maxsim, **options), (Q, D), (IN_BATCH, 2 * GATHERED)) for options in (
        {"normalize": True, "backward": "unified"}, {"q_weights": torch.rand(Nq, Lq)}, {"mean": True},
    )),
    (partial(li.maxsim, winners="recompute"), (Q, D), (IN_BATCH, IN_BATCH + 2 * GATHERED)),
    (li.maxsim, (Q, OWN), (K * PAIRS, K * 2 * 2 * Nq * Lq * d)),
    (li.maxsim, LISTS, (2 * 8 * 13 * d, 2 * 2 * 8 * 3 * d)),
    (li.maxsim_pairs, (Q, PAIRED), (PAIRS, 2 * 2 * Nq * Lq * d)),
    (li.maxsim_pairs, (LISTS[0], LISTS[1][:2]), (2 * (3 * 2 + 5 * 7) * d, 2 * 2 * (3 + 5) * d)),
    (score_pairs_packed, (leaf(8, d), leaf(13, d), *OFFSETS, *LISTED),
     (2 * d * sum(q * x for q, x in OF_LISTED), 2 * 2 * d * sum(q for q, _ in OF_LISTED))),
    (li.smooth_maxsim, (Q, D), (IN_BATCH, 3 * IN_BATCH)),
    (li.smooth_maxsim_pairs, (Q, PAIRED), (PAIRS, 3 * PAIRS)),
    (li.xtr_scores, (Q, D, 9), (IN_BATCH, 2 * GATHERED)),
    (li.losses.contrastive, (Q, D), (IN_BATCH, 2 * GATHERED)),
    (partial(li.losses.contrastive, kept_bytes=0), (Q, D), (IN_BATCH, IN_BATCH + 2 * GATHERED)),
    (maxsim_from_hidden, (Q, leaf(Nd, Ld, d_model), leaf(d, d_model)),
     (PROJECTED + IN_BATCH, 3 * PROJECTED + 2 * GATHERED)),  # again, and gradients of H and W
    *((li.maxsim, (Q.detach(), codec.encode(D.detach())), IN_BATCH) for codec in (
        li.codecs.Bits(1), li.codecs.Bits(4), li.codecs.Int8(),
    )),
    (lambda *args: li.search(*args).scores, (Q.detach()[0], D.detach(), 2), IN_BATCH // Nq),
]  # fmt: skip


@pytest.mark.parametrize(("function", "args", "expected"), COUNTS)
def test_what_calls_count(function, args, expected):
    assert flops(function, *args) == expected


def test_listed_pairs_without_values_count_average_lengths():
    with FakeTensorMode():
        Q, D = torch.randn(8, d), torch.randn(12, d)
        offsets, pairs = ((torch.zeros(n, dtype=torch.int32) for n in sizes) for sizes in ((3, 4), (5, 5)))
        operator = torch.ops.late_interaction.maxsim_pairs_packed
        assert flops(operator, Q, D, *offsets, *pairs) == 2 * 5 * 4 * 4 * d


@pytest.mark.parametrize("first", ["late_interaction", "torch.utils.flop_counter"])
def test_whatever_is_imported_first(first):
    code = f"""
import sys, {first}
assert ("torch.utils.flop_counter" in sys.modules) == ("flop" in "{first}")
import late_interaction as li, torch
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    li.maxsim(torch.ones(1, 2, 3), torch.ones(4, 5, 3))
assert counter.get_total_flops() == 2 * 2 * 4 * 5 * 3
assert not any("late_interaction" in type(x).__module__ and "flop" in x.name for x in sys.meta_path)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
