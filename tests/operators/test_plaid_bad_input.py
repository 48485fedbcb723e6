"""Bad arguments of the functions on compressed documents are a TypeError or ValueError that names them."""

import pytest
import torch

from late_interaction.lik import plaid
from tests.support.calls import refused

Q = torch.randn(2, 5, 16)
CODES = torch.randint(9, (3, 7))
RESIDUALS = torch.randint(256, (3, 7, 4)).to(torch.uint8)
LENGTHS = torch.tensor([7, 0, 3])
CENTROIDS, WEIGHTS = torch.randn(9, 16), torch.randn(4)
PADDED = {
    "Q": Q,
    "codes": CODES,
    "residuals": RESIDUALS,
    "doc_lengths": LENGTHS,
    "centroids": CENTROIDS,
    "bucket_weights": WEIGHTS,
    "nbits": 2,
}
PACKED = {
    "Q": Q,
    "codes_flat": CODES.flatten(),
    "residuals_flat": RESIDUALS.flatten(0, 1),
    "cu_seqlens_d": torch.tensor([0, 7, 7, 21]),
    "centroids": CENTROIDS,
    "bucket_weights": WEIGHTS,
    "nbits": 2,
}

# What replaces good arguments, the exception, and words that its message must hold.
BOTH = {
    "Q is a list": ({"Q": Q.tolist()}, TypeError, ["Q must be a torch.Tensor", "list"]),
    "Q of integers": ({"Q": Q.int()}, TypeError, ["Q must be bfloat16", "int32"]),
    "rank of Q": ({"Q": Q[None]}, ValueError, ["Q must be [Nq, Lq, d]", "[1, 2, 5, 16]"]),
    "no d": ({"Q": Q[..., :0]}, ValueError, ["Q must be [..., d]", "[2, 5, 0]"]),
    "3 bits": ({"nbits": 3}, ValueError, ["nbits must be 1, 2, 4 or 8", "3"]),
    "nbits of a kind": ({"nbits": 2.0}, TypeError, ["nbits must be an int", "float"]),
    "nbits is True": ({"nbits": True}, TypeError, ["nbits must be an int", "bool"]),
    "other bits": ({"nbits": 4}, ValueError, ["residuals", "nbits = 4", "8]", "4]"]),
    "d of centroids": ({"centroids": CENTROIDS[:, :8]}, ValueError, ["centroids must be [n, 16]", "[9, 8]"]),
    "no centroid": ({"centroids": CENTROIDS[:0]}, ValueError, ["centroids", "[0, 16]"]),
    "centroids of integers": ({"centroids": CENTROIDS.int()}, TypeError, ["centroids", "int32"]),
    "centroids elsewhere": ({"centroids": CENTROIDS.to("meta")}, ValueError, ["centroids", "cpu", "meta"]),
    "8 weights": ({"bucket_weights": torch.randn(8)}, ValueError, ["bucket_weights must be [4]", "[8]"]),
    "weights elsewhere": ({"bucket_weights": WEIGHTS.to("meta")}, ValueError, ["bucket_weights", "meta"]),
    "weights of integers": ({"bucket_weights": WEIGHTS.int()}, TypeError, ["bucket_weights", "int32"]),
    "normalize": ({"normalize": 1}, TypeError, ["normalize must be True or False"]),
}
PADDED_ALONE = {
    "codes of floats": ({"codes": CODES.float()}, TypeError, ["codes must be", "integers", "float32"]),
    "no codes": ({"codes": None}, TypeError, ["codes must be a torch.Tensor", "NoneType"]),
    "rank of codes": ({"codes": CODES[0]}, ValueError, ["codes must be [Nd, Ld]", "[7]"]),
    "codes elsewhere": ({"codes": CODES.to("meta")}, ValueError, ["codes", "of Q, cpu", "meta"]),
    "residuals of floats": ({"residuals": RESIDUALS.float()}, TypeError, ["residuals", "float32"]),
    "wide residuals": ({"residuals": RESIDUALS.short()}, TypeError, ["residuals must be uint8", "int16"]),
    "rank of residuals": ({"residuals": RESIDUALS[0]}, ValueError, ["residuals must be [Nd, Ld, bytes]"]),
    "fewer residuals": ({"residuals": RESIDUALS[:2]}, ValueError, ["residuals", "[3, 7, 4]", "[2, 7, 4]"]),
    "bytes": ({"residuals": RESIDUALS[..., :3]}, ValueError, ["residuals", "[3, 7, 4]", "[3, 7, 3]"]),
    "fewer lengths": ({"doc_lengths": LENGTHS[:2]}, ValueError, ["doc_lengths must be [3]", "[2]"]),
    "lengths of floats": ({"doc_lengths": LENGTHS.float()}, TypeError, ["doc_lengths", "float32"]),
    "too long": (
        {"doc_lengths": LENGTHS + 1},
        ValueError,
        ["doc_lengths must all be >= 0 and <= 7", "doc_lengths[0] = 8"],
    ),
    "negative": (
        {"doc_lengths": LENGTHS - 1},
        ValueError,
        ["doc_lengths must all be >= 0 and <= 7", "] = -1"],
    ),
}
PACKED_ALONE = {
    "rank of codes": ({"codes_flat": CODES}, ValueError, ["codes_flat must be [tokens]", "[3, 7]"]),
    "wide residuals": (
        {"residuals_flat": RESIDUALS.flatten(0, 1).short()},
        TypeError,
        ["residuals_flat must be uint8", "int16"],
    ),
    "rank of residuals": (
        {"residuals_flat": RESIDUALS},
        ValueError,
        ["residuals_flat must be [tokens, bytes]"],
    ),
    "no offsets": ({"cu_seqlens_d": LENGTHS[:0]}, ValueError, ["cu_seqlens_d must be [Nd + 1]", "[0]"]),
    "falling": (
        {"cu_seqlens_d": torch.tensor([0, 5, 4])},
        ValueError,
        ["cu_seqlens_d must not decrease", "cu_seqlens_d[2] = 4 after 5"],
    ),
    "past the end": ({"cu_seqlens_d": torch.tensor([0, 22])}, ValueError, ["cu_seqlens_d", "[0, 21]"]),
    "before the start": ({"cu_seqlens_d": torch.tensor([-1, 2])}, ValueError, ["cu_seqlens_d", "[0, 21]"]),
    "offsets of floats": ({"cu_seqlens_d": torch.tensor([0.0])}, TypeError, ["cu_seqlens_d", "float32"]),
    "longest": ({"max_seqlen_d": 2.5}, TypeError, ["max_seqlen_d must be an int or None", "float"]),
}


