"""Public functions called with fake and with meta tensors, and traced with lengths that depend on data."""

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import late_interaction as li
from late_interaction.lik import padded, plaid
from late_interaction.lik.varlen import maxsim_varlen
from late_interaction.score_pairs import rerank_direct, score_pairs_packed
from tests.support.calls import Called, Module
from tests.support.public_calls import CALLS, Ld, Lq, Nq, d, of_tokens, with_gradients


def described(results):
    return [(tuple(x.shape), x.dtype, x.requires_grad) for x in pytree.tree_leaves(results) if x is not None]


def converted(args, to):
    return pytree.tree_map_only(
        torch.Tensor, lambda x: to(x.detach()).requires_grad_(x.requires_grad and x.is_leaf), args
    )


@pytest.mark.parametrize("kind", ["meta", "fake", "fake, symbols"])
@pytest.mark.parametrize("name", CALLS)
def test_shapes_and_dtypes_without_values(name, kind):
    function, args = CALLS[name]
    args = converted(args, lambda x: x)
    expected = described(with_gradients(function, args))
    if kind == "meta":
        got = with_gradients(function, converted(args, lambda x: x.to("meta")))
    else:
        mode = FakeTensorMode(shape_env=ShapeEnv() if kind == "fake, symbols" else None)
        fakes = converted(args, mode.from_tensor)
        with mode:
            got = with_gradients(function, fakes)
    assert described(got) == expected


def is_leaf(x):
    return isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf


COMPILED = [
    "maxsim_with_winners", "MaxSimScorer", "maxsim_varlen", "score_pairs_packed medium", "rerank_direct",
    "smooth_maxsim", "smooth_maxsim_pairs", "xtr_scores", "xtr_scores of own", "maxsim_from_hidden",
    "maxsim_from_hidden medium", "maxsim_residual", "maxsim_residual_varlen", "plaid_approx_score", "Bits(1)",
    "Bits(4)",
]  # fmt: skip
# They have no gradient, of what requires one either.
CONSTANT = ("encode", "quantize", "search", "maxsim_forward", "lowmem", "unified")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole(name, nothing_compiled):
    """Results and gradients are those of an eager call."""
    function, args = CALLS[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with dynamo.patch(specialize_int=True):  # as where a user writes them down
        found, wanted = (pytree.tree_leaves(with_gradients(f, args)) for f in (compiled, function))
    assert len(found) == len(wanted)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "name", [x for x in CALLS if any(map(is_leaf, CALLS[x][1])) and not x.startswith(CONSTANT)]
)
def test_gradients_that_are_wanted_alone_are_those_of_all(name):
    function, args = CALLS[name]
    results, gradients = with_gradients(function, args)
    for place, wanted in zip([i for i, x in enumerate(args) if is_leaf(x)], gradients, strict=True):
        alone = [x.detach().requires_grad_(i == place) if is_leaf(x) else x for i, x in enumerate(args)]
        _, (found,) = with_gradients(function, alone)
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        found = pytree.tree_leaves(function(*args))
    assert not any(x.requires_grad for x in found if isinstance(x, torch.Tensor))
    torch.testing.assert_close(found, pytree.tree_leaves(results))


@pytest.mark.parametrize("name", ["maxsim high", "maxsim_varlen", "score_pairs_packed", "plaid_approx_score"])
def test_fake_tensors_outside_their_mode(name):
    function, args = CALLS[name]
    fakes = converted(args, FakeTensorMode().from_tensor)
    assert described(with_gradients(function, fakes)) == described(with_gradients(function, args))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_of_either_device_need_none(device):
    with FakeTensorMode():
        Q, D = torch.randn(6, d, device=device), torch.randn(20, d, device=device)
        cu = torch.zeros(3, dtype=torch.int64, device=device)
        scores = of_tokens(Q, D, cu, cu, precision="high")
    assert scores.shape == (2, 2) and scores.device.type == device


def test_what_is_packed_of_fake_lengths_has_symbols_as_shapes():
    lengths = torch.tensor([2, 3]), torch.tensor([[4, 5], [1, 5]])
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    tensors = torch.randn(Nq, Lq, d), torch.randn(Nq, 2, Ld, d), *lengths
    with mode:
        batch = padded.pack_padded(*(mode.from_tensor(x) for x in tensors))
        scores = maxsim_varlen(batch.Q_packed, batch.D_packed, batch.cu_seqlens_q, batch.cu_seqlens_d)
    assert scores.shape == (Nq, 2 * Nq) and isinstance(batch.max_seqlen_q, torch.SymInt)
    assert isinstance(batch.D_packed.shape[0], torch.SymInt)
    with pytest.raises(ValueError, match="query_lengths must hold values"):
        padded.pack_padded(*(x.to("meta") for x in tensors))


