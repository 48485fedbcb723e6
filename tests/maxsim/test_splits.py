"""Few long documents, each split over several blocks: every plan that splits them, on a GPU."""

import pytest
import torch

import late_interaction as li
from late_interaction import ops
from tests import ref
from tests.cases import Case, call, code_limit, inputs

OPS = torch.ops.late_interaction
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}


def explained(layout, Nq, N, Lq, Ld, d, dtype=torch.bfloat16, masked=False, scaled=False, sm=90):
    """The names of all plans, first of the one that the planner chooses."""
    text = ops.explain_plan(
        layout != "in-batch", Nq, 1 if layout == "pairs" else N, Lq, Ld, d, NAMES[dtype], "highest",
        masked, scaled, "alternatives", "auto", sm, 132,
    )  # fmt: skip
    return text.split("\n")


def split_plans(*sizes, **options):
    """The names of the plans that split documents, which are called `cut`."""
    return [name for name in explained(*sizes, **options) if " cut " in name]


def test_which_plans_split():
    # A split for each multiprocessor.
    assert split_plans("in-batch", 1, 1, 32, 1_000_000, 128)[0] == "documents 1x3 cut 132"
    assert split_plans("in-batch", 64, 4, 32, 1_000_000, 128)[0] == "rows 152 cut 4"
    assert split_plans("KD", 1, 8, 32, 100_000, 128)[0] == "documents 1x3 cut 16"
    assert "rows 128 cut 3" in split_plans("in-batch", 9, 2, 33, 760, 128)  # six tiles
    # Five tiles, and a split has two at least.
    assert "rows 104 cut 3" not in split_plans("in-batch", 9, 2, 33, 520, 128)
    assert not split_plans("in-batch", 1, 1000, 32, 1030, 128)  # documents enough
    for name in ("thin", "registers 32 x4", "registers 128"):
        assert f"{name} cut 3" in split_plans("in-batch", 1, 1, 32, 1_000_000, 128, sm=80)
    assert all(name.startswith("thin") for name in split_plans("in-batch", 9, 2, 33, 5000, 1024))
    # Long embeddings, of which so few documents would leave most multiprocessors idle whole.
    assert explained("pairs", 1, 1, 120, 2590, 768)[0].startswith("thin cut")
    assert explained("pairs", 100, 100, 120, 2590, 768)[0].startswith("split")
    assert not split_plans("in-batch", 9, 2, 33, 60, 128, sm=80)


def forced(force, *sizes, **options):
    names = split_plans(*sizes, **options, sm=ops.cuda_capability())
    assert names
    for name in names:
        force(name)
        yield name


