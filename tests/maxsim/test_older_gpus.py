"""The kernels of GPUs without wgmma about the edges of their tiles, on whatever GPU is here."""

import pytest
import torch

import late_interaction as li
from late_interaction import ops
from tests.operators import test_quantized as codes
from tests.support import packed, ref
from tests.support.cases import QUANTIZED, mask
from tests.support.judge import Judge, twice, whole_numbers

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
FEW_TO_MANY = pytest.mark.parametrize("rows", [(1, 20), (3, 43), (30, 40)])


@pytest.fixture(params=[75, 80, 86, 120], autouse=True)
def planned(request, planned_as):
    planned_as(request.param)


@pytest.mark.parametrize("d", [64, 128, 256])
@FEW_TO_MANY
@pytest.mark.parametrize("hidden", ["nan", "inf", "-inf"])
def test_what_a_mask_hides_has_no_say(hidden, rows, d):
    Q = torch.randn(*rows, d, device="cuda", dtype=BF16)
    D = torch.randn(40, 150, d, device="cuda", dtype=BF16)
    d_mask = mask((40, 150), "cuda", "holes")
    clean = li.maxsim_with_winners(Q, D, None, d_mask)
    dirty = li.maxsim_with_winners(Q, D.masked_fill(~d_mask.unsqueeze(-1), float(hidden)), None, d_mask)
    assert all(map(torch.equal, clean, dirty))


@FEW_TO_MANY
def test_ties_go_to_the_lowest_token(rows):
    D = twice(whole_numbers(-1, 1, 9, 200, 128)).to(BF16)
    Judge(whole_numbers(-2, 2, *rows, 128).to(BF16), D).check_exact()


@FEW_TO_MANY
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_numbers_that_are_not_finite(value, rows):
    Q = torch.randn(*rows, 128, device="cuda", dtype=BF16)
    D = torch.randn(50, 90, 128, device="cuda", dtype=BF16)
    D[3, 77, 5], D[9, 0] = value, value
    Judge(Q, D).check_not_finite()


@FEW_TO_MANY
@pytest.mark.parametrize(("q", "d"), [(1e30, 1e-30), (1e-30, 1e30), (1e30, 1.0), (1.0, 1e-30)])
def test_rows_of_any_magnitude(q, d, rows):
    """Before 8.0 products of bf16 are those of fp16, with a power of two for each row."""
    Q = (torch.randn(*rows, 128, device="cuda") * q).to(BF16)
    of_document = torch.tensor([d, 1.0], device="cuda").repeat(20)
    D = (torch.randn(40, 150, 128, device="cuda") * of_document[:, None, None]).to(BF16)
    unit = q * of_document.double()
    ref.assert_close(li.maxsim(Q, D) / unit, ref.maxsim(Q, D)[0] / unit, ref.tolerance(BF16))


@pytest.mark.parametrize(("Nq", "Lq"), [(1, 30), (9, 32), (70, 17)])
@pytest.mark.parametrize(
    "d, dtype", [(64, BF16), (128, BF16), (200, BF16), (128, torch.float32), (67, torch.float32)]
)
def test_packed_sequences(Nq, Lq, d, dtype):
    generator = torch.Generator().manual_seed(0)
    d_lengths = [0, 1, 300, 17, 64, 0, 65, 500, 16, 3] * 9
    Q, cu_q = packed.pack(torch.randint(0, Lq + 1, (Nq,), generator=generator).tolist(), d, dtype, "cuda")
    D, cu_d = packed.pack(d_lengths, d, dtype, "cuda")
    # Tensor cores truncate as they add, and products are about 1: an absolute error that grows with d.
    limit = {"rel": 5e-6, "abs": 1e-5 * max(1, d / 67)}
    scores = li.lik.maxsim_varlen(Q, D, cu_q, cu_d)
    for i, q in enumerate(packed.slices(Q, cu_q)):
        for j, x in enumerate(packed.slices(D, cu_d)):
            wanted = (q.double() @ x.double().T).amax(-1).sum() if len(x) and len(q) else 0.0
            assert float(scores[i, j]) == pytest.approx(float(wanted), **limit)
    of_documents = torch.arange(len(d_lengths), device="cuda").int()  # few enough to be scored one by one
    listed = ops.maxsim_pairs_packed(Q, D, cu_q, cu_d, of_documents % Nq, of_documents, None, "highest")
    torch.testing.assert_close(listed, scores[of_documents % Nq, of_documents], rtol=5e-6, atol=limit["abs"])


