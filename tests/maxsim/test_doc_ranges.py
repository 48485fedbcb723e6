"""Documents whose kept tokens are made contiguous before the kernel, that are scheduled longest first (lpt),
or whose masked tokens are left out where they are multiplied, on a GPU."""

import pytest
import torch

import late_interaction as li
from tests import packed, ref
from tests.cases import code_limit

OPS = torch.ops.late_interaction
pytestmark = pytest.mark.gpu


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
    scores, winners = ref.maxsim(Q, D, q_mask, d_mask, normalize)
    limit = ref.tolerance(Q.dtype)
    ref.assert_close(li.maxsim(Q, D, q_mask, d_mask, normalize=normalize), scores, limit)
    out, found = li.maxsim_with_winners(Q, D, q_mask, d_mask, normalize=normalize)
    ref.assert_close(out, scores, limit)
    ref.assert_winners_close(found, winners, Q, D, limit, normalize)


def test_documents_shorter_than_a_tile_need_no_mask():
    Q, D, _ = inputs("short documents")
    scores, winners = ref.maxsim(Q, D)
    out, found = li.maxsim_with_winners(Q, D)
    ref.assert_close(out, scores, 5e-6)
    ref.assert_winners_close(found, winners, Q, D, 5e-6)


def test_each_query_with_documents_of_its_own():
    Q, D = torch.randn(4, 1100, 128, device="cuda"), torch.randn(4, 70, 300, 128, device="cuda")
    Q, D = Q.bfloat16(), D.bfloat16()
    d_mask = holes(280, 300).view(4, 70, 300)
    scores, winners = ref.maxsim(Q, D, None, d_mask)
    out, found = li.maxsim_with_winners(Q, D, None, d_mask)
    ref.assert_close(out, scores, 5e-6)
    ref.assert_winners_close(found, winners, Q, D, 5e-6)


