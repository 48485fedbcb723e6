"""Half-precision copies that a GPU multiplies in place of many rows: of unit rows, and of float32 at "high"
(one fp16 number for an element) and at "highest" (two)."""

from typing import NamedTuple

import pytest
import torch

import late_interaction as li
from tests.support import ref
from tests.support.judge import Judge


class Way(NamedTuple):
    """A call that copies, and how far its scores and its similarities may be apart from float64."""

    dtype: torch.dtype
    options: dict
    limit: float
    apart: float
    words: str  # of its plan

    @property
    def normalize(self):
        return self.options.get("normalize", False)


def unit(dtype, precision="high"):
    options = {"normalize": True, "precision": precision}
    return Way(dtype, options, ref.UNIT_SCORE_TOLERANCE, ref.UNIT_WINNER_TOLERANCE, "in fp16, normalized")


WAYS = {
    "unit bf16": unit(torch.bfloat16),
    "unit fp16": unit(torch.float16),
    "unit fp32": unit(torch.float32),
    "unit fp32 medium": unit(torch.float32, "medium"),
    "high": Way(torch.float32, {"precision": "high"}, 1e-3, 1e-3, "scaled"),
    "highest": Way(torch.float32, {"precision": "highest"}, 3e-6, 3e-6, "3xfp16"),
    "highest, unit": Way(torch.float32, {"precision": "highest", "normalize": True}, 3e-6, 3e-6, "3xfp16"),
}
gpu = [pytest.mark.gpu, pytest.mark.native]
EVERY = pytest.mark.parametrize("way", [pytest.param(WAYS[name], marks=gpu, id=name) for name in WAYS])
FLOAT32 = pytest.mark.parametrize(
    "way", [pytest.param(WAYS[name], marks=pytest.mark.gpu, id=name) for name in ("high", "highest")]
)


def problem(way, d=128, N=30, Ld=130, rows=(70, 33)):
    """Work enough that a GPU makes copies for it."""
    Q, D = (torch.randn(*size, d, device="cuda") for size in (rows, (N, Ld)))
    if not way.normalize:
        Q, D = (torch.nn.functional.normalize(x, dim=-1) for x in (Q, D))
    Q, D = Q.to(way.dtype), D.to(way.dtype)
    assert way.words in li.explain_plan(Q, D, winners=False, **way.options)
    return Q, D


def check(way, Q, D, q_mask=None, d_mask=None, limit=None):
    options = {name: x for name, x in way.options.items() if name != "normalize"}
    judge = Judge(Q, D, q_mask, d_mask, normalize=way.normalize)
    return judge.check(limit or way.limit, way.apart, **options)


def test_the_planner_makes_them_where_products_outweigh_the_pass():
    def made(Q, D, **options):
        here = {"dtype": torch.bfloat16, "normalize": True, "winners": False, "sm": 90, "sm_count": 132}
        return "in fp16, normalized" in li.explain_plan(Q, D, **here | options)

    train = (256, 32, 128), (256, 300, 128)
    assert made(*train) and made(*train, dtype=torch.float16) and made(*train, sm=80, sm_count=108)
    assert made(*train, dtype=torch.float32, precision="high")
    assert made((64, 32, 768), (64, 300, 768)) and made((2, 2048, 128), (2, 30, 300, 128))
    # Copies of what a mask keeps are enough; "highest" makes two numbers of an element.
    for options in ({"normalize": False}, {"d_mask": True}, {"dtype": torch.float32, "precision": "highest"}):
        assert not made(*train, **options)
    assert not made((1, 1024, 128), (1000, 1024, 128))  # few rows meet a token
    assert not made((256, 32, 100), (256, 300, 100))  # rows of no whole 16 bytes
    assert not made((256, 32, 128), (20000, 300, 128))  # copies of over a GiB
    assert not made((64, 32, 768), (64, 300, 768), sm=80, sm_count=108)  # no kernel wants whole rows of these


