"""Every instruction set that the CPU kernels are written for, where this CPU has it."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

import late_interaction as li
from late_interaction.ops.winners import widen
from late_interaction.score_pairs import score_pairs_packed
from tests.operators import test_plaid as plaid
from tests.support import coded, packed, ref
from tests.support.cases import QUANTIZED, call, inputs, mask, tokens, walk
from tests.support.isas import ISAS
from tests.support.page_ends import at_page_end

CASES = list(walk(150))[3::5]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_winners_and_gradients(isa, case):
    Q, D, q_mask, d_mask = inputs(case, "cpu")
    Q, D = Q.detach().requires_grad_(), D.detach().requires_grad_()
    reference, expected = ref.maxsim(Q, D, q_mask, d_mask, case.normalize)
    scores, winners = call(li.maxsim_with_winners, case, Q, D, q_mask, d_mask)
    limit = ref.tolerance(case.dtype)
    ref.assert_close(scores, reference, limit)
    ref.assert_winners_close(winners, expected, Q, D, limit, case.normalize)
    ref.assert_gradients(scores, Q, D, winners, ref.GRAD_TOLERANCE[case.dtype], case.normalize)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("d", [128, 130])
def test_every_dtype(isa, dtype, d):
    """33 query tokens, 70 document tokens and 130 dims: whole vectors and a rest of each."""
    Q, D = torch.randn(5, 33, d).to(dtype), torch.randn(4, 70, d).to(dtype)
    scores, winners = li.maxsim_with_winners(Q, D)
    expected, best = ref.maxsim(Q, D)
    ref.assert_close(scores, expected, ref.tolerance(dtype))
    ref.assert_winners_close(winners, best, Q, D, ref.tolerance(dtype), False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("Lq", [7, 32, 65])
@pytest.mark.parametrize("d", [16, 64, 128])
def test_tokens_are_widened_while_others_multiply(isa, Lq, d, dtype):
    """Every number of document tokens around the groups of 6, 12 and 32; one panel of query rows and more.
    Products and sums of small integers are exact."""
    Q = torch.randint(-8, 9, (2, Lq, d)).to(dtype)
    for Ld in [*range(1, 50), 203, 391]:
        D = torch.randint(-8, 9, (3, Ld, d)).to(dtype)
        d_mask = mask((3, Ld), "cpu", "holes") if Ld % 2 else None
        scores, winners = li.maxsim_with_winners(Q, D, d_mask=d_mask)
        expected, best = ref.maxsim(Q, D, None, d_mask)
        assert torch.equal(scores.double(), expected.double())
        assert torch.equal(winners.long(), best.long())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_sequences_listed_pairs_and_recomputed_winners(isa, dtype):
    """Small integers are exact, so each has the scores and gradients of its padded form, to the bit."""
    q_lengths, d_lengths = [7, 32, 33, 1, 64], [1, 15, 16, 17, 40, 300, 24]
    Q, D = (torch.randint(-4, 5, (sum(n), 64)).to(dtype) for n in (q_lengths, d_lengths))
    cu_q, cu_d = packed.offsets(q_lengths), packed.offsets(d_lengths)
    expected, _ = packed.scores_and_winners(Q, D, cu_q, cu_d)
    assert torch.equal(li.lik.maxsim_varlen(Q, D, cu_q, cu_d).double(), expected)
    pair_q, pair_d = torch.tensor([4, 0, 2, 2, 3, 1]).int(), torch.tensor([5, 0, 3, 6, 5, 2]).int()
    scores = score_pairs_packed(Q, D, cu_q, cu_d, pair_q, pair_d)
    assert torch.equal(scores.double(), expected[pair_q.long(), pair_d.long()])
    q, d = Q[-64:][None].requires_grad_(), D[-324:-24].view(5, 60, 64).requires_grad_()
    saved, recomputed = (li.maxsim(q, d, winners=winners) for winners in ("save", "recompute"))
    grads = [torch.autograd.grad(scores.sum(), (q, d)) for scores in (saved, recomputed)]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("precision", ["highest", "high", "medium", "fp16"])
def test_float32_precisions(isa, precision):
    Q, D = torch.randn(5, 33, 130), torch.randn(4, 70, 130)
    scores = torch.ops.late_interaction.maxsim(Q, D, None, None, False, precision)
    ref.assert_close(scores, ref.maxsim(Q, D)[0], ref.tolerance(torch.float32, precision))


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("d", [1, 8, 37, 128])
def test_quantized_tokens(isa, dtype, d):
    Q, D = tokens((5, 33, d), dtype, "cpu", "sliced"), tokens((4, 70, d), dtype, "cpu", "transposed")
    scale_Q, scale_D, d_mask = torch.rand(5, 33), torch.rand(4, 70), mask((4, 70), "cpu", "holes")
    scores = torch.ops.late_interaction.maxsim_quantized(Q, D, scale_Q, scale_D, None, d_mask)
    expected = ref.maxsim(ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D), None, d_mask)[0]
    ref.assert_close(scores, expected, 5e-6)


def integers(*shape):
    """Codes of every size, and many of the largest."""
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    return codes.masked_fill(torch.rand(shape) < 0.3, -128)


@pytest.mark.parametrize("Lq", [1, 5, 16, 17, 33])
@pytest.mark.parametrize("Ld", [1, 7, 24, 301])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 63, 128, 129, 1024])
def test_int8_sums_are_exact(isa, Lq, Ld, d):
    """Scores of integers below 2^24 have the same bits with every instruction set."""
    Q, D = integers(3, Lq, d), integers(4, Ld, d)
    ones = torch.ones(())
    q_mask, d_mask = mask((3, Lq), "cpu", "holes"), mask((4, Ld), "cpu", "holes")
    scores = torch.ops.late_interaction.maxsim_quantized(Q, D, ones, ones, q_mask, d_mask)
    assert torch.equal(scores, ref.maxsim(Q, D, q_mask, d_mask)[0].float())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("d", [1 << 16, (1 << 17) - 1, 1 << 17, (1 << 17) + 5])
def test_int8_sums_of_many_dims(isa, d, sign, turned):
    """The largest products of all, up to where 32 bits would overflow and beyond, and negative ones."""
    Q = torch.full((1, 1, d), -128, dtype=torch.int8)
    D = torch.full((1, 1, d), -128 if sign > 0 else 127, dtype=torch.int8)
    if turned:
        Q, D = D, Q
    scores = torch.ops.late_interaction.maxsim_quantized(Q, D, torch.ones(()), torch.ones(()), None, None)
    expected = (Q.double() * D.double()).sum()
    assert abs(scores.item() / expected.item() - 1) < 1e-5


@pytest.mark.parametrize("case", plaid.CASES[::3], ids=str)
def test_residual_compressed_documents(isa, case):
    Q, index = plaid.draw(case, "cpu")
    expected, best = plaid.expected(Q, index, case.normalize)
    limit = ref.tolerance(case.dtype) * (10 if case.Ld == 1 else 1)
    for args in (index.padded, index.packed):
        scores, winners = plaid.OPS.maxsim_residual_winners(Q, *args, case.normalize)
        ref.assert_close(scores, expected, limit)
        tokens = index.tokens
        ref.assert_winners_close(widen(winners, case.Ld), best, Q.double(), tokens, 1e-5, case.normalize)
        assert torch.equal(plaid.OPS.maxsim_residual(Q, *args, case.normalize), scores)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_centroids_of_another_dtype(isa, nbits, kept):
    """Integers, so that tokens are exact in every dtype and scores have the same bits. Codes that no centroid
    has count as 0, and the last residual ends with the memory that holds it."""
    n, L, d = 9, 37, 40
    Q = torch.randint(-4, 5, (3, 7, d)).to(torch.bfloat16)
    centroids, weights = torch.randint(-4, 5, (n, d)).to(kept), torch.randint(-4, 5, (2**nbits,)).float()
    codes = torch.randint(-2, n + 2, (4, L), dtype=torch.int32)
    residuals = torch.randint(256, (4, L, d * nbits // 8), dtype=torch.uint8)
    lengths = torch.tensor([L, 0, 5, L - 1])
    scores = plaid.OPS.maxsim_residual(Q, codes, residuals, lengths, centroids, weights, nbits, False)
    known = torch.where((codes >= 0) & (codes < n), codes, 0).long()
    D = centroids.double()[known] + weights.double()[plaid.unpacked(residuals, nbits, d)]
    d_mask = torch.arange(L) < lengths.unsqueeze(1)
    assert torch.equal(scores.double(), ref.maxsim(Q.double(), D, None, d_mask)[0])


# ---- nothing is read past the last value: a page that faults, which ends the process, lies behind it ----

# Around a vector of 2 to 32 values and two and eight of them, and multiples of one less and of one more.
PAGE_DIMS = [1, 2, 3, 5, 7, 8, 9, 14, 15, 16, 17, 21, 24, 28, 30, 31, 32, 33, 45, 62, 63, 64, 65, 75, 90, 105,
             119, 120, 127, 128, 129, 135]  # fmt: skip
PAGE_CASES = list(zip(PAGE_DIMS, itertools.cycle([1, 2, 5, 7, 12, 13]), strict=False))


def check_at_page_ends(operator, *inputs):
    """The same bits wherever the inputs lie."""
    elsewhere, there = operator(*inputs), operator(*map(at_page_end, inputs))
    assert all(map(torch.equal, elsewhere, there))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_and_gradients_at_page_ends(isa, dtype, normalize):
    def scores_and_gradients(Q, D):
        Q, D = Q.requires_grad_(), D.requires_grad_()
        scores, winners = li.maxsim_with_winners(Q, D, normalize=normalize)
        return scores, winners, *torch.autograd.grad(scores.sum(), (Q, D))

    for d, L in PAGE_CASES:
        check_at_page_ends(
            scores_and_gradients, torch.randn(2, L, d).to(dtype), torch.randn(3, L, d).to(dtype)
        )


@pytest.mark.parametrize("precision", ["high", "medium", "fp16"])
def test_float32_precisions_at_page_ends(isa, precision):
    def scores(Q, D):
        return (torch.ops.late_interaction.maxsim(Q, D, None, None, False, precision),)

    for d, L in PAGE_CASES:
        check_at_page_ends(scores, torch.randn(2, L, d), torch.randn(3, L, d))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_tokens_at_page_ends(isa, dtype):
    def scores(Q, D, scale_Q, scale_D):
        return (torch.ops.late_interaction.maxsim_quantized(Q, D, scale_Q, scale_D, None, None),)

    for d, L in PAGE_CASES:
        Q, D = tokens((2, L, d), dtype, "cpu"), tokens((3, L, d), dtype, "cpu")
        check_at_page_ends(scores, Q, D, torch.rand(2, L), torch.rand(3, L))


@pytest.mark.parametrize("nbits", [1, 4])
def test_packed_codes_at_page_ends(isa, nbits):
    OPS = torch.ops.late_interaction
    for d, L in PAGE_CASES:
        Q, D = (coded.packed((n, L), d, nbits, "cpu") for n in (2, 3))
        codes, scale_Q, scale_D = integers(2, L, d), torch.rand(2, L), torch.rand(3, L)
        check_at_page_ends(
            lambda *x: (OPS.maxsim_asymmetric(*x, None, None, nbits),), codes, D, scale_Q, scale_D
        )
        if nbits == 1:
            check_at_page_ends(lambda *x, d=d: (OPS.maxsim_hamming(*x, d, None, None),), Q, D)


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_residual_compressed_documents_at_page_ends(isa, nbits):
    for d, L in [(d, L) for d, L in PAGE_CASES if d * nbits % 8 == 0]:
        codes = torch.randint(9, (3, L), dtype=torch.int32)
        residuals = torch.randint(256, (3, L, d * nbits // 8), dtype=torch.uint8)
        inputs = torch.randn(2, L, d), codes, residuals, torch.full((3,), L), torch.randn(9, d)
        check_at_page_ends(
            lambda *x: plaid.OPS.maxsim_residual_winners(*x, nbits, True), *inputs, torch.randn(2**nbits)
        )


def test_muvera_at_page_ends(isa):
    for d, L in PAGE_CASES:
        muvera = li.Muvera(d, 3, 5, None if d == 1 else d // 2)
        check_at_page_ends(lambda x: (muvera.encode_documents([x]),), torch.randn(L, d))  # noqa: B023


CODE = """
import torch, late_interaction as li
print(torch.ops.late_interaction.cpu_isa(""), li.maxsim(torch.ones(1, 2, 3), torch.ones(1, 4, 3)).item())
"""


def with_variable(name):
    environment = {**os.environ, "LATE_INTERACTION_CPU_ISA": name}
    command = [sys.executable, "-c", CODE]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_variable_forces_one():
    done = with_variable("portable")
    assert done.stdout == "portable 6.0\n", done.stderr


def test_the_variable_has_a_name_that_no_cpu_has():
    done = with_variable("sse9")
    assert done.returncode == 1
    assert "RuntimeError: late_interaction: LATE_INTERACTION_CPU_ISA is 'sse9'; this CPU" in done.stderr
    assert "'portable'" in done.stderr


def test_unknown():
    with pytest.raises(RuntimeError, match=r"'sse9'; this CPU, with this build, has .*'portable'"):
        torch.ops.late_interaction.cpu_isa("sse9")
    assert torch.ops.late_interaction.cpu_isa("") in ISAS
