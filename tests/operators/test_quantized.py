"""Scores of fp8 and int8 tokens against float64 brute force, and the quantizers."""

import dataclasses

import pytest
import torch

import late_interaction as li
from late_interaction import codecs
from late_interaction._scoring import quantized as scoring
from late_interaction.lik import fp8
from late_interaction.ops import quantized
from late_interaction.reference import maxsim_quantized_reference
from tests import ref
from tests.cases import QUANTIZED, inputs, mask, tokens, walk
from tests.coded import codec_of, decoded, encoded, scored

OPS = torch.ops.late_interaction
E4M3, INT8, E5M2 = QUANTIZED
# Products of codes are exact in float32, whose sums alone err on a CPU; a GPU may score TF32 copies.
LIMIT = {"cpu": 5e-6, "cuda": 2e-3}
BAD_SCALES = [float("nan"), float("inf"), -1.0]


def scales(shape, device, form):
    """One for all tokens, or one a token in different places in memory."""
    if form == "tensor":
        return torch.tensor(0.03, device=device)
    if form == "expanded":
        return (torch.rand(shape[-1:], device=device) / 20).expand(shape)
    if form == "strided":
        return (torch.rand(*shape, 2, device=device) / 20)[..., 1]
    return torch.rand(shape, device=device) / 20


def score(Q, D, scale_Q, scale_D, q_mask=None, d_mask=None):
    """By Codes where they can be: sequences with a scale a token."""
    if scale_Q.shape == Q.shape[:2] and D.dim() > 2 and scale_D.shape == D.shape[:-1]:
        return scored(codec_of(Q.dtype), (Q, scale_Q), D, scale_D, q_mask, d_mask)
    return scoring.maxsim(Q, D, scale_Q, scale_D, q_mask, d_mask, tuple(QUANTIZED))


def expected(Q, D, scale_Q, scale_D, q_mask=None, d_mask=None):
    return ref.maxsim(ref.dequantized(Q, scale_Q), ref.dequantized(D, scale_D), q_mask, d_mask)[0]


@pytest.fixture(params=["kernel", "copies", "one document at a time"])
def way(request, monkeypatch):
    """The kernel, and the float32 copies that GPUs without a kernel make, on every device."""
    if request.param == "kernel":
        return score
    if request.param == "one document at a time":
        monkeypatch.setattr(quantized, "_BYTES", 1)
    return lambda *args: OPS.maxsim_dequantized(*args, *[None] * (6 - len(args)))


