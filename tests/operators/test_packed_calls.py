"""Packed queries and documents against float64, pair by pair: maxsim_varlen, which scores all pairs, and
score_pairs_packed, which scores listed ones (test_score_pairs.py has what lists alone can be)."""

import pytest
import torch

import late_interaction as li
from late_interaction.lik.varlen import maxsim_varlen
from late_interaction.score_pairs import score_pairs_packed
from tests.support import packed, ref
from tests.support.calls import in_graph, waiting_for_nothing
from tests.support.packed import pack_sequences

OPS = torch.ops.late_interaction
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BOTH = pytest.mark.parametrize("listed", [False, True])
CASES = [
    (listed, name, packed.DIMS[(i + shift) % len(packed.DIMS)], DTYPES[(i + 3 * shift) % 4], shift % 2 * 3)
    for listed in (False, True)
    for shift in range(6)
    for i, name in enumerate(packed.LENGTHS)
]


def scored(pairs, *args, **options):
    return maxsim_varlen(*args, **options) if pairs is None else score_pairs_packed(*args, *pairs, **options)


def with_winners(pairs, Q, D, cu_q, cu_d):
    """Scores and winners by the operator, and in float64. pairs: None for all."""
    args = Q, D, cu_q, cu_d
    if pairs is None:
        return OPS.maxsim_varlen_winners(*args), packed.scores_and_winners(*args)
    args = *args, *pairs, int(cu_q.diff().amax()) if len(cu_q) > 1 else 0
    return OPS.maxsim_pairs_packed_winners(*args), packed.judged_pairs(*args)


