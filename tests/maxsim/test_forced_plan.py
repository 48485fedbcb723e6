"""Plans that a forward could have beside the planner's own: each can be named, forced, and is right."""

import pytest
import torch

import late_interaction as li
from late_interaction import ops
from tests import ref
from tests.cases import Case, call, inputs

CASES = [
    Case("in-batch", 1, 40, 32, 300, 128, torch.bfloat16),
    Case("in-batch", 3, 5, 21, 70, 128, torch.float16, "holes"),
    Case("in-batch", 9, 7, 33, 31, 48, torch.bfloat16),
    Case("in-batch", 9, 140, 33, 130, 128, torch.bfloat16, "dead"),
    Case("in-batch", 5, 7, 60, 200, 320, torch.bfloat16),
    Case("in-batch", 5, 6, 70, 90, 1024, torch.bfloat16, "holes"),
    Case("in-batch", 9, 40, 7, 17, 100, torch.float16),
    Case("KD", 5, 60, 24, 6, 128, torch.bfloat16),
    Case("KD", 40, 25, 20, 2, 1024, torch.bfloat16),
    Case("KD", 9, 100, 24, 13, 200, torch.float16, "holes"),
    Case("KD", 3, 4, 130, 300, 128, torch.bfloat16, "holes"),
    Case("pairs", 7, 7, 64, 129, 96, torch.float16),
    Case("in-batch", 7, 17, 25, 32, 512, torch.bfloat16, "holes"),
    Case("in-batch", 6, 80, 98, 8, 320, torch.float16),
    Case("KD", 9, 20, 75, 6, 768, torch.bfloat16, "dead"),
    Case("in-batch", 3, 9, 90, 300, 128, torch.bfloat16, "holes"),
    # Several documents to a tile: the last one of a tile missing, or all but one; spans of whole eights, and
    # one token less and more; queries that divide the rows of a warp, share them, and span several tiles.
    Case("in-batch", 16, 13, 16, 24, 128, torch.bfloat16),
    Case("in-batch", 9, 61, 33, 17, 96, torch.float16),
    Case("in-batch", 3, 20, 513, 48, 64, torch.bfloat16, "holes"),
    Case("in-batch", 70, 7, 5, 64, 128, torch.bfloat16),
    Case("in-batch", 300, 5, 1, 1, 72, torch.float16),
    Case("in-batch", 21, 33, 20, 9, 40, torch.bfloat16, "dead"),
    Case("in-batch", 6, 18, 150, 40, 128, torch.float16, "holes"),
    Case("in-batch", 11, 50, 40, 55, 112, torch.bfloat16),
    Case("in-batch", 40, 37, 30, 32, 128, torch.bfloat16, "dead"),
    Case("in-batch", 3, 33, 128, 16, 128, torch.float16),
    Case("KD", 4, 9, 140, 21, 128, torch.float16, "holes"),
    # A warp a document, in tiles of 8 to 32 tokens: one or several a document, the last one cut or not;
    # documents for many rounds, and for some warps alone; several short queries that share the rows.
    Case("in-batch", 1, 5000, 32, 24, 128, torch.bfloat16),
    Case("in-batch", 1, 3, 16, 64, 128, torch.float16),
    Case("in-batch", 1, 1700, 5, 1, 72, torch.bfloat16),
    Case("in-batch", 2, 3000, 16, 33, 96, torch.float16, "holes"),
    Case("in-batch", 1, 2000, 31, 17, 40, torch.bfloat16, "dead"),
    Case("in-batch", 1, 4001, 32, 65, 128, torch.float16),
    Case("in-batch", 4, 1601, 8, 8, 64, torch.bfloat16, "holes"),
    Case("in-batch", 1, 2500, 1, 48, 8, torch.float16),
    # float32 by tensor cores and without them: rows of 16 bytes and not, Q that stays and that streams.
    Case("in-batch", 9, 7, 33, 131, 128, torch.float32, "holes"),
    Case("in-batch", 3, 5, 40, 90, 67, torch.float32, "dead"),
    Case("in-batch", 2, 9, 300, 65, 768, torch.float32),
    Case("KD", 5, 4, 130, 63, 48, torch.float32, "holes"),
    Case("pairs", 7, 7, 20, 300, 264, torch.float32, "dead"),
]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def alternatives(case, masked=None, sm=90, sm_count=132, normalize=False):
    per_query, masked = case.layout != "in-batch", case.masks != "none" if masked is None else masked
    N = 1 if case.layout == "pairs" else case.N
    shape = (case.Nq, N, case.Lq, case.Ld, case.d)
    options = ("highest", masked, normalize, "alternatives", "auto", sm, sm_count)
    text = ops.explain_plan(per_query, *shape, NAMES[case.dtype], *options)
    return text.split("\n")[:-1]


def test_plans_have_names_of_their_own_and_the_chosen_one_comes_first():
    for case in CASES:
        for sm in (80, 90):
            found = alternatives(case, sm=sm)
            assert len(set(found)) == len(found) and {"thin", "wide"} <= {name.split()[0] for name in found}
            assert ({"thin fp32", "wide fp32"} <= set(found)) == (case.dtype == torch.float32)
            wgmma = [
                name for name in found if name.split()[0] in ("documents", "rows", "split", "short", "stream")
            ]
            assert bool(wgmma) == (sm == 90 and case.d % 8 == 0)
    assert alternatives(CASES[0])[0] == "documents 1x3"
    assert alternatives(Case("in-batch", 256, 256, 32, 300, 128, torch.bfloat16))[0] == "rows 152"
    assert alternatives(CASES[5])[0].startswith("split")
    for piece_by_piece in (8, 9, 12, 13, 14):
        assert alternatives(CASES[piece_by_piece])[0] == "direct 8"
    assert "direct 32" not in alternatives(CASES[4])  # embeddings longer than its registers
    assert "rows 152 copied" in alternatives(CASES[3])
    assert not any("copied" in name for name in alternatives(CASES[0]))  # nothing to leave out


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan_agrees_with_float64(case, force):
    Q, D, q_mask, d_mask = inputs(case, "cuda")
    reference, expected = ref.maxsim(Q, D, q_mask, d_mask, False)
    limit = ref.tolerance(case.dtype)
    for name in alternatives(case, sm=ops.cuda_capability()):
        assert force(name) == name == force()
        ref.assert_close(call(li.maxsim, case, Q, D, q_mask, d_mask), reference, limit, name)
        scores, winners = call(li.maxsim_with_winners, case, Q, D, q_mask, d_mask)
        ref.assert_close(scores, reference, limit, f"{name}, scores beside winners")
        ref.assert_winners_close(winners, expected, Q, D, limit, False)


@pytest.mark.gpu
def test_a_plan_that_a_call_cannot_have_is_refused(force):
    Q, D = (torch.randn(3, n, 320, device="cuda", dtype=torch.bfloat16) for n in (50, 90))
    for name in ("rows 152", "direct 32", "documents 4x1", "no such plan"):
        force(name)
        with pytest.raises(RuntimeError, match=f"this call cannot have the plan '{name}', only .*thin"):
            li.maxsim(Q, D)
    assert force("") == force() == ""
    assert li.maxsim(Q, D).isfinite().all()


@pytest.mark.skipif(ops.cuda_missing is None, reason="the CUDA library is loaded")
def test_without_the_cuda_library_it_says_so():
    with pytest.raises(RuntimeError, match="late_interaction has no CUDA kernels here"):
        ops.forced_plan("wide")
