"""Documents whose kept tokens are made contiguous before the kernel, that are scheduled longest first (lpt),
or whose masked tokens are left out where they are multiplied, on a GPU."""

import pytest
import torch

import late_interaction as li
from tests.maxsim.test_forced_plan import TAILS, copied_lengths, holes
from tests.support import packed, ref
from tests.support.cases import code_limit
from tests.support.judge import Judge, twice, whole_numbers

OPS = torch.ops.late_interaction
pytestmark = pytest.mark.gpu


# (Nq, N, Lq, Ld, d): rows enough, and work enough, that copying pays.
SHAPES = {
    "two chunks": (40, 260, 32, 300, 128),
    "one chunk": (128, 140, 32, 300, 64),
    "long documents": (20, 70, 64, 1030, 128),
    "long queries": (3, 90, 1030, 300, 128),
    "short documents": (64, 700, 32, 60, 128),
    "odd d": (64, 170, 32, 303, 104),
}


def inputs(shape, dtype=torch.bfloat16):
    Nq, N, Lq, Ld, d = SHAPES[shape]
    Q, D = torch.randn(Nq, Lq, d, device="cuda"), torch.randn(N, Ld, d, device="cuda")
    assert 2 * Nq * N * Lq * Ld * d >= 2e10 and Nq * Lq >= 1024
    return Q.to(dtype), D.to(dtype), holes(N, Ld)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_and_winners(shape, normalize):
    Q, D, d_mask = inputs(shape, torch.float16 if shape == "odd d" else torch.bfloat16)
    q_mask = torch.rand(Q.shape[:2], device="cuda") < 0.9
    Judge(Q, D, q_mask, d_mask, normalize=normalize).check()


def test_documents_shorter_than_a_tile_need_no_mask():
    Judge(*inputs("short documents")[:2]).check()


def test_each_query_with_documents_of_its_own():
    Q, D = torch.randn(4, 1100, 128, device="cuda"), torch.randn(4, 70, 300, 128, device="cuda")
    Judge(Q.bfloat16(), D.bfloat16(), None, holes(280, 300).view(4, 70, 300)).check()


def test_ties_go_to_the_lowest_token_that_counts():
    Nq, N, Lq, Ld, d = SHAPES["two chunks"]
    Q, D = whole_numbers(-2, 2, Nq, Lq, d).bfloat16(), twice(whole_numbers(-1, 1, N, Ld, d)).bfloat16()
    Judge(Q, D, None, holes(N, Ld)).check_exact()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(value):
    Q, D, d_mask = inputs("two chunks")
    D[:9, 290, 3] = D[:9, 7, 3] = value
    judge = Judge(Q, D, None, d_mask)
    judge.check_not_finite(limit=1e-5)
    _, _, found = judge.run()
    ref.assert_winners_close(found[:, 9:], judge.winners[:, 9:], Q, D[9:], 5e-6)


def test_gradients_reach_kept_tokens_alone():
    Q, D, d_mask = inputs("two chunks")
    Q.requires_grad_(), D.requires_grad_()
    scores = li.maxsim(Q, D, None, d_mask)
    _, found = li.maxsim_with_winners(Q.detach(), D.detach(), None, d_mask)
    _, grad_D = ref.assert_gradients(scores, Q, D, found, ref.GRAD_TOLERANCE[Q.dtype])
    assert not grad_D[~d_mask].any()


@pytest.mark.parametrize("masked", [False, True])
def test_quantized_tokens(masked):
    Nq, N, Lq, Ld, d = SHAPES["two chunks"]
    Q = torch.randint(-9, 10, (Nq, Lq, d), device="cuda", dtype=torch.int8)
    D = torch.randint(-9, 10, (N, Ld, d), device="cuda", dtype=torch.int8)
    scale_Q, scale_D = torch.rand(Nq, Lq, device="cuda"), torch.rand(N, Ld, device="cuda")
    d_mask = holes(N, Ld) if masked else None
    expected, _ = ref.maxsim(ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D), None, d_mask)
    ref.assert_close(
        OPS.maxsim_quantized(Q, D, scale_Q, scale_D, None, d_mask), expected, code_limit(torch.int8)
    )


# Few and many row tiles: documents are scheduled longest first, or blocks take ranges.
PACKED = {
    "longest first": ([32, 7, 0, 25] * 40, [20 + 37 * k % 1000 for k in range(128)]),
    "longest first, with short ones": ([31] * 90, [5, 0, 900, 79, 80, 1, 176, 300] * 20),
    "in stretches": ([40] * 400, [3, 150, 700, 0, 64] * 30),
    "one query, longest first": ([32], [20 + 61 * k % 500 for k in range(700)]),
    "one query, in stretches": ([32], [20 + 61 * k % 500 for k in range(3000)]),
    "a long query": ([2000], [900, 5, 0, 81] * 12),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PACKED)