def test_ties_go_to_the_lowest_token_that_counts():
    Nq, N, Lq, Ld, d = SHAPES["two chunks"]
    Q = torch.randint(-2, 3, (Nq, Lq, d), device="cuda").bfloat16()
    D = torch.randint(-1, 2, (N, Ld, d), device="cuda").bfloat16()
    D[:, Ld // 2 :] = D[:, : Ld // 2].clone()
    d_mask = holes(N, Ld)
    scores, winners = ref.maxsim(Q, D, None, d_mask)
    out, found = li.maxsim_with_winners(Q, D, None, d_mask)
    assert torch.equal(out.double(), scores)
    assert torch.equal(found.long(), winners)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(value):
    Q, D, d_mask = inputs("two chunks")
    for document in range(9):
        D[document, 290, 3] = value
        D[document, 7, 3] = value
    scores, winners = ref.maxsim(Q, D, None, d_mask)
    out, found = li.maxsim_with_winners(Q, D, None, d_mask)
    ref.assert_close(out, scores, 1e-5)
    ref.assert_winners_close(found[:, 9:], winners[:, 9:], Q, D[9:], 5e-6)
    assert torch.equal(found[:, :9].long()[scores[:, :9].isnan()], winners[:, :9][scores[:, :9].isnan()])


def test_gradients_reach_kept_tokens_alone():
    Q, D, d_mask = inputs("two chunks")
    Q.requires_grad_(), D.requires_grad_()
    scores = li.maxsim(Q, D, None, d_mask)
    _, found = li.maxsim_with_winners(Q.detach(), D.detach(), None, d_mask)
    grad = torch.randn_like(scores)
    scores.backward(grad)
    grad_Q, grad_D = ref.gradients(grad, Q, D, found)
    ref.assert_close(Q.grad, grad_Q, ref.GRAD_TOLERANCE[Q.dtype], "grad_Q")
    ref.assert_close(D.grad, grad_D, ref.GRAD_TOLERANCE[D.dtype], "grad_D")
    assert not D.grad[~d_mask].any()


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


# Few and many row tiles: documents are scheduled longest first, or blocks take ranges; copied, or not.
PACKED = {
    "longest first": ([32, 7, 0, 25] * 40, [20 + 37 * k % 1000 for k in range(128)]),
    "longest first, and short ones copied": ([31] * 90, [5, 0, 900, 79, 80, 1, 176, 300] * 20),
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
    longest_q, longest_d = max(lengths_q), max(lengths_d)

    def pad(tokens, cu, longest):
        sequences = [
            torch.nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x in packed.slices(tokens, cu)
        ]
        keeps = torch.arange(longest, device="cuda") < cu.diff()[:, None]
        return torch.stack(sequences), keeps

    padded_Q, q_mask = pad(Q, cu_q, longest_q)
    padded_D, d_mask = pad(D, cu_d, longest_d)
    scores, winners = ref.maxsim(padded_Q, padded_D, q_mask, d_mask)
    ref.assert_close(li.maxsim_varlen(Q, D, cu_q, cu_d), scores, 5e-6)
    out, found = OPS.maxsim_varlen_winners(Q, D, cu_q, cu_d)
    ref.assert_close(out, scores, 5e-6)
    winners = winners.transpose(0, 1)[q_mask.expand(len(lengths_d), -1, -1)].view(len(lengths_d), -1)
    found = torch.where(found < -1, found.int() + 65536, found.int())
    assert torch.equal(found == -1, winners == -1)
    assert (found != winners).sum() <= 1e-3 * found.numel()  # two similarities within rounding


def filled(mask, N, Ld, d, dtype, integers):
    """Documents whose masked tokens would spoil every score that they had a say in."""
    D = torch.randint(-1, 2, (N, Ld, d), device="cuda").float() if integers else torch.randn(N, Ld, d).cuda()
    return D.masked_fill_(~mask.unsqueeze(-1), float("nan")).to(dtype)


# Every width of a tile, one and two chunks of an embedding, documents shorter than a tile, and of a tile or
# two and a bit; small whole numbers make ties, and exact sums.
@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [16, 72, 128])
@pytest.mark.parametrize("Ld", [3, 79, 80, 81, 104, 151, 153, 209, 300, 457])
def test_what_does_not_count_has_no_say(Ld, d, dtype, force):
    N, Lq = 45, 17
    d_mask = holes(N, Ld)
    for integers in (True, False):
        Q = torch.randint(-2, 3, (16, Lq, d), device="cuda").float() if integers else torch.randn(16, Lq, d)
        Q, D = Q.cuda().to(dtype), filled(d_mask, N, Ld, d, dtype, integers)
        scores, winners = ref.maxsim(Q, D, None, d_mask)
        for width in (152, 128, 104, 80):
            force(f"rows {width}")
            out, found = li.maxsim_with_winners(Q, D, None, d_mask)
            assert torch.equal(li.maxsim(Q, D, None, d_mask), out)
            if integers:
                assert torch.equal(out.double(), scores) and torch.equal(found.long(), winners)
            else:
                ref.assert_close(out, scores, 5e-6)
                settled = ~D.isnan()
                ref.assert_winners_close(found, winners, Q, D.where(settled, 0.0), 5e-6)


TAILS = {152: 104, 128: 80, 104: 64, 80: 64}  # of each width of a tile, that of the last one


def edges(width):
    """Lengths at which the tiles of a copied document change in number, or the last one in width."""
    tail = TAILS[width]
    near = (tail, width, width + tail, 2 * width, 2 * width + tail, 3 * width + tail)
    return [0, 1, 7, *(n + k for n in near for k in (-1, 0, 1))]


# Documents with holes, which are copied, and documents that are read where they lie; whole numbers make ties
# between tiles, too, since the tokens of a document are repeated.
@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("width", TAILS)
def test_last_tiles_of_copies(width, d, dtype, force):
    lengths = edges(width)
    N, Ld = 2 * len(lengths), 4 * width
    d_mask = torch.zeros(N, Ld, dtype=torch.bool, device="cuda")
    for i, length in enumerate(lengths):
        d_mask[i, torch.randperm(Ld, device="cuda")[:length]] = True
        d_mask[len(lengths) + i, 5 : 5 + length] = True
    Q = torch.randint(-2, 3, (19, 31, d), device="cuda").to(dtype)
    D = torch.randint(-1, 2, (N, Ld, d), device="cuda").float()
    D[:, 2 * width :] = D[:, : 2 * width].clone()
    D = D.masked_fill_(~d_mask.unsqueeze(-1), float("nan")).to(dtype)
    scores, winners = ref.maxsim(Q, D, None, d_mask)
    force(f"rows {width} copied")
    for _ in range(10):
        assert torch.equal(li.maxsim(Q, D, None, d_mask).double(), scores)
        out, found = li.maxsim_with_winners(Q, D, None, d_mask)
        assert torch.equal(out.double(), scores) and torch.equal(found.long(), winners)


@pytest.mark.native
@pytest.mark.parametrize("width", TAILS)
def test_last_tiles_of_packed_documents(width, force):
    lengths_q, lengths_d = [32, 0, 77, 300] * 2, edges(width) * 2
    Q, cu_q = packed.pack(lengths_q, 128, torch.bfloat16, "cuda")
    D, cu_d = packed.pack(lengths_d, 128, torch.bfloat16, "cuda")
    Q, D = torch.randint_like(Q, -2, 3), torch.randint_like(D, -1, 2)
    force(f"rows {width} copied")
    scores = li.maxsim_varlen(Q, D, cu_q, cu_d)
    out, found = OPS.maxsim_varlen_winners(Q, D, cu_q, cu_d)
    assert torch.equal(out, scores)
    for j, tokens in enumerate(packed.slices(D, cu_d)):
        if len(tokens) == 0:
            assert (scores[:, j] == 0).all() and (found[j] == -1).all()
            continue
        similarities = Q.double() @ tokens.double().T
        best = similarities.amax(1)
        is_best = similarities == best[:, None]
        first = torch.arange(len(tokens), device="cuda").where(is_best, len(tokens)).amin(1)
        assert torch.equal(found[j].long(), first)
        of_queries = [part.sum() for part in best.split(lengths_q)]
        assert torch.equal(scores[:, j].double(), torch.stack(of_queries))


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
