"""Scores and winners against float64 brute force."""

import itertools

import pytest
import torch

import late_interaction as li
from late_interaction.lik.forward import maxsim_forward
from tests.support import ref
from tests.support.cases import MASKS, Case, inputs, walk
from tests.support.judge import Judge, twice, whole_numbers


def check(case, device):
    Q, D, q_mask, d_mask = inputs(case, device)
    limits = ()
    if device == "cuda" and case.normalize:
        plan = li.explain_plan(Q, D, d_mask=d_mask is not None, normalize=True, winners=False)
        if "in fp16, normalized" in plan:
            limits = ref.UNIT_SCORE_TOLERANCE, ref.UNIT_WINNER_TOLERANCE
    judge = Judge(Q, D, q_mask, d_mask, normalize=case.normalize, case=case)
    scores, winners = judge.check(*limits)
    assert scores.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert winners.dtype == torch.int32


@pytest.mark.parametrize("case", list(walk(130)), ids=str)
def test_scores_and_winners(case, device):
    check(case, device)


# Large enough that a GPU's blocks walk several tiles, documents and row groups each.
LARGE = [
    Case("in-batch", 64, 200, 32, 300, 128, torch.bfloat16, "holes"),
    Case("in-batch", 130, 67, 33, 129, 128, torch.float16, "none", normalize=True),
    Case("in-batch", 1, 3000, 32, 77, 128, torch.bfloat16),
    Case("in-batch", 3, 500, 5, 180, 96, torch.float32, "dead"),
    Case("in-batch", 5, 40, 1030, 1030, 128, torch.bfloat16),
    Case("in-batch", 2, 3, 2049, 4100, 64, torch.float16, "holes"),
    Case("KD", 32, 17, 32, 300, 128, torch.bfloat16, "dead", normalize=True),
    Case("KD", 128, 8, 48, 180, 40, torch.float32, "holes", "expanded"),
    Case("pairs", 500, 500, 32, 300, 128, torch.bfloat16, "holes"),
    Case("in-batch", 20, 30, 100, 200, 768, torch.bfloat16, "holes"),
    Case("in-batch", 700, 9, 1, 90, 64, torch.bfloat16),
    Case("in-batch", 100, 9, 7, 300, 128, torch.float16, "dead"),
    Case("in-batch", 9, 20, 129, 160, 128, torch.bfloat16, normalize=True),
    Case("in-batch", 9, 11, 70, 90, 2000, torch.float16),
    Case("in-batch", 17, 19, 70, 90, 128, torch.float64, "holes", normalize=True),
]


MANY = [  # more than 16 documents a multiprocessor, which its block takes one after another
    Case("in-batch", 1, 2300, 32, 161, 128, torch.bfloat16),
    Case("in-batch", 1, 2300, 9, 200, 128, torch.float16, "dead"),
    Case("in-batch", 1, 2150, 33, 190, 256, torch.bfloat16, "holes"),
    Case("in-batch", 1, 2150, 120, 170, 128, torch.float16, "holes", normalize=True),
    Case("in-batch", 1, 2300, 20, 300, 64, torch.bfloat16, "holes"),
    Case("in-batch", 2, 2300, 30, 181, 64, torch.float16, "dead"),
    Case("in-batch", 1, 2150, 5, 160, 512, torch.bfloat16),
]


