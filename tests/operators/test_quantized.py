"""Scores of fp8 and int8 tokens against float64 brute force.

Among them are shapes that Hopper GPUs have kernels for: rows of whole 16 bytes, few of them and many. What is
true of these shapes is true on every device.
"""

import dataclasses

import pytest
import torch

from late_interaction._scoring import quantized as scoring
from late_interaction.ops import _blocks
from late_interaction.ops.quantized import maxsim_dequantized
from late_interaction.reference import maxsim_quantized_reference
from tests.support import ref
from tests.support.calls import in_graph, peak, waiting_for_nothing
from tests.support.cases import QUANTIZED, code_limit, inputs, mask, tokens, walk
from tests.support.coded import codec_of, scored
from tests.support.contrastive import Made

OPS = torch.ops.late_interaction
E4M3, INT8, E5M2 = QUANTIZED
BAD_SCALES = [float("nan"), float("inf"), -1.0]
# (Nq, Lq, Nd, Ld, d)
SHAPES = [
    (1, 32, 300, 300, 128),  # up to 128 query rows
    (1, 32, 3, 1030, 128),
    (2, 33, 7, 129, 96),
    (1, 5, 40, 7, 16),
    (4, 32, 5, 64, 256),
    (3, 40, 9, 200, 320),
    (1, 128, 4, 500, 512),
    (1, 20, 4, 130, 2048),
    (40, 32, 30, 300, 128),  # and more
    (9, 33, 12, 1030, 128),
    (7, 100, 5, 33, 64),
    (200, 1, 6, 75, 32),
    (5, 64, 11, 105, 256),
    (3, 300, 6, 177, 144),
    (12, 32, 9, 161, 48),
    (9, 33, 12, 70, 272),  # in chunks: Q stays
    (9, 33, 18, 170, 768),  # or streams
    (3, 150, 3, 100, 1040),
]
# Shapes that no GPU has a kernel for.
COPIED = [(9, 33, 12, 70, 24), (1, 8, 5, 70, 8192)]
# Few query rows of a document, many, and more than a block of any kernel has.
ROWS = [(3, 9), (5, 33), (17, 33)]
# Document tokens about the edges of one tile, and behind two: of fp8 and int8, of every kernel.
WIDTHS = (64, 80, 104, 112, 128, 144, 152, 160)
EDGES = sorted({w + e for w in WIDTHS for e in (-1, 0, 1)} | {2 * w + 1 for w in WIDTHS})


def scales(shape, device, form):
    """One for all tokens, or one a token in different places in memory."""
    if form == "tensor":
        return torch.tensor(0.03, device=device)
    if form == "expanded":
        return (torch.rand(shape[-1:], device=device) / 20).expand(shape)
    if form == "strided":
        return (torch.rand(*shape, 2, device=device) / 20)[..., 1]
    return torch.rand(shape, device=device) / 20


def score(Q, D, scale_Q, scale_D, q_mask=None, d_mask=None):
    """By Codes where they can be: sequences with a scale a token."""
    if scale_Q.shape == Q.shape[:2] and D.dim() > 2 and scale_D.shape == D.shape[:-1]:
        return scored(codec_of(Q.dtype), (Q, scale_Q), D, scale_D, q_mask, d_mask)
    return scoring.maxsim(Q, D, scale_Q, scale_D, q_mask, d_mask, tuple(QUANTIZED))


def expected(Q, D, scale_Q, scale_D, q_mask=None, d_mask=None):
    return ref.maxsim(ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D), q_mask, d_mask)[0]


def quantized(shape, dtype, device, layout="in-batch", form="token"):
    Nq, Lq, Nd, Ld, d = shape
    if layout == "KD":
        Nq, Nd = min(Nq, 5), min(Nd, 7)
    Q = tokens((Nq, Lq, d), dtype, device)
    D = tokens((Nd, Ld, d) if layout == "in-batch" else (Nq, Nd, Ld, d), dtype, device)
    return Q, D, scales(Q.shape[:-1], device, form), scales(D.shape[:-1], device, form)


@pytest.fixture(params=["kernel", "copies", "one document at a time"])
def way(request, monkeypatch):
    """The kernel, and the float32 copies that GPUs without a kernel make, on every device."""
    if request.param == "kernel":
        return score
    if request.param == "one document at a time":
        monkeypatch.setattr(_blocks, "_BYTES", 1)
    return lambda *args: OPS.maxsim_dequantized(*args, *[None] * (6 - len(args)))