def test_packed(name, dtype):
    lengths_q, lengths_d = PACKED[name]
    Q, cu_q = packed.pack(lengths_q, 128, dtype, "cuda")
    D, cu_d = packed.pack(lengths_d, 128, dtype, "cuda")
    scores, winners = packed.scores_and_winners(Q, D, cu_q, cu_d)
    ref.assert_close(li.lik.maxsim_varlen(Q, D, cu_q, cu_d), scores, 5e-6)
    out, found = OPS.maxsim_varlen_winners(Q, D, cu_q, cu_d)
    ref.assert_close(out, scores, 5e-6)
    found = packed.widened(found, len(D))
    assert torch.equal(found == -1, winners == -1)
    assert (found != winners).sum() <= 1e-3 * found.numel()  # two similarities within rounding


def check_exact(Q, D, lengths_q, cu_d, which=slice(None)):
    """Scores and winners of whole numbers, for some of the documents."""
    cu_q = packed.offsets(lengths_q).cuda()
    scores = li.lik.maxsim_varlen(Q, D, cu_q, cu_d)
    out, found = OPS.maxsim_varlen_winners(Q, D, cu_q, cu_d)
    assert torch.equal(out[:, which], scores[:, which])
    for j, tokens in list(enumerate(packed.slices(D, cu_d)))[which]:
        best, first = ref.maxsim(Q[:, None], tokens[None])  # of each row as a query
        assert torch.equal(found[j].long(), first.flatten())
        of_queries = [part.sum() for part in best.flatten().split(lengths_q)]
        assert torch.equal(scores[:, j].double(), torch.stack(of_queries))


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("width", TAILS)
def test_last_tiles_of_packed_documents(width, d, dtype, force):
    lengths_q = [32, 0, 77, 300] * 2
    D, cu_d = packed.pack(copied_lengths(width) * 2, d, dtype, "cuda")
    force(f"rows {width}")
    check_exact(
        whole_numbers(-2, 2, sum(lengths_q), d).to(dtype), torch.randint_like(D, -1, 2), lengths_q, cu_d
    )


# Every second document is NaN. All similarities are negative, so that zeros behind the last one would win.
@pytest.mark.native
@pytest.mark.parametrize("width", TAILS)
def test_what_lies_behind_a_packed_document_has_no_say(width, force):
    tail, lengths_q = TAILS[width], [32, 0, 77, 300] * 2
    short = [1, *(n + k for n in (8, 32, 64, tail, width - 8, width) for k in (-1, 0, 1))]
    D, cu_d = packed.pack([n for n in (*short, 3) for _ in range(2)][:-1], 128, torch.bfloat16, "cuda")
    D = torch.randint_like(D, -2, 0)
    for poisoned in packed.slices(D, cu_d)[1::2]:
        poisoned.fill_(float("nan"))
    force(f"rows {width}")
    check_exact(whole_numbers(1, 2, sum(lengths_q), 128).bfloat16(), D, lengths_q, cu_d, slice(0, None, 2))


# ---- packed codes ----

INT8_TAILS = {160: 112, 144: 80, 128: 80, 112: 64, 80: 64}
CODE_TILES = [
    *((dtype, *tile) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for tile in TAILS.items()),
    *((torch.int8, *tile) for tile in INT8_TAILS.items()),
]
CODE_TILES_AND_DIMS = [  # of long embeddings a ring holds too few of the widest tiles
    (*tile, d) for tile in CODE_TILES for d in (64, 128, 256) if d <= 128 or tile[1] <= 128
]
SCALES = {
    "of every size": lambda n: 10.0 ** torch.randint(-30, 31, (n,), device="cuda"),
    "zero or huge": lambda n: torch.randint(0, 2, (n,), device="cuda") * 1e30,
    "huge": lambda n: torch.full((n,), 1e30, device="cuda"),
    "tiny": lambda n: torch.full((n,), 1e-30, device="cuda"),
    "zero": lambda n: torch.zeros(n, device="cuda"),
    "of all": lambda _: torch.tensor(0.5, device="cuda"),
}


def packed_code_scores(Q, D, scale_Q, scale_D, cu_d):
    """In float64, document by document."""
    q, x = ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D)
    return torch.cat([ref.maxsim(q, tokens[None])[0] for tokens in packed.slices(x, cu_d)], 1)