def check(function, good, bad):
    wrong, error, words = bad
    refused(error, words, function, **(good | wrong))


@pytest.mark.parametrize("bad", [*BOTH, *PADDED_ALONE])
def test_padded(bad):
    check(plaid.maxsim_residual, PADDED, {**BOTH, **PADDED_ALONE}[bad])


@pytest.mark.parametrize("bad", [*BOTH, *PACKED_ALONE])
def test_packed(bad):
    check(plaid.maxsim_residual_varlen, PACKED, {**BOTH, **PACKED_ALONE}[bad])


TABLE = torch.randn(9, 5)
APPROXIMATE = {
    "a list": ({"query_centroid_scores": TABLE.tolist()}, TypeError, ["query_centroid_scores", "list"]),
    "rank": ({"query_centroid_scores": TABLE[0]}, ValueError, ["query_centroid_scores must be", "[5]"]),
    "no centroid": ({"query_centroid_scores": TABLE[:0]}, ValueError, ["query_centroid_scores", "[0, 5]"]),
    "codes": ({"codes": CODES.float()}, TypeError, ["codes", "float32"]),
    "rank of codes": ({"codes": CODES[0]}, ValueError, ["codes must be [B, Ld]", "[7]"]),
    "lengths": ({"doc_lengths": LENGTHS[:2]}, ValueError, ["doc_lengths must be [3]", "[2]"]),
    "too long": ({"doc_lengths": LENGTHS + 1}, ValueError, ["doc_lengths must all be >= 0 and <= 7"]),
    "elsewhere": ({"codes": CODES.to("meta")}, ValueError, ["codes", "query_centroid_scores, cpu", "meta"]),
}


@pytest.mark.parametrize("bad", APPROXIMATE)
def test_approximate(bad):
    good = {"query_centroid_scores": TABLE, "codes": CODES, "doc_lengths": LENGTHS}
    check(plaid.plaid_approx_score, good, APPROXIMATE[bad])