def limit_of(way, dtype, device):
    """Products of codes are exact in float32, whose sums alone err on a CPU; a GPU may score TF32 copies."""
    if way is not score:
        return {"cpu": 5e-6, "cuda": 2e-3}[device]
    return min(code_limit(dtype, device), 5e-6) if device == "cpu" else code_limit(dtype, device)


def check(way, device, *args):
    ref.assert_close(way(*args), expected(*args), limit_of(way, args[0].dtype, device))


FORMS = ["token", "tensor", "expanded", "strided", "token"]
CASES = [
    (
        dataclasses.replace(case, dtype=QUANTIZED[i % 3], normalize=False),
        FORMS[i % 5],
        FORMS[(i + i // 5) % 5],
    )
    for i, case in enumerate(walk(110))
]


@pytest.mark.parametrize("case, form_Q, form_D", CASES, ids=str)
def test_scores(case, form_Q, form_D, way, device):
    Q, D, q_mask, d_mask = inputs(case, device)
    scale_Q, scale_D = scales(Q.shape[:-1], device, form_Q), scales(D.shape[:-1], device, form_D)
    scores = way(Q, D, scale_Q, scale_D, q_mask, d_mask)
    assert scores.dtype == torch.float32
    wanted = expected(Q, D, scale_Q, scale_D, q_mask, d_mask)
    if device == "cuda" and case.Ld == 1:
        # No maximum keeps these sums from cancelling, so errors are measured by the products that are summed.
        # TF32 errs by up to 2^-10 of each, and by far less of the sum; bf16 would not keep to this.
        products = expected(*(x.float().abs() for x in (Q, D)), scale_Q, scale_D, q_mask, d_mask)
        assert torch.all((scores.double() - wanted.double()).abs() <= 2**-12 * products.double())
    else:
        ref.assert_close(scores, wanted, {"cpu": 5e-6, "cuda": 2e-3}[device])


def test_the_reference_is_the_definition(device):
    for case, form_Q, form_D in CASES[:40]:
        Q, D, q_mask, d_mask = inputs(case, device)
        scale_Q, scale_D = scales(Q.shape[:-1], device, form_Q), scales(D.shape[:-1], device, form_D)
        out = maxsim_quantized_reference(Q, D, q_mask, d_mask, scale_Q=scale_Q, scale_D=scale_D)
        ref.assert_close(out, expected(Q, D, scale_Q, scale_D, q_mask, d_mask), 1e-7)


@pytest.mark.parametrize("kind", ["none", "holes", "dead"])
@pytest.mark.parametrize("form", ["token", "tensor", "strided"])
@pytest.mark.parametrize("layout", ["in-batch", "KD"])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 40, 1, 5000, 128), (3, 1200, 2, 300, 128)], ids=str)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_scores_of_larger_batches(dtype, shape, layout, form, kind, device):
    if device == "cpu" and (form == "strided" or kind == "holes" or (layout == "KD") == (form == "tensor")):
        pytest.skip("the CPU takes some of layout, form and mask together")
    args = quantized(shape, dtype, device, layout, form)
    check(score, device, *args, *(mask(x.shape[:-1], device, kind) for x in args[:2]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "holes"])
@pytest.mark.parametrize("d", [64, 128, 400])
@pytest.mark.parametrize("sizes", [(1, 32, 2300, 170), (1, 32, 2300, 300), (64, 32, 500, 170)], ids=str)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_every_call_gives_the_same_scores(dtype, sizes, d, kind):
    """Multiplications of a block's other documents hold up the loads of a document's mask and scales."""
    args = quantized((*sizes, d), dtype, "cuda")
    args = *args, mask(args[0].shape[:-1], "cuda", kind), mask(args[1].shape[:-1], "cuda", kind)
    first = score(*args)
    for _ in range(60):
        torch.testing.assert_close(score(*args), first, rtol=0, atol=0)
    ref.assert_close(first, expected(*args), code_limit(dtype))


