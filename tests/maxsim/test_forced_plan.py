"""Plans that a forward could have beside the planner's own: each can be named, forced, and is right."""

import dataclasses

import pytest
import torch

import late_interaction as li
from late_interaction import ops
from tests.support import ref
from tests.support.cases import Case, code_limit, inputs
from tests.support.judge import Judge, twice, whole_numbers

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {
    BF16: "bf16", FP16: "fp16", torch.float32: "fp32", torch.int8: "int8", torch.float8_e4m3fn: "e4m3",
}  # fmt: skip

CASES = [
    Case("in-batch", 1, 40, 32, 300, 128, torch.bfloat16),
    Case("in-batch", 3, 5, 21, 70, 128, torch.float16, "holes"),
    Case("in-batch", 9, 7, 33, 31, 48, torch.bfloat16),
    Case("in-batch", 9, 140, 33, 130, 128, torch.bfloat16, "dead"),
    Case("in-batch", 5, 7, 60, 200, 320, torch.bfloat16),
    Case("in-batch", 5, 6, 70, 90, 1024, torch.bfloat16, "holes"),
    Case("in-batch", 9, 40, 7, 17, 100, torch.float16),
    Case("KD", 5, 60, 24, 6, 128, torch.bfloat16),
    Case("KD", 40, 25, 20, 2, 1024, torch.bfloat16),
    Case("KD", 9, 100, 24, 13, 200, torch.float16, "holes"),
    Case("KD", 3, 4, 130, 300, 128, torch.bfloat16, "holes"),
    Case("pairs", 7, 7, 64, 129, 96, torch.float16),
    Case("in-batch", 7, 17, 25, 32, 512, torch.bfloat16, "holes"),
    Case("in-batch", 6, 80, 98, 8, 320, torch.float16),
    Case("KD", 9, 20, 75, 6, 768, torch.bfloat16, "dead"),
    Case("in-batch", 3, 9, 90, 300, 128, torch.bfloat16, "holes"),
    # Several documents to a tile: the last one of a tile missing, or all but one; spans of whole eights, and
    # one token less and more; queries that divide the rows of a warp, share them, and span several tiles.
    Case("in-batch", 16, 13, 16, 24, 128, torch.bfloat16),
    Case("in-batch", 9, 61, 33, 17, 96, torch.float16),
    Case("in-batch", 3, 20, 513, 48, 64, torch.bfloat16, "holes"),
    Case("in-batch", 70, 7, 5, 64, 128, torch.bfloat16),
    Case("in-batch", 300, 5, 1, 1, 72, torch.float16),
    Case("in-batch", 21, 33, 20, 9, 40, torch.bfloat16, "dead"),
    Case("in-batch", 6, 18, 150, 40, 128, torch.float16, "holes"),
    Case("in-batch", 11, 50, 40, 55, 112, torch.bfloat16),
    Case("in-batch", 40, 37, 30, 32, 128, torch.bfloat16, "dead"),
    Case("in-batch", 3, 33, 128, 16, 128, torch.float16),
    Case("KD", 4, 9, 140, 21, 128, torch.float16, "holes"),
    # A warp a document, in tiles of 8 to 32 tokens: one or several a document, the last one cut or not;
    # documents for many rounds, and for some warps alone; several short queries that share the rows.
    Case("in-batch", 1, 5000, 32, 24, 128, torch.bfloat16),
    Case("in-batch", 1, 3, 16, 64, 128, torch.float16),
    Case("in-batch", 1, 1700, 5, 1, 72, torch.bfloat16),
    Case("in-batch", 2, 3000, 16, 33, 96, torch.float16, "holes"),
    Case("in-batch", 1, 2000, 31, 17, 40, torch.bfloat16, "dead"),
    Case("in-batch", 1, 4001, 32, 65, 128, torch.float16),
    Case("in-batch", 4, 1601, 8, 8, 64, torch.bfloat16, "holes"),
    Case("in-batch", 1, 2500, 1, 48, 8, torch.float16),
    # float32 by tensor cores and without them: rows of 16 bytes and not, Q that stays and that streams.
    Case("in-batch", 9, 7, 33, 131, 128, torch.float32, "holes"),
    Case("in-batch", 3, 5, 40, 90, 67, torch.float32, "dead"),
    Case("in-batch", 2, 9, 300, 65, 768, torch.float32),
    Case("KD", 5, 4, 130, 63, 48, torch.float32, "holes"),
    Case("pairs", 7, 7, 20, 300, 264, torch.float32, "dead"),
]
# Documents in splits: lengths about the edges of tiles of 64, 80, 128 and 152 tokens and of splits; primes.
CUT = [
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
]


