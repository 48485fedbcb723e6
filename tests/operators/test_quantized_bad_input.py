"""Bad arguments of the functions on quantized tokens are a TypeError or ValueError that names them."""

import pytest
import torch

import late_interaction as li
from late_interaction import Codes, codecs
from late_interaction._scoring import quantized
from late_interaction.lik import fp8
from late_interaction.reference import maxsim_quantized_reference
from tests.support.calls import refused

X, Y = torch.randn(3, 5, 8), torch.randn(4, 7, 8)
KD = torch.randn(3, 2, 7, 8)
S, T = torch.rand(3, 5), torch.rand(4, 7)
ONE = torch.ones(())
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def score_int8(Q, D, scale_Q, scale_D, q_mask=None, d_mask=None):
    """What a corpus of int8 codes scores its chunks by."""
    return quantized.maxsim(Q, D, scale_Q, scale_D, q_mask, d_mask, (INT8,))


def boolean(*shape):
    return torch.ones(*shape, dtype=torch.bool)


# A function, what replaces its good arguments, the exception, and words that its message must hold.
TOKENS = {
    "fp8 wants fp8": (fp8, {"Q": X}, TypeError, ["Q must be float8_e4m3fn or float8_e5m2", "torch.float32"]),
    "not int8": (fp8, {"D": Y.to(torch.int8)}, TypeError, ["D must be float8", "torch.int8"]),
    "nor another fp8": (fp8, {"D": Y.to(torch.float8_e4m3fnuz)}, TypeError, ["D", "float8_e4m3fnuz"]),
    "int8 wants int8": (INT8, {"Q": X.to(E4M3)}, TypeError, ["Q must be int8", "float8_e4m3fn"]),
    "not uint8": (INT8, {"D": Y.abs().to(torch.uint8)}, TypeError, ["D must be int8", "torch.uint8"]),
    "one dtype": (fp8, {"D": Y.to(E5M2)}, TypeError, ["Q and D must share", "e4m3fn", "e5m2"]),
    "list": (INT8, {"Q": X.tolist()}, TypeError, ["Q", "torch.Tensor", "list"]),
    "sparse": (INT8, {"D": Y.to(torch.int8).to_sparse()}, TypeError, ["D", "dense", "sparse_coo"]),
    "elsewhere": (fp8, {"D": Y.to(E4M3).to("meta")}, ValueError, ["Q and D", "cpu", "meta"]),
    "d": (fp8, {"D": Y[..., :7].to(E4M3)}, ValueError, ["Q and D", "[3, 5, 8]", "[4, 7, 7]"]),
    "rank": (fp8, {"Q": X[None].to(E4M3)}, ValueError, ["Q must be [Nq, Lq, d]", "[1, 3, 5, 8]"]),
    "another Nq": (fp8, {"D": KD[:2].to(E4M3)}, ValueError, ["Nq", "[3, 5, 8]", "[2, 2, 7, 8]"]),
    "a gradient": (fp8, {"Q": X.to(E4M3).requires_grad_()}, ValueError, ["Q must not require", "no_grad"]),
    "mask": (fp8, {"d_mask": boolean(4, 6)}, ValueError, ["d_mask", "[4, 7]", "[4, 6]"]),
    "mask of floats": (INT8, {"q_mask": S}, TypeError, ["q_mask", "bool", "float32"]),
    "scale is a number": (fp8, {"scale_Q": 0.5}, TypeError, ["scale_Q must be a torch.Tensor", "float"]),
    "scale is missing": (fp8, {"scale_D": None}, TypeError, ["scale_D must be a torch.Tensor", "NoneType"]),
    "integer scale": (INT8, {"scale_D": T.int()}, TypeError, ["scale_D", "float32", "int32"]),
    "fp8 scale": (fp8, {"scale_Q": S.to(torch.float8_e8m0fnu)}, TypeError, ["scale_Q", "e8m0fnu"]),
    "sparse scale": (INT8, {"scale_D": T.to_sparse()}, TypeError, ["scale_D", "dense", "sparse_coo"]),
    "scale of a shape": (fp8, {"scale_Q": S[:, :4]}, ValueError, ["scale_Q", "[3, 5]", "[3, 4]"]),
    "with d": (fp8, {"scale_D": T.unsqueeze(-1)}, ValueError, ["scale_D", "[4, 7]", "[4, 7, 1]"]),
    "scale a document": (INT8, {"scale_D": T[:, 0]}, ValueError, ["scale_D", "[4, 7]", "[4]"]),
    "needs broadcasting": (INT8, {"scale_D": T[:1]}, ValueError, ["scale_D", "[4, 7]", "[1, 7]"]),
    "scale elsewhere": (fp8, {"scale_D": T.to("meta")}, ValueError, ["scale_D", "of D, cpu", "meta"]),
    "scale with gradient": (
        INT8,
        {"scale_Q": S.clone().requires_grad_()},
        ValueError,
        ["scale_Q must not require a gradient"],
    ),
}


