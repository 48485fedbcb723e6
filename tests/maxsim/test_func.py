"""torch.func: gradients of every differentiable operator at every level; what there is not says so."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import late_interaction as li
from late_interaction.lik import plaid
from late_interaction.ops._registration import applied
from tests.operators.test_every_scorer import scorers

OPS = torch.ops.late_interaction
SIZES = 2, 3, 3, 5, 4


def tensors(device):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    return normal


def functions(device):
    """{name: f(Q, D)} with Q [2, 3, 4] and D [3, 5, 4]."""
    cu_q, cu_d = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 6], [0, 5, 11, 15]))
    pairs = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 1], [2, 0, 0]))
    residual = scorers(device, SIZES)["residual"]

    def flat(function, *rest):
        return lambda Q, D: function(Q.flatten(0, 1), D.flatten(0, 1), cu_q, cu_d, *rest)

    return scorers(device, SIZES) | {
        "unified": lambda Q, D: li.maxsim(Q, D, backward="unified"),
        "with winners": lambda Q, D: li.maxsim_with_winners(Q, D)[0],
        "residual": lambda Q, D: residual(Q, D) * D.sum(),
        "operator": lambda Q, D: OPS.maxsim(Q, D, None, None),
        "operator, winners": lambda Q, D: OPS.maxsim_winners(Q, D, None, None, True)[0],
        "operator, varlen": flat(OPS.maxsim_varlen),
        "operator, listed pairs": flat(OPS.maxsim_pairs_packed, *pairs, 3),
    }


NAMES = list(functions("cpu"))
EVERY = pytest.mark.parametrize("name", NAMES)
# What says so where it is differentiated a second time. A residual-compressed document has no gradient.
ONCE = {
    "varlen": "maxsim of packed tokens",
    "listed pairs": "score_pairs_packed",
    "from hidden": "maxsim_from_hidden",
    "smooth": "smooth_maxsim",
    "smooth, normalized": "smooth_maxsim",
    "smooth pairs": "smooth_maxsim",
    "weighted": "maxsim with q_weights",
    "XTR, weighted": "maxsim with q_weights",
    "operator, varlen": "maxsim of packed tokens",
    "operator, listed pairs": "score_pairs_packed",
}
TWICE = [name for name in NAMES if name not in ONCE and "residual" not in name]


def drawn(name, device):
    normal = tensors(device)
    return functions(device)[name], normal(2, 3, 4), normal(3, 5, 4)


def expected(f, Q, D):
    inputs = Q.clone().requires_grad_(), D.clone().requires_grad_()
    return torch.autograd.grad(f(*inputs).sum(), inputs)


def summed(f):
    return lambda *args: f(*args).sum()


@EVERY
def test_grad_and_vjp(name, device):
    f, Q, D = drawn(name, device)
    wanted = expected(f, Q, D)
    torch.testing.assert_close(func.grad(summed(f), (0, 1))(Q, D), wanted)
    torch.testing.assert_close(func.grad(summed(f))(Q, D), wanted[0])
    scores, vjp = func.vjp(f, Q, D)
    torch.testing.assert_close(scores, f(Q, D))
    torch.testing.assert_close(vjp(torch.ones_like(scores)), wanted)
    with torch.no_grad():
        torch.testing.assert_close(func.grad(summed(f), 1)(Q, D), wanted[1])


@EVERY
@pytest.mark.parametrize("chunk", [None, 2])
def test_jacrev(name, chunk, device):
    f, Q, D = drawn(name, device)
    inputs = Q.clone().requires_grad_(), D.clone().requires_grad_()
    scores = f(*inputs)
    rows = [torch.autograd.grad(x, inputs, retain_graph=True) for x in scores.flatten()]
    columns = (torch.stack(column) for column in zip(*rows, strict=True))
    wanted = tuple(g.view(*scores.shape, *x.shape) for g, x in zip(columns, inputs, strict=True))
    torch.testing.assert_close(func.jacrev(f, (0, 1), chunk_size=chunk)(Q, D), wanted)


@EVERY
def test_levels_within_one_another(name, device):
    f, Q, D = drawn(name, device)
    wanted = expected(f, Q, D)
    # The inner level differentiates one input, the outer one the other, through the value.
    got = (
        func.grad(lambda Q: func.grad_and_value(summed(f), 1)(Q, D)[1])(Q),
        func.grad(lambda D: func.grad_and_value(summed(f), 0)(Q, D)[1])(D),
    )
    torch.testing.assert_close(got, wanted)
    # Both levels differentiate the same one.
    torch.testing.assert_close(func.grad(lambda Q: func.grad_and_value(summed(f))(Q, D)[1])(Q), wanted[0])
    inputs = Q.clone().requires_grad_(), D.clone().requires_grad_()
    value = func.grad_and_value(lambda one: one * f(*inputs).sum())(torch.ones((), device=device))[0]
    torch.testing.assert_close(torch.autograd.grad(value, inputs), wanted)
    value = func.grad_and_value(summed(f))(*inputs)[1]
    torch.testing.assert_close(torch.autograd.grad(value, inputs), wanted)


@pytest.mark.parametrize("name", TWICE)
def test_first_and_second_derivatives(name, device):
    """Those of finite differences; of a gradient's penalty by either way."""
    f, Q, D = drawn(name, device)
    f, Q, D = (lambda q, d, f=f: f(q, d).logsumexp(0)), Q.double(), D.double()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(f, (Q.requires_grad_(), D.requires_grad_()), nondet_tol=1e-12)

    def penalty(Q, D):
        return func.grad(summed(f))(Q, D).square().sum()

    gradient, wanted = func.grad(penalty, (0, 1))(Q.detach(), D.detach()), []
    (first,) = torch.autograd.grad(f(Q, D).sum(), Q, create_graph=True)
    wanted = torch.autograd.grad(first.square().sum(), (Q, D))
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("name", ONCE)
def test_no_second_derivatives(name, device):
    f, Q, D = drawn(name, device)
    words = f"double backward of {ONCE[name]} is not supported: differentiate late_interaction"
    with pytest.raises(RuntimeError, match=words):
        func.grad(lambda Q: func.grad(summed(f))(Q, D).square().sum())(Q)
    with pytest.raises(RuntimeError, match=words):
        func.grad(lambda D: func.grad(summed(f))(Q, D).sum())(D)
    Q.requires_grad_()
    with pytest.raises(RuntimeError, match=words):
        torch.autograd.grad(func.grad(summed(f), 1)(Q, D).sum(), Q)