@pytest.mark.parametrize("Ld", EDGES)
@pytest.mark.parametrize("layout", ["in-batch", "pairs"])
@pytest.mark.parametrize(("rows", "d"), [(ROWS[0], 64), ((3, 140), 64), ((3, 140), 400)])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_scores_at_the_edges_of_tiles(dtype, rows, d, layout, Ld, device):
    if device == "cpu" and (EDGES.index(Ld) + QUANTIZED.index(dtype)) % 3:
        pytest.skip("these are edges of no tile of the CPU's: each once")
    Q = tokens((*rows, d), dtype, device)
    D = tokens((3, Ld, d) if layout == "in-batch" else (3, 1, Ld, d), dtype, device)
    below = torch.randint(1, 9, Q.shape, device=device), torch.randint(-8, 0, D.shape, device=device)
    for args in ((Q, D), tuple(x.to(dtype) for x in below)):  # zeros behind a document would beat the second
        for form in ("token", "tensor"):
            both = scales(rows, device, form), scales(D.shape[:-1], device, form)
            for d_mask in (None, mask(D.shape[:-1], device, "holes")):
                check(score, device, *args, *both, None, d_mask)


def test_the_scale_of_a_document_token_decides_its_similarity(way, device):
    Q = torch.tensor([[[1], [-1]]], dtype=INT8, device=device)
    D = torch.tensor([[[2], [3]]], dtype=INT8, device=device)
    scale_Q = torch.tensor([[10.0, 1.0]], device=device)
    for scale_D, wanted in (([1.0, 1.0], 10 * 3 - 2), ([2.0, 1.0], 10 * 4 - 3), ([0.0, 0.0], 0)):
        assert way(Q, D, scale_Q, torch.tensor([scale_D], device=device)).item() == wanted