@pytest.mark.parametrize("bad", TOKENS)
def test_scoring(bad):
    module, wrong, error, words = TOKENS[bad]
    dtype = INT8 if module is INT8 else E4M3
    function = score_int8 if module is INT8 else fp8.maxsim_inference_fp8
    good = {"Q": X.to(dtype), "D": Y.to(dtype), "scale_Q": S, "scale_D": T}
    for called in (function, maxsim_quantized_reference):
        if called is not function and bad in ("fp8 wants fp8", "not int8", "int8 wants int8"):
            continue  # the reference takes both
        with pytest.raises(error) as caught:
            called(**{**good, **wrong})
        said = str(caught.value).replace("float8_e4m3fn, float8_e5m2 or int8", "int8")
        assert all(word in said for word in words), caught.value
        assert "\n" not in said


QUANTIZERS = [fp8.quantize_fp8_per_tensor, fp8.quantize_fp8_per_token]


@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("bad", [X.tolist(), X.int(), X.to(E4M3), X.to_sparse(), None])
def test_quantizers_want_floats(quantize, bad):
    with pytest.raises(TypeError, match="X must be"):
        quantize(bad)


@pytest.mark.parametrize("codec", [codecs.Int8(), codecs.Fp8(), codecs.Bits(1), codecs.Bits(4)], ids=str)
@pytest.mark.parametrize("bad", [X.tolist(), X.int(), X.to(E4M3), X.to_sparse(), None, [], [X[0], 1]])
def test_codecs_want_floats(codec, bad):
    with pytest.raises(TypeError, match="tokens"):
        codec.encode(bad)
    with pytest.raises(ValueError, match=r"tokens must be .* with d of at least 1"):
        codec.encode(torch.randn(3, 0))
    with pytest.raises(ValueError, match=r"tokens must be \[N, L, d\], \[L, d\] or \[Nq, K, L, d\]"):
        codec.encode(torch.randn(3))


@pytest.mark.parametrize("quantize", [*QUANTIZERS, lambda _, dtype: codecs.Fp8(dtype)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fnuz, torch.float16, "float8_e4m3fn"])
def test_fp8_has_two_formats(quantize, dtype):
    with pytest.raises(TypeError, match=r"dtype must be torch\.float8_e4m3fn or torch\.float8_e5m2"):
        quantize(X, dtype)


@pytest.mark.parametrize("X", [torch.tensor(1.0), torch.randn(3, 0)])
def test_a_token_has_dims(X):
    with pytest.raises(ValueError, match=r"X must be \[\.\.\., d\] with d of at least 1"):
        fp8.quantize_fp8_per_token(X)


# What makes floats of codes again, with good arguments.
DEQUANTIZERS = {
    fp8.dequantize_fp8_per_tensor: {"X_fp8": X.to(E4M3), "scale": ONE},
    fp8.dequantize_fp8_per_token: {"X_fp8": X.to(E5M2), "scale": S},
}


@pytest.mark.parametrize("function", DEQUANTIZERS)
@pytest.mark.parametrize(
    ("at", "bad", "error"),
    [
        (0, None, TypeError),
        (0, X, TypeError),
        (0, X.tolist(), TypeError),
        (1, 0.5, TypeError),
        (1, S.int(), TypeError),
        (1, S.to_sparse(), TypeError),
        (1, S.to("meta"), ValueError),
        (1, S[:, :4], ValueError),
        (1, S[:1], ValueError),
        (1, S.unsqueeze(0), ValueError),
    ],
)
def test_what_is_converted_back(function, at, bad, error):
    good = DEQUANTIZERS[function]
    assert function(**good).shape == X.shape
    name = list(good)[at]
    with pytest.raises(error, match=f"^{name} must be"):
        function(**good | {name: bad})