def check_last_tiles_of_codes(near, dtype, d, scales):
    """Documents whose lengths are about these. All similarities of judged ones are negative; behind each lies
    one of larger similarities, whose scales make NaN."""
    lengths = [0, *(n + k for n in near for k in (-1, 0, 1))]
    cu_d = packed.offsets([n for length in lengths for n in (length, 5)]).cuda()
    judged = torch.tensor([True, False] * len(lengths), device="cuda").repeat_interleave(cu_d.diff())
    signs = torch.where(judged, -1, 3)[:, None]
    D = (torch.randint(1, 3, (len(judged), d), device="cuda") * signs).to(dtype)
    Q = torch.randint(1, 3, (9, 37, d), device="cuda").to(dtype)
    scale_D = SCALES[scales](len(D)).float()
    known = scale_D.clone()
    if scale_D.dim():
        bad = torch.tensor([float("nan"), float("inf"), -1.0], device="cuda")
        scale_D[~judged] = bad[torch.arange(5 * len(lengths), device="cuda") % 3]
    scale_Q = torch.ones(9, 37, device="cuda")
    found = OPS.maxsim_quantized_packed(Q, D, scale_Q, scale_D, None, cu_d)
    expected = packed_code_scores(Q, D, scale_Q, known, cu_d)
    torch.testing.assert_close(found[:, ::2].double(), expected[:, ::2], rtol=1e-5, atol=0)
    assert found[:, 1::2].isnan().all() or scale_D.dim() == 0


@pytest.mark.native
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("dtype", "width", "tail", "d"), CODE_TILES_AND_DIMS, ids=str)
def test_last_tiles_of_packed_codes(dtype, width, tail, d, scales, force):
    near = (1, 16, 32, 64, tail, width, width + 32, width + 64, width + tail, 2 * width, 3 * width + tail)
    force(f"rows {width}")
    check_last_tiles_of_codes(near, dtype, d, scales)


@pytest.mark.native
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("d", [48, 128, 256])
@pytest.mark.parametrize("many", [False, True])
def test_last_stages_of_packed_codes(many, d, dtype, scales, planned_as, force):
    """Without wgmma: few query rows and many. Those of fp8 take twice the registers."""
    planned_as(80)
    force(f"registers {128 if not many else 256 if d > 128 and dtype != torch.int8 else 512}")
    check_last_tiles_of_codes((1, 16, 32, 48, 64, 80, 96, 128, 192, 224), dtype, d, scales)


# Few and many row tiles, and scales that lie apart. A bad one is the fault of its own document alone.
@pytest.mark.parametrize("Nq", [9, 300])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_many_packed_codes(dtype, Nq):
    Q = torch.randint(-9, 10, (Nq, 32, 128), device="cuda").to(dtype)
    cu_d = packed.offsets([37 * k % 300 for k in range(1500)]).cuda()
    D = torch.randint(-9, 10, (int(cu_d[-1]), 128), device="cuda").to(dtype)
    scale_Q, scale_D = torch.rand(Nq, 32, device="cuda"), torch.rand(len(D), 2, device="cuda")[:, 1]
    expected = packed_code_scores(Q, D, scale_Q, scale_D, cu_d)
    found = OPS.maxsim_quantized_packed(Q, D, scale_Q, scale_D, None, cu_d)
    ref.assert_close(found, expected, code_limit(dtype))
    for j, bad in ((3, float("nan")), (700, -1.0), (1499, float("inf"))):
        scale_D[cu_d[j]] = bad
    again = OPS.maxsim_quantized_packed(Q, D, scale_Q, scale_D, None, cu_d)
    assert again[:, [3, 700, 1499]].isnan().all() and not found.isnan().any()
    assert torch.equal(again.isnan().sum(1), torch.full((Nq,), 3, device="cuda"))
    assert torch.equal(again.nan_to_num(), found.where(~again.isnan(), 0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(("Ld", "d"), [(61, 128), (300, 64), (301, 256), (170, 176)])
def test_codes_that_do_not_count_have_no_say(Ld, d, each, dtype):
    N = 50
    Q = torch.randint(-9, 10, (16, 17, d), device="cuda").to(dtype)
    D = torch.randint(-9, 10, (N, Ld, d), device="cuda").to(dtype)
    d_mask = holes(N, Ld)
    scale_Q = torch.rand(16, 17, device="cuda")
    scale_D = (
        torch.rand(N, Ld, device="cuda").where(d_mask, float("nan"))
        if each
        else torch.rand((), device="cuda")
    )
    known = scale_D.nan_to_num() if each else scale_D
    expected, _ = ref.maxsim(ref.dequantized(Q, scale_Q), ref.dequantized(D, known), None, d_mask)
    ref.assert_close(OPS.maxsim_quantized(Q, D, scale_Q, scale_D, None, d_mask), expected, code_limit(dtype))
