"""Gradients by the kernels that the planner has for some shapes, with winners as given."""

from typing import NamedTuple

import pytest
import torch

import late_interaction as li
from tests.support import ref
from tests.support.given_winners import OPS, batch, check, gradients, plan, reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Family(NamedTuple):
    """Shapes (Nq, N, Lq, Ld, d) that the planner gives to a kernel on 132 multiprocessors."""

    sides: str  # whose gradients it computes
    dtypes: list
    shapes: list


FAMILIES = {
    # Short documents of one query: rows of one step of 16 and of two, embeddings of one slice and of many.
    "lone": Family("QD", [BF16, FP16], [
        (1, 1000, 32, 64, 128), (1, 2700, 16, 24, 128), (1, 9000, 1, 7, 128), (1, 1400, 31, 63, 96),
        (1, 1301, 17, 33, 200), (1, 2303, 5, 7, 512), (1, 800, 32, 127, 104), (1, 63000, 3, 1, 128),
    ]),
    # And of many: units of one to four steps, rows of a query that fill no step or take several units, slices
    # of 64, 96 and 128 dims, fewer documents than a block has room for, blocks of 192 rows and of 128.
    "many": Family("QD", [BF16, FP16], [
        (64, 1000, 16, 24, 128), (2, 1003, 513, 17, 96), (32, 1100, 32, 8, 128), (70, 1000, 15, 13, 256),
        (36, 1009, 29, 1, 72), (34, 1001, 31, 23, 200), (70, 1000, 15, 22, 512), (128, 1000, 32, 48, 64),
        (130, 1003, 32, 64, 64), (300, 1000, 15, 30, 40), (140, 1001, 30, 33, 8), (128, 128, 32, 32, 128),
        (700, 50, 16, 5, 128), (40, 230, 61, 48, 104), (260, 63, 32, 40, 96), (70, 1500, 15, 20, 128),
        (34, 3000, 31, 48, 64),
    ]),
    # grad_Q of rows that ldmatrix reads from shared memory: numbers of documents that fill no stage, rows
    # that fill no block, odd numbers of groups, long documents, slices that reach past d. From Lq = 23 on
    # winners of a query start where they start.
    "gathered": Family("Q", [BF16], [
        (512, 187, 32, 180, 128), (600, 264, 32, 179, 64), (700, 200, 24, 70, 128), (128, 187, 136, 97, 120),
        (513, 191, 32, 65, 96), (2100, 75, 24, 203, 40), (64, 71, 512, 203, 128), (2100, 187, 8, 191, 200),
        (999, 33, 32, 100, 128), (512, 1000, 32, 129, 8), (4096, 41, 32, 180, 128), (2100, 75, 23, 203, 40),
        (700, 200, 20, 70, 128), (129, 188, 130, 97, 120), (1030, 189, 9, 180, 128), (1500, 187, 7, 66, 96),
        (9000, 101, 5, 90, 64),
    ]),
    # grad_D with the rows of Q from shared memory: odd numbers of documents, several waves, rows past a stage
    # of 256, odd lengths, rows of several widths. The last three have a document a block.
    "tiled": Family("D", [BF16, FP16], [
        (512, 187, 32, 180, 128), (600, 264, 32, 179, 64), (2341, 503, 7, 101, 8), (5500, 200, 3, 70, 128),
        (128, 187, 130, 97, 120), (513, 191, 32, 65, 96), (2060, 131, 32, 300, 128), (9400, 264, 7, 183, 64),
        (505, 203, 130, 360, 120),
    ]),
    # grad_Q by tiles of query rows, on a GPU of any size.
    "rows": Family("Q", [BF16, FP16], [
        (4096, 67, 16, 180, 128), (2048, 131, 31, 1, 128), (2048, 64, 32, 7, 64), (1371, 129, 48, 384, 96),
        (2048, 97, 29, 300, 120), (331, 1103, 125, 33, 768),
    ]),
}  # fmt: skip
KINDS = ["uniform", "skewed", "holes", "one token"]


def some(*places, of=tuple(FAMILIES)):
    """A case for the shapes of each family at these places."""
    found = [(name, shape) for name in of for at in places for shape in FAMILIES[name].shapes[at : at + 1]]
    return pytest.mark.parametrize(("family", "shape"), found, ids=lambda x: str(x).replace(" ", ""))


# ---- plans ----


def says(family, shape, sm):
    """Words of the plan that names a family."""
    _, N, _, Ld, _ = shape
    if family == "gathered":
        return f"{8 if sm == 90 else 4} documents at a time in shared memory"
    if Ld > (180 if sm == 90 else 182):
        return f"{N} blocks instead, a document each: query rows pass through shared memory"
    return f"{(N + 1) // 2} blocks instead, 2 documents each: query rows pass through shared memory"


@pytest.mark.parametrize(
    ("family", "sm"),
    [*(("gathered", sm) for sm in (80, 90, 100)), *(("tiled", sm) for sm in (80, 86, 90, 100))],
)
def test_the_planner_gives_it_these_calls(family, sm):
    for shape in FAMILIES[family].shapes:
        assert says(family, shape, sm) in plan(shape, sm=sm, backward="lowmem"), shape


