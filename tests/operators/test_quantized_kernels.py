"""Quantized scores of shapes that Hopper GPUs have kernels for: rows of whole 16 bytes, few of them and many.

What is true of these shapes is true on every device.
"""

import pytest
import torch

from late_interaction import ops
from late_interaction._checks.tensors import CODES
from tests import ref
from tests.cases import QUANTIZED, code_limit, mask, tokens
from tests.operators.test_quantized import BAD_SCALES, E4M3, E5M2, INT8, expected, scales, score

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
# Few query rows of a document, and many.
ROWS = [(3, 9), (5, 33)]
# Document tokens about the edges of one tile, and behind two: of fp8 and int8, of every kernel.
WIDTHS = (64, 80, 104, 112, 128, 144, 152, 160)
EDGES = sorted({w + e for w in WIDTHS for e in (-1, 0, 1)} | {2 * w + 1 for w in WIDTHS})


def quantized(shape, dtype, device, layout="in-batch", form="token"):
    Nq, Lq, Nd, Ld, d = shape
    if layout == "KD":
        Nq, Nd = min(Nq, 5), min(Nd, 7)
    Q = tokens((Nq, Lq, d), dtype, device)
    D = tokens((Nd, Ld, d) if layout == "in-batch" else (Nq, Nd, Ld, d), dtype, device)
    return Q, D, scales(Q.shape[:-1], device, form), scales(D.shape[:-1], device, form)


