"""What holds of packed queries and documents whether all pairs are scored, or listed ones."""

import pytest
import torch

from late_interaction.lik.varlen import maxsim_varlen
from late_interaction.score_pairs import score_pairs_packed
from tests.support import packed, ref

OPS = torch.ops.late_interaction
BOTH = pytest.mark.parametrize("listed", [False, True])


def found(listed, Q, D, cu_q, cu_d):
    """Scores and winners by the operator, and pair by pair in float64. Half as many pairs as there are."""
    if not listed:
        return OPS.maxsim_varlen_winners(Q, D, cu_q, cu_d), packed.scores_and_winners(Q, D, cu_q, cu_d)
    queries, documents = len(cu_q) - 1, len(cu_d) - 1
    pairs = packed.draw_pairs(queries, documents, queries * documents // 2, Q.device)
    args = (Q, D, cu_q, cu_d, *pairs, int(cu_q.diff().amax()))
    return OPS.maxsim_pairs_packed_winners(*args), packed.judged_pairs(*args)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("d", [16, 136])
def test_ties_go_to_the_lowest_token(dtype, d, listed, device):
    # Small integers multiply and add exactly: all ties are real.
    lengths_q, lengths_d = [200, 3, 64], [5, 64, 300, 81, 2, 700] * (10 if listed else 1)
    Q = torch.randint(-2, 3, (sum(lengths_q), d), device=device).to(dtype)
    D = torch.randint(-1, 2, (sum(lengths_d), d), device=device).to(dtype)
    offsets = (packed.offsets(x).to(device) for x in (lengths_q, lengths_d))
    (out, winners), (wanted, wanted_winners) = found(listed, Q, D, *offsets)
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
    (out, winners), (wanted, wanted_winners) = found(listed, Q, D, cu_q, cu_d)
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
            pairs = packed.draw_pairs(sequences, sequences, count, "cuda") if listed else ()
            scores = (score_pairs_packed if listed else maxsim_varlen)(Q, D, cu, cu, *pairs)
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
