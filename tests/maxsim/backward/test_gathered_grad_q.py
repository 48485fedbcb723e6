"""grad_Q of rows that ldmatrix reads from shared memory (backward/gathered_grad_q), with winners as given."""

import pytest
import torch

import late_interaction as li
from tests import ref
from tests.maxsim.backward.test_short_docs import batch, gradients, plan, reference

BF16 = torch.bfloat16

# (Nq, N, Lq, Ld, d) that the planner gives to this kernel on 132 multiprocessors: numbers of documents that
# fill no stage, rows that fill no block, odd numbers of groups, long documents, slices that reach past d.
SHAPES = [
    (512, 187, 32, 180, 128),
    (600, 264, 32, 179, 64),
    (700, 200, 24, 70, 128),
    (128, 187, 136, 97, 120),
    (513, 191, 32, 65, 96),
    (2100, 75, 24, 203, 40),
    (64, 71, 512, 203, 128),
    (2100, 187, 8, 191, 200),
    (999, 33, 32, 100, 128),
    (512, 1000, 32, 129, 8),
    (4096, 41, 32, 180, 128),
    (2100, 75, 23, 203, 40),  # from here on winners of a query start where they start
    (700, 200, 20, 70, 128),
    (129, 188, 130, 97, 120),
    (1030, 189, 9, 180, 128),
    (1500, 187, 7, 66, 96),
    (9000, 101, 5, 90, 64),
]


def assert_reference(grad_Q, grad, Q, D, winners):
    assert grad_Q.dtype == Q.dtype
    ref.assert_close(grad_Q, reference(grad, Q, D, winners)[0], ref.GRAD_TOLERANCE[Q.dtype], "grad_Q")


@pytest.mark.parametrize(("sm", "docs"), [(90, 8), (80, 4), (100, 4)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_planner_gives_it_these_calls(shape, sm, docs):
    Nq, N, Lq, Ld, d = shape
    text = plan((Nq, Lq, d), (N, Ld, d), sm=sm, backward="lowmem")
    assert f"{docs} documents at a time in shared memory" in text


@pytest.mark.parametrize(
    "options",
    [
        {"sm": 86},
        {"normalize": True},
        {"dtype": torch.float32},
        {"dtype": torch.float16},
        {"Ld": 221},
        {"d": 132},
        {"N": 31},
        {"Nq": 3},
    ],
    ids=str,
)
def test_the_planner_leaves_other_calls_to_other_kernels(options):
    sizes = {"Nq": 512, "N": 187, "Lq": 32, "Ld": 180, "d": 128}
    options = dict(options)
    Nq, N, Lq, Ld, d = (options.pop(name, size) for name, size in sizes.items())
    assert "documents at a time" not in plan((Nq, Lq, d), (N, Ld, d), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "skewed", "holes", "one token"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, kind):
    inputs = batch(shape, BF16, "cuda", kind)
    if kind == "one token":  # each document's own
        inputs[3].copy_(torch.arange(shape[1], device="cuda").view(-1, 1) * 7 % shape[3])
    assert_reference(gradients(*inputs, need_grad_D=False)[0], *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[12]], ids=str)
def test_gradients_that_nearly_cancel(shape):
    # As a cross entropy's: those of a query sum to zero, and rows have much in common.
    grad, Q, D, winners = batch(shape, BF16, "cuda")
    inputs = grad - grad.mean(1, keepdim=True), Q, (D + 4).to(BF16), winners
    assert_reference(gradients(*inputs, need_grad_D=False)[0], *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["D", "grad"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[6], SHAPES[13]], ids=str)
def test_what_is_not_finite_reaches_its_winners_alone(shape, where):
    grad, Q, D, winners = batch(shape, BF16, "cuda", "holes")
    x = {"D": D, "grad": grad}[where]
    x.view(-1)[3], x.view(-1)[-1] = float("nan"), float("-inf")
    assert_reference(gradients(grad, Q, D, winners)[0], grad, Q, D, winners)


@pytest.mark.gpu
def test_gradients_beyond_the_range_of_halves_and_too_small_for_it():
    grad, Q, D, winners = batch(SHAPES[0], BF16, "cuda")
    for scale in (2.0**100, 2.0**-100):
        assert_reference(gradients(grad * scale, Q, D, winners)[0], grad * scale, Q, D, winners)


@pytest.mark.gpu
def test_sums_over_very_many_documents_do_not_drift():
    # Tensor cores truncate as they accumulate: terms of one sign would show it.
    grad, Q, D, winners = batch((2048, 5000, 8, 65, 32), BF16, "cuda")
    grad, D = grad.abs(), D.abs()
    out, wanted = gradients(grad, Q, D, winners)[0], reference(grad, Q, D, winners)[0]
    assert abs((out.double() / wanted - 1).mean().item()) < 2**-12


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5], SHAPES[7], SHAPES[11]], ids=str)
def test_the_same_bits_in_every_run_and_of_each_gradient_alone(shape):
    inputs = batch(shape, BF16, "cuda", "skewed")
    grad_Q, grad_D = gradients(*inputs)
    for _ in range(10):
        assert torch.equal(gradients(*inputs, need_grad_D=False)[0], grad_Q)
    nothing, only_D = gradients(*inputs, need_grad_Q=False)
    assert torch.equal(only_D, grad_D) and nothing.numel() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[6]], ids=str)