@pytest.mark.parametrize("family", ["lone", "many"])
def test_the_planner_gives_short_documents_these_calls(family):
    for shape in FAMILIES[family].shapes:
        assert "products" in plan(shape) and "gather" not in plan(shape), shape


BASE = {"Nq": 512, "N": 187, "Lq": 32, "Ld": 180, "d": 128}


@pytest.mark.parametrize(("words", "options"), [
    *(("documents at a time", x) for x in (
        {"sm": 86}, {"normalize": True}, {"dtype": FP32}, {"dtype": FP16}, {"Ld": 221}, {"d": 132}, {"N": 31},
        {"Nq": 3},
    )),
    *(("query rows pass", x) for x in (
        {"sm": 86, "Ld": 365}, {"normalize": True}, {"dtype": FP32}, {"Ld": 361}, {"d": 136}, {"N": 100},
        {"Nq": 500}, {"Nq": 2047, "Ld": 181, "N": 264},
    )),
    *(("products", {"Nq": Nq, "N": 3000, "Lq": 16, "Ld": 24} | x) for Nq in (1, 64) for x in (
        {"normalize": True}, {"dtype": FP32}, {"backward": "unified"}, {"Ld": 5000}, {"d": 100},
    )),
], ids=str)  # fmt: skip
def test_the_planner_leaves_other_calls_to_other_kernels(words, options):
    shape = tuple(options.get(name, size) for name, size in BASE.items())
    text = plan(shape, **{name: x for name, x in options.items() if name not in BASE})
    assert words not in text and "added up in registers" not in text and "gather" in text


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_plans_of_short_documents(sm):
    lone, many = (plan((Nq, 3000, 16, 24, 128), sm=sm) for Nq in (1, 64))
    assert "added up in registers" in lone and "method     lowmem" in lone
    assert "as products of gradients with winning tokens" in many and "that share" in many
    assert "as products of 0 and 1 with queries" in many
    half = plan((64, 3000, 16, 24, 128), sm=sm, dtype=FP16)  # grad_Q of fp16 is gathered from L2 but on 9.0
    assert ("grad_Q     as" in half) == (sm == 90) and "grad_D     as products of 0 and 1" in half


# ---- gradients ----


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "dtype", "shape"),
    [(name, dtype, shape) for name, x in FAMILIES.items() for dtype in x.dtypes for shape in x.shapes],
    ids=lambda x: str(x).replace(" ", ""),
)
def test_gradients(family, dtype, shape, kind):
    check(FAMILIES[family].sides, *batch(shape, dtype, "cuda", kind))


@pytest.mark.gpu
@some(0, 1, 12)
def test_gradients_that_nearly_cancel(family, shape):
    # As a cross entropy's: those of a query sum to zero, and rows have much in common.
    grad, Q, D, winners = batch(shape, BF16, "cuda")
    grad = grad - grad.mean(1, keepdim=True)
    grad = grad - grad.mean(0) if len(Q) > 1 else grad
    check(FAMILIES[family].sides, grad, (Q + 4).to(BF16), (D + 4).to(BF16), winners)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["Q", "D", "grad"])
@some(0, 5, 7)
def test_what_is_not_finite_reaches_its_winners_alone(family, shape, where):
    """A product with zeros in place of a choice would carry it to other rows."""
    grad, Q, D, winners = batch(shape, BF16, "cuda", "holes")
    x = {"Q": Q, "D": D, "grad": grad}[where]
    x.view(-1)[3], x.view(-1)[-1] = float("nan"), float("-inf")
    check(FAMILIES[family].sides, grad, Q, D, winners)


@pytest.mark.gpu
@some(0, of=("gathered", "rows"))
def test_gradients_of_any_size(family, shape):
    """Softmax weights span many powers of two, beyond the range of halves and below it."""
    grad, Q, D, winners = batch(shape, BF16, "cuda")
    lone = torch.zeros_like(grad)
    lone[-1] = grad[-1]
    spread = grad * torch.rand_like(grad).mul(-60).exp2()
    for some_grad in (grad * 2.0**100, grad * 2.0**-100, spread * 2.0**100, spread * 2.0**-100, lone):
        check("Q", some_grad, Q, D, winners)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 60_000, 16, 2, 32), (2048, 5000, 8, 65, 32)], ids=str)
def test_sums_over_very_many_documents_do_not_drift(shape):
    # Tensor cores truncate as they accumulate: terms of one sign would show it.
    grad, Q, D, winners = batch(shape, BF16, "cuda")
    grad, Q, D = grad.abs(), Q.abs(), D.abs()
    for out, wanted in zip(gradients(grad, Q, D, winners), reference(grad, Q, D, winners), strict=True):
        assert abs((out.double() / wanted - 1).mean().item()) < 2**-12


