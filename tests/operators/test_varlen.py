"""maxsim_varlen: packed sequences against float64, pair by pair."""

import pytest
import torch

import late_interaction as li
from late_interaction.lik.varlen import maxsim_varlen
from tests.support import packed, ref
from tests.support.calls import in_graph, refused, waiting_for_nothing
from tests.support.packed import pack_sequences

OPS = torch.ops.late_interaction
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CASES = [
    (name, packed.DIMS[(i + shift) % len(packed.DIMS)], DTYPES[(i + 3 * shift) % 4], shift % 2 * 3)
    for shift in range(6)
    for i, name in enumerate(packed.LENGTHS)
]


@pytest.mark.parametrize(("name", "d", "dtype", "stray"), CASES)
def test_scores_winners_and_gradients(name, d, dtype, stray, device):
    lengths_q, lengths_d = packed.LENGTHS[name]
    Q, cu_q = packed.pack(lengths_q, d, dtype, device, stray)
    D, cu_d = packed.pack(lengths_d, d, dtype, device, stray)
    scores, winners = packed.scores_and_winners(Q, D, cu_q, cu_d)

    out = maxsim_varlen(Q, D, cu_q, cu_d)
    ref.assert_close(out, scores, ref.tolerance(dtype))
    again, found = OPS.maxsim_varlen_winners(Q, D, cu_q, cu_d)
    ref.assert_close(again, scores, ref.tolerance(dtype))
    found = packed.widened(found, len(D)).long()
    assert torch.equal(found == -1, winners == -1), "sentinels differ"
    assert (found != winners).sum() <= 0.01 * found.numel()  # two similarities within rounding

    Q.requires_grad_(), D.requires_grad_()
    grad_scores = torch.randn_like(out)
    maxsim_varlen(Q, D, cu_q, cu_d).backward(grad_scores)
    grad_Q, grad_D = packed.gradients(grad_scores, Q.detach(), D.detach(), cu_q, cu_d, found)
    ref.assert_close(Q.grad, grad_Q, ref.GRAD_TOLERANCE[dtype], "grad_Q")
    ref.assert_close(D.grad, grad_D, ref.GRAD_TOLERANCE[dtype], "grad_D")


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


def test_views_and_long_offsets(device):
    Q, cu_q = packed.pack([5, 40], 24, torch.float32, device)
    D, cu_d = packed.pack([70, 3], 24, torch.float32, device)
    expected = maxsim_varlen(Q, D, cu_q, cu_d)
    wide_Q, wide_D = Q.repeat(1, 2), D.repeat_interleave(2, 0)
    out = maxsim_varlen(wide_Q[:, :24], wide_D[::2], cu_q.long(), cu_d.repeat_interleave(2)[::2])
    ref.assert_close(out, expected, 1e-6)
    transposed = maxsim_varlen(Q.t().contiguous().t(), D.t().contiguous().t(), cu_q, cu_d)
    ref.assert_close(transposed, expected, 1e-6)


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


Q, CU_Q = packed.pack([3, 5], 8, torch.float32)
D, CU_D = packed.pack([7, 4], 8, torch.float32)
BAD = {
    "Q is a list": ({"Q_packed": Q.tolist()}, TypeError, ["Q_packed", "torch.Tensor", "list"]),
    "D of integers": ({"D_packed": D.int()}, TypeError, ["D_packed", "bfloat16", "int32"]),
    "Q is padded": ({"Q_packed": Q[None]}, ValueError, ["Q_packed", "[tokens, d]", "[1, 8, 8]"]),
    "D is one token": ({"D_packed": D[0]}, ValueError, ["D_packed", "[tokens, d]", "[8]"]),
    "dtypes": ({"D_packed": D.half()}, TypeError, ["Q_packed and D_packed", "float32", "float16"]),
    "devices": ({"D_packed": D.to("meta")}, ValueError, ["Q_packed and D_packed", "cpu", "meta"]),
    "d": ({"D_packed": D[:, :7]}, ValueError, ["Q_packed and D_packed", "[8, 8]", "[11, 7]"]),
    "d is 0": ({"Q_packed": Q[:, :0], "D_packed": D[:, :0]}, ValueError, ["at least 1", "[8, 0]"]),
    "offsets are a list": ({"cu_seqlens_q": [0, 3, 8]}, TypeError, ["cu_seqlens_q", "list"]),
    "offsets are floats": ({"cu_seqlens_d": CU_D.float()}, TypeError, ["cu_seqlens_d", "int32", "float32"]),
    "offsets of rank 2": ({"cu_seqlens_d": CU_D[None]}, ValueError, ["cu_seqlens_d", "[1, 3]"]),
    "no offset": ({"cu_seqlens_q": CU_Q[:0]}, ValueError, ["cu_seqlens_q", "sequences + 1", "[0]"]),
    "offsets elsewhere": ({"cu_seqlens_q": CU_Q.to("meta")}, ValueError, ["cu_seqlens_q", "cpu", "meta"]),
    "offsets fall": ({"cu_seqlens_q": torch.tensor([0, 5, 3])}, ValueError, ["cu_seqlens_q", "not decrease"]),
    "offsets past the end": ({"cu_seqlens_d": CU_D + 1}, ValueError, ["cu_seqlens_d", "[0, 11]", "12"]),
    "offsets below 0": ({"cu_seqlens_d": CU_D - 1}, ValueError, ["cu_seqlens_d", "[0, 11]", "-1"]),
    "max_seqlen_q too small": ({"max_seqlen_q": 4}, ValueError, ["max_seqlen_q", "at least 5", "4"]),
    "max_seqlen_d too small": ({"max_seqlen_d": 6}, ValueError, ["max_seqlen_d", "at least 7", "6"]),
    "max_seqlen_d a float": ({"max_seqlen_d": 9.5}, TypeError, ["max_seqlen_d", "int", "float"]),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input(bad):
    change, error, words = BAD[bad]
    good = {"Q_packed": Q, "D_packed": D, "cu_seqlens_q": CU_Q, "cu_seqlens_d": CU_D}
    refused(error, words, maxsim_varlen, **(good | change))


@pytest.mark.gpu
def test_lengths_are_hints_on_a_gpu_and_nothing_waits_for_it():
    given = [x.cuda() for x in (Q, D, CU_Q, CU_D)]
    expected = maxsim_varlen(*given)
    for tokens in given[:2]:
        tokens.requires_grad_()
    with waiting_for_nothing():
        scores = maxsim_varlen(*given, max_seqlen_q=1, max_seqlen_d=1)
        scores.sum().backward()
    assert torch.equal(scores, expected)


SEQUENCES = {
    "a tensor": (Q, TypeError, ["sequences", "list", "Tensor"]),
    "nothing": ([], TypeError, ["sequences", "at least one"]),
    "rank 3": ([Q, Q[None]], ValueError, ["sequences[1]", "[L, 8]", "[1, 8, 8]"]),
    "another d": ([Q, Q[:, :7]], ValueError, ["sequences[1]", "[L, 8]", "[8, 7]"]),
    "another dtype": ([Q, Q.half()], TypeError, ["sequences[1]", "float32", "float16"]),
    "another device": ([Q, Q.to("meta")], ValueError, ["sequences[1]", "cpu", "meta"]),
}


@pytest.mark.parametrize("bad", SEQUENCES)
def test_bad_sequences(bad):
    sequences, error, words = SEQUENCES[bad]
    refused(error, words, pack_sequences, sequences)
