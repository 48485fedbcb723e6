"""Batches larger than L2: documents go by in parts.

Winners and scores must be those of small calls, to the bit; gradients are compared with float64 sums over the
same winners.
"""

import pytest
import torch

import late_interaction as li
from tests.support import packed, ref
from tests.support.calls import in_graph
from tests.support.cases import tokens
from tests.support.given_winners import reference

ops = torch.ops.late_interaction
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def close(got, want, dtype):
    error = (got.double() - want).norm() / want.norm()
    assert error < ref.GRAD_TOLERANCE[dtype], float(error)


def inputs(Nq, N, Lq, Ld, d, dtype, form="contiguous"):
    torch.manual_seed(Nq + N + Ld)
    return tokens((Nq, Lq, d), dtype, "cuda", form), tokens((N, Ld, d), dtype, "cuda", form)


def packed_inputs(q_lengths, d_lengths, d, dtype, stray=0):
    """Q and D [tokens, d], and offsets; tokens of no sequence lie before the first and behind the last."""
    sides = (packed.pack(lengths, d, dtype, "cuda", stray) for lengths in (q_lengths, d_lengths))
    return zip(*sides, strict=True)


# Documents take more than half of an H100's or H200's L2, and many query rows meet them.
LARGE = [
    (300, 700, 32, 180, 128, BF16),
    (1031, 1025, 32, 180, 128, BF16),
    (523, 257, 17, 601, 128, FP16),
    (331, 1103, 48, 33, 768, BF16),
    (300, 419, 32, 300, 96, FP32),
    (70, 130, 130, 1030, 128, BF16),
]
# And winners take 256 MiB or more, so that gradients have parts. The last two have no tiles of query rows.
LARGER = [
    (2053, 2048, 32, 180, 128, BF16),
    (1409, 1025, 96, 65, 256, FP16),
    (2048, 1543, 42, 90, 64, FP32),
    (700, 461, 420, 1030, 128, BF16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_scores_and_winners_are_those_of_small_calls(shape, masked):
    *sizes, dtype = shape
    Nq, N, Lq, Ld, _ = sizes
    Q, D = inputs(*sizes, dtype)
    q_mask = torch.rand(Nq, Lq, device="cuda") < 0.9 if masked else None
    d_mask = torch.rand(N, Ld, device="cuda") < 0.8 if masked else None
    scores, winners = ops.maxsim_winners(Q, D, q_mask, d_mask, False, "highest", "auto", False)
    assert torch.equal(ops.maxsim(Q, D, q_mask, d_mask, False, "highest", "auto", False), scores)
    for first in range(0, N, 97):
        part = slice(first, first + 97)
        some = None if d_mask is None else d_mask[part]
        its_scores, its_winners = ops.maxsim_winners(
            Q, D[part], q_mask, some, False, "highest", "auto", False
        )
        torch.testing.assert_close(scores[:, part], its_scores, rtol=1e-6, atol=1e-5)
        # Another tile adds the same products in the same order, or ties fall as they fall.
        assert (winners[:, part] != its_winners).float().mean() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_normalized_scores_are_those_of_small_calls(shape):
    *sizes, dtype = shape
    Q, D = inputs(*sizes, dtype)
    scores = li.maxsim(Q, D, normalize=True)
    want = torch.cat([li.maxsim(Q, part, normalize=True) for part in D.split(97)], 1)
    torch.testing.assert_close(scores, want, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [32, 130])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_packed_scores_and_winners_are_those_of_small_calls(longest, dtype):
    torch.manual_seed(longest)
    q_lengths, d_lengths = torch.randint(1, longest + 1, (700,)), torch.randint(0, 400, (701,))
    (Q, D), offsets = packed_inputs(q_lengths.tolist(), d_lengths.tolist(), 128, dtype)
    scores, winners = ops.maxsim_varlen_winners(Q, D, *offsets, "highest")
    assert torch.equal(ops.maxsim_varlen(Q, D, *offsets, "highest"), scores)
    for first in range(0, 701, 97):
        ends = offsets[1][first : first + 98]
        part = D[ends[0] : ends[-1]]
        its_scores, its_winners = ops.maxsim_varlen_winners(Q, part, offsets[0], ends - ends[0], "highest")
        torch.testing.assert_close(scores[:, first : first + 97], its_scores, rtol=1e-6, atol=1e-5)
        same = winners[first : first + 97].int() == its_winners.int()
        assert (~same).float().mean() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGER, ids=str)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gradients_of_parts(shape, needs):
    *sizes, dtype = shape
    Q, D = inputs(*sizes, dtype)
    _, winners = ops.maxsim_winners(Q, D, None, None, False, "highest", "auto", False)
    grad = torch.randn(sizes[0], sizes[1], device="cuda")
    found = ops.maxsim_backward(grad, Q, D, winners, False, "lowmem", *needs)
    again = ops.maxsim_backward(grad, Q, D, winners, False, "lowmem", *needs)
    for got, twice, want, needed in zip(found, again, reference(grad, Q, D, winners), needs, strict=True):
        assert torch.equal(got, twice)
        assert got.numel() == 0 if not needed else close(got, want, dtype) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGER[:3], ids=str)