def test_strided_gradients_of_scores_and_strided_documents(shape):
    grad, Q, D, winners = batch(shape, BF16, "cuda")
    wanted = gradients(grad, Q, D, winners)[0]
    N, Ld, d = D.shape
    wide = D.new_zeros(N, Ld + 3, d + 16)
    wide[:, 2 : 2 + Ld, 8 : 8 + d] = D
    for some in (grad, grad.t().contiguous().t(), torch.stack([grad, -grad], 2)[..., 0]):
        assert torch.equal(gradients(some, Q, wide[:, 2 : 2 + Ld, 8 : 8 + d], winners)[0], wanted)
    odd = D.new_zeros(N, Ld, d + 1)[..., 1:]  # rows that TMA cannot read take another kernel
    odd.copy_(D)
    assert_reference(gradients(grad, Q, odd, winners)[0], grad, Q, D, winners)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["documents", "tokens"])
def test_expanded_documents(where):
    grad, Q, D, winners = batch(SHAPES[0], BF16, "cuda")
    D = (D[:1] if where == "documents" else D[:, :1]).expand_as(D)
    assert_reference(gradients(grad, Q, D, winners)[0], grad, Q, D, winners)


@pytest.mark.gpu
def test_sums_that_go_on_over_parts_of_the_documents():
    grad, Q, D, winners = batch(SHAPES[0], BF16, "cuda")
    sums = torch.randn(Q.shape, dtype=torch.float32, device="cuda")
    wanted = sums.double() + reference(grad, Q, D, winners)[0]
    none = Q.new_empty(0)
    torch.ops.late_interaction.maxsim_backward_into_(
        grad, Q, D, None, winners.to(torch.int16), torch.empty_like(Q), none, sums, False, False
    )
    ref.assert_close(sums, wanted, 1e-5, "sums")


@pytest.mark.gpu
def test_masked_training_steps_and_winners_found_again():
    Nq, N, Lq, Ld, _ = shape = SHAPES[0]
    grad, Q, D, _ = batch(shape, BF16, "cuda")
    q_mask = torch.rand(Nq, Lq, device="cuda") < 0.7
    d_mask = torch.rand(N, Ld, device="cuda") < 0.6
    d_mask[0] = False
    Q.masked_fill_(~q_mask.unsqueeze(-1), float("nan"))
    D.masked_fill_(~d_mask.unsqueeze(-1), float("nan"))
    Q.requires_grad_(), D.requires_grad_()
    scores, winners = li.maxsim_with_winners(Q, D, q_mask, d_mask, backward="lowmem")
    scores.backward(grad)
    assert_reference(Q.grad, grad, Q.detach(), D.detach(), winners.long())
    assert not Q.grad[~q_mask].any()
    saved, Q.grad = Q.grad, None
    li.maxsim(Q, D, q_mask, d_mask, winners="recompute").backward(grad)
    ref.assert_close(Q.grad, saved.double(), 2 * ref.GRAD_TOLERANCE[BF16])