FORMS = ["token", "tensor", "expanded", "strided", "token"]
CASES = [
    (
        dataclasses.replace(case, dtype=QUANTIZED[i % 3], normalize=False),
        FORMS[i % 5],
        FORMS[(i + i // 5) % 5],
    )
    for i, case in enumerate(walk(110))
]


@pytest.mark.parametrize("case, form_Q, form_D", CASES, ids=str)
def test_scores(case, form_Q, form_D, way, device):
    Q, D, q_mask, d_mask = inputs(case, device)
    scale_Q, scale_D = scales(Q.shape[:-1], device, form_Q), scales(D.shape[:-1], device, form_D)
    scores = way(Q, D, scale_Q, scale_D, q_mask, d_mask)
    assert scores.dtype == torch.float32
    wanted = expected(Q, D, scale_Q, scale_D, q_mask, d_mask)
    if device == "cuda" and case.Ld == 1:
        # No maximum keeps these sums from cancelling, so errors are measured by the products that are summed.
        # TF32 errs by up to 2^-10 of each, and by far less of the sum; bf16 would not keep to this.
        products = expected(*(x.float().abs() for x in (Q, D)), scale_Q, scale_D, q_mask, d_mask)
        assert torch.all((scores.double() - wanted.double()).abs() <= 2**-12 * products.double())
    else:
        ref.assert_close(scores, wanted, LIMIT[device])


def test_the_reference_is_the_definition(device):
    for case, form_Q, form_D in CASES[:40]:
        Q, D, q_mask, d_mask = inputs(case, device)
        scale_Q, scale_D = scales(Q.shape[:-1], device, form_Q), scales(D.shape[:-1], device, form_D)
        out = maxsim_quantized_reference(Q, D, q_mask, d_mask, scale_Q=scale_Q, scale_D=scale_D)
        ref.assert_close(out, expected(Q, D, scale_Q, scale_D, q_mask, d_mask), 1e-7)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("shape", [(1, 40, 1, 5000), (3, 1200, 2, 300)])
def test_long_queries_and_documents_are_cut_into_parts(shape, dtype, device):
    Nq, Lq, Nd, Ld = shape
    Q, D = tokens((Nq, Lq, 128), dtype, device), tokens((Nd, Ld, 128), dtype, device)
    scale_Q, scale_D = scales((Nq, Lq), device, "token"), scales((Nd, Ld), device, "token")
    d_mask = mask((Nd, Ld), device, "holes")
    scores = score(Q, D, scale_Q, scale_D, None, d_mask)
    ref.assert_close(scores, expected(Q, D, scale_Q, scale_D, None, d_mask), LIMIT[device])


def test_the_scale_of_a_document_token_decides_its_similarity(way, device):
    Q = torch.tensor([[[1], [-1]]], dtype=INT8, device=device)
    D = torch.tensor([[[2], [3]]], dtype=INT8, device=device)
    scale_Q = torch.tensor([[10.0, 1.0]], device=device)
    for scale_D, wanted in (([1.0, 1.0], 10 * 3 - 2), ([2.0, 1.0], 10 * 4 - 3), ([0.0, 0.0], 0)):
        assert way(Q, D, scale_Q, torch.tensor([scale_D], device=device)).item() == wanted


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_every_code_means_what_pytorch_says(dtype, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(dtype)
    one = torch.ones((), device=device)
    Q = torch.ones(1, 1, 1, device=device).to(dtype)
    scores = score(Q, codes.view(256, 1, 1), one, one)[0]  # 256 documents of one dim
    torch.testing.assert_close(scores, codes.float(), rtol=0, atol=0, equal_nan=True)
    kept = codes[:128][codes[:128].float().isfinite()]  # the negative ones would cancel these
    Q = torch.eye(len(kept), device=device).to(dtype)  # one document of as many dims
    ref.assert_close(score(Q, kept[None], one, one), kept.double().sum(), 1e-6)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_whole_numbers_and_powers_of_two_score_exactly(dtype, way, device):
    # Every product and sum is exact in any order, so equal similarities are equal.
    Q = torch.randint(-2, 3, (3, 40, 16), device=device).to(dtype)
    D = torch.randint(-1, 2, (4, 70, 16), device=device).to(dtype)
    scale_Q, scale_D = (2.0 ** torch.randint(-2, 3, x.shape[:-1], device=device) for x in (Q, D))
    for s in (scale_Q, scale_Q.new_tensor(0.5)):
        for t in (scale_D, scale_D.new_tensor(4.0)):
            assert torch.equal(way(Q, D, s, t).double(), expected(Q, D, s, t))


@pytest.mark.parametrize("q_rank", [2, 3])
@pytest.mark.parametrize("d_rank", [2, 3])
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_ranks(q_rank, d_rank, dtype, device):
    Q, D = tokens((3, 5, 8), dtype, device), tokens((4, 6, 8), dtype, device)
    scale_Q, scale_D = scales((3, 5), device, "token"), scales((4, 6), device, "token")
    q_mask, d_mask = mask((3, 5), device, "holes"), mask((4, 6), device, "holes")
    full = expected(Q, D, scale_Q, scale_D, q_mask, d_mask)
    q, d = (slice(None) if q_rank == 3 else 0), (slice(None) if d_rank == 3 else 0)
    args = Q[q], D[d], scale_Q[q], scale_D[d], q_mask[q], d_mask[d]
    ref.assert_close(score(*args), full[q, d], LIMIT[device])
    reference = maxsim_quantized_reference(*args[:2], *args[4:], scale_Q=args[2], scale_D=args[3])
    ref.assert_close(reference, full[q, d], 1e-7)


def test_scales_of_other_forms(device):
    Q, D = tokens((1, 5, 8), E4M3, device), tokens((4, 6, 8), E4M3, device)
    scale_Q, scale_D = scales((5,), device, "token"), torch.tensor([0.5], device=device)
    wanted = expected(Q, D, scale_Q[None], scale_D[0])
    ref.assert_close(score(Q, D, scale_Q, scale_D), wanted, LIMIT[device])
    ref.assert_close(score(Q, D, scale_Q.double(), scale_D.half()), wanted, LIMIT[device])
    first = expected(Q[:, :1], D, scale_Q[0], scale_D[0])[0]
    ref.assert_close(score(Q[0, :1], D, scale_Q[:1], scale_D), first, LIMIT[device])


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_layouts_agree(dtype, way, device):
    Q, D = tokens((3, 33, 24), dtype, device), tokens((4, 70, 24), dtype, device)
    scale_Q, scale_D = scales((3, 33), device, "token"), scales((4, 70), device, "token")
    d_mask = mask((4, 70), device, "dead")
    each = D.expand(3, *D.shape), scale_Q, scale_D.expand(3, 4, 70), None, d_mask.expand(3, 4, 70)
    torch.testing.assert_close(way(Q, *each), way(Q, D, scale_Q, scale_D, None, d_mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["transposed", "sliced", "offset", "expanded"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_memory_layout_does_not_change_scores(form, dtype, device):
    Q, D = tokens((3, 33, 72), dtype, device, form), tokens((4, 70, 72), dtype, device, form)
    scale_Q, scale_D = scales((3, 33), device, "token"), scales((4, 70), device, "token")
    dense = score(Q.contiguous(), D.contiguous(), scale_Q, scale_D)
    ref.assert_close(score(Q, D, scale_Q, scale_D), dense.double(), 5e-6)


# ---- what is not finite, and what does not count ----


@pytest.mark.parametrize("bad", BAD_SCALES)
@pytest.mark.parametrize("where", ["Q", "D"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_scale_that_is_none_makes_nan_where_it_counts(dtype, where, bad, way, device):
    Q, D = tokens((3, 9, 24), dtype, device), tokens((4, 70, 24), dtype, device)
    scale_Q, scale_D = scales((3, 9), device, "token"), scales((4, 70), device, "token")
    clean = way(Q, D, scale_Q, scale_D)
    if where == "Q":
        scale_Q[1, 3] = bad
    else:
        scale_D[2, 40] = bad
    scores = way(Q, D, scale_Q, scale_D)
    hit = torch.zeros(3, 4, dtype=torch.bool, device=device)
    hit[(1, slice(None)) if where == "Q" else (slice(None), 2)] = True
    assert scores[hit].isnan().all() and torch.equal(scores[~hit], clean[~hit])


@pytest.mark.parametrize("bad", BAD_SCALES)
def test_one_bad_scale_for_all_tokens(bad, way, device):
    Q, D = tokens((2, 9, 24), E4M3, device), tokens((3, 7, 24), E4M3, device)
    good, bad = torch.tensor(0.5, device=device), torch.tensor(bad, device=device)
    q_mask = torch.tensor([[True], [False]], device=device).expand(2, 9)
    d_mask = torch.tensor([[True], [False], [True]], device=device).expand(3, 7)
    for args in ((bad, good), (good, bad)):
        scores = way(Q, D, *args, q_mask, d_mask)
        assert scores[0, ::2].isnan().all()
        assert not scores[1].any() and scores[0, 1] == 0  # what has no tokens scores 0, whatever their scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("where", ["Q", "D"])
def test_codes_that_are_nan(dtype, where, way, device):
    Q, D = tokens((3, 9, 24), dtype, device), tokens((4, 70, 24), dtype, device)
    (Q if where == "Q" else D)[1, 3, 5] = float("nan")
    args = Q, D, scales((3, 9), device, "token"), scales((4, 70), device, "token")
    ref.assert_close(way(*args), expected(*args), LIMIT[device])
    assert way(*args).isnan().sum() == (4 if where == "Q" else 3)


def test_codes_that_are_infinite(way, device):
    Q, D = torch.rand(3, 9, 24, device=device).add(0.5).to(E5M2), tokens((4, 70, 24), E5M2, device)
    D[1, 3, 5] = float("inf")
    D[2, 4, 6] = float("-inf")
    args = Q, D, scales((3, 9), device, "token") + 0.1, scales((4, 70), device, "token") + 0.1
    ref.assert_close(way(*args), expected(*args), LIMIT[device])


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_what_masked_tokens_hold_does_not_matter(dtype, way, device):
    Q, D = tokens((3, 33, 24), dtype, device), tokens((4, 65, 24), dtype, device)
    scale_Q, scale_D = scales((3, 33), device, "token"), scales((4, 65), device, "token")
    q_mask, d_mask = mask((3, 33), device, "dead"), mask((4, 65), device, "dead")
    clean = way(Q, D, scale_Q, scale_D, q_mask, d_mask)
    for x, keep in ((Q, q_mask), (D, d_mask)):
        x.view(torch.int8)[~keep] = 0x7F  # the NaN of both fp8 formats
    for bad in (*BAD_SCALES, 0.0):
        scale_Q, scale_D = scale_Q.masked_fill(~q_mask, bad), scale_D.masked_fill(~d_mask, bad)
        assert torch.equal(way(Q, D, scale_Q, scale_D, q_mask, d_mask), clean)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_negative_scores(dtype, way, device):
    # Padding with zeros would win here.
    Q = torch.rand(3, 33, 40, device=device).mul(90).add(30).to(dtype)
    D = torch.rand(5, 70, 40, device=device).mul(-90).sub(30).to(dtype)
    args = Q, D, scales((3, 33), device, "token") + 0.01, scales((5, 70), device, "token") + 0.01
    assert (way(*args) < 0).all()
    ref.assert_close(way(*args), expected(*args), LIMIT[device])


# ---- quantizers ----

# Codecs, by what they err at most: a part of the value, and their largest code.
PER_TOKEN = {
    E4M3: (codecs.Fp8(), 2**-4, 448),
    E5M2: (codecs.Fp8(E5M2), 2**-3, 57344),
    INT8: (codecs.Int8(), 0, 127),
}


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(8,), (2, 3, 5, 8), (0, 5, 8), (3, 0, 8)])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
def test_per_token_round_trip(dtype, given, shape, size, device):
    codec, relative, largest = PER_TOKEN[dtype]
    X = (size * torch.randn(shape, device=device)).to(given)
    codes, scale = encoded(codec, X)
    assert codes.dtype == dtype and codes.shape == X.shape and codes.is_contiguous()
    assert scale.dtype == torch.float32 and scale.shape == X.shape[:-1]
    back = decoded(codec, codes, scale)
    assert back.dtype == torch.float32
    # fp8 errs by a part of the value, or of the smallest step; int8 by half a step.
    step = scale.unsqueeze(-1) * (0.5 if dtype == INT8 else 2.0**-9 if dtype == E4M3 else 2.0**-16)
    X = X.double()
    assert ((back - X).abs() <= 1.01 * (relative * X.abs() + step)).all()
    if codes.numel():
        assert codes.float().abs().amax(-1).eq(largest).all()


def test_a_power_of_two_a_token_rounds_as_one_for_all_tokens_does():
    """docs/roofline.md says so of unit vectors: an fp8 code has an exponent of its own. Codes that are
    subnormal by the scale for all tokens alone differ."""
    X = torch.nn.functional.normalize(torch.randn(500, 128, dtype=torch.float64), dim=-1)
    per_token, for_all = (
        2.0 ** torch.ceil(torch.log2(largest / 448))
        for largest in (X.abs().amax(-1, keepdim=True), X.abs().amax())
    )
    rounded = [(X / scale).to(E4M3).double() * scale for scale in (per_token, for_all)]
    assert per_token.max() == for_all and per_token.min() < for_all
    normal = X.abs() >= for_all * 2**-6
    assert torch.equal(rounded[0][normal], rounded[1][normal]) and normal.float().mean() > 0.999
    errors = [(each - X).norm().item() for each in rounded]
    assert errors[1] < 1.001 * errors[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "shape", [(8,), (1, 1), (3, 5, 31), (2, 40, 128), (7, 1000), (0, 5, 8), (20_000, 33)]
)
def test_rows_by_a_kernel_have_the_bits_of_pytorch_s_operators(dtype, given, shape, monkeypatch):
    codec = PER_TOKEN[dtype][0]
    X = torch.randn(shape, generator=torch.Generator().manual_seed(5)).cuda()
    if X.numel() > 8:
        X = X * torch.randn(*shape[:-1], 1, generator=torch.Generator().manual_seed(6)).cuda().mul(8).exp2()
        rows = X.view(-1, shape[-1])
        special = [0.0, 1e-30, 1e-42, 3e38, torch.nan, -torch.nan, torch.inf, -torch.inf]
        for i, value in zip(range(0, len(rows), max(len(rows) // 8, 1)), special, strict=False):
            rows[i, i % shape[-1]] = value
        rows[-1] = 0
    X = X.to(given)
    for x in (X, X.mT if X.dim() > 1 else X[::2]):
        found = encoded(codec, x)
        with monkeypatch.context() as patch:
            patch.setattr(scoring, "rows_by_kernel", lambda *_: None)
            wanted = encoded(codec, x)
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)
        bits = found[0].view(torch.uint8), wanted[0].view(torch.uint8)
        unlike = (bits[0] != bits[1]) & ~(found[0].float().isnan() & wanted[0].float().isnan())
        assert not unlike.any() and found[0].is_contiguous() and found[0].dtype == dtype


@pytest.mark.gpu
def test_what_the_kernel_of_rows_refuses():
    rows, codes = torch.zeros(3, 8, device="cuda"), torch.zeros(3, 8, dtype=torch.int8, device="cuda")
    scale, op = torch.zeros(3, device="cuda"), torch.ops.late_interaction.quantize_rows_
    torch.library.opcheck(op.default, (rows, codes, scale))
    for args, words in (
        ((rows.mT, codes, scale), "rows must be contiguous"),
        ((rows, codes[:2], scale), "codes must be contiguous"),
        ((rows, codes, scale.double()), "scale must be contiguous float32"),
        ((rows, codes.cpu(), scale), "the device of rows"),
        ((codes, codes, scale), "must be bfloat16, float16"),
        ((rows, rows, scale), "must be float8_e4m3fn"),
    ):
        with pytest.raises(RuntimeError, match=words):
            op(*args)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(), (8,), (3, 5, 8)])
def test_per_tensor_round_trip(dtype, shape, device):
    X = torch.randn(shape, device=device)
    codes, scale = fp8.quantize_fp8_per_tensor(X, dtype)
    assert codes.dtype == dtype and codes.shape == X.shape and scale.shape == ()
    assert codes.float().abs().max() == torch.finfo(dtype).max
    back = fp8.dequantize_fp8_per_tensor(codes, scale)
    assert ((back - X).abs() <= 2**-3 * X.abs() + scale * 2**-9).all()


def test_defaults_are_e4m3():
    X = torch.randn(3, 8)
    assert fp8.quantize_fp8_per_tensor(X)[0].dtype == codecs.Fp8().stored == E4M3


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_zeros_stay_zeros_and_tiny_rows_keep_their_bits(dtype, device):
    codec = PER_TOKEN[dtype][0]
    X = torch.randn(3, 40, device=device)
    X[1] = 0
    codes, scale = encoded(codec, X)
    assert not codes[1].float().any() and (scale > 0).all()
    small, small_scale = encoded(codec, X * 2.0**-60)
    assert torch.equal(small.float(), codes.float())
    assert torch.equal(small_scale[[0, 2]], scale[[0, 2]] * 2.0**-60)
    assert not decoded(codec, codes, scale)[1].any()


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gets_the_scale_nan(dtype, value, device):
    codec = PER_TOKEN[dtype][0]
    X = torch.randn(2, 3, 8, device=device)
    X[1, 2, 5] = value
    codes, scale = encoded(codec, X)
    assert scale.isnan().nonzero().tolist() == [[1, 2]]
    assert decoded(codec, codes, scale).isnan().any(-1).nonzero().tolist() == [[1, 2]]
    scores = score(
        encoded(codec, torch.randn(2, 4, 8, device=device))[0], codes, torch.ones((), device=device), scale
    )
    assert scores.isnan().tolist() == [[False, True]] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_gets_the_scale_nan(value, device):
    X = torch.randn(2, 3, 8, device=device)
    X[1, 2, 5] = value
    codes, scale = fp8.quantize_fp8_per_tensor(X)
    assert scale.isnan() and fp8.dequantize_fp8_per_tensor(codes, scale).isnan().all()


@pytest.mark.parametrize("shape", [(0,), (3, 0, 8), (3, 5, 0)])
def test_an_empty_tensor_has_scale_one(shape, device):
    X = torch.randn(shape, device=device)
    torch.set_default_dtype(torch.float64)  # which is not to matter
    try:
        codes, scale = fp8.quantize_fp8_per_tensor(X)
    finally:
        torch.set_default_dtype(torch.float32)
    assert codes.shape == shape and scale.item() == 1.0 and scale.dtype == torch.float32


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantizers_are_outside_autograd(dtype, device):
    X = torch.randn(2, 3, 8, device=device, requires_grad=True)
    codes, scale = encoded(PER_TOKEN[dtype][0], X)
    assert not codes.requires_grad and not scale.requires_grad
    score(codes, codes, scale, scale)
    assert not any(x.requires_grad for x in fp8.quantize_fp8_per_tensor(X))


def test_transposed_embeddings_quantize_alike(device):
    X = torch.randn(8, 5, device=device).t()
    for dtype in QUANTIZED:
        codes, scale = encoded(PER_TOKEN[dtype][0], X)
        dense, same = encoded(PER_TOKEN[dtype][0], X.contiguous())
        assert (
            codes.is_contiguous() and torch.equal(codes.float(), dense.float()) and torch.equal(scale, same)
        )


# ---- rankings ----


def corpus(device, Nq=300, Nd=1000, Lq=16, Ld=48, d=128, topics=30, words=2000):
    """Unit vectors of queries and documents that cluster as text does.

    A token is its word, the document's topic, what all tokens share (embeddings of a model fill a cone, not
    the sphere) and its context. A topic has 80 words, the frequent ones in common with other topics. A query
    takes words of one document into another context. The 10th and the 11th document of a query then lie 1.1%
    apart in the mean; all-MiniLM-L6-v2 puts them 1.2% apart on the docstrings of `make demo`.
    """
    make = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=make)

    def pick(count, *shape):
        return torch.randint(count, shape, generator=make)

    word, topic, shared = random(words, d), random(topics, d), random(d)
    vocabulary = (words * torch.rand(topics, 80, generator=make) ** 2).long()
    topic_of = pick(topics, Nd)
    text = vocabulary[topic_of.unsqueeze(1), pick(80, Nd, Ld)]
    lengths = Ld // 4 + pick(Ld - Ld // 4 + 1, Nd)
    source = pick(Nd, Nq)
    place = (torch.rand(Nq, Lq, generator=make) * lengths[source].unsqueeze(1)).long()
    asked = text[source.unsqueeze(1), place]

    def embed(ids, of):
        x = word[ids] + 0.5 * (topic[of].unsqueeze(1) + shared) + 0.7 * random(*ids.shape, d)
        return torch.nn.functional.normalize(x, dim=-1).to(device)

    d_mask = torch.arange(Ld) < lengths.unsqueeze(1)
    return embed(asked, topic_of[source]), embed(text, topic_of), d_mask.to(device)


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_the_ten_best_documents_are_those_of_bfloat16(dtype, device):
    Q, D, d_mask = corpus(device)
    exact = li.maxsim(Q, D, None, d_mask)
    tenth, eleventh = exact.topk(11).values[:, 9:].unbind(1)
    assert 0.009 < float((tenth / eleventh - 1).mean()) < 0.013  # neither easier nor harder than text
    best = li.maxsim(Q.bfloat16(), D.bfloat16(), None, d_mask).topk(10).indices
    found = li.maxsim(Q, PER_TOKEN[dtype][0].encode(li.Tokens(D, d_mask))).topk(10).indices
    agreement = (found.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean()
    assert agreement >= 0.99, f"{agreement:.2%} of the ten best are the same"


def test_codes_of_a_token_that_is_not_finite_are_zeros():
    X = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [1.0, -0.5]])
    codes, scale = encoded(codecs.Int8(), X)
    assert codes.tolist() == [[0, 0], [0, 0], [127, -64]] and scale.isnan().tolist() == [True, True, False]
