"""The quantizers of fp8 and int8 tokens, and the rankings of what they make."""

import pytest
import torch

import late_interaction as li
from late_interaction import codecs
from late_interaction._scoring import quantized as scoring
from late_interaction.lik import fp8
from tests.operators.test_quantized import E4M3, E5M2, INT8, score
from tests.support.cases import QUANTIZED
from tests.support.coded import decoded, encoded

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
    """docs/performance.md says so of unit vectors: an fp8 code has an exponent of its own. Codes that are
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