def older():
    """Kernels without wgmma: document tokens about the edges of 16 tokens, of a stage and of two; query rows
    about those of a warp (32, 64), of a block (128, 256, 512), and of sm80_d (32); dims of each number of
    products, whole and not."""
    lengths = [0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 129, 193, 300, 601]
    rows = [
        (1, 1),
        (1, 32),
        (1, 33),
        (4, 31),
        (2, 64),
        (3, 43),
        (9, 57),
        (16, 32),
        (19, 27),
        (5, 130),
        (2, 513),
    ]
    dims = [128, 64, 8, 72, 256, 136, 120]
    for i, Ld in enumerate(lengths * 2):
        layout, N = (("in-batch", (3, 37, 300)[i % 3]), ("KD", 5))[i % 2]
        sizes = rows[i % len(rows)][0], N, rows[i % len(rows)][1], Ld, dims[i % len(dims)]
        for masks, normalize in (("none", False), ("holes", i % 2 == 0), ("dead", False)):
            yield Case(layout, *sizes, (BF16, FP16)[i // 3 % 2], masks, normalize=normalize)


def alternatives(case, words="", sm=90, scaled=False):
    """The names of the plans that a call can have, the planner's own first, that hold these words."""
    N = 1 if case.layout == "pairs" else case.N
    shape = (case.Nq, N, case.Lq, case.Ld, case.d)
    options = ("highest", case.masks != "none", case.normalize or scaled, "alternatives", "auto", sm, 132)
    text = ops.explain_plan(case.layout != "in-batch", *shape, NAMES[case.dtype], *options)
    return [name for name in text.split("\n")[:-1] if words in name]


def forced(force, case, words="", **options):
    """Force each of these plans in turn."""
    names = alternatives(case, words, ops.cuda_capability(), **options)
    assert names
    for name in names:
        assert force(name) == name == force()
        yield name


# ---- names ----


@pytest.mark.parametrize("sm", [80, 90])
def test_plans_have_names_of_their_own(sm):
    for case in CASES:
        found = alternatives(case, sm=sm)
        kinds = {name.split()[0] for name in found}
        assert len(set(found)) == len(found) and {"thin", "wide"} <= kinds
        assert ({"thin fp32", "wide fp32"} <= set(found)) == (case.dtype == torch.float32)
        assert bool({"documents", "rows", "split", "short", "stream"} & kinds) == (
            sm == 90 and case.d % 8 == 0
        )
        assert case.d <= 256 or "direct 32" not in found  # embeddings longer than its registers
    assert "rows 152 copied" in alternatives(CASES[3])


def test_few_long_documents_are_cut_for_all_multiprocessors():
    def cuts(Nq, N, Lq, Ld, d=128, layout="in-batch", **options):
        return alternatives(Case(layout, Nq, N, Lq, Ld, d, BF16), " cut ", **options)

    for shape, layout in (((1, 1, 32, 1_000_000), "in-batch"), ((1, 8, 32, 100_000), "KD")):
        assert int(cuts(*shape, layout=layout)[0].split()[-1]) * shape[1] >= 120
    assert not cuts(1, 1000, 32, 1030) and not cuts(9, 2, 33, 60, sm=80)  # documents enough, or short ones
    # Six tiles make three splits, five do not: a split has two at least.
    assert "rows 128 cut 3" in cuts(9, 2, 33, 760) and "rows 104 cut 3" not in cuts(9, 2, 33, 520)
    assert {x.split()[0] for x in cuts(1, 1, 32, 1_000_000, sm=80)} == {"thin", "registers"}
    # Hopper's own kernel for long embeddings cuts nothing: it is taken where enough documents fill the GPU.
    for count, kind in ((1, "thin cut"), (100, "split")):
        assert alternatives(Case("pairs", count, count, 120, 2590, 768, BF16))[0].startswith(kind)


@pytest.mark.skipif(ops.cuda_missing is None, reason="the CUDA library is loaded")
@pytest.mark.parametrize("force", [lambda: ops.forced_plan("wide"), ops.cuda_capability])
def test_without_the_cuda_library_it_says_so(force):
    with pytest.raises(RuntimeError, match="late_interaction has no CUDA kernels here"):
        force()


@pytest.mark.gpu
def test_a_plan_that_a_call_cannot_have_is_refused(force):
    Q, D = (torch.randn(3, n, 320, device="cuda", dtype=BF16) for n in (50, 90))
    for name in ("rows 152", "direct 32", "documents 4x1", "no such plan"):
        force(name)
        with pytest.raises(RuntimeError, match=f"this call cannot have the plan '{name}', only .*thin"):
            li.maxsim(Q, D)
    assert force("") == force() == ""
    assert li.maxsim(Q, D).isfinite().all()


# ---- every plan against float64 ----


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("words", "case"), [*(("", case) for case in CASES), *((" cut ", case) for case in CUT)], ids=str
)
def test_every_plan_agrees_with_float64(words, case, force):
    judge = Judge(*inputs(case, "cuda"), normalize=case.normalize, case=case)
    for name in forced(force, dataclasses.replace(case, normalize=False), words):
        judge.check(what=name)


@pytest.mark.gpu
def test_every_cut_of_tokens_that_lie_apart(force):
    case = Case("KD", 3, 2, 32, 643, 128, BF16)
    Q, D = (torch.nn.functional.pad(x, (8, 8))[..., 8:-8] for x in inputs(case, "cuda")[:2])
    judge = Judge(Q, D)
    for name in forced(force, case, " cut "):
        judge.check(what=name)


@pytest.fixture(params=[80, 86, 120])
def planned(request, planned_as):
    """As for a GPU without wgmma. 8.6 and 12.0 have 100 KiB of shared memory, not 164."""
    planned_as(request.param)
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(older()), ids=str)
def test_every_plan_without_wgmma(case, planned, force):
    """Those that the planner does not choose for so little work, too. Normalized rows of larger batches have
    plans for their fp16 copies."""
    judge = Judge(*inputs(case, "cuda"), normalize=case.normalize, case=case)
    copied = case.normalize and case.Nq * case.Lq >= 1024
    limits = (
        (ref.UNIT_SCORE_TOLERANCE, ref.UNIT_WINNER_TOLERANCE) if copied and case.layout == "in-batch" else ()
    )
    judge.check(*limits, same=True)
    if case.Ld > 0 and not copied:
        names = list(forced(force, case))
        assert {"thin", "wide", "registers"} <= {name.split()[0] for name in names}
        for name in forced(force, case):
            judge.check(what=name, same=True)