BYTES = torch.zeros(3, 5, 4, dtype=torch.uint8)
OFFSETS = torch.tensor([0, 2, 15])
FLAT = {"values": X.to(INT8).flatten(0, 1), "offsets": OFFSETS, "scales": S.flatten()}
RESIDUAL = codecs.Residual(
    torch.eye(4), torch.tensor([-0.1, 0.0, 0.1]), torch.tensor([-0.2, -0.05, 0.05, 0.2])
)
EYE = RESIDUAL.encode(torch.eye(4))
ROWS, COARSE = EYE.values, EYE.centroids
STORED = {"codec": RESIDUAL, "values": ROWS, "scales": None, "centroids": COARSE}
# A codec, what replaces its good values and scales, the exception, and words that its message must hold.
BAD_CODES = [
    ({"codec": "int8"}, TypeError, ["codec must be one of late_interaction.codecs", "int8"]),
    ({"codec": codecs.Int8}, TypeError, ["codec must be one of late_interaction.codecs"]),
    ({"values": X}, TypeError, ["values must be int8", "float32"]),
    ({"values": [1]}, TypeError, ["values must be a torch.Tensor"]),
    ({"values": X.to(INT8).to_sparse()}, TypeError, ["values must be a dense"]),
    ({"values": X[0].to(INT8), "scales": S[0]}, ValueError, ["values must be [N, L, w]", "[5, 8]"]),
    ({"values": X[..., :0].to(INT8)}, ValueError, ["w of at least 1"]),
    ({"scales": None}, TypeError, ["scales must be a torch.Tensor for Int8()", "NoneType"]),
    ({"scales": S.int()}, TypeError, ["scales must be a dense float32", "int32"]),
    ({"scales": S[:, :4]}, ValueError, ["scales must be [3, 5]", "[3, 4]"]),
    ({"scales": ONE}, ValueError, ["scales must be [3, 5]", "[]"]),
    ({"scales": S.to("meta")}, ValueError, ["scales must be on the device of values", "meta"]),
    ({"centroids": S.int()}, ValueError, ["centroids must be None for Int8()"]),
    ({"mask": boolean(3, 4)}, ValueError, ["mask must be [3, 5]", "[3, 4]"]),
    ({"d": 7}, ValueError, ["values must have 7 elements a token", "[3, 5, 8]"]),
    ({"d": 8.0}, TypeError, ["d must be an int"]),
    ({"codec": codecs.Bits(4), "values": BYTES, "d": 9}, ValueError, ["5 elements", "d = 9"]),
    ({"codec": codecs.Bits(scales=False), "values": BYTES}, ValueError, ["scales must be None"]),
    (FLAT | {"offsets": OFFSETS + 1}, ValueError, ["offsets", "within [0, 15]"]),
    (FLAT | {"offsets": OFFSETS[:2]}, ValueError, ["offsets must begin with 0 and end"]),
    (FLAT | {"values": X.to(INT8), "scales": S}, ValueError, ["values must be [tokens, w]"]),
    (STORED | {"centroids": COARSE.float()}, TypeError, ["centroids must be a dense tensor of int"]),
    (STORED | {"centroids": COARSE[:, :2]}, ValueError, ["centroids must be [1, 4], one a token"]),
    (STORED | {"centroids": COARSE + 1}, ValueError, ["centroids must all be >= 0 and < 4"]),
    (STORED | {"centroids": COARSE - 1}, ValueError, ["centroids must all be >= 0 and < 4"]),
    (STORED | {"centroids": None}, TypeError, ["centroids must be a torch.Tensor"]),
    (STORED | {"scales": COARSE.float()}, ValueError, ["scales must be None for Residual"]),
    (STORED | {"values": ROWS.repeat(1, 1, 2)}, ValueError, ["values must have 1 elements a token"]),
    (FLAT | {"max_length": 3}, ValueError, ["max_length must be at least 13"]),
]