@EVERY
def test_no_forward_mode(name, device):
    f, Q, D = drawn(name, device)
    refused = pytest.raises(RuntimeError, match=r"no forward-mode derivative \(jvp\)")
    for transformed in (func.jacfwd(f), func.hessian(summed(f)), lambda Q, D: func.jvp(f, (Q, D), (Q, D))):
        with refused:
            transformed(Q, D)
    with forward_ad.dual_level(), refused:
        f(forward_ad.make_dual(Q, Q), D)
    inputs = Q.clone().requires_grad_(), D
    scores = f(*inputs)
    with forward_ad.dual_level(), refused:
        torch.autograd.grad(scores, inputs[0], forward_ad.make_dual(torch.ones_like(scores), scores.detach()))


@EVERY
def test_no_vmap_of_a_forward(name, device):
    f, Q, D = drawn(name, device)
    how = "pack all sequences" if any(word in name for word in ("varlen", "listed")) else "pass Q as"
    for transformed in (lambda Q: f(Q, D), func.grad(lambda Q: f(Q, D).sum())):
        with pytest.raises(RuntimeError, match=f"does not support vmap: it is batched already, so {how}"):
            func.vmap(transformed)(Q.expand(2, *Q.shape))


def test_forward_mode_of_other_inputs_is_left_alone(device):
    normal = tensors(device)
    scores, one = li.maxsim(normal(2, 3, 4), normal(3, 5, 4)).sum(), torch.ones((), device=device)
    torch.testing.assert_close(func.jvp(lambda x: x * scores, (one,), (one,))[1], scores)


def test_tangents_of_an_index(device):
    normal = tensors(device)
    codes = torch.zeros(2, 3, dtype=torch.int32, device=device)
    lengths = torch.tensor([3, 2], device=device)
    residuals = torch.zeros(2, 3, 1, dtype=torch.uint8, device=device)
    Q, centroids, weights, table = normal(1, 2, 4), normal(7, 4), normal(4), normal(7, 5)
    refused = pytest.raises(RuntimeError, match=r"no forward-mode derivative \(jvp\)")
    for function, primal in (
        (lambda x: plaid.maxsim_residual(Q, codes, residuals, lengths, x, weights, 2), centroids),
        (lambda x: plaid.maxsim_residual(Q, codes, residuals, lengths, centroids, x, 2), weights),
        (lambda x: plaid.plaid_approx_score(x, codes, lengths), table),
    ):
        with refused:
            func.jvp(function, (primal,), (primal,))
        with forward_ad.dual_level(), refused:
            function(forward_ad.make_dual(primal, primal))


def test_a_transform_records_a_function_of_one_level():
    """PyTorch 2.15 hands what is a Function to every level of torch.func, whoever calls its apply."""
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(issubclass(ctx._forward_cls, torch.autograd.Function))
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    double, x = applied(Double), torch.ones(3, requires_grad=True)
    assert torch.equal(torch.autograd.grad(double(x).sum(), x)[0], torch.full((3,), 2.0))
    assert torch.equal(func.grad(lambda x: double(x).sum())(x.detach()), torch.full((3,), 2.0))
    assert seen == [True, False]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev], ids=lambda f: f.__name__)
@pytest.mark.parametrize("loss", [
    lambda Q, D: li.losses.contrastive(Q, D, temperature=0.1, kept_bytes=0),
    lambda Q, D: li.losses.contrastive(Q[:, :1], D[:, :1], temperature=0.1),
    lambda Q, D: li.losses.pairwise(Q, D),
    lambda Q, D: li.losses.sigmoid(Q, D, temperature=0.1, bias=0.0),
    lambda Q, D: li.losses.recall(Q, D, temperature=0.1),
])  # fmt: skip
def test_losses_in_parts_say_what_to_call_instead(loss, transform, device):
    Q, D = (torch.randn(6, 4, 8, device=device) for _ in range(2))
    with pytest.raises(NotImplementedError, match=r"torch\.func .* does not transform this loss"):
        transform(lambda q: loss(q, D))(Q)


def test_a_loss_with_all_scores_kept_has_transforms(device):
    Q, D = (torch.randn(6, 4, 8, device=device) for _ in range(2))
    q = Q.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(li.losses.contrastive(q, D, temperature=0.1), q)
    found = func.grad(lambda x: li.losses.contrastive(x, D, temperature=0.1))(Q)
    torch.testing.assert_close(found, wanted)