# ---- ties, masks, and what is no number, at the edges of tiles: whole numbers are exact ----

SECOND = {152: 152, 128: 104, 104: 80, 80: 80}  # the width of the second of two tiles that differ
TAILS = {152: 104, 128: 80, 104: 64, 80: 64}  # of each width of a tile, that of the last one of a copy
SIGNS = ["mixed", "negative", "one positive", "zeros"]


def signed(kind, Ld, d):
    """Small whole numbers, whose products are exact and tie: (Q, D)."""
    Q, D = whole_numbers(-2, 2, 19, 31, d), whole_numbers(-1, 1, 13, Ld, d)
    if kind in ("negative", "one positive"):  # all similarities, but of some token of a document
        Q, D = whole_numbers(1, 2, 19, 31, d), whole_numbers(-2, -1, 13, Ld, d)
    if kind == "one positive":
        D[torch.arange(12), torch.randint(Ld, (12,), device="cuda")] = 1.0
    elif kind == "zeros":  # of either sign, among negative ones
        Q[:, ::2], Q[3], D[:, ::3], D[2] = 0.0, 2.0, 0.0, -1.0
    return Q, D


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", SIGNS)
@pytest.mark.parametrize(
    ("width", "d"), [(152, 128), (128, 64), (128, 120), (104, 40), (104, 128), (80, 128)]
)
def test_the_first_of_equal_similarities_wins(width, d, kind, dtype, force):
    """Lengths at which the tiles of a document that is read where it lies change in number or in width."""
    near = (width + SECOND[width], 2 * width, 3 * width)
    for Ld in sorted({width, width + 1, *(n + k for n in near for k in (-1, 0, 1))}):
        Q, D = (x.to(dtype) for x in signed(kind, Ld, d))
        judge = Judge(Q, twice(D))
        assert force(f"rows {width}") == f"rows {width}"
        judge.check_exact(what=Ld)


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("width", "Ld"), [(152, 170), (128, 230), (104, 180), (80, 150)])
def test_what_is_no_number_wins_or_spoils_its_row(width, Ld, dtype, force):
    Q, D = (torch.randn(*size, 128, device="cuda").to(dtype) for size in ((17, 33), (11, Ld)))
    D[1, Ld - 1, 5], D[2, 3], D[3, Ld // 2, 0] = float("nan"), float("-inf"), float("inf")
    D[4], D[5], Q[6, 7, 9] = float("-inf"), float("nan"), float("nan")
    D[7] = -D[7].abs()
    force(f"rows {width}")
    Judge(Q, D).check_not_finite()


def holes(N, Ld):
    """Masks of every kind: holes, a first part, a middle part, few tokens, one, none, all."""
    mask = torch.rand(N, Ld, device="cuda") < 0.8
    mask[1::9] = torch.arange(Ld, device="cuda") < Ld - 7
    mask[2::9] = (torch.arange(Ld, device="cuda") >= 5) & (torch.arange(Ld, device="cuda") < Ld - 3)
    mask[3::9] = torch.rand(N, Ld, device="cuda")[3::9] < 9 / Ld
    mask[4::9] = torch.arange(Ld, device="cuda") == Ld - 1
    mask[5::9] = False
    mask[6::9] = True
    return mask


def poisoned(D, mask):
    """Documents whose masked tokens would spoil every score that they had a say in."""
    return D.masked_fill(~mask.unsqueeze(-1), float("nan"))


# Every width of a tile, one and two chunks of an embedding, documents shorter than a tile, and of a tile or
# two and a bit.
@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", [16, 72, 128])
@pytest.mark.parametrize("Ld", [3, 79, 80, 81, 104, 151, 153, 209, 300, 457])
def test_what_does_not_count_has_no_say(Ld, d, dtype, force):
    d_mask = holes(45, Ld)
    D = poisoned(whole_numbers(-1, 1, 45, Ld, d), d_mask).to(dtype)
    exact = Judge(whole_numbers(-2, 2, 16, 17, d).to(dtype), D, None, d_mask)
    Q, D = torch.randn(16, 17, d, device="cuda").to(dtype), torch.randn(45, Ld, d, device="cuda").to(dtype)
    clean = Judge(Q, D, None, d_mask)
    for width in TAILS:
        force(f"rows {width}")
        exact.check_exact(what=width)
        _, winners = clean.check(what=width, same=True)
        dirty, same = li.maxsim_with_winners(Q, poisoned(D, d_mask), None, d_mask)
        assert torch.equal(dirty, li.maxsim(Q, D, None, d_mask)) and torch.equal(same, winners)


# Documents with holes, which are copied, and documents that are read where they lie, at lengths at which the
# tiles of a copy change in number, or the last one in width.
@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("width", TAILS)
def test_last_tiles_of_copies(width, d, dtype, force):
    lengths = copied_lengths(width)
    N, Ld = 2 * len(lengths), 4 * width
    d_mask = torch.zeros(N, Ld, dtype=torch.bool, device="cuda")
    for i, length in enumerate(lengths):
        d_mask[i, torch.randperm(Ld, device="cuda")[:length]] = True
        d_mask[len(lengths) + i, 5 : 5 + length] = True
    D = poisoned(twice(whole_numbers(-1, 1, N, Ld, d)), d_mask).to(dtype)
    judge = Judge(whole_numbers(-2, 2, 19, 31, d).to(dtype), D, None, d_mask)
    force(f"rows {width} copied")
    for _ in range(10):
        judge.check_exact()


def copied_lengths(width):
    tail = TAILS[width]
    tiles = (width * i + n for i in (1, 2) for n in (0, 32, 64, tail))
    near = (32, 64, tail, *tiles, 3 * width + tail)
    return [0, 1, 7, *(n + k for n in near for k in (-1, 0, 1))]


# ---- splits ----


def of(Nq, N, Lq, Ld, d, dtype=BF16, masks="none"):
    return Case("in-batch", Nq, N, Lq, Ld, d, dtype, masks)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 2, 32, 1217, 16), (3, 1, 130, 1531, 16), (9, 2, 33, 913, 72)])