@pytest.mark.gpu
@some(0, 1, 3)
def test_tokens_and_gradients_apart_in_memory(family, shape):
    """What TMA cannot read takes another kernel, whose sums are in another order."""
    sides = FAMILIES[family].sides
    Nq, N, Lq, Ld, d = shape
    grad, Q, D, winners = batch(shape, BF16, "cuda")
    wanted = check(sides, grad, Q, D, winners)
    wide_Q, wide_D = Q.new_zeros(Nq, Lq + 1, d + 8), D.new_zeros(N, Ld + 3, d + 16)
    wide_Q[:, 1:, 8:], wide_D[:, 2 : 2 + Ld, 8 : 8 + d] = Q, D
    for some_grad in (grad, grad.t().contiguous().t(), torch.stack([grad, -grad], 2)[..., 0]):
        found = gradients(some_grad, Q, D, winners, "Q" in sides, "D" in sides)
        assert all(map(torch.equal, found, wanted))
        check(sides, some_grad, wide_Q[:, 1:, 8:], wide_D[:, 2 : 2 + Ld, 8 : 8 + d], winners)
    check(sides, torch.ones((), device="cuda").expand(Nq, N), Q, D, winners)
    check(sides, grad, Q, D.new_zeros(N, Ld, d + 1)[..., 1:].copy_(D), winners)
    if sides == "Q":
        for expanded in (D[:1].expand_as(D), D[:, :1].expand_as(D)):
            check(sides, grad, Q, expanded, winners)


@pytest.mark.gpu
@some(0, 1, 2, 3, 13, of=("many",))
def test_winners_may_start_at_any_element(family, shape):
    grad, Q, D, winners = batch(shape, BF16, "cuda", "holes")
    narrow = winners.to(torch.int16)
    expected = gradients(grad, Q, D, narrow)
    for elements in (1, 2, 7):
        moved = narrow.new_empty(narrow.numel() + elements)[elements:].view(narrow.shape).copy_(narrow)
        assert moved.data_ptr() % 16
        assert all(map(torch.equal, gradients(grad, Q, D, moved), expected))


@pytest.mark.gpu
@some(0, of=("gathered", "rows"))
def test_nothing_is_read_for_winners_that_no_forward_wrote(family, shape):
    grad, Q, D, winners = batch(shape, BF16, "cuda")
    wild = torch.randint(-32768, 32767, winners.shape, dtype=torch.int16, device="cuda")
    check("Q", grad, Q, D, wild)


@pytest.mark.gpu
@some(0, 2, 8, 11, of=("lone", "many", "gathered", "tiled"))
def test_the_same_bits_in_every_run_and_of_each_gradient_alone(family, shape):
    inputs = batch(shape, BF16, "cuda", "skewed")
    both = gradients(*inputs)
    for _ in range(20):
        assert all(map(torch.equal, gradients(*inputs), both))
    only_Q, nothing = gradients(*inputs, need_grad_D=False)
    assert torch.equal(only_Q, both[0]) and nothing.numel() == 0
    nothing, only_D = gradients(*inputs, need_grad_Q=False)
    assert torch.equal(only_D, both[1]) and nothing.numel() == 0


@pytest.mark.gpu
@some(0, 7)
def test_masked_training_steps_and_winners_found_again(family, shape):
    Nq, N, Lq, Ld, _ = shape
    grad, Q, D, _ = batch(shape, BF16, "cuda")
    q_mask = torch.rand(Nq, Lq, device="cuda") < 0.7
    d_mask = torch.rand(N, Ld, device="cuda") < 0.6
    d_mask[0] = False
    Q.masked_fill_(~q_mask.unsqueeze(-1), float("nan"))
    D.masked_fill_(~d_mask.unsqueeze(-1), float("nan"))
    Q.requires_grad_(), D.requires_grad_()
    scores, winners = li.maxsim_with_winners(Q, D, q_mask, d_mask, backward="lowmem")
    saved = torch.autograd.grad(scores, (Q, D), grad)
    again = torch.autograd.grad(li.maxsim(Q, D, q_mask, d_mask, winners="recompute"), (Q, D), grad)
    wanted = reference(grad, Q.detach(), D.detach(), winners)
    for x, twice, expected, kept in zip(saved, again, wanted, (q_mask, d_mask), strict=True):
        ref.assert_close(x, expected, ref.GRAD_TOLERANCE[BF16])
        ref.assert_close(twice, x.double(), 2 * ref.GRAD_TOLERANCE[BF16])
        assert not x[~kept].any()


@pytest.mark.gpu
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("shape", [FAMILIES["gathered"].shapes[0], (1024, 2051, 32, 20, 128)], ids=str)
def test_sums_that_go_on_over_parts_of_the_documents(shape, ones):
    """Sums in float32 that a caller goes on with: off by far less than a bf16 gradient."""
    grad, Q, D, winners = batch(shape, BF16, "cuda")
    grad = torch.ones_like(grad) if ones else grad
    sums = torch.randn(Q.shape, device="cuda")
    wanted = sums.double() + reference(grad, Q, D, winners)[0]
    outputs = torch.empty_like(Q), Q.new_empty(0), sums
    OPS.maxsim_backward_into_(grad, Q, D, None, winners.to(torch.int16), *outputs, False, False)
    ref.assert_close(sums, wanted, 2e-5, "sums")