def test_gradients_of_normalized_parts(shape):
    *sizes, dtype = shape
    Q, D = (x.requires_grad_() for x in inputs(*sizes, dtype))
    weights = torch.randn(sizes[0], sizes[1], device="cuda")
    (li.maxsim(Q, D, normalize=True) * weights).sum().backward()
    rows = [x.detach().double().requires_grad_() for x in (Q, D)]
    unit = [x / x.norm(dim=-1, keepdim=True) for x in rows]
    _, winners = ops.maxsim_winners(Q.detach(), D.detach(), None, None, True, "highest", "auto", False)
    torch.autograd.backward(unit, reference(weights, *(x.detach() for x in unit), winners))
    for got, want in zip((Q, D), rows, strict=True):
        close(got.grad, want.grad, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGER[::3], ids=str)
def test_recomputed_gradients_of_parts(shape):
    *sizes, dtype = shape
    Q, D = (x.requires_grad_() for x in inputs(*sizes, dtype))
    grad = torch.randn(sizes[0], sizes[1], device="cuda")
    saved = torch.autograd.grad(li.maxsim(Q, D, backward="lowmem"), (Q, D), grad)
    for needed in [(Q, D), (Q,), (D,)]:
        found = torch.autograd.grad(li.maxsim(Q, D, winners="recompute"), needed, grad)
        for x, got in zip(needed, found, strict=True):
            want = saved[0 if x is Q else 1].double()
            close(got, want, dtype)