# ---- lengths that depend on data ----


def packed_of_masked(score):
    """A packed call on the tokens that a mask keeps: how many, the graph does not know."""

    def function(Q, D, q_mask, d_mask):
        cu_q, cu_d = (torch.nn.functional.pad(mask.sum(-1).cumsum(0), (1, 0)) for mask in (q_mask, d_mask))
        return score(Q[q_mask], D[d_mask], cu_q, cu_d)

    return function


def listed(Q, D, cu_q, cu_d):
    pairs = torch.ones(cu_q.shape[0] - 1, cu_d.shape[0] - 1, device=Q.device).nonzero()
    return score_pairs_packed(Q, D, cu_q, cu_d, pairs[:, 0], pairs[:, 1])


def reranked(Q, D, cu_q, cu_d):
    return rerank_direct(Q.detach(), D.detach(), cu_d[:-1], cu_d.diff())


def residual(Q, D, cu_q, cu_d):
    codes = D[:, 0].detach().abs().long()
    residuals = (D[:, :2].detach() * 50).to(torch.uint8)
    centroids, weights = D.new_ones(5, d).detach(), D.new_ones(4).detach()
    return plaid.maxsim_residual_varlen(
        Q.detach().unsqueeze(0), codes, residuals, cu_d, centroids, weights, 2, normalize=False
    )


def padded_rows(Q, D, q_mask, d_mask):
    own = D.view(Q.shape[0], -1, *D.shape[1:])
    lengths = q_mask.sum(-1), d_mask.sum(-1).view(Q.shape[0], -1)
    batch = padded.pack_padded(Q, own, *lengths)
    args = batch.Q_packed, batch.D_packed, batch.cu_seqlens_q, batch.cu_seqlens_d
    longest = {"max_seqlen_q": batch.max_seqlen_q, "max_seqlen_d": batch.max_seqlen_d}
    pairs = score_pairs_packed(*args, batch.pair_q_idx, batch.pair_d_idx, **longest)
    return maxsim_varlen(*args).sum() + pairs


LATE = {
    "varlen": packed_of_masked(maxsim_varlen),
    "listed pairs": packed_of_masked(listed),
    "rerank": packed_of_masked(reranked),
    "residual": packed_of_masked(residual),
    "padded": padded_rows,
}


def masked_batch(seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    Q, D = torch.randn(2, 6, d, generator=generator), torch.randn(4, 9, d, generator=generator)
    masks = (torch.rand(x.shape[:-1], generator=generator) < 0.7 for x in (Q, D))
    return Q.to(device).requires_grad_(), D.to(device).requires_grad_(), *(m.to(device) for m in masks)


@pytest.mark.parametrize("name", LATE)
def test_compiled_with_lengths_that_depend_on_data(name, device, nothing_compiled):
    with dynamo.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(LATE[name], fullgraph=True, backend="aot_eager")
        for seed in range(3):
            args = masked_batch(seed, device)
            got, expected = compiled(*args), LATE[name](*args)
            torch.testing.assert_close(got, expected)
            if expected.requires_grad:
                got, expected = (torch.autograd.grad(x.square().sum(), args[:2]) for x in (got, expected))
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", LATE)
def test_exported_with_lengths_that_depend_on_data(name, device):
    args = [x.detach() for x in masked_batch(0, device)]
    program = torch.export.export(Module(LATE[name]), tuple(args))
    for seed in range(3):
        args = [x.detach() for x in masked_batch(seed, device)]
        torch.testing.assert_close(program.module()(*args), LATE[name](*args))


@pytest.mark.parametrize("options", [{}, {"backward": "lowmem"}, {"precision": "medium"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_traced_call_has_its_options(dtype, options):
    """And multiplies as an eager one: torch.set_float32_matmul_precision is for float32 alone."""
    torch.set_float32_matmul_precision("high")
    Q, D = torch.randn(2, 3, 8, dtype=dtype), torch.randn(4, 5, 8, dtype=dtype)
    program = torch.export.export(Module(lambda Q, D: li.maxsim(Q, D, **options)), (Q, D))
    with Called() as called:
        program.module()(Q, D)
        li.maxsim(Q, D, **options)
    traced, eager = called.arguments
    assert traced["backward"] == options.get("backward", "auto")
    assert traced["precision"] == eager["precision"]
    if "precision" not in options:
        assert traced["precision"] == ("high" if dtype is torch.float32 else "highest")