@pytest.mark.parametrize("kind", ["none", "holes", "dead"])
@pytest.mark.parametrize("form", ["token", "tensor", "strided"])
@pytest.mark.parametrize("layout", ["in-batch", "KD"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_scores(dtype, shape, layout, form, kind, device):
    if device == "cpu" and (form == "strided" or kind == "holes"):
        pytest.skip("the CPU has these shapes in test_quantized.py")
    chosen = (layout == "KD") + (form == "tensor") + (kind == "dead") + SHAPES.index(shape)
    if device == "cpu" and chosen % 2:
        pytest.skip("the CPU takes every two of layout, form and mask together")
    Q, D, scale_Q, scale_D = quantized(shape, dtype, device, layout, form)
    masks = mask(Q.shape[:-1], device, kind), mask(D.shape[:-1], device, kind)
    scores = score(Q, D, scale_Q, scale_D, *masks)
    ref.assert_close(scores, expected(Q, D, scale_Q, scale_D, *masks), code_limit(dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "holes"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_many_documents_of_one_query(dtype, d, kind):
    Q, D, scale_Q, scale_D = quantized((1, 32, 2300, 170, d), dtype, "cuda")
    masks = mask(Q.shape[:-1], "cuda", kind), mask(D.shape[:-1], "cuda", kind)
    scores = score(Q, D, scale_Q, scale_D, *masks)
    ref.assert_close(scores, expected(Q, D, scale_Q, scale_D, *masks), code_limit(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "holes"])
@pytest.mark.parametrize("d", [64, 128, 400])
@pytest.mark.parametrize("sizes", [(1, 32, 2300, 170), (1, 32, 2300, 300), (64, 32, 500, 170)], ids=str)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_every_call_gives_the_same_scores(dtype, sizes, d, kind):
    """Multiplications of a block's other documents hold up the loads of a document's mask and scales."""
    Q, D, scale_Q, scale_D = quantized((*sizes, d), dtype, "cuda")
    masks = mask(Q.shape[:-1], "cuda", kind), mask(D.shape[:-1], "cuda", kind)
    first = score(Q, D, scale_Q, scale_D, *masks)
    for _ in range(60):
        torch.testing.assert_close(score(Q, D, scale_Q, scale_D, *masks), first, rtol=0, atol=0)
    ref.assert_close(first, expected(Q, D, scale_Q, scale_D, *masks), code_limit(dtype))


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
            scale_Q, scale_D = scales(rows, device, form), scales(D.shape[:-1], device, form)
            for d_mask in (None, mask(D.shape[:-1], device, "holes")):
                wanted = expected(*args, scale_Q, scale_D, None, d_mask)
                ref.assert_close(
                    score(*args, scale_Q, scale_D, None, d_mask), wanted, code_limit(dtype, device)
                )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_every_code_means_what_pytorch_says(dtype, rows, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(dtype)
    D = torch.zeros(256, 3, 32, device=device).to(dtype)
    D[:, :, 5] = codes[:, None]
    one = torch.ones((), device=device)
    Q = torch.ones(*rows, 32, device=device).to(dtype)
    wanted = (codes.float() * rows[1]).expand(rows[0], 256)
    for scale in (one, one.expand(256, 3).contiguous()):
        torch.testing.assert_close(score(Q, D, one, scale), wanted, rtol=0, atol=0, equal_nan=True)


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
def test_whole_numbers_and_powers_of_two_score_exactly(dtype, rows, device):
    Q = torch.randint(-2, 3, (*rows, 64), device=device).to(dtype)
    D = torch.randint(-1, 2, (4, 170, 64), device=device).to(dtype)
    scale_Q, scale_D = (2.0 ** torch.randint(-2, 3, x.shape[:-1], device=device) for x in (Q, D))
    for s in (scale_Q, scale_Q.new_tensor(0.5)):
        for t in (scale_D, scale_D.new_tensor(4.0), torch.zeros_like(scale_D)):
            assert torch.equal(score(Q, D, s, t).double(), expected(Q, D, s, t))


@pytest.mark.parametrize("bad", BAD_SCALES)
@pytest.mark.parametrize("where", ["Q", "D"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_scale_that_is_none_makes_nan_where_it_counts(dtype, rows, where, bad, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 4, 170, 32), dtype, device)
    clean = score(Q, D, scale_Q, scale_D)
    if where == "Q":
        scale_Q[1, 3] = bad
    else:
        scale_D[2, 140] = bad
    scores = score(Q, D, scale_Q, scale_D)
    hit = torch.zeros_like(scores, dtype=torch.bool)
    hit[(1, slice(None)) if where == "Q" else (slice(None), 2)] = True
    assert scores[hit].isnan().all() and torch.equal(scores[~hit], clean[~hit])


@pytest.mark.parametrize("bad", BAD_SCALES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_bad_scale_counts_only_where_tokens_do(dtype, rows, bad, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 3, 70, 32), dtype, device)
    q_mask = torch.ones(rows, dtype=torch.bool, device=device)
    q_mask[1] = False
    d_mask = torch.ones(3, 70, dtype=torch.bool, device=device)
    d_mask[1] = False
    d_mask[2, ::2] = False
    bad = torch.tensor(bad, device=device)
    for args in ((bad, scale_D), (scale_Q, bad), (bad, bad)):
        scores = score(Q, D, *args, q_mask, d_mask)
        assert scores[0, ::2].isnan().all()
        assert not scores[1].any() and scores[0, 1] == 0  # what has no tokens scores 0, whatever their scale
    # Nor does what masked tokens and their scales hold.
    clean = score(Q, D, scale_Q, scale_D, q_mask, d_mask)
    for x, keep in ((Q, q_mask), (D, d_mask)):
        x.view(torch.int8)[~keep] = 0x7F
    scale_Q, scale_D = scale_Q.masked_fill(~q_mask, bad), scale_D.masked_fill(~d_mask, bad)
    assert torch.equal(score(Q, D, scale_Q, scale_D, q_mask, d_mask), clean)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["token", "tensor"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_codes_and_scales_that_are_no_numbers(dtype, form, rows, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 5, 170, 64), dtype, device, form=form)
    D[1, 130, 5] = float("nan")
    Q[1, 3, 7] = float("nan")
    # Zero is a scale like others, and no mask: NaN * 0 is NaN.
    for args in ((Q, D, scale_Q, scale_D), (Q, D, torch.zeros_like(scale_Q), scale_D)):
        ref.assert_close(score(*args), expected(*args), code_limit(dtype, device))
    if dtype == E5M2:
        Q[0] = Q[0].float().abs().add(1).to(dtype)
        D[2, 3, 5], D[3, 169, 6] = float("inf"), float("-inf")
        args = Q, D, scale_Q + 0.1, scale_D + 0.1
        ref.assert_close(score(*args), expected(*args), code_limit(dtype, device))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", ["token", "tensor"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_negative_scores(dtype, form, rows, device):
    # Padding with zeros would win here.
    Q = torch.rand(*rows, 64, device=device).mul(90).add(30).to(dtype)
    D = torch.rand(5, 70, 64, device=device).mul(-90).sub(30).to(dtype)
    args = Q, D, scales(rows, device, form) + 0.01, scales((5, 70), device, form) + 0.01
    assert (score(*args) < 0).all()
    ref.assert_close(score(*args), expected(*args), code_limit(dtype, device))


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
    ref.assert_close(score(*args), expected(*args), code_limit(dtype, device))
    if form == "token":  # zeros of either sign
        scale_D[5, where] = 0
        ref.assert_close(score(*args), expected(*args), code_limit(dtype, device))


@pytest.mark.parametrize("form", ["token", "tensor"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_nan_of_either_sign_counts(dtype, rows, form, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 3, 170, 32), dtype, device, form=form)
    D.view(torch.uint8)[0, 100, 3], D.view(torch.uint8)[2, 169, 9] = 0x7F, 0xFF
    scores = score(Q, D, scale_Q, scale_D)
    assert scores[:, [0, 2]].isnan().all() and scores[:, 1].isfinite().all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_huge_and_tiny_scales(dtype, rows, device):
    Q, D, scale_Q, scale_D = quantized((*rows, 5, 70, 64), dtype, device)
    for s, t in ((1e30, 1e-30), (1e-30, 1e30), (1e-20, 1e-10)):
        args = Q, D, scale_Q * s, scale_D * t
        ref.assert_close(score(*args), expected(*args), code_limit(dtype, device))


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, *COPIED], ids=str)
def test_every_gpu_scores_every_shape(shape):
    capability = ops.cuda_capability()
    args = quantized(shape, INT8, "cuda")
    wanted = expected(*args)
    ref.assert_close(score(*args), wanted, 1e-3)
    ops.cuda_capability(80)
    try:
        ref.assert_close(score(*args), wanted, 1e-3)
    finally:
        ops.cuda_capability(0)
    assert ops.cuda_capability() == capability


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("shape", [(1, 32, 4000, 300, 128), (64, 32, 4000, 300, 128)])
def test_nothing_is_copied(shape, dtype):
    if ops.cuda_capability() != 90:
        pytest.skip("the kernels are those of Hopper GPUs")
    Q, D, scale_Q, scale_D = quantized(shape, dtype, "cuda")
    score(Q, D[:1], scale_Q, scale_D[:1])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    score(Q, D, scale_Q, scale_D)
    score(Q, D, scale_Q, scale_D[0, 0])
    assert torch.cuda.max_memory_allocated() - before < 8 << 20


def test_codes_are_what_the_checks_take():
    assert set(CODES) == set(QUANTIZED)