def in_step(count, *lists):
    """Cases of layouts with Nq, N and Lq, lengths Ld, dims and forms, as all of these go round."""
    walks, cases = itertools.islice(zip(*map(itertools.cycle, lists), strict=True), count), []
    for index, ((layout, Nq, N, Lq), Ld, d, form) in enumerate(walks):
        dtype = (torch.bfloat16, torch.float16)[index % 2]
        cases.append(Case(layout, Nq, N, Lq, Ld, d, dtype, MASKS[index // 2 % 3], form))
    return cases


# Documents of up to two tiles, of rows that can and cannot be read 16 bytes at a time.
SHORT = in_step(
    63,
    [("in-batch", 3, 700, 9), ("KD", 40, 90, 32), ("pairs", 300, 300, 5), ("KD", 3, 7, 70)],
    [1, 7, 8, 9, 31, 32, 33, 63, 64],
    [128, 100, 8, 96, 99, 64, 24],
    ["contiguous", "contiguous", "sliced", "offset", "expanded", "transposed"],
)
# Many query rows against documents of every length about whole eights: the last tile of documents full, short
# of one, and of one alone; queries that divide the rows of a warp, share them, and span several.
SEVERAL_TO_A_TILE = in_step(
    69,
    [("in-batch", 40, 61, 16), ("in-batch", 9, 300, 33), ("in-batch", 3, 29, 513), ("in-batch", 300, 6, 1),
     ("in-batch", 70, 7, 5), ("in-batch", 2, 40, 150), ("KD", 4, 19, 140), ("in-batch", 33, 49, 128)],
    [1, 5, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 40, 41, 47, 48, 49, 55, 56, 57, 63, 64],
    [128, 96, 64, 8, 72, 40, 112],
    ["contiguous", "sliced", "contiguous", "transposed"],
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*LARGE, *MANY, *SHORT, *SEVERAL_TO_A_TILE], ids=str)
def test_on_a_gpu(case):
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("Ld", [11, 16, 24, 37, 64])
def test_short_documents_of_a_tile_do_not_meet(Ld):
    """The lowest token wins among equal similarities; what one document holds that is no number stays there,
    and a masked token counts nowhere, whatever it holds."""
    Q = whole_numbers(-2, 2, 40, 30, 64).bfloat16()
    D = twice(whole_numbers(-2, 2, 41, Ld, 64)).bfloat16()
    Judge(Q, D).check_exact()
    D[7, Ld - 1, 3], D[8, 0, 0] = float("nan"), float("inf")
    Judge(Q, D).check_not_finite()
    kept = torch.ones(41, Ld, dtype=torch.bool, device="cuda")
    kept[7, Ld - 1] = kept[8, 0] = False
    Judge(Q, D, None, kept).check_exact()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_short_documents_hold_that_is_no_number(dtype):
    Q, D = (torch.randn(*shape, 100, device="cuda", dtype=dtype) for shape in ((3, 5), (9, 20)))
    D[1, 3], D[2, 19, 7], D[4, 0, 0] = float("nan"), float("inf"), float("-inf")
    Judge(Q, D).check_not_finite()


@pytest.mark.gpu
def test_short_documents_keep_the_first_of_equals():
    D = torch.randn(50, 1, 128, device="cuda", dtype=torch.bfloat16).expand(50, 61, 128).contiguous()
    won = li.maxsim_with_winners(torch.randn(2, 9, 128, device="cuda", dtype=torch.bfloat16), D)[1]
    assert (won == 0).all()


@pytest.mark.gpu
def test_many_documents_and_query_rows_have_the_bits_of_few():
    """Persistent blocks, whose rings go round many times: as many calls of a few documents."""
    Q = torch.nn.functional.normalize(torch.randn(700, 32, 128, device="cuda"), dim=-1).bfloat16()
    D = torch.nn.functional.normalize(torch.randn(300, 180, 128, device="cuda"), dim=-1).bfloat16()
    scores, winners = li.maxsim_with_winners(Q, D)
    assert torch.equal(li.maxsim(Q, D), scores)
    for first in range(0, 300, 60):
        part = slice(first, first + 60)
        found, won = li.maxsim_with_winners(Q, D[part])
        assert torch.equal(found, scores[:, part]) and torch.equal(won, winners[:, part])


@pytest.mark.parametrize("q_rank", [2, 3])
@pytest.mark.parametrize("d_rank", [2, 3])
def test_ranks(q_rank, d_rank, device):
    Q, D = torch.randn(3, 5, 8, device=device), torch.randn(4, 6, 8, device=device)
    q_mask, d_mask = torch.rand(3, 5, device=device) < 0.7, torch.rand(4, 6, device=device) < 0.7
    q, d = (slice(None) if q_rank == 3 else 0), (slice(None) if d_rank == 3 else 0)
    scores, winners = li.maxsim_with_winners(Q[q], D[d], q_mask[q], d_mask[d])
    full, full_winners = ref.maxsim(Q, D, q_mask, d_mask)
    ref.assert_close(scores, full[q, d], 1e-5)
    assert torch.equal(winners.long(), full_winners[q, d])
    ref.assert_close(li.maxsim(Q[q], D[d], q_mask[q], d_mask[d]), full[q, d], 1e-5)


def test_one_dimensional_masks_fit_a_batch_of_one(device):
    Q, D = torch.randn(1, 5, 8, device=device), torch.randn(1, 6, 8, device=device)
    q_mask, d_mask = torch.rand(5, device=device) < 0.7, torch.rand(6, device=device) < 0.7
    ref.assert_close(li.maxsim(Q, D, q_mask, d_mask), ref.maxsim(Q, D, q_mask[None], d_mask[None])[0], 1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integer_masks_count_as_bool(dtype, device):
    Q, D = torch.randn(2, 5, 8, device=device), torch.randn(3, 6, 8, device=device)
    q_mask = torch.randint(-1, 2, (2, 5), device=device)
    d_mask = torch.randint(-2, 3, (3, 6), device=device)
    d_mask[:, 0] = -128  # every bit but the highest is clear
    wanted = li.maxsim(Q, D, q_mask != 0, d_mask != 0)
    assert torch.equal(li.maxsim(Q, D, q_mask.to(dtype), d_mask.to(dtype)), wanted)
    assert torch.equal(li.maxsim(Q, D, (q_mask != 0) * -1, d_mask.to(dtype)), wanted)


def test_strided_masks(device):
    Q, D = torch.randn(4, 33, 16, device=device), torch.randn(5, 65, 16, device=device)
    q_mask = (torch.rand(33, 8, device=device) < 0.7).t()[::2]
    Judge(Q, D, q_mask, (torch.rand(1, 65, device=device) < 0.7).expand(5, -1)).check(1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("Ld", [5, 64, 300])
def test_ties_go_to_the_lowest_index(dtype, Ld, device):
    Q = whole_numbers(-2, 2, 3, 40, 16, device=device).to(dtype)
    D = twice(whole_numbers(-1, 1, 4, Ld, 16, device=device)).to(dtype)
    for mask in (None, torch.rand(4, Ld, device=device) < 0.8):
        Judge(Q, D, None, mask).check_exact()


@pytest.mark.parametrize("rows", [5, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norm_of_a_token_does_not_depend_on_its_place(dtype, rows, device):
    few = torch.randn(40, 128, device=device) * 10 ** torch.empty(40, 1, device=device).uniform_(-2, 2)
    which = torch.randint(40, (7, 331), device=device)
    Q, D = torch.randn(rows, 9, 128, device=device).to(dtype), few.to(dtype)[which]
    _, found = li.maxsim_with_winners(Q, D, normalize=True)
    found = found.long()
    for j in range(7):
        first = torch.stack([(which[j] == k).int().argmax() for k in range(40)])
        assert torch.equal(first[which[j][found[:, j]]], found[:, j])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_negative_scores(dtype, device):
    # Padding of a tile with zeros would win here.
    Q, D = torch.rand(3, 33, 40, device=device).to(dtype), -torch.rand(5, 70, 40, device=device).to(dtype)
    scores, _ = Judge(Q, D).check()
    assert (scores < 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["Q", "D"])
@pytest.mark.parametrize(("rows", "Ld"), [((3, 9), 70), ((5, 33), 170)])
def test_not_finite(dtype, value, where, rows, Ld, device):
    Q, D = torch.randn(*rows, 24, device=device).to(dtype), torch.randn(4, Ld, 24, device=device).to(dtype)
    if where == "Q":
        Q[1, 3, 5] = value
    else:
        D[2, 40, 7] = value
        D[2, 66, 7] = value
    Judge(Q, D).check_not_finite(1e-5)


@pytest.mark.parametrize("score", [li.maxsim_with_winners, li.reference.maxsim_with_winners_reference])
def test_minus_infinity_can_win(score, device):
    # The only valid tokens score -inf: a true maximum, not the sentinel.
    Q, D = torch.ones(1, 2, 1, device=device), torch.full((1, 3, 1), float("-inf"), device=device)
    scores, winners = score(Q, D, None, torch.tensor([[False, True, True]], device=device))
    assert scores.item() == float("-inf")
    assert winners.tolist() == [[[1, 1]]]


def test_zero_rows_normalize_to_zero(device):
    Q, D = torch.randn(2, 5, 8, device=device), torch.randn(3, 6, 8, device=device)
    Q[0, 1], D[1, 2], D[2] = 0, 0, 0
    Judge(Q, D, normalize=True).check(1e-6)


@pytest.mark.parametrize("Ld", [32767, 32768, 32769, 65534, 65535, 65600])
def test_winners_of_long_documents(Ld, device):
    Q = torch.randn(1, 3, 8, device=device)
    D = torch.randn(2, Ld, 8, device=device)
    D[0, -1], D[1, Ld // 2 + 1] = 100 * Q[0, 0], 100 * Q[0, 1]
    Q.requires_grad_()
    D.requires_grad_()
    scores, winners = li.maxsim_with_winners(Q, D)
    reference, expected = ref.maxsim(Q, D)
    ref.assert_close(scores, reference, 1e-5)
    assert torch.equal(winners.long(), expected)
    assert winners[0, 0, 0] == Ld - 1
    assert torch.ops.late_interaction.maxsim_winners(Q, D, None, None)[1].dtype == (
        torch.int16 if Ld <= 65534 else torch.int32
    )
    ref.assert_gradients(scores, Q, D, expected, 1e-6)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[1] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    Nd, Ld, d = 140, 131072, 128  # 2.3e9 elements
    Q = torch.randn(1, 32, d, device="cuda", dtype=torch.bfloat16)
    D = torch.zeros(Nd, Ld, d, device="cuda", dtype=torch.bfloat16)
    D[-1, -1], D[70, 5] = Q[0, 0], Q[0, 1]
    scores, winners = li.maxsim_with_winners(Q, D)
    assert winners[0, -1, 0] == Ld - 1 and winners[0, 70, 1] == 5
    tail, tail_winners = ref.maxsim(Q, D[-1:])
    ref.assert_close(scores[:, -1:], tail, 5e-6)
    ref.assert_winners_close(winners[:, -1:], tail_winners, Q, D[-1:], 5e-6)
    ops = torch.ops.late_interaction
    kept = ops.maxsim_winners(Q, D, None, None)[1]
    grad_D = ops.maxsim_backward(torch.ones_like(scores), Q, D, kept, False, "lowmem")[1]
    assert grad_D[-1, -1].any() and not grad_D[71:139, 1:].any()  # of equals, the first wins


def test_forward_without_gradients(device):
    Q, D = torch.randn(3, 5, 8, device=device, requires_grad=True), torch.randn(4, 6, 8, device=device)
    scores, argmax = maxsim_forward(Q, D)
    assert argmax is None and not scores.requires_grad
    scores, argmax = maxsim_forward(Q, D, save_argmax=True, normalize=True)
    reference, winners = ref.maxsim(Q, D, normalize=True)
    ref.assert_close(scores, reference, 1e-6)
    assert torch.equal(argmax.long(), winners.view(12, 5))
    scores, argmax = maxsim_forward(Q[0], D[0], save_argmax=True)
    assert scores.shape == () and argmax.shape == (1, 5)


def test_reference_is_the_definition(device):
    for case in walk(40):
        Q, D, q_mask, d_mask = inputs(case, device)
        scores, winners = ref.maxsim(Q, D, q_mask, d_mask, case.normalize)
        out, found = li.reference.maxsim_with_winners_reference(
            Q, D, q_mask, d_mask, normalize=case.normalize
        )
        limit = 1e-13 if case.dtype == torch.float64 else 3e-6
        ref.assert_close(out, scores, limit)
        ref.assert_winners_close(found, winners, Q, D, limit, case.normalize)


def test_winners_have_a_row_for_each_score():
    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    shapes = {(2, 2): (1, 3), (2, 3): (4, 3), (3, 2): (2, 3), (3, 3): (8, 3)}
    for (q, d), shape in shapes.items():
        winners = maxsim_forward(Q[0] if q == 2 else Q, D[0] if d == 2 else D, save_argmax=True)[1]
        assert winners.shape == shape