# Lengths about the edges of tiles of 64, 80, 128 and 152 tokens and of splits, and primes.
CASES = [
    Case("in-batch", 1, 1, 32, 1217, 128, torch.bfloat16),
    Case("in-batch", 1, 3, 1, 385, 48, torch.float16),
    Case("in-batch", 3, 2, 31, 512, 128, torch.bfloat16, "holes"),
    Case("in-batch", 2, 1, 64, 513, 96, torch.float16, normalize=True),
    Case("in-batch", 1, 2, 32, 769, 768, torch.bfloat16, "holes", normalize=True),
    Case("in-batch", 5, 2, 60, 608, 128, torch.bfloat16),
    Case("in-batch", 9, 1, 33, 607, 48, torch.float16, "holes", normalize=True),
    Case("in-batch", 2, 3, 130, 609, 128, torch.bfloat16, "dead"),
    Case("in-batch", 1, 2, 1030, 911, 64, torch.float16, "holes"),
    Case("KD", 3, 2, 32, 641, 128, torch.bfloat16, "holes"),
    Case("KD", 2, 2, 130, 913, 128, torch.float16, "holes", normalize=True),
    Case("pairs", 5, 5, 33, 640, 48, torch.bfloat16, "dead"),
    Case("pairs", 3, 3, 300, 1367, 128, torch.bfloat16),
    Case("KD", 3, 2, 32, 643, 128, torch.bfloat16, form="sliced"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_cut_agrees_with_float64(case, force):
    Q, D, q_mask, d_mask = inputs(case, "cuda")
    if case.form == "sliced":  # rows of whole 16 bytes
        Q, D = (torch.nn.functional.pad(x, (8, 8))[..., 8:-8] for x in (Q, D))
    expected, winners = ref.maxsim(Q, D, q_mask, d_mask, case.normalize)
    limit = ref.tolerance(case.dtype)
    sizes = (case.layout, case.Nq, case.N, case.Lq, case.Ld, case.d, case.dtype)
    for name in forced(force, *sizes, masked=case.masks != "none"):
        scores, found = call(li.maxsim_with_winners, case, Q, D, q_mask, d_mask)
        ref.assert_close(scores, expected, limit, name)
        ref.assert_winners_close(found, winners, Q, D, limit, case.normalize)
        ref.assert_close(
            call(li.maxsim, case, Q, D, q_mask, d_mask), expected, limit, f"{name}, scores alone"
        )


def whole_numbers(Nq, N, Lq, Ld, d):
    Q = torch.randint(-2, 3, (Nq, Lq, d), device="cuda").bfloat16()
    return Q, torch.randint(-1, 2, (N, Ld, d), device="cuda").bfloat16()


# Sums of whole numbers are exact, and few enough that most maxima are met more than once.
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 2, 32, 1217, 16), (3, 1, 130, 1531, 16), (9, 2, 33, 913, 72)])
def test_of_equals_the_earliest_wins(shape, force):
    _, N, _, Ld, d = shape
    Q, D = whole_numbers(*shape)
    expected, winners = ref.maxsim(Q, D)
    for name in forced(force, "in-batch", *shape):
        scores, found = li.maxsim_with_winners(Q, D)
        assert torch.equal(scores.double(), expected) and torch.equal(found.long(), winners), name
        assert torch.equal(li.maxsim(Q, D), scores)
        scores, found = li.maxsim_with_winners(Q, D[:, :1].expand(N, Ld, d).contiguous())
        assert not found.any(), name  # all tokens are equal


def codes(Nq, N, Lq, Ld, d, dtype):
    Q = torch.randint(-9, 10, (Nq, Lq, d), device="cuda").to(dtype)
    D = torch.randint(-9, 10, (N, Ld, d), device="cuda").to(dtype)
    d_mask = torch.rand(N, Ld, device="cuda") < 0.7
    d_mask[1, : Ld // 2] = False
    return Q, D, torch.rand(Nq, Lq, device="cuda"), d_mask


# What a mask leaves: a range in the middle, one token (at the edge of a split, too), all but a split, none.
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 9, 32, 1217, 128), (9, 9, 33, 1217, 128)])
def test_masks_that_leave_whole_splits_out(shape, force):
    Nq, N, Lq, Ld, _ = shape
    Q, D = whole_numbers(*shape)
    at = torch.arange(Ld, device="cuda")
    d_mask = torch.zeros(N, Ld, dtype=torch.bool, device="cuda")
    d_mask[0] = (at >= 500) & (at < 700)
    d_mask[1] = at == 608
    d_mask[2] = at == Ld - 1
    d_mask[3] = (at < 300) | (at >= 900)
    d_mask[4] = at == 607
    d_mask[5] = at < 5
    d_mask[7] = True
    d_mask[8] = torch.rand(Ld, device="cuda") < 0.02
    D = D.masked_fill(~d_mask.unsqueeze(-1), float("nan"))  # what does not count has no say
    q_mask = torch.rand(Nq, Lq, device="cuda") < 0.8
    expected, winners = ref.maxsim(Q, D, q_mask, d_mask)
    for name in forced(force, "in-batch", *shape, masked=True):
        scores, found = li.maxsim_with_winners(Q, D, q_mask, d_mask)
        assert torch.equal(scores.double(), expected) and torch.equal(found.long(), winners), name
        assert torch.equal(li.maxsim(Q, D, q_mask, d_mask), scores)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 6, 32, 1217, 128), (9, 6, 33, 1217, 128)])