def test_of_equals_in_several_splits_the_earliest_wins(shape, force):
    Nq, N, Lq, Ld, d = shape
    Q, D = whole_numbers(-2, 2, Nq, Lq, d).bfloat16(), whole_numbers(-1, 1, N, Ld, d).bfloat16()
    judge, equal = Judge(Q, D), Judge(Q, D[:, :1].expand(N, Ld, d).contiguous())
    for name in forced(force, of(*shape), " cut "):
        judge.check_exact(name)
        equal.check_exact(name)


# What a mask leaves: a range in the middle, one token (at the edge of a split, too), all but a split, none.
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 9, 32, 1217, 128), (9, 9, 33, 1217, 128)])
def test_masks_that_leave_whole_splits_out(shape, force):
    Nq, N, Lq, Ld, d = shape
    at = torch.arange(Ld, device="cuda")
    kept = [(at >= 500) & (at < 700), at == 608, at == Ld - 1, (at < 300) | (at >= 900), at == 607, at < 5,
            at < 0, at >= 0, torch.rand(Ld, device="cuda") < 0.02]  # fmt: skip
    d_mask = torch.stack(kept)
    D = poisoned(whole_numbers(-1, 1, N, Ld, d), d_mask).bfloat16()
    q_mask = torch.rand(Nq, Lq, device="cuda") < 0.8
    judge = Judge(whole_numbers(-2, 2, Nq, Lq, d).bfloat16(), D, q_mask, d_mask)
    for name in forced(force, of(*shape, masks="holes"), " cut "):
        judge.check_exact(name)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(1, 6, 32, 1217, 128), (9, 6, 33, 1217, 128)])