@pytest.mark.parametrize("rows", [(1, 1), *ROWS])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_every_code_means_what_pytorch_says(dtype, rows, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(dtype)
    one = torch.ones((), device=device)
    for d, at in ((32, 5), (1, 0)):
        D = torch.zeros(256, 3, d, device=device).to(dtype)
        D[:, :, at] = codes[:, None]
        wanted = (codes.float() * rows[1]).expand(rows[0], 256)
        for scale in (one, one.expand(256, 3).contiguous()):
            scores = score(torch.ones(*rows, d, device=device).to(dtype), D, one, scale)
            torch.testing.assert_close(scores, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("d", [128, 256, 512])
def test_the_largest_int8_products_are_exact(d, per_token, rows, device):
    one = torch.ones((), device=device)
    for a in (-128, 127):
        for b in (-128, 127):
            Q = torch.full((*rows, d), a, dtype=INT8, device=device)
            D = torch.full((4, 90, d), b, dtype=INT8, device=device)
            D[:, 40] = b + 1 if b < 0 else b - 1
            best = max(a * b, a * int(D[0, 40, 0])) * d
            scale = one.expand(4, 90).contiguous() if per_token else one
            assert score(Q, D, one, scale).eq(best * rows[1]).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_whole_numbers_and_powers_of_two_score_exactly(dtype, rows, way, device):
    # Every product and sum is exact in any order, so equal similarities are equal.
    Q = torch.randint(-2, 3, (*rows, 64), device=device).to(dtype)
    D = torch.randint(-1, 2, (4, 170, 64), device=device).to(dtype)
    scale_Q, scale_D = (2.0 ** torch.randint(-2, 3, x.shape[:-1], device=device) for x in (Q, D))
    for s in (scale_Q, scale_Q.new_tensor(0.5)):
        for t in (scale_D, scale_D.new_tensor(4.0), torch.zeros_like(scale_D)):
            assert torch.equal(way(Q, D, s, t).double(), expected(Q, D, s, t))


@pytest.mark.parametrize("q_rank", [2, 3])
@pytest.mark.parametrize("d_rank", [2, 3])
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_ranks(q_rank, d_rank, dtype, device):
    args = quantized((3, 5, 4, 6, 8), dtype, device)
    Q, D, s, t = args
    q_mask, d_mask = mask((3, 5), device, "holes"), mask((4, 6), device, "holes")
    q, d = (slice(None) if q_rank == 3 else 0), (slice(None) if d_rank == 3 else 0)
    full = expected(*args, q_mask, d_mask)[q, d]
    limit = {"cpu": 5e-6, "cuda": 2e-3}[device]
    ref.assert_close(score(Q[q], D[d], s[q], t[d], q_mask[q], d_mask[d]), full, limit)
    reference = maxsim_quantized_reference(Q[q], D[d], q_mask[q], d_mask[d], scale_Q=s[q], scale_D=t[d])
    ref.assert_close(reference, full, 1e-7)


def test_scales_of_other_forms(device):
    Q, D = tokens((1, 5, 8), E4M3, device), tokens((4, 6, 8), E4M3, device)
    scale_Q, scale_D = scales((5,), device, "token"), torch.tensor([0.5], device=device)
    wanted, limit = expected(Q, D, scale_Q[None], scale_D[0]), {"cpu": 5e-6, "cuda": 2e-3}[device]
    ref.assert_close(score(Q, D, scale_Q, scale_D), wanted, limit)
    ref.assert_close(score(Q, D, scale_Q.double(), scale_D.half()), wanted, limit)
    first = expected(Q[:, :1], D, scale_Q[0], scale_D[0])[0]
    ref.assert_close(score(Q[0, :1], D, scale_Q[:1], scale_D), first, limit)


# ---- what is not finite, and what does not count ----


@pytest.mark.parametrize("bad", BAD_SCALES)
@pytest.mark.parametrize("where", ["Q", "D"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_scale_that_is_none_makes_nan_where_it_counts(dtype, rows, where, bad, way, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 4, 170, 32), dtype, device)
    clean = way(Q, D, scale_Q, scale_D)
    if where == "Q":
        scale_Q[1, 3] = bad
    else:
        scale_D[2, 140] = bad
    scores = way(Q, D, scale_Q, scale_D)
    hit = torch.zeros_like(scores, dtype=torch.bool)
    hit[(1, slice(None)) if where == "Q" else (slice(None), 2)] = True
    assert scores[hit].isnan().all() and torch.equal(scores[~hit], clean[~hit])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_scale_of_minus_zero_is_zero(dtype, rows, way, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 4, 170, 32), dtype, device)
    scale_D[2, 140] = 0.0
    clean = way(Q, D, scale_Q, scale_D)
    scale_D[2, 140] = -0.0
    assert torch.equal(way(Q, D, scale_Q, scale_D), clean)


@pytest.mark.parametrize("bad", [*BAD_SCALES, 0.0])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_bad_scale_counts_only_where_tokens_do(dtype, rows, bad, way, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 3, 70, 32), dtype, device)
    q_mask = torch.ones(rows, dtype=torch.bool, device=device)
    q_mask[1] = False
    d_mask = torch.ones(3, 70, dtype=torch.bool, device=device)
    d_mask[1] = False
    d_mask[2, ::2] = False
    clean = way(Q, D, scale_Q, scale_D, q_mask, d_mask)
    one = torch.tensor(bad, device=device)
    for args in ((one, scale_D), (scale_Q, one), (one, one)) if bad else ():
        scores = way(Q, D, *args, q_mask, d_mask)
        assert scores[0, ::2].isnan().all()
        assert not scores[1].any() and scores[0, 1] == 0  # what has no tokens scores 0, whatever their scale
    # Nor does what masked tokens and their scales hold.
    for x, keep in ((Q, q_mask), (D, d_mask)):
        x.view(torch.int8)[~keep] = 0x7F  # the NaN of both fp8 formats
    scale_Q, scale_D = scale_Q.masked_fill(~q_mask, bad), scale_D.masked_fill(~d_mask, bad)
    assert torch.equal(way(Q, D, scale_Q, scale_D, q_mask, d_mask), clean)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["token", "tensor"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_codes_and_scales_that_are_no_numbers(dtype, form, rows, way, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 5, 170, 64), dtype, device, form=form)
    D[1, 130, 5] = float("nan")
    Q[1, 3, 7] = float("nan")
    # Zero is a scale like others, and no mask: NaN * 0 is NaN.
    for args in ((Q, D, scale_Q, scale_D), (Q, D, torch.zeros_like(scale_Q), scale_D)):
        check(way, device, *args)
    if dtype == E5M2:
        Q[0] = Q[0].float().abs().add(1).to(dtype)
        D[2, 3, 5], D[3, 169, 6] = float("inf"), float("-inf")
        check(way, device, Q, D, scale_Q + 0.1, scale_D + 0.1)
    D.view(torch.uint8)[0, 100, 3], D.view(torch.uint8)[4, 169, 9] = 0x7F, 0xFF  # of either sign
    assert way(Q, D, scale_Q, scale_D)[:, [0, 4]].isnan().all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["token", "tensor"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_negative_scores(dtype, form, rows, way, device):
    # Padding with zeros would win here.
    Q = torch.rand(*rows, 64, device=device).mul(90).add(30).to(dtype)
    D = torch.rand(5, 70, 64, device=device).mul(-90).sub(30).to(dtype)
    args = Q, D, scales(rows, device, form) + 0.01, scales((5, 70), device, form) + 0.01
    assert (way(*args) < 0).all()
    check(way, device, *args)


@pytest.mark.parametrize("where", [0, 79, 80, 169])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["token", "tensor"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_maximum_of_either_sign_is_found_among_negative_ones(dtype, form, rows, where, device):
    Q = torch.randint(1, 9, (*rows, 32), device=device).to(dtype)
    D = torch.randint(-9, 0, (6, 170, 32), device=device).to(dtype)
    for j, best in enumerate((1, 0, -1)):
        D[j, where] = torch.full((32,), best, device=device).to(dtype)
    D[3] = 0
    D[4, where:] = 0
    scale_D = scales((6, 170), device, form) + 0.01
    args = Q, D, scales(rows, device, form) + 0.01, scale_D
    check(score, device, *args)
    if form == "token":  # zeros of either sign
        scale_D[5, where] = 0
        check(score, device, *args)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_huge_and_tiny_scales(dtype, rows, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 5, 70, 64), dtype, device)
    for s, t in ((1e30, 1e-30), (1e-30, 1e30), (1e-20, 1e-10)):
        args = Q, D, scale_Q * s, scale_D * t
        check(score, device, *args)


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, *COPIED], ids=str)
def test_every_gpu_scores_every_shape(shape, planned_as):
    args = quantized(shape, INT8, "cuda")
    wanted = expected(*args)
    ref.assert_close(score(*args), wanted, 1e-3)
    planned_as(80)
    ref.assert_close(score(*args), wanted, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("shape", [(1, 32, 4000, 300, 128), (64, 32, 4000, 300, 128)])
def test_nothing_is_copied(shape, dtype):
    Q, D, scale_Q, scale_D = quantized(shape, dtype, "cuda")
    score(Q, D[:1], scale_Q, scale_D[:1])
    for scale in (scale_D, scale_D[0, 0]):
        assert peak(lambda scale=scale: score(Q, D, scale_Q, scale)) < 8 << 20


# ---- CUDA graphs, memory ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("name", ["maxsim_quantized", "maxsim_dequantized", "public"])
def test_cuda_graph_without_synchronization(name, dtype):
    function = score if name == "public" else getattr(OPS, name)
    Q, D = tokens((9, 33, 128), dtype, "cuda"), tokens((7, 300, 128), dtype, "cuda")
    scale_Q, scale_D = scales((9, 33), "cuda", "token"), scales((7, 300), "cuda", "token")
    args = Q, D, scale_Q, scale_D, None, mask((7, 300), "cuda", "holes")
    function(*args)
    with waiting_for_nothing():
        function(*args)
    graph, captured = in_graph(lambda: function(*args))
    scale_D.mul_(0.5)
    graph.replay()
    assert torch.equal(captured, function(*args))


def test_documents_are_copied_one_at_a_time_where_no_more_fit(monkeypatch):
    monkeypatch.setattr(_blocks, "_BYTES", 1)
    Q, D, scale_Q, scale_D = quantized((2, 3, 9, 64, 16), INT8, "cpu")
    with Made() as seen:
        maxsim_dequantized(Q, D, scale_Q, scale_D, None, None)
    assert max(seen.elements) == D[0].numel()


@pytest.mark.gpu
def test_copies_stay_small():
    """256 MiB of codes are 1 GiB as float32."""
    Q = tokens((2, 32, 128), torch.int8, "cuda")
    D = torch.ones(2**14, 128, 128, dtype=torch.int8, device="cuda")
    one = torch.ones((), device="cuda")
    OPS.maxsim_dequantized(Q, D[:1], one, one, None, None)
    scales = one.expand(2**14, 128)
    assert peak(lambda: OPS.maxsim_dequantized(Q, D, one, scales, None, None)) < 3 * _blocks._BYTES