@pytest.mark.parametrize("kind", ["none", "holes"])
@pytest.mark.parametrize("form", ["token", "tensor"])
@pytest.mark.parametrize("layout", ["in-batch", "KD"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 32, 300, 65, 128),
        (2, 9, 7, 129, 96),
        (3, 40, 9, 200, 256),
        (40, 32, 30, 300, 128),
        (7, 100, 5, 1, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_scores_of_codes(dtype, shape, layout, form, kind):
    Q, D, scale_Q, scale_D = codes.quantized(shape, dtype, "cuda", layout, form)
    masks = mask(Q.shape[:-1], "cuda", kind), mask(D.shape[:-1], "cuda", kind)
    wanted = codes.expected(Q, D, scale_Q, scale_D, *masks)
    ref.assert_close(codes.score(Q, D, scale_Q, scale_D, *masks), wanted, ref.tolerance(FP16))


@pytest.mark.parametrize("rows", codes.ROWS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_codes_mean_what_pytorch_says(dtype, rows):
    codes.test_every_code_means_what_pytorch_says(dtype, rows, "cuda")
    codes.test_whole_numbers_and_powers_of_two_score_exactly(dtype, rows, codes.score, "cuda")
    for d in (128, 256) if dtype == torch.int8 else ():
        codes.test_the_largest_int8_products_are_exact(d, True, rows, "cuda")


@pytest.mark.parametrize("kind", ["none", "holes"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("d", [128, 100, 8])
@pytest.mark.parametrize("rows", [(9, 33), (40, 32)])
def test_float32_by_three_products(rows, d, normalize, kind):
    """The smallest work that is worth copies, and rows far below the largest."""
    N, Ld = 70, -(-int(1.1e9) // (rows[0] * rows[1] * 70 * d))
    Q, D = (torch.randn(*size, d, device="cuda") for size in (rows, (N, Ld)))
    D[::5] *= 1e-20
    d_mask = mask((N, Ld), "cuda", kind)
    plan = li.explain_plan(Q, D, d_mask=d_mask is not None, normalize=normalize)
    # A block of 7.5 has too little shared memory for them.
    assert ("maxsim_forward_sm80_3xfp16, " in plan) == (ops.cuda_capability() != 75)
    judge = Judge(Q, D, None, d_mask, normalize=normalize)
    alone, scores, winners = judge.run()
    limit = ref.tolerance(torch.float32)
    for of in (slice(0, None, 5), slice(1, None, 5)):
        ref.assert_close(scores[:, of], judge.scores[:, of], limit)
    ref.assert_winners_close(winners[:, 1::5], judge.winners[:, 1::5], Q, D[1::5], limit, normalize)
    assert torch.equal(alone, scores)


@pytest.mark.parametrize("kind", ["none", "holes"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("d", [768, 264, 67])
@pytest.mark.parametrize("rows", [(1, 20), (3, 43), (9, 57), (16, 32)])
def test_long_embeddings_and_rows_of_odd_bytes(rows, d, dtype, kind):
    for Ld in (1, 47, 48, 97, 193):
        Q, D = (torch.randn(*size, d, device="cuda", dtype=dtype) for size in (rows, (37, Ld)))
        Judge(Q, D, None, mask((37, Ld), "cuda", kind)).check()