def half_of(listed, cu_q, cu_d, device):
    """Half as many pairs as there are, where they are listed."""
    queries, documents = len(cu_q) - 1, len(cu_d) - 1
    return packed.draw_pairs(queries, documents, queries * documents // 2, device) if listed else None


def check(pairs, Q, D, cu_q, cu_d):
    """Compare scores, winners and gradients with float64."""
    args, dtype = (Q, D, cu_q, cu_d), Q.dtype
    (again, found), (scores, winners) = with_winners(pairs, *args)
    ref.assert_close(scored(pairs, *args), scores, ref.tolerance(dtype))
    ref.assert_close(again, scores, ref.tolerance(dtype))
    found = packed.widened(found, len(D)).long()
    assert torch.equal(found == -1, winners == -1), "sentinels differ"
    assert (found != winners).sum() <= 0.01 * found.numel()  # two similarities within rounding

    Q.requires_grad_(), D.requires_grad_()
    out = scored(pairs, *args, **({} if pairs is None else {"max_seqlen_q": found.shape[1]}))
    grad_scores = torch.randn_like(out)
    out.backward(grad_scores)
    given = grad_scores, Q.detach(), D.detach(), cu_q, cu_d
    tolerance = ref.GRAD_TOLERANCE[dtype]
    if pairs is None:
        wanted = packed.gradients(*given, found)
    else:
        wanted = packed.gradients_of_pairs(*given, *pairs, found)
        tolerance *= 1.5  # a few pairs leave a few elements: rounding hardly averages
    for x, grad, name in zip((Q, D), wanted, "QD", strict=True):
        ref.assert_close(x.grad, grad, tolerance, f"grad_{name}")


@pytest.mark.parametrize(("listed", "name", "d", "dtype", "stray"), CASES)
def test_scores_winners_and_gradients(listed, name, d, dtype, stray, device):
    lengths_q, lengths_d = packed.LENGTHS[name]
    Q, cu_q = packed.pack(lengths_q, d, dtype, device, stray)
    D, cu_d = packed.pack(lengths_d, d, dtype, device, stray)
    pairs = packed.draw_pairs(len(lengths_q), len(lengths_d), 1 + len(lengths_d), device) if listed else None
    check(pairs, Q, D, cu_q, cu_d)


@BOTH
def test_views_and_long_integers(listed, device):
    Q, cu_q = packed.pack([5, 40], 24, torch.float32, device)
    D, cu_d = packed.pack([70, 3, 0, 9], 24, torch.float32, device)
    pairs = packed.draw_pairs(2, 4, 3, device) if listed else None
    expected = scored(pairs, Q, D, cu_q, cu_d)
    wide_Q, wide_D = Q.repeat(1, 2), D.repeat_interleave(2, 0)
    cu_q, cu_d, *strided = (x.repeat_interleave(2)[::2].long() for x in (cu_q, cu_d, *(pairs or ())))
    pairs = strided or None
    ref.assert_close(scored(pairs, wide_Q[:, :24], wide_D[::2], cu_q, cu_d), expected, 1e-6)
    ref.assert_close(
        scored(pairs, Q.t().contiguous().t(), D.t().contiguous().t(), cu_q, cu_d), expected, 1e-6
    )
    one = D[:1].expand(len(D), -1)
    same = scored(pairs, Q, one.contiguous(), cu_q, cu_d)
    ref.assert_close(scored(pairs, Q, one, cu_q, cu_d), same, 1e-6)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("d", [16, 136])
def test_ties_go_to_the_lowest_token(dtype, d, listed, device):
    # Small integers multiply and add exactly: all ties are real.
    lengths_q, lengths_d = [200, 3, 64], [5, 64, 300, 81, 2, 700] * (10 if listed else 1)
    Q = torch.randint(-2, 3, (sum(lengths_q), d), device=device).to(dtype)
    D = torch.randint(-1, 2, (sum(lengths_d), d), device=device).to(dtype)
    offsets = [packed.offsets(x).to(device) for x in (lengths_q, lengths_d)]
    (out, winners), (wanted, wanted_winners) = with_winners(half_of(listed, *offsets, device), Q, D, *offsets)
    assert torch.equal(out.double(), wanted)
    assert torch.equal(winners.long(), wanted_winners)


@BOTH
@pytest.mark.parametrize("rows", [20, 200])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_stays_with_its_document(value, rows, listed, device):
    Q, cu_q = packed.pack([rows, 7], 64, torch.bfloat16, device)
    D, cu_d = packed.pack([9, 70, 0, 300, 5] * (4 if listed else 1), 64, torch.bfloat16, device)
    D[9 + 40, 3] = value
    D[9 + 69, 3] = value
    pairs = half_of(listed, cu_q, cu_d, device)
    (out, winners), (wanted, wanted_winners) = with_winners(pairs, Q, D, cu_q, cu_d)
    ref.assert_close(out, wanted, 1e-5)
    assert torch.equal(winners.long(), wanted_winners)


@pytest.mark.gpu
@BOTH
def test_offsets_that_lead_elsewhere_harm_nothing(listed):
    Q, _ = packed.pack([300], 64, torch.bfloat16, "cuda")
    D, _ = packed.pack([400], 64, torch.bfloat16, "cuda")
    Q.requires_grad_(), D.requires_grad_()
    for wrong in ([0, 1 << 30], [-9, 40, 20, 300], [300, 200, 100, 0], [500, 600, 700]):
        cu, sequences = torch.tensor(wrong, dtype=torch.int32, device="cuda"), len(wrong) - 1
        for count in (2, 50) if listed else (0,):
            pairs = packed.draw_pairs(sequences, sequences, count, "cuda") if listed else None
            scores = scored(pairs, Q, D, cu, cu)
            torch.autograd.grad(scores.sum(), (Q, D))
    torch.cuda.synchronize()


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize(("dtype", "d"), [(torch.bfloat16, 128), (torch.float32, 40), (torch.float16, 768)])
def test_older_kernels_agree(dtype, d, listed, planned_as):
    lengths_q, lengths_d = packed.LENGTHS["rows past a tile"]
    Q, cu_q = packed.pack(lengths_q, d, dtype, "cuda", 2)
    D, cu_d = packed.pack(lengths_d * (20 if listed else 1), d, dtype, "cuda", 1)
    op, rest = OPS.maxsim_varlen_winners, ()
    if listed:
        op, rest = OPS.maxsim_pairs_packed_winners, (*packed.draw_pairs(7, 160, 200, "cuda"), 300)
    out = op(Q, D, cu_q, cu_d, *rest)
    planned_as(80)
    older = op(Q, D, cu_q, cu_d, *rest)
    ref.assert_close(older[0], out[0], 1e-5)
    assert (older[1] != out[1]).sum() <= 0.001 * out[1].numel()


# ---- all pairs ----


def test_equals_the_padded_call(device):
    lengths_q, lengths_d = [8, 31, 17, 32], [200, 1, 33, 64, 90]
    Q, cu_q = packed.pack(lengths_q, 128, torch.bfloat16, device)
    D, cu_d = packed.pack(lengths_d, 128, torch.bfloat16, device)

    def pad(tokens, cu):
        return torch.nn.utils.rnn.pad_sequence(packed.slices(tokens, cu), batch_first=True)

    q_mask = torch.arange(32, device=device) < torch.tensor(lengths_q, device=device)[:, None]
    d_mask = torch.arange(200, device=device) < torch.tensor(lengths_d, device=device)[:, None]
    padded = li.maxsim(pad(Q, cu_q), pad(D, cu_d), q_mask, d_mask)
    ref.assert_close(maxsim_varlen(Q, D, cu_q, cu_d), padded, 1e-6)


def test_two_dtypes_under_autocast_are_autocasts_whatever_precision_says(device):
    Q, cu_q = packed.pack([5, 9], 64, torch.float32, device, 0)
    D, cu_d = packed.pack([30, 2], 64, torch.bfloat16, device, 0)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = packed.scored(Q, D, cu_q, cu_d, precision="highest")
    assert torch.equal(out, maxsim_varlen(Q.bfloat16(), D, cu_q, cu_d))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_added_to_sums(dtype, needs, device):
    Q, cu_q = packed.pack([3, 0, 5], 24, dtype, device)
    D, cu_d = packed.pack([7, 0, 40], 24, dtype, device)
    scores, winners = OPS.maxsim_varlen_winners(Q, D, cu_q, cu_d)
    grad = torch.randn(scores.shape, device=device, dtype=scores.dtype)
    args = (grad, Q, D, cu_q, cu_d, winners)
    before = [torch.randn(x.shape, device=device, dtype=scores.dtype) for x in (Q, D)]
    sums = [x.clone() if need else None for x, need in zip(before, needs, strict=True)]
    OPS.maxsim_varlen_backward_into_(*args, *sums)
    for found, start, part in zip(sums, before, OPS.maxsim_varlen_backward(*args), strict=True):
        if found is not None:
            tolerance = 1e-12 if dtype is torch.float64 else 1e-6 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(found, start + part, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_captured_in_a_cuda_graph_follows_new_offsets():
    Q, cu_q = packed.pack([20, 12, 200], 64, torch.bfloat16, "cuda")
    D, cu_d = packed.pack([70, 200, 30], 64, torch.bfloat16, "cuda")
    maxsim_varlen(Q, D, cu_q, cu_d)
    graph, out = in_graph(lambda: maxsim_varlen(Q, D, cu_q, cu_d))
    for lengths_q, lengths_d in (([1, 0, 231], [300, 0, 0]), ([100, 100, 32], [1, 298, 1])):
        cu_q.copy_(packed.offsets(lengths_q))
        cu_d.copy_(packed.offsets(lengths_d))
        graph.replay()
        ref.assert_close(out, packed.scores_and_winners(Q, D, cu_q, cu_d)[0], 5e-6)


def test_sequences_are_packed(device):
    sequences = [torch.randn(L, 6, device=device, requires_grad=True) for L in (3, 0, 7)]
    tokens, cu_seqlens = pack_sequences(sequences)
    assert cu_seqlens.tolist() == [0, 3, 3, 10] and cu_seqlens.dtype == torch.int32
    assert cu_seqlens.device == tokens.device
    tokens.square().sum().backward()
    assert all(torch.equal(x.grad, 2 * x) for x in sequences)


@pytest.mark.gpu
def test_lengths_are_hints_on_a_gpu_and_nothing_waits_for_it():
    (Q, cu_q), (D, cu_d) = (packed.pack(x, 8, torch.float32, "cuda") for x in ([3, 5], [7, 4]))
    given = [Q, D, cu_q, cu_d]
    expected = maxsim_varlen(*given)
    for tokens in given[:2]:
        tokens.requires_grad_()
    with waiting_for_nothing():
        scores = maxsim_varlen(*given, max_seqlen_q=1, max_seqlen_d=1)
        scores.sum().backward()
    assert torch.equal(scores, expected)
