"""grad_D with the rows of Q from shared memory (backward/tiled_grad_d), with winners as given."""

import pytest
import torch

import late_interaction as li
from tests import ref
from tests.maxsim.backward.test_short_docs import batch, gradients, plan, reference

BF16, FP16 = torch.bfloat16, torch.float16

# (Nq, N, Lq, Ld, d) that the planner gives to this kernel on 132 multiprocessors: odd numbers of documents,
# several waves, rows past a stage of 256, odd lengths, rows of several widths.
SHAPES = [
    (512, 187, 32, 180, 128),
    (600, 264, 32, 179, 64),
    (2341, 503, 7, 101, 8),
    (5500, 200, 3, 70, 128),
    (128, 187, 130, 97, 120),
    (513, 191, 32, 65, 96),
    (2060, 131, 32, 300, 128),  # from here on a document a block
    (9400, 264, 7, 183, 64),
    (505, 203, 130, 360, 120),
]


def assert_reference(grad_D, grad, Q, D, winners):
    assert grad_D.dtype == Q.dtype
    ref.assert_close(grad_D, reference(grad, Q, D, winners)[1], ref.GRAD_TOLERANCE[Q.dtype], "grad_D")


@pytest.mark.parametrize(("sm", "tokens"), [(90, 180), (80, 182), (86, 182), (100, 182)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_planner_gives_it_these_calls(shape, sm, tokens):
    Nq, N, Lq, Ld, d = shape
    blocks = (
        f"{N} blocks instead, a document" if Ld > tokens else f"{(N + 1) // 2} blocks instead, 2 documents"
    )
    text = plan((Nq, Lq, d), (N, Ld, d), sm=sm)
    assert f"{blocks} each: query rows pass through shared memory" in text


@pytest.mark.parametrize(
    "options",
    [
        {"sm": 86, "Ld": 365},
        {"normalize": True},
        {"dtype": torch.float32},
        {"Ld": 361},
        {"d": 136},
        {"N": 100},
        {"Nq": 500},
        {"Nq": 2047, "Ld": 181, "N": 264},
    ],
    ids=str,
)
def test_the_planner_leaves_other_calls_to_other_kernels(options):
    sizes = {"Nq": 512, "N": 187, "Lq": 32, "Ld": 180, "d": 128}
    options = dict(options)
    Nq, N, Lq, Ld, d = (options.pop(name, size) for name, size in sizes.items())
    assert "query rows pass" not in plan((Nq, Lq, d), (N, Ld, d), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "skewed", "holes", "one token"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, dtype, kind):
    inputs = batch(shape, dtype, "cuda", kind)
    if kind == "one token":  # each document's own
        inputs[3].copy_(torch.arange(shape[1], device="cuda").view(-1, 1) * 7 % shape[3])
    assert_reference(gradients(*inputs, need_grad_Q=False)[1], *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["Q", "grad"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5], SHAPES[6]], ids=str)
def test_what_is_not_finite_reaches_its_winners_alone(shape, where):
    grad, Q, D, winners = batch(shape, BF16, "cuda", "holes")
    x = {"Q": Q, "grad": grad}[where]
    x.view(-1)[3], x.view(-1)[-1] = float("nan"), float("-inf")
    assert_reference(gradients(grad, Q, D, winners)[1], grad, Q, D, winners)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[4], SHAPES[8]], ids=str)
def test_the_same_bits_in_every_run_and_of_each_gradient_alone(shape):
    inputs = batch(shape, BF16, "cuda", "skewed")
    grad_Q, grad_D = gradients(*inputs)
    for _ in range(10):
        assert torch.equal(gradients(*inputs, need_grad_Q=False)[1], grad_D)
    only_Q, nothing = gradients(*inputs, need_grad_D=False)
    assert torch.equal(only_Q, grad_Q) and nothing.numel() == 0


@pytest.mark.gpu
def test_strided_gradients_of_scores_and_strided_queries():
    """Queries that are not contiguous take another kernel, whose sums are in another order."""
    grad, Q, D, winners = batch(SHAPES[1], FP16, "cuda")
    wanted = gradients(grad, Q, D, winners)[1]
    for some in (grad.t().contiguous().t(), torch.stack([grad, -grad], 2)[..., 0]):
        assert torch.equal(gradients(some, Q, D, winners)[1], wanted)
    wide = Q.new_zeros(len(Q), Q.shape[1] + 1, Q.shape[2] + 8)
    wide[:, 1:, 8:] = Q
    assert_reference(gradients(grad, wide[:, 1:, 8:], D, winners)[1], grad, Q, D, winners)


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
    assert_reference(D.grad, grad, Q.detach(), D.detach(), winners.long())
    assert not D.grad[~d_mask].any()
    saved, D.grad, Q.grad = D.grad, None, None
    li.maxsim(Q, D, q_mask, d_mask, winners="recompute").backward(grad)
    assert_reference(D.grad, grad, Q.detach(), D.detach(), winners.long())
    ref.assert_close(D.grad, saved.double(), 2 * ref.GRAD_TOLERANCE[BF16])