DIMS = {
    "3xfp16": [8, 9, 63, 64, 65, 100, 128, 129, 200, 640, 768, 1030],
    "scaled": [128],
    "in fp16, normalized": [8, 40, 48, 96, 128, 192, 256, 264, 768, 1024],
}


@pytest.mark.parametrize(
    ("way", "d"),
    [pytest.param(x, d, marks=gpu, id=f"{n}-{d}") for n, x in WAYS.items() for d in DIMS[x.words]],
)
def test_scores_and_winners(way, d):
    Q, D = problem(way, d, N=5000 // d if way.words == "3xfp16" else 30)
    check(way, Q, D, limit=(2 if d == 8 else 1) * way.limit)
    if way.words == "3xfp16" and not way.normalize:  # as exact as float32 itself
        exact, einsum = ref.maxsim(Q, D)[0], torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)
        found = li.maxsim(Q, D, **way.options)
        assert ref.relative_error(found, exact) <= 2 * ref.relative_error(einsum, exact)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
@EVERY
def test_masked_tokens_have_no_say(way, garbage):
    garbage = garbage if garbage != 1e30 else torch.finfo(way.dtype).max / 2
    Q, D = problem(way)
    q_mask, d_mask = torch.rand(70, 33, device="cuda") < 0.9, torch.rand(30, 130, device="cuda") < 0.7
    d_mask[3], d_mask[4, 5:] = False, False
    scores, winners = check(way, Q, D, q_mask, d_mask)
    dirty = li.maxsim_with_winners(
        Q, D.masked_fill(~d_mask.unsqueeze(-1), garbage), q_mask, d_mask, **way.options
    )
    assert torch.equal(dirty[0], scores) and torch.equal(dirty[1], winners) and not scores[:, 3].any()


@EVERY
def test_documents_of_each_query(way):
    Q, D = torch.randn(2, 2100, 64, device="cuda"), torch.randn(2, 45, 90, 64, device="cuda")
    Q, D = Q.to(way.dtype), D.to(way.dtype)
    check(way, Q, D)
    check(way, Q, D, None, torch.rand(2, 45, 90, device="cuda") < 0.6)


@pytest.mark.parametrize("form", ref.LAID)
@EVERY
def test_inputs_that_lie_otherwise(way, form):
    laid, plain = ref.laid(form, *problem(way))
    found, wanted = (li.maxsim_with_winners(*x, **way.options) for x in (laid, plain))
    if way.words == "3xfp16" and way.normalize:  # norms are summed in the order of the loads
        ref.assert_close(found[0], wanted[0].double(), way.limit)
        assert (found[1] == wanted[1]).float().mean() > 0.999
    else:
        assert all(map(torch.equal, found, wanted))


@EVERY
def test_rows_that_are_zero_or_not_finite(way):
    Q, D = problem(way)
    Q[0, 0], D[0], D[1, 2] = 0, 0, 0
    check(way, Q, D)
    Q[1, 1, 0], D[2, 5, 3], D[4, 9, 1] = float("inf"), -float("inf"), float("nan")
    scores, winners = ref.maxsim(Q, D, normalize=way.normalize)
    out, found = li.maxsim_with_winners(Q, D, **way.options)
    ref.assert_close(out, scores, way.limit)
    settled = scores.isnan().unsqueeze(-1).expand_as(winners).clone()
    settled[1] = False  # what an infinite element of Q makes of similarities is for its products to say
    assert not way.normalize or torch.equal(found.long()[settled], winners[settled])


@EVERY
def test_equal_tokens_tie(way):
    Q, D = problem(way, Ld=180)
    D[:, 90:] = D[:, :90]
    assert check(way, Q, D)[1].max() < 90
    d_mask = torch.rand(30, 180, device="cuda") < 0.5
    _, found = check(way, Q, D, None, d_mask)
    twin = (found - 90).clamp_min(0).long()
    kept = d_mask.expand(70, -1, -1).gather(-1, twin)
    assert not (kept & (found >= 90)).any()


