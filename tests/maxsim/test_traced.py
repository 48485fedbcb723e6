"""Public functions called with fake and with meta tensors, and traced with lengths that depend on data."""

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import late_interaction as li
from late_interaction import codecs, reference
from late_interaction._scoring.traced import traced_scores
from late_interaction.fused_head import maxsim_from_hidden
from late_interaction.lik import fp8, padded, plaid
from late_interaction.lik.backward import maxsim_backward_lowmem, maxsim_backward_unified
from late_interaction.lik.forward import maxsim_forward
from late_interaction.lik.varlen import maxsim_varlen
from late_interaction.score_pairs import rerank_direct, score_pairs_packed
from tests.maxsim.test_call_edges import Called
from tests.support.packed import pack_sequences

Nq, Lq, Nd, Ld, d, d_model = 2, 3, 4, 5, 8, 6


def of_tokens(Q, D, cu_q, cu_d, **options):
    return li.maxsim(li.Tokens.packed(Q, cu_q), li.Tokens.packed(D, cu_d), **options)


def options(function, **kwargs):
    return lambda *args: function(*args, **kwargs)


def calls():
    """{name: (function, arguments)}; the arguments that are differentiated require gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, grad=True):
        return torch.randn(*shape, generator=generator, requires_grad=grad)

    Q, D = normal(Nq, Lq, d), normal(Nd, Ld, d)
    masks = torch.rand(Nq, Lq) < 0.8, torch.rand(Nd, Ld) < 0.8
    flat = normal(Nq * Lq, d), normal(Nd * Ld, d)
    cu = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 5, 14, 20])
    pairs = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 3])
    lengths = torch.tensor([2, 3]), torch.tensor([[4, 5], [1, 5]])
    own = normal(Nq, 2, Ld, d)
    H, W, b = normal(Nd, Ld, d_model), normal(d, d_model), normal(d)
    codes, residuals = torch.randint(7, (Nd, Ld)), torch.randint(256, (Nd, Ld, 2), dtype=torch.uint8)
    index = normal(7, d, grad=False), normal(4, grad=False), 2
    documents, offsets = torch.tensor([5, 4, 1, 2]), torch.tensor([0, 5, 6, 14, 20])
    q8, d8 = fp8.quantize_fp8_per_token(Q), fp8.quantize_fp8_per_token(D)
    codec = codecs.Residual(index[0], torch.zeros(3), index[1])
    kinds = codecs.Int8(), codecs.Bits(1), codecs.Bits(1, scales=False), codecs.Bits(4)
    q = Q.detach()
    best = torch.zeros(Nq * Nd, Lq, dtype=torch.int32)
    grads = normal(Nq, Nd, grad=False)

    def quantized(function):
        return lambda q, s, x, t: function(q, x, scale_Q=s, scale_D=t)

    return {
        "maxsim": (li.maxsim, (Q, D, *masks)),
        "maxsim high": (options(li.maxsim, precision="high"), (Q, D)),
        "maxsim medium": (options(li.maxsim, precision="medium", normalize=True), (Q, D)),
        "maxsim recompute": (options(li.maxsim, winners="recompute"), (Q, D)),
        "maxsim_pairs": (options(li.maxsim_pairs, precision="high"), (Q, own[:, 0])),
        "maxsim_with_winners": (li.maxsim_with_winners, (Q, D)),
        "maxsim_forward": (options(maxsim_forward, save_argmax=True), (Q, D)),
        "lowmem": (maxsim_backward_lowmem, (grads, Q, D, best, masks[0])),
        "unified": (maxsim_backward_unified, (grads, Q, D, best)),
        "maxsim_varlen": (maxsim_varlen, (*flat, *cu)),
        "maxsim_varlen high": (options(of_tokens, precision="high"), (*flat, *cu)),
        "score_pairs_packed": (score_pairs_packed, (*flat, *cu, *pairs)),
        "score_pairs_packed medium": (
            options(score_pairs_packed, precision="medium", max_seqlen_q=3), (*flat, *cu, *pairs)
        ),
        "rerank_direct": (
            options(rerank_direct, max_seqlen_d=7), (flat[0].detach(), flat[1].detach(), *lengths[1].int())
        ),
        "maxsim_padded": (li.lik.maxsim_padded, (Q, own, *lengths)),
        "smooth_maxsim": (options(li.smooth_maxsim, tau=0.3), (Q, D, *masks)),
        "smooth_maxsim of own": (options(li.smooth_maxsim, normalize=True), (Q, own)),
        "smooth_maxsim_pairs": (li.smooth_maxsim_pairs, (Q, own[:, 0], masks[0])),
        "xtr_scores": (options(li.xtr_scores, precision="high"), (Q, D, 3, *masks)),
        "xtr_scores of own": (options(li.xtr_scores, rule="pylate"), (Q, own, 3, masks[0])),
        "maxsim_from_hidden": (maxsim_from_hidden, (Q, H, W, b, masks[1])),
        "maxsim_from_hidden medium": (
            options(maxsim_from_hidden, precision="medium", project_Q=True), (normal(Nq, Lq, d_model), H, W)
        ),
        "maxsim_residual": (plaid.maxsim_residual, (Q, codes, residuals, documents, *index)),
        "maxsim_residual_varlen": (
            plaid.maxsim_residual_varlen, (Q, codes.flatten(), residuals.flatten(0, 1), offsets, *index)
        ),
        "plaid_approx_score": (
            plaid.plaid_approx_score, (normal(7, Lq, grad=False), codes, documents)
        ),
        "reverse_bits": (codecs.reverse_bits, (residuals,)),
        "residual codes": (li.maxsim, (Q, li.Codes(codec, residuals, None, codes, masks[1]))),
        "residual pieces": (
            lambda codes: codes.codec.decode(codes), (li.Codes(codec, residuals, None, codes),)
        ),
        "fp8": (quantized(fp8.maxsim_inference_fp8), (*q8, *d8)),
        **{f"{kind}": (li.maxsim, (q, kind.encode(D))) for kind in kinds},
        **{f"encode {kind}": (lambda x, kind=kind: kind.encode(x), (D,)) for kind in kinds},
        "quantize fp8": (fp8.quantize_fp8_per_token, (Q,)),
        "quantize fp8 in all": (fp8.quantize_fp8_per_tensor, (Q,)),
        "search": (lambda *args: tuple(li.search(*args, chunk_bytes=8 * Ld * d)), (Q, D, 3)),
        "search high": (lambda *args: tuple(li.search(*args, precision="high")), (Q, D, 3)),
        "MaxSimScorer": (
            li.lik.MaxSimScorer(mask_pad_token=0).forward_with_ids, (Q, D, masks[0].long(), masks[1].long())
        ),
        "pack_sequences": (lambda *args: pack_sequences(args), (Q[0].detach(), D[0].detach())),
        "reference": (reference.maxsim_reference, (Q, D, *masks)),
        "reference of hidden": (reference.maxsim_from_hidden_reference, (Q, H, W, b)),
    }  # fmt: skip


CALLS = calls()


def described(results):
    return [(tuple(x.shape), x.dtype, x.requires_grad) for x in pytree.tree_leaves(results) if x is not None]


def with_gradients(function, args):
    """Results of a call, and gradients of its inputs, where it has any."""
    results = function(*args)
    scores = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
    wanted = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
    if not scores:
        return results
    return results, torch.autograd.grad(scores[0].sum(), wanted, allow_unused=True)


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
    *("maxsim_varlen", "score_pairs_packed medium", "rerank_direct", "smooth_maxsim", "smooth_maxsim_pairs"),
    *(
        "xtr_scores",
        "xtr_scores of own",
        "maxsim_from_hidden",
        "maxsim_from_hidden medium",
        "maxsim_residual",
    ),
    *("maxsim_residual_varlen", "plaid_approx_score", "Bits(1)", "Bits(4)"),
]
# They have no gradient, of what requires one either.
CONSTANT = ("encode", "quantize", "search", "maxsim_forward", "lowmem", "unified")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole(name):
    """Results and gradients are those of an eager call."""
    function, args = CALLS[name]
    torch._dynamo.reset()
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
def test_compiled_with_lengths_that_depend_on_data(name, device):
    torch._dynamo.reset()
    with dynamo.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(LATE[name], fullgraph=True, backend="aot_eager")
        for seed in range(3):
            args = masked_batch(seed, device)
            got, expected = compiled(*args), LATE[name](*args)
            torch.testing.assert_close(got, expected)
            if expected.requires_grad:
                got, expected = (torch.autograd.grad(x.square().sum(), args[:2]) for x in (got, expected))
                torch.testing.assert_close(got, expected)


class _Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.mark.parametrize("name", LATE)
def test_exported_with_lengths_that_depend_on_data(name, device):
    args = [x.detach() for x in masked_batch(0, device)]
    program = torch.export.export(_Module(LATE[name]), tuple(args))
    for seed in range(3):
        args = [x.detach() for x in masked_batch(seed, device)]
        torch.testing.assert_close(program.module()(*args), LATE[name](*args))


# ---- the short way of a traced call, called by itself ----

Q3, D3, OWN = torch.randn(2, 3, 8), torch.randn(4, 5, 8), torch.randn(2, 4, 5, 8)
KEPT = torch.rand(2, 3) < 0.7, torch.rand(4, 5) < 0.7
REST = {"q_mask": None, "d_mask": None, "normalize": False, "backward": None}
REST |= {"precision": None, "paired": False, "weights": None}


@pytest.mark.parametrize(
    "change",
    [
        {"backward": "lowmem"},
        {"precision": "high"},
        {"weights": torch.ones(2, 3)},
        {"Q": [1.0]},
        {"D": [1.0]},
        {"Q": Q3.int(), "D": D3.int()},
        {"Q": Q3.to(torch.float8_e4m3fn), "D": D3.to(torch.float8_e4m3fn)},
        {"D": D3.double()},
        {"D": D3.half()},
        {"D": D3.to("meta")},
        {"Q": Q3.to_sparse()},
        {"D": D3.to_sparse()},
        {"Q": torch.nested.nested_tensor([Q3[0], Q3[1]])},
        {"D": torch.nested.nested_tensor([D3[0], D3[1]])},
        {"Q": Q3[0]},
        {"Q": Q3[None]},
        {"D": D3[0]},
        {"D": OWN[None]},
        {"D": OWN, "paired": True},
        {"D": D3[..., :7]},
        {"Q": Q3[..., :7]},
        {"Q": Q3[..., :0], "D": D3[..., :0]},
        {"paired": True},
        {"D": D3[:1], "paired": True},
        {"D": OWN[:1]},
        {"Q": Q3[:1], "D": OWN},
        {"q_mask": KEPT[0].int()},
        {"q_mask": [True]},
        {"q_mask": KEPT[0].to("meta")},
        {"q_mask": KEPT[0].to_sparse()},
        {"q_mask": KEPT[0][:1]},
        {"q_mask": KEPT[0][:, :2]},
        {"d_mask": KEPT[1].int()},
        {"d_mask": KEPT[1][:, :4]},
        {"normalize": 1},
        {"normalize": None},
    ],
)
def test_calls_that_the_checks_are_left_to(change):
    assert torch.equal(traced_scores(Q3, D3, **REST), li.maxsim(Q3, D3))
    assert traced_scores(**{"Q": Q3, "D": D3, **REST} | change) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_traced_call_multiplies_as_an_eager_one(dtype):
    """torch.set_float32_matmul_precision is for float32 alone."""
    torch.set_float32_matmul_precision("high")
    for function in (lambda Q, D: traced_scores(Q, D, **REST), li.maxsim):
        with Called() as called:
            function(Q3.to(dtype), D3.to(dtype))
        assert called.arguments[0]["precision"] == ("high" if dtype is torch.float32 else "highest")