def test_nan_and_infinities(shape, force):
    Nq, N, Lq, Ld, d = shape
    Q, D = torch.rand(Nq, Lq, d, device="cuda").bfloat16(), torch.randn(N, Ld, d, device="cuda").bfloat16()
    D[0, 700, 3] = D[0, 1100, 5] = float("nan")
    D[1, 1216, 3] = float("inf")
    D[2] = float("-inf")
    D[3, :608] = float("-inf")
    D[4, 3], D[4, 1200] = float("inf"), float("nan")
    Q[0, 0, 0] = float("nan")
    q_mask = torch.ones(Nq, Lq, dtype=torch.bool, device="cuda")
    q_mask[0, 0] = False  # NaN in a row that does not count
    d_mask = torch.ones(N, Ld, dtype=torch.bool, device="cuda")
    d_mask[0, 650:750] = False
    for mask in (None, d_mask):
        force("wide")
        expected, winners = li.maxsim_with_winners(Q, D, q_mask, mask)
        for name in forced(force, "in-batch", *shape, masked=mask is not None):
            scores, found = li.maxsim_with_winners(Q, D, q_mask, mask)
            ref.assert_close(scores, expected.double(), 5e-6, name)
            ref.assert_close(li.maxsim(Q, D, q_mask, mask), expected.double(), 5e-6, name)
            assert torch.equal(found[:, :5], winners[:, :5]), name  # the last: two within rounding


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("Nq", "Ld", "d"), [(1, 1217, 128), (16, 1217, 128), (9, 1003, 256), (2, 700, 176)])
def test_codes_with_a_scale_each(Nq, Ld, d, dtype, force):
    N, Lq = 2, 33
    Q, D, scale_Q, d_mask = codes(Nq, N, Lq, Ld, d, dtype)
    scale_D = torch.rand(N, Ld, device="cuda")
    for mask in (None, d_mask):
        expected, _ = ref.maxsim(ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D), None, mask)
        options = {"dtype": dtype, "masked": mask is not None, "scaled": True}
        for name in forced(force, "in-batch", Nq, N, Lq, Ld, d, **options):
            got = OPS.maxsim_quantized(Q, D, scale_Q, scale_D, None, mask)
            ref.assert_close(got, expected, code_limit(dtype), name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("Nq", [1, 16])
def test_codes_with_one_scale(Nq, dtype):
    Q, D, scale_Q, d_mask = codes(Nq, 2, 33, 20_011, 128, dtype)
    scale_D = torch.rand((), device="cuda")
    assert "splits" in li.explain_plan(Q, D, winners=False)
    for mask in (None, d_mask):
        expected, _ = ref.maxsim(ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D), None, mask)
        got = OPS.maxsim_quantized(Q, D, scale_Q, scale_D, None, mask)
        ref.assert_close(got, expected, code_limit(dtype))


# As the planner has them: winners of over 65534 tokens are wider, and a query of 1030 is summed in parts.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 1, 32, 200_003, 128), (1, 2, 1030, 70_001, 128), (16, 3, 32, 65_534, 64)]
)
def test_the_same_bits_each_time(shape):
    Nq, N, Lq, Ld, d = shape
    generator = torch.Generator("cuda").manual_seed(1)
    Q, D = (torch.randn(*x, d, device="cuda", generator=generator).bfloat16() for x in ((Nq, Lq), (N, Ld)))
    assert "splits" in li.explain_plan(Q, D, winners=False)
    expected, best = ref.maxsim(Q, D)
    scores, winners = li.maxsim_with_winners(Q, D)
    ref.assert_close(scores, expected, ref.tolerance(Q.dtype))
    ref.assert_winners_close(winners, best, Q, D, ref.tolerance(Q.dtype))
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for turn in range(100):
        with torch.cuda.stream(streams[turn % 3]):
            again, found = li.maxsim_with_winners(Q, D)
            alone = li.maxsim(Q, D)
        streams[turn % 3].synchronize()
        assert torch.equal(again, scores) and torch.equal(found, winners) and torch.equal(alone, scores)