def test_nan_and_infinities_in_splits(shape, masked, force):
    Nq, N, Lq, Ld, d = shape
    Q, D = torch.rand(Nq, Lq, d, device="cuda").bfloat16(), torch.randn(N, Ld, d, device="cuda").bfloat16()
    D[0, 700, 3] = D[0, 1100, 5] = float("nan")
    D[1, 1216, 3], D[2], D[3, :608] = float("inf"), float("-inf"), float("-inf")
    D[4, 3], D[4, 1200] = float("inf"), float("nan")
    Q[0, 0, 0] = float("nan")
    q_mask = torch.ones(Nq, Lq, dtype=torch.bool, device="cuda")
    q_mask[0, 0] = False  # NaN in a row that does not count
    d_mask = None
    if masked:
        d_mask = torch.ones(N, Ld, dtype=torch.bool, device="cuda")
        d_mask[0, 650:750] = False
    judge = Judge(Q, D, q_mask, d_mask)
    force("wide")
    _, _, winners = judge.run()
    for name in forced(force, of(*shape, masks="holes" if masked else "none"), " cut "):
        judge.check_not_finite(what=name)
        assert torch.equal(judge.run()[2][:, :5], winners[:, :5]), name  # the last: two within rounding


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("Nq", "Ld", "d", "each"), [
    *((*x, True) for x in ((1, 1217, 128), (16, 1217, 128), (9, 1003, 256), (2, 700, 176))),
    *((Nq, 20_011, 128, False) for Nq in (1, 16)),
])  # fmt: skip
def test_codes_in_splits(Nq, Ld, d, each, dtype, force):
    """With a scale for each token in every plan, and with one for all as the planner has them."""
    Q = torch.randint(-9, 10, (Nq, 33, d), device="cuda").to(dtype)
    D = torch.randint(-9, 10, (2, Ld, d), device="cuda").to(dtype)
    scale_Q, scale_D = torch.rand(Nq, 33, device="cuda"), torch.rand((2, Ld) if each else (), device="cuda")
    d_mask = torch.rand(2, Ld, device="cuda") < 0.7
    d_mask[1, : Ld // 2] = False
    for mask in (None, d_mask):
        wanted, _ = ref.maxsim(ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D), None, mask)
        case = of(Nq, 2, 33, Ld, d, dtype, "holes" if mask is not None else "none")
        assert each or "splits" in li.explain_plan(Q, D, winners=False)
        for name in forced(force, case, " cut ", scaled=True) if each else [""]:
            got = ops.maxsim_quantized(Q, D, scale_Q, scale_D, None, mask)
            ref.assert_close(got, wanted, code_limit(dtype), name)


# As the planner has them: winners of over 65534 tokens are wider, and a query of 1030 is summed in parts.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 1, 32, 200_003, 128), (1, 2, 1030, 70_001, 128), (16, 3, 32, 65_534, 64)]
)
def test_the_same_bits_each_time(shape):
    Nq, N, Lq, Ld, d = shape
    Q, D = (torch.randn(*x, d, device="cuda").bfloat16() for x in ((Nq, Lq), (N, Ld)))
    assert "splits" in li.explain_plan(Q, D, winners=False)
    judge = Judge(Q, D)
    scores, winners = judge.check()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for turn in range(100):
        with torch.cuda.stream(streams[turn % 3]):
            alone, again, found = judge.run()
        streams[turn % 3].synchronize()
        assert torch.equal(again, scores) and torch.equal(found, winners) and torch.equal(alone, scores)
