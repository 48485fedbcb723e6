"""Arguments at the edge of what is accepted, on both sides of it, and the exact words on what is wrong."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import late_interaction as li
from late_interaction import codecs
from late_interaction._checks.packed import read_longest
from late_interaction.fused_head import maxsim_from_hidden
from late_interaction.lik import fp8, padded, plaid
from late_interaction.ops.from_hidden import driver
from late_interaction.score_pairs import rerank_direct, score_pairs_packed

OPS = torch.ops.late_interaction
TOKENS = torch.ones(9, 4)


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def refused(error, words):
    return pytest.raises(error, match=f"^{re.escape(words)}$")


@pytest.mark.parametrize("most", [2**30, 2**30 + 1])
def test_packed_tokens_are_at_most_2_to_the_30(most):
    Q, D = torch.empty(5, 4, device="meta"), torch.empty(most, 4, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    if most == 2**30:
        assert li.lik.maxsim_varlen(Q, D, cu, cu).shape == (2, 2)
    else:
        with refused(ValueError, f"D_packed must have at most 2**30 tokens, got [{most}, 4]"):
            li.lik.maxsim_varlen(Q, D, cu, cu)


Q, D, KD = torch.ones(2, 3, 4), torch.ones(2, 5, 4), torch.ones(2, 3, 5, 4)
ONE, ALL = integers(0), integers(0, 9)
PACKED = {"Q_packed": TOKENS, "D_packed": TOKENS, "cu_seqlens_q": ALL, "cu_seqlens_d": ALL}
LISTED = PACKED | {"pair_q_idx": ONE, "pair_d_idx": ONE}
SPANS = {"Q": TOKENS, "batch_tensor": TOKENS, "doc_offsets": ONE, "doc_lengths": ONE}
LENGTHS = {"query_lengths": integers(1, 3), "doc_lengths": integers(1, 0, 1, 5, 1, 1).view(2, 3)}
PADDED = {"queries": Q, "documents": KD, **LENGTHS}
HIDDEN = {"Q": Q, "H_d": D, "W": torch.ones(4, 4), "b": torch.ones(4)}
RESIDUAL = {
    "Q": Q, "codes": torch.zeros(2, 5).int(), "residuals": torch.zeros(2, 5, 2).byte(),
    "doc_lengths": integers(5, 2), "centroids": torch.ones(3, 4), "bucket_weights": torch.ones(16),
    "nbits": 4,
}  # fmt: skip
# The arguments of each function that may have one rank alone.
RANKED = [
    (li.maxsim, {"Q": Q, "D": D}, ""),
    (li.maxsim_pairs, {"Q": Q, "D": D}, "Q D"),
    (li.lik.maxsim_varlen, PACKED, " ".join(PACKED)),
    (score_pairs_packed, LISTED, " ".join(LISTED)),
    (rerank_direct, SPANS, " ".join(SPANS)),
    (padded.pack_padded, PADDED, " ".join(PADDED)),
    (maxsim_from_hidden, HIDDEN, "H_d W b"),
    (plaid.maxsim_residual, RESIDUAL, "codes residuals doc_lengths centroids bucket_weights"),
]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[0],
        lambda x: x[:, 0] if x.dim() > 1 else x[0],
        lambda x: x.unsqueeze(0),
        lambda x: x.unsqueeze(-1),
    ],
    ids=["without the first", "without the second", "one before", "one behind"],
)
@pytest.mark.parametrize(
    "function, arguments, name",
    [(function, arguments, name) for function, arguments, names in RANKED for name in names.split()],
)
def test_one_dim_fewer_and_one_more_are_refused(function, arguments, name, change):
    function(**arguments)
    with pytest.raises(ValueError, match=rf"\b{name}\b.* must |{function.__name__} needs Q and D"):
        function(**arguments | {name: change(arguments[name])})


# ---- offsets, spans, lengths: values on the edge and beyond it ----


@pytest.mark.parametrize("offsets", [(0, 9), (9, 9), (0, 0), (1, 8), (0, 4, 4, 9)])
def test_offsets_within_the_tokens_are_accepted(offsets):
    scores = li.lik.maxsim_varlen(TOKENS, TOKENS, integers(*offsets), integers(*offsets))
    assert scores.shape == (len(offsets) - 1,) * 2


def test_offsets_hold_one_entry_at_least():
    with refused(ValueError, "cu_seqlens_q must be [sequences + 1], got [0]"):
        li.lik.maxsim_varlen(TOKENS, TOKENS, integers(), ALL)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("start, length", [(0, 9), (9, 0), (8, 1), (0, 0)])
def test_spans_within_the_buffer_are_accepted(start, length, dtype):
    start, length = torch.tensor([start], dtype=dtype), torch.tensor([length], dtype=dtype)
    assert rerank_direct(TOKENS, TOKENS, start, length).shape == (1,)


@pytest.mark.parametrize("names", [("int32", "int32"), ("int32", "int64"), ("int64", "int32")])
@pytest.mark.parametrize(
    "start, length", [(0, 10), (9, 1), (-1, 1), (-5, 9), (3, -1), (-1, 0), (2**30, 2**30), (2**31 - 1, 5)]
)
def test_spans_beyond_the_buffer_are_named(start, length, names):
    pairs = zip(((0, start), (9, length)), names, strict=True)
    starts, lengths = (torch.tensor(x, dtype=getattr(torch, name)) for x, name in pairs)
    words = (
        "doc_offsets and doc_lengths must lie within the 9 tokens of batch_tensor, got"
        f" {names[0]} [2] with doc_offsets[1] = {start} and {names[1]} [2] with doc_lengths[1] = {length}"
    )
    with refused(ValueError, words):
        rerank_direct(TOKENS, TOKENS, starts, lengths)


def test_a_padded_batch_of_nothing():
    batch = padded.pack_padded(Q[:0], KD[:0], LENGTHS["query_lengths"][:0], LENGTHS["doc_lengths"][:0])
    assert batch.max_seqlen_q == batch.max_seqlen_d == 0
    assert batch.cu_seqlens_q.tolist() == batch.cu_seqlens_d.tolist() == [0]


def test_a_longest_sequence_is_as_long_as_the_longest_one():
    def score(longest, *offsets, device="cpu"):
        tokens, cu = TOKENS.to(device), integers(*offsets).to(device)
        return li.lik.maxsim_varlen(tokens, tokens, cu, cu, max_seqlen_q=longest)

    assert score(5, 0, 4, 9).shape == score(6, 0, 4, 9).shape == (2, 2)
    assert score(0, 0).shape == (0, 0)
    with refused(ValueError, "max_seqlen_q must be at least 5, the longest sequence, got 4"):
        score(4, 0, 4, 9)
    assert score(0, 0, 9, device="meta").shape == (1, 1)
    with refused(ValueError, "max_seqlen_q must not be negative, got -1"):
        score(-1, 0, 9, device="meta")
    for wrong, kind in ((True, "bool"), (4.0, "float"), (torch.tensor(9), "Tensor")):
        with refused(TypeError, f"max_seqlen_q must be an int or None, got {kind}"):
            score(wrong, 0, 9)


# ---- dtypes ----


def test_under_autocast_dtypes_may_differ_but_not_from_float64():
    half, single, double = (
        torch.ones(2, 3, 4, dtype=x) for x in (torch.bfloat16, torch.float32, torch.float64)
    )
    cu = integers(0, 3)
    calls = (
        li.maxsim,
        li.maxsim_pairs,
        lambda Q, D: li.lik.maxsim_varlen(Q[0], D[0], cu, cu),
        lambda Q, D: li.lik.maxsim_padded(Q, D.unsqueeze(1), integers(3, 3), integers(3, 3).view(2, 1)),
        lambda Q, D: score_pairs_packed(Q[0], D[0], cu, cu, ONE, ONE, precision="high"),
    )
    for call in calls:
        with pytest.raises(TypeError, match="must share a dtype"):
            call(half, single)
        with torch.autocast("cpu", torch.bfloat16):
            assert call(half, single).flatten()[0] == call(single, half).flatten()[0] == 12
            for pair in ((single, double), (double, half)):
                with pytest.raises(TypeError, match="must share a dtype"):
                    call(*pair)


# ---- residual-compressed documents ----


def residual(nbits, d, size, **changed):
    tables = {"centroids": torch.rand(3, d), "bucket_weights": torch.rand(2**nbits), "nbits": nbits}
    residuals = torch.zeros(2, 5, size, dtype=torch.uint8)
    return plaid.maxsim_residual(
        **RESIDUAL | {"Q": torch.rand(2, 3, d), "residuals": residuals} | tables | changed
    )


@pytest.mark.parametrize("nbits, d, size", [(1, 8, 1), (1, 9, 2), (2, 4, 1), (4, 3, 2), (8, 64, 64)])
def test_residuals_take_whole_bytes(nbits, d, size):
    assert residual(nbits, d, size).shape == (2, 2)
    for wrong in (size - 1, size + 1):
        with pytest.raises(ValueError, match=rf"residuals must be \[2, 5, {size}\]"):
            residual(nbits, d, wrong)


@pytest.mark.parametrize("n", [0, 1, 2**31 - 1, 2**31])
def test_centroids_are_at_least_one_and_fit_int32(n):
    arguments = {name: x.to("meta") for name, x in RESIDUAL.items() if name != "nbits"}
    arguments |= {"centroids": torch.empty(n, 4, device="meta"), "nbits": 4}
    scores = torch.empty(n, 3, device="meta")
    codes, lengths = arguments["codes"], arguments["doc_lengths"]
    if 0 < n < 2**31:
        assert plaid.maxsim_residual(**arguments).shape == (2, 2)
        assert plaid.plaid_approx_score(scores, codes, lengths).shape == (2,)
    else:
        with pytest.raises(ValueError, match=r"^centroids must be \[n, 4\]"):
            plaid.maxsim_residual(**arguments)
        with pytest.raises(ValueError, match=r"^query_centroid_scores must be \[n_centroids, Lq\]"):
            plaid.plaid_approx_score(scores, codes, lengths)


def test_padded_queries_may_have_no_tokens_and_d_is_at_least_one():
    none = integers(0, 0)
    batch = padded.pack_padded(Q[:, :0], KD, none, LENGTHS["doc_lengths"])
    assert batch.Q_packed.shape == (0, 4)
    with pytest.raises(ValueError, match=r"must share an embedding dim d .* of at least 1"):
        padded.pack_padded(Q[..., :0], KD[..., :0], **LENGTHS)


def test_tangents_alone_are_refused_where_forward_mode_is_on():
    codes, scale = fp8.quantize_fp8_per_token(torch.rand(2, 3, 4))
    with forward_ad.dual_level():
        assert li.lik.maxsim_varlen(TOKENS, TOKENS, ALL, ALL).shape == (1, 1)
        assert fp8.maxsim_inference_fp8(codes, codes, scale_Q=scale, scale_D=scale).shape == (2, 2)
        for name in ("scale_Q", "scale_D"):
            scales = {"scale_Q": scale, "scale_D": scale, name: forward_ad.make_dual(scale, scale)}
            with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
                fp8.maxsim_inference_fp8(codes, codes, **scales)
        dual = forward_ad.make_dual(TOKENS, TOKENS)
        for pair in ((dual, TOKENS), (TOKENS, dual)):
            with pytest.raises(RuntimeError, match="maxsim has no forward-mode derivative"):
                li.lik.maxsim_varlen(*pair, ALL, ALL)


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


def test_values_of_subclasses_are_looked_at_and_those_of_fake_tensors_are_not():
    wrong = integers(0, 10)
    with pytest.raises(ValueError, match="must not decrease and lie within"):
        li.lik.maxsim_varlen(TOKENS, TOKENS, ALL, wrong.as_subclass(Plain))
    with FakeTensorMode() as mode:
        tokens, cu = mode.from_tensor(TOKENS), mode.from_tensor(wrong)
        assert li.lik.maxsim_varlen(tokens, tokens, cu, cu).shape == (1, 1)


def test_no_sequences_have_no_longest_one():
    none = integers(0)
    assert li.lik.maxsim_varlen(TOKENS, TOKENS, none, ALL, 0).shape == (0, 1)
    assert li.lik.maxsim_varlen(TOKENS, TOKENS, ALL, none, None, 0).shape == (1, 0)
    with pytest.raises(ValueError, match="max_seqlen_d must be at least 0, the longest sequence, got -1"):
        li.lik.maxsim_varlen(TOKENS, TOKENS, ALL, none, None, -1)


@pytest.mark.parametrize("shape", [(4,), (4, 4, 1), (0, 4), (4, 0)])
def test_a_projection_has_two_dims_of_at_least_one(shape):
    hidden = HIDDEN["H_d"][..., : shape[-1]] if len(shape) == 2 else HIDDEN["H_d"]
    with pytest.raises(ValueError, match=r"W must be \[d, d_model\] with d_model = "):
        maxsim_from_hidden(HIDDEN["Q"], hidden, torch.ones(shape))


@pytest.mark.parametrize("devices", [("meta", "cpu"), ("cpu", "meta")])
def test_a_corpus_elsewhere_is_refused_unless_it_travels_to_a_gpu(devices):
    queries, documents = (torch.ones(2, 3, 4, device=device) for device in devices)
    with pytest.raises(
        ValueError, match=r"Q and D must be on the same device \(or Q on a GPU and D on the CPU\)"
    ):
        li.search(queries, documents, 1)


@pytest.mark.gpu
def test_a_corpus_on_a_gpu_is_refused_by_queries_on_the_cpu():
    with pytest.raises(ValueError, match=r"must be on the same device .* got cpu and cuda:0"):
        li.search(torch.ones(2, 3, 4), torch.ones(2, 3, 4, device="cuda"), 1)
    assert li.search(torch.ones(2, 3, 4, device="cuda"), torch.ones(2, 3, 4), 1).scores.shape == (2, 1)


def test_a_list_of_one_scale_is_the_scale_of_all_tokens():
    codes, scale = torch.ones(2, 3, 4).to(torch.float8_e4m3fn), torch.tensor(0.5)
    scores = fp8.maxsim_inference_fp8(codes, codes, scale_Q=scale[None], scale_D=scale[None])
    assert torch.equal(scores, torch.full((2, 2), 3.0))
    with pytest.raises(ValueError, match=r"scale_D must be 0-dim or have the shape of D .* got \[2\]"):
        fp8.maxsim_inference_fp8(codes, codes, scale_Q=scale, scale_D=scale.expand(2))


# ---- words that no other test looks for ----


META_CU = torch.empty(3, dtype=torch.int32, device="meta")
META_2, META_3 = torch.empty(9, 4, device="meta"), torch.empty(2, 9, 4, device="meta")
LACKS = {
    "nested lists": (
        lambda: li.maxsim(Q, D, backward=[[[1]]]),
        r"^backward must be one of .* or None, got \[\[\[\.\.\.\]\]\]$",
    ),
    **{
        f"a seed of {seed}": (
            lambda seed=seed: codecs.Residual.train(torch.rand(300, 8), 8, seed=seed),
            r"seed must lie in \[-2\*\*63, 2\*\*64\)",
        )
        for seed in (-(1 << 63) - 1, 1 << 64)
    },
    "packed tokens of rank 3, without values": (
        lambda: OPS.maxsim_varlen(META_2, META_3, META_CU, META_CU),
        r"Q and D must be \[tokens, d\], got ranks",
    ),
    "listed pairs of rank 3, without values": (
        lambda: OPS.maxsim_pairs_packed(META_3, META_2, *[META_CU] * 4),
        r"Q and D must be \[tokens, d\], got ranks",
    ),
    **{
        f"{name} elsewhere": (
            lambda name=name: driver.check(
                **{"Q": Q, "H": D, "W": HIDDEN["W"], "b": HIDDEN["b"]} | {name: HIDDEN[name].to("meta")}
            ),
            "late_interaction: Q, H, W and b must be on one device",
        )
        for name in ("W", "b")
    },
    "approximate scores with a gradient": (
        lambda: plaid.plaid_approx_score(
            torch.ones(3, 4, requires_grad=True), RESIDUAL["codes"], RESIDUAL["doc_lengths"]
        ),
        "query_centroid_scores must not require a gradient",
    ),
    "lengths that lie on a GPU": (
        lambda: read_longest("n", torch.tensor((7, 0, 8)), 7),
        r"^n must all be >= 0 and <= 7, got int64 \[3\] with n\[2\] = 8$",
    ),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_is_wrong_is_said(what):
    call, words = LACKS[what]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        call()
    assert read_longest("n", torch.tensor((7, 0, 3)), 7) == 7


def test_spans_without_values_need_no_longest_one():
    assert rerank_direct(**{name: x.to("meta") for name, x in SPANS.items()}).shape == (1,)