@EVERY
def test_a_hundred_runs_give_the_same_bits(way):
    Q, D = problem(way, Ld=300)
    first = li.maxsim_with_winners(Q, D, **way.options)
    for _ in range(100):
        assert all(map(torch.equal, first, li.maxsim_with_winners(Q, D, **way.options)))


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["lowmem", "unified"])
@pytest.mark.parametrize("winners", ["save", "recompute"])
def test_gradients_are_of_the_rows_as_they_are(winners, backward):
    Q, D = (x.requires_grad_() for x in problem(WAYS["unit bf16"], Ld=90))
    _, found = li.maxsim_with_winners(Q.detach(), D.detach(), normalize=True)
    scores = li.maxsim(Q, D, normalize=True, backward=backward, winners=winners)
    ref.assert_gradients(scores, Q, D, found, ref.GRAD_TOLERANCE[torch.bfloat16], True)


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-19, 1e-12, 1e-5, 1e5, 1e17])
def test_unit_rows_of_any_length(scale):
    way = WAYS["unit bf16"]
    Q, D = problem(way, Ld=90)
    check(way, Q * scale, D)
    check(way, Q, D * scale)
    lengths = torch.logspace(-8, 8, 90, device="cuda").view(1, -1, 1).bfloat16()
    check(way, Q * lengths[:, :33], D * lengths)


@pytest.mark.parametrize("exponents", [(0, 0), (-18, 18), (18, -18), (-12, -12), (10, 10)])
@FLOAT32
def test_copies_have_the_range_of_float32(way, exponents):
    # Rows of Q over sixteen orders of magnitude, tokens of D over four, around these.
    Q, D = problem(way)
    Q = Q * 10.0 ** (exponents[0] + torch.linspace(-8, 8, 33, device="cuda")).view(1, -1, 1)
    D = D * 10.0 ** (exponents[1] + torch.linspace(-2, 2, 130, device="cuda")).view(1, -1, 1)
    check(way, Q, D)
    # Row by row: the large ones of a query hide nothing here.
    alone = Q.flatten(0, 1).unsqueeze(1)
    out, exact = li.maxsim(alone, D, **way.options).double(), ref.maxsim(alone, D)[0]
    assert ((out - exact).norm(dim=1) / exact.norm(dim=1)).max() < way.limit


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("Ld", [1, 7, 79, 80, 81, 151, 152, 153, 305, 1031])
@pytest.mark.parametrize("d", [64, 130, 768])
def test_two_numbers_at_the_edges_of_tiles(Ld, d):
    way = WAYS["highest"]
    Q, D = problem(way, d, 2 + 500_000 // (Ld * d), Ld, (131, 20))
    d_mask = torch.rand(D.shape[:-1], device="cuda") < 0.7
    d_mask[0] = False
    for mask in (None, d_mask):
        check(way, Q, D, None, mask)


@pytest.mark.native
@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [1e-4, 1e-9, 1e-15])
@pytest.mark.parametrize("Ld", [1, 2, 5, 8, 130])
def test_two_numbers_hide_no_document_behind_a_larger_one(Ld, ratio):
    way = WAYS["highest"]
    Q, D = problem(way, 128, 5000 // Ld, Ld, (131, 20))
    D[1:] *= ratio
    D[2::3, ::2] *= ratio  # nor a token behind one of its own document
    exact, best = ref.maxsim(Q, D)
    found, winners = li.maxsim_with_winners(Q, D, **way.options)
    ref.assert_winners_close(winners, best, Q, D, way.apart)
    einsum = torch.einsum("isd,jtd->ijst", Q, D).amax(-1).sum(-1)
    errors = [((x.double() - exact).norm(dim=0) / exact.norm(dim=0)).max() for x in (found, einsum)]
    assert errors[0] <= 2 * errors[1]