@pytest.mark.parametrize(("wrong", "error", "words"), BAD_CODES)
def test_codes(wrong, error, words):
    make = Codes.packed if "offsets" in wrong else Codes
    refused(error, words, make, **({"codec": codecs.Int8(), "values": X.to(INT8), "scales": S} | wrong))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"nbits": 2}, ValueError, "nbits must be 1 or 4, got 2"),
        ({"nbits": 4, "scales": False}, ValueError, "scales must be True for nbits = 4"),
        ({"scales": 1}, TypeError, "scales must be True or False"),
    ],
)
def test_bits_of_another_kind(options, error, words):
    with pytest.raises(error, match=words):
        codecs.Bits(**options)


FP8 = codecs.Fp8()
BOTH, SCORES, SEARCH = (li.maxsim, li.search), (li.maxsim,), (li.search,)
Q8, TWO = codecs.Int8().encode(X), torch.ones(2, 4)
# Functions of embeddings and documents of Fp8, what replaces their good arguments, the exception, and words.
OF_CODES = [
    (BOTH, {"Q": [1]}, TypeError, ["Q must be a torch.Tensor"]),
    (BOTH, {"Q": X.int()}, TypeError, ["Q must be bfloat16", "int32"]),
    (BOTH, {"Q": X[..., :4]}, ValueError, ["Q and D must share an embedding dim d, got 4 and 8"]),
    (BOTH, {"Q": X[0, 0]}, ValueError, ["Q must be [Nq, Lq, d] or [Lq, d]", "[8]"]),
    (BOTH, {"Q": X[None]}, ValueError, ["Q must be [Nq, Lq, d] or [Lq, d]", "[1, 3, 5, 8]"]),
    (BOTH, {"Q": Q8}, ValueError, ["Q must be of Fp8", "Int8()"]),
    (BOTH, {"Q": Q8, "D": Y}, TypeError, ["Q must be a torch.Tensor", "got Codes"]),
    (SCORES, {"Q": X.to("meta")}, ValueError, ["D must be on the device of Q, meta"]),
    (SEARCH, {"Q": X.to("meta")}, ValueError, ["Q and D must be on the same device", "meta"]),
    (SCORES, {"Q": Q8, "q_mask": S > 0}, ValueError, ["Q must be Codes", "without q_mask"]),
    (SEARCH, {"Q": Q8, "q_mask": S > 0}, ValueError, ["q_mask must be None where Q is Codes"]),
    (BOTH, {"d_mask": T > 0}, ValueError, ["d_mask must be None where D is Codes"]),
    (BOTH, {"normalize": True}, ValueError, ["normalize must be False for Fp8"]),
    (BOTH, {"normalize": 1}, TypeError, ["normalize must be True or False"]),
    (BOTH, {"precision": "high"}, ValueError, ["precision must be None for Fp8", "high"]),
    (BOTH, {"precision": "hgih"}, ValueError, ["precision must be one of"]),
    (SCORES, {"winners": "save"}, ValueError, ["winners must be None where D is Codes, got 'save'"]),
    (SCORES, {"q_weights": S}, ValueError, ["q_weights must be None where D is Codes"]),
    (SCORES, {"D": codecs.Bits(4).encode(TWO), "Q": codecs.Bits(1).encode(TWO)}, ValueError,
     ["Q must be embeddings or codes of Int8() for D of Bits(4)"]),
    (SEARCH, {"D": FP8.encode(KD)}, ValueError, ["D must be Codes [N, L, w]", "[3, 2, 7"]),
    (SEARCH, {"coarse": FP8}, ValueError, ["coarse must be None for Codes"]),
    (SEARCH, {"candidates": 20}, ValueError, ["candidates must be None for Codes, got 20"]),
]  # fmt: skip


@pytest.mark.parametrize(("functions", "wrong", "error", "words"), OF_CODES)
def test_what_codes_do_not_go_with(functions, wrong, error, words):
    D = FP8.encode(Y)
    # A search of packed codes refuses queries as one of a corpus does.
    for documents in (D,) if "Q" in wrong else (D, D.pack()):
        for function in functions:
            function(X, documents)
            refused(error, words, function, **({"Q": X, "D": documents} | wrong))
