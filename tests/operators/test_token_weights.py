"""Masks and scales of document tokens, wherever they lie in memory: at any byte, apart, shared, turned."""

import pytest
import torch

import late_interaction as li
from tests.operators.test_quantized import E4M3, E5M2, INT8, expected, score
from tests.support import ref
from tests.support.cases import QUANTIZED, begun, code_limit, mask, tokens

BF16, FP16 = torch.bfloat16, torch.float16
# (Lq, Ld, d, dtype): tiles of 64 and of 128 tokens, in one stage and in several.
SHAPES = [
    (32, 301, 128, E4M3),
    (32, 1031, 128, BF16),
    (5, 63, 64, BF16),
    (64, 129, 320, FP16),
    (33, 257, 256, INT8),
    (128, 130, 512, E5M2),
    (96, 67, 96, BF16),
    (20, 1, 128, BF16),
    (32, 127, 48, INT8),
]
# Documents of all queries, and of each: several for every block of a GPU.
LAYOUTS = {"cpu": [(1, (9,)), (2, (2, 3))], "cuda": [(1, (300,)), (3, (3, 90))]}


def apart(x, between):
    """x, its documents so many elements apart."""
    wide = x.new_empty(*x.shape[:-1], x.shape[-1] + between)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


FORMS = {
    "at 1": lambda x: begun(x, 1),
    "at 3": lambda x: begun(x, 3),
    "at 15": lambda x: begun(x, 15),
    "apart": lambda x: apart(x, 13),
    "one document's": lambda x: x[..., :1, :].expand(x.shape),
    "one query's": lambda x: x[:1].expand(x.shape),
    "one token's": lambda x: x[..., :1].expand(x.shape),
    "every third": lambda x: x.repeat_interleave(3, -1)[..., 1::3],
    "turned": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


def weighed(shape, queries, documents, device):
    rows, Ld, d, dtype = shape
    Q = tokens((queries, rows, d), dtype, device)
    D = tokens((*documents, Ld, d), dtype, device)
    kept = mask(D.shape[:-1], device, "dead")
    scale = torch.rand(D.shape[:-1], device=device) + 0.01
    return Q, D, kept, scale


@pytest.mark.native
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", [0, 1], ids=["in-batch", "KD"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_are_those_of_the_same_numbers_elsewhere(shape, layout, form, device):
    Q, D, kept, scale = weighed(shape, *LAYOUTS[device][layout], device)
    kept, scale = FORMS[form](kept), FORMS[form](scale)
    if shape[-1] in QUANTIZED:
        one = torch.ones((), device=device)
        for its_mask, its_scale in ((kept, scale), (kept, one), (None, scale)):
            scores = score(Q, D, one, its_scale, None, its_mask)
            ref.assert_close(
                scores, expected(Q, D, one, its_scale, None, its_mask), code_limit(shape[-1], device)
            )
            there = None if its_mask is None else its_mask.contiguous()
            assert torch.equal(scores, score(Q, D, one, its_scale.contiguous(), None, there))
        return
    wanted, winners = ref.maxsim(Q, D, None, kept)
    scores, found = li.maxsim_with_winners(Q, D, None, kept)
    ref.assert_close(scores, wanted, ref.tolerance(shape[-1]))
    ref.assert_winners_close(found, winners, Q, D, ref.tolerance(shape[-1]))
    assert torch.equal(li.maxsim(Q, D, None, kept), scores)
    normalized = li.maxsim(Q, D, None, kept, normalize=True)
    assert torch.equal(normalized, li.maxsim(Q, D, None, kept.contiguous(), normalize=True))


@pytest.mark.parametrize("dtype", [BF16, E4M3, INT8])
@pytest.mark.parametrize("Ld", [1, 63, 64, 65, 127, 129, 300])
def test_a_document_knows_nothing_of_its_neighbours(dtype, Ld, device):
    """Alternately kept and masked, or of scales that count and that make NaN."""
    Q, D, _, scale = weighed((32, Ld, 128, dtype), 1, (41,), device)
    kept = torch.zeros(41, Ld, dtype=torch.bool, device=device)
    kept[::2] = True
    one = torch.ones((), device=device)
    plain = score(Q, D, one, one) if dtype in QUANTIZED else li.maxsim(Q, D)
    masked = score(Q, D, one, one, None, kept) if dtype in QUANTIZED else li.maxsim(Q, D, None, kept)
    assert torch.equal(masked[:, ::2], plain[:, ::2]) and not masked[:, 1::2].any()
    if dtype in QUANTIZED:
        bad = scale.masked_fill(~kept, float("nan"))
        scores = score(Q, D, one, bad)
        assert torch.equal(scores[:, ::2], score(Q, D, one, scale)[:, ::2])
        assert scores[:, 1::2].isnan().all()


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("form", ["at 3", "turned"])
@pytest.mark.parametrize("teams", ["1x3", "1x4", "2x2", "4x1"])
def test_every_share_of_warpgroups(teams, form, force):
    """Tiles that go round among warpgroups, and documents of each its own."""
    Q, D, kept, _ = weighed((32, 333, 128, BF16), 1, (500,), "cuda")
    kept = FORMS[form](kept)
    wanted = ref.maxsim(Q, D, None, kept)[0]
    force(f"documents {teams}")
    ref.assert_close(li.maxsim(Q, D, None, kept), wanted, ref.tolerance(BF16))