# Packed batches whose gradients have parts: (queries, their longest, documents, their longest, d, dtype,
# planned as this capability, which has 6 MiB of L2 where it is 86; 0 is the GPU's own).
PACKED = [
    (1203, 31, 2000, 20, 128, BF16, 86),
    (1501, 17, 4001, 12, 256, FP16, 86),
    (700, 31, 1301, 24, 64, FP32, 86),
    (600, 31, 3001, 50, 64, FP32, 86),  # winners of 32 bits
    (400, 130, 9000, 8, 768, BF16, 86),
    (4001, 39, 5000, 50, 128, BF16, 0),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", PACKED, ids=str)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_packed_gradients_of_parts(shape, needs, planned_as):
    queries, longest, documents, longest_d, d, dtype, capability = shape
    torch.manual_seed(queries)
    q_lengths = torch.randint(1, longest + 1, (queries,)).tolist()
    d_lengths = torch.randint(0, longest_d + 1, (documents,)).tolist()
    (Q, D), offsets = packed_inputs(q_lengths, d_lengths, d, dtype, stray=3)
    _, winners = ops.maxsim_varlen_winners(Q, D, *offsets, "highest")
    grad = torch.randn(documents, queries, device="cuda").t()
    args = (Q, D, *offsets, winners, *needs)
    planned_as(capability)
    mean_Q, mean_D = Q.shape[0] // queries, D.shape[0] // documents
    sms = torch.cuda.get_device_properties().multi_processor_count
    shapes, here = ((queries, mean_Q, d), (documents, mean_D, d)), {"sm": capability or 90, "sm_count": sms}
    plan = li.explain_plan(*shapes, dtype=dtype, packed=True, **here)
    assert "grad_Q by" in plan and "grad_D by" in plan
    found, again = (ops.maxsim_varlen_backward(grad, *args) for _ in range(2))
    strided = ops.maxsim_varlen_backward(grad.contiguous(), *args)
    for got, *others, want, needed in zip(
        found, again, strided, packed.gradients(grad, Q, D, *offsets, winners), needs, strict=True
    ):
        assert all(torch.equal(got, other) for other in others)
        assert got.numel() == 0 if not needed else close(got, want, dtype) is None
    inputs = zip((Q, D), needs, strict=True)
    sums = [torch.ones(x.shape, device="cuda", dtype=grad.dtype) if need else None for x, need in inputs]
    torch.ops.late_interaction.maxsim_varlen_backward_into_(grad, *args[:-2], *sums)
    for added, got in zip(sums, found, strict=True):
        if added is not None:
            close(added - 1, got, dtype)


@pytest.mark.gpu
def test_packed_parts_keep_tokens_of_no_sequence_at_zero(planned_as):
    planned_as(86)
    (Q, D), (cu_q, cu_d) = packed_inputs([20] * 1200, [10] * 2000, 128, BF16, stray=70)
    _, winners = ops.maxsim_varlen_winners(Q, D, cu_q, cu_d, "highest")
    grad = torch.ones(1200, 2000, device="cuda")
    grad_Q, grad_D = ops.maxsim_varlen_backward(grad, Q, D, cu_q, cu_d, winners, True, True)
    for x in (grad_Q, grad_D):
        assert (x[:70] == 0).all() and (x[-70:] == 0).all() and x[70:-70].abs().sum() > 0


@pytest.mark.gpu
def test_packed_parts_of_a_graph(planned_as):
    """Nothing waits for the device, so a CUDA graph holds all of it."""
    planned_as(86)
    (Q, D), offsets = packed_inputs([20] * 1200, [10] * 2000, 128, BF16)
    _, winners = ops.maxsim_varlen_winners(Q, D, *offsets, "highest")
    grad = torch.randn(1200, 2000, device="cuda")

    def gradients():
        return ops.maxsim_varlen_backward(grad, Q, D, *offsets, winners, True, True)

    want = gradients()
    torch.cuda.synchronize()
    graph, found = in_graph(gradients)
    for x in found:
        x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, want))


def test_the_plan_says_what_stays_in_l2_of_packed_batches():
    shapes = (8192, 32, 128), (8192, 180, 128)
    said = li.explain_plan(*shapes, packed=True, sm=90, sm_count=132)
    assert "documents a launch, which stay in L2 while all 8192 queries meet them" in said
    assert "grad_Q by" in said and "grad_D by" in said and "method     lowmem" in said
    alone = li.explain_plan(*shapes, packed=True, winners=False, sm=90, sm_count=132)
    assert "backward" not in alone
    small = li.explain_plan((64, 32, 128), (64, 180, 128), packed=True, sm=90, sm_count=132)
    assert "L2" not in small and "longest first" in small


def test_the_plan_says_what_stays_in_l2():
    Q, D = torch.empty(8192, 32, 128, device="meta"), torch.empty(8192, 180, 128, device="meta")
    Q, D = Q.bfloat16(), D.bfloat16()
    said = li.explain_plan(Q, D, sm=90)
    assert "documents a launch, which stay in L2" in said
    assert (
        "8 documents at a time in shared memory" in said and "query rows pass through shared memory" in said
    )
    longer = li.explain_plan((8192, 32, 256), (8192, 180, 256), sm=90)  # of more dims than that kernel takes
    assert "8 documents at a time in shared memory" in longer and "whose rows stay in L2" in longer
    older = li.explain_plan((8192, 32, 128), (8192, 180, 128), sm=80, sm_count=132)
    assert "4 documents at a time in shared memory" in older
    assert "query rows pass through shared memory" in older
    # Two stages of four such documents do not fit the shared memory of these GPUs.
    smaller = li.explain_plan((8192, 32, 128), (8192, 180, 128), sm=86, sm_count=132)
    assert "documents pass through shared memory" in smaller
    assert "query rows pass through shared memory" in smaller
    small = li.explain_plan(Q[:64], D[:64], sm=90)
    assert "L2" not in small
