"""The references alone: ranks, empty documents, masks, scales and defaults, and shapes that they refuse."""

import pytest
import torch

from late_interaction import reference
from late_interaction.muvera import Muvera
from tests.support import ref

F64 = torch.float64
BYTE = torch.uint8


def codes(x):
    return (20 * x).round().to(torch.int8)


def scales(x):
    """A scale a token, from its place in its sequence alone."""
    return (torch.arange(1, x.shape[-2] + 1) / 4).expand(x.shape[:-1])


def quantized(Q, D):
    return reference.maxsim_quantized_reference(codes(Q), codes(D), scale_Q=scales(Q), scale_D=scales(D))


def hamming(Q, D):
    return reference.maxsim_hamming_reference(codes(Q).view(BYTE), codes(D).view(BYTE), 8 * Q.shape[-1])


def asymmetric(Q, D):
    packed = codes(D).view(BYTE)[..., : Q.shape[-1] // 2]
    return reference.maxsim_asymmetric_reference(codes(Q), packed, scales(Q), scales(D), nbits=4)


OF_ANY_RANK = {
    "dense": reference.maxsim_reference,
    "winners": lambda Q, D: reference.maxsim_with_winners_reference(Q, D)[1],
    "smooth": lambda Q, D: reference.smooth_maxsim_reference(Q, D, tau=0.5),
    "xtr": lambda Q, D: reference.xtr_scores_reference(Q, D, 10),
    "quantized": quantized,
    "hamming": hamming,
    "asymmetric": asymmetric,
}


@pytest.mark.parametrize(("Nq", "Nd"), [(2, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("name", OF_ANY_RANK)
def test_a_dim_less_for_one_query_or_document(name, Nq, Nd):
    Q, D, call = torch.randn(Nq, 4, 6, dtype=F64), torch.randn(Nd, 5, 6, dtype=F64), OF_ANY_RANK[name]
    whole = call(Q, D)
    assert whole.shape[:2] == (Nq, Nd)
    close = {"rtol": 1e-12, "atol": 1e-12}
    for i in range(Nq):
        torch.testing.assert_close(call(Q[i], D), whole[i], **close)
    for j in range(Nd):
        alone = call(Q, D[j : j + 1])[:, 0]
        assert name == "xtr" or torch.allclose(alone, whole[:, j])  # XTR's documents compete with each other
        torch.testing.assert_close(call(Q, D[j]), alone, **close)
        for i in range(Nq):
            torch.testing.assert_close(call(Q[i], D[j]), alone[i], **close)


@pytest.mark.parametrize("scale", [0.0, -0.5, -2.0, float("inf"), float("nan"), 0.25])
def test_a_scale_that_is_none_makes_nan(scale):
    Q, D = torch.ones(1, 1, 2, dtype=torch.int8), torch.full((1, 1, 2), 3, dtype=torch.int8)
    one, own = torch.ones(1, 1), torch.full((1, 1), scale)
    packed = torch.tensor([[[0xBB]]], dtype=BYTE)  # 3 and 3 in 4 bits each
    wanted = 6 * scale if 0 <= scale < float("inf") else float("nan")
    for s, t in ((one, own), (own, one)):
        for got in (
            reference.maxsim_quantized_reference(Q, D, scale_Q=s, scale_D=t),
            reference.maxsim_asymmetric_reference(Q, packed, s, t, nbits=4),
        ):
            torch.testing.assert_close(got, torch.tensor([[wanted]]), equal_nan=True)


@pytest.mark.parametrize("masked", [False, True])
def test_xtr_scores_of_documents_of_each_query(masked):
    """All documents compete; each query gets the scores of its own."""
    Q, D = torch.randn(2, 4, 6, dtype=F64), torch.randn(2, 3, 5, 6, dtype=F64)
    q_mask, d_mask = (torch.rand(2, 4) < 0.7, torch.rand(2, 3, 5) < 0.7) if masked else (None, None)
    flat = None if d_mask is None else d_mask.flatten(0, 1)
    for rule in ("paper", "pylate"):
        every = reference.xtr_scores_reference(Q, D.flatten(0, 1), 8, q_mask, flat, rule=rule)
        own = reference.xtr_scores_reference(Q, D, 8, q_mask, d_mask, rule=rule)
        assert torch.equal(own, torch.stack((every[0, :3], every[1, 3:])))


@pytest.mark.parametrize("rule", ["paper", "pylate"])
def test_xtr_selects_the_first_of_equal_similarities(rule):
    Q, D = torch.ones(1, 1, 2), torch.ones(40, 10, 2)
    for k in (3, 15, 40, 399):
        scores = reference.xtr_scores_reference(Q, D, k, rule=rule)
        assert scores.tolist() == [[2.0] * -(-k // 10) + [0.0] * (40 - -(-k // 10))]


# ---- defaults ----

TOKENS, LONG = torch.randn(7, 4, dtype=F64), torch.tensor([0, 3, 7])
PLAID = (
    *(torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.randint(256, (2, 3, 1), dtype=BYTE), torch.tensor([3, 2])),
    *(torch.randn(3, 4), torch.randn(4), 2),
)
FLAT = (PLAID[0].flatten(), PLAID[1].flatten(0, 1), torch.tensor([0, 3, 6]), *PLAID[3:])
DEFAULTS = [
    (reference.maxsim_reference, (TOKENS, TOKENS.flip(0))),
    (reference.maxsim_with_winners_reference, (TOKENS, TOKENS.flip(0))),
    (reference.smooth_maxsim_reference, (TOKENS, TOKENS.flip(0))),
    (reference.maxsim_reference_varlen, (TOKENS, TOKENS.flip(0), LONG, LONG)),
    (reference.maxsim_reference_scatter, (TOKENS, TOKENS.flip(0), LONG, LONG, LONG[:2] * 0, LONG[:2] * 0)),
    (
        reference.maxsim_padded_reference,
        (TOKENS.view(1, 7, 4), TOKENS.view(1, 1, 7, 4), torch.tensor([5]), torch.tensor([[6]])),
    ),
    (reference.maxsim_from_hidden_reference, (TOKENS, TOKENS.view(1, 7, 4), torch.eye(4, dtype=F64))),
    (reference.maxsim_residual_reference, (TOKENS, *PLAID)),
    (reference.maxsim_residual_varlen_reference, (TOKENS, *FLAT)),
]


@pytest.mark.parametrize(("function", "args"), DEFAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_tokens_are_not_normalized_where_nobody_says(function, args):
    plain, same, other = function(*args), *(function(*args, normalize=n) for n in (False, True))
    if isinstance(plain, tuple):
        plain, same, other = plain[0], same[0], other[0]
    assert torch.equal(plain, same) and not torch.allclose(plain, other)


@pytest.mark.parametrize("document", [False, True])
def test_a_token_on_a_hyperplane_is_on_the_lower_side(document):
    muvera = Muvera(4, k_sim=3, repetitions=2)
    tokens = torch.cat((torch.zeros(1, 4), torch.randn(5, 4)))
    encode = muvera.encode_documents if document else muvera.encode_queries
    got = encode(tokens.unsqueeze(0))[0]
    ref.assert_close(got, reference.muvera_reference(muvera, tokens, document=document), 1e-6)


# ---- shapes that do not fit ----

CODES, RESIDUALS, LENGTHS, CENTROIDS, WEIGHTS, _ = PLAID
SCORES = torch.randn(3, 2)
QUERIES, DOCUMENTS = torch.randn(2, 3, 4), torch.randn(2, 1, 3, 4)
TWO, ONE_EACH, CU = torch.tensor([2, 3]), torch.tensor([[2], [3]]), torch.tensor([0, 2, 7])


def plaid(codes=CODES, residuals=RESIDUALS, lengths=LENGTHS, weights=WEIGHTS):
    return reference.maxsim_residual_reference(TOKENS, codes, residuals, lengths, CENTROIDS, weights, 2)


def approx(scores=SCORES, codes=CODES, lengths=LENGTHS):
    return reference.plaid_approx_score_reference(scores, codes, lengths)


def padded(queries=QUERIES, documents=DOCUMENTS, query_lengths=TWO, doc_lengths=ONE_EACH):
    return reference.maxsim_padded_reference(queries, documents, query_lengths, doc_lengths)


def varlen(Q=TOKENS, cu=CU, cu_d=CU):
    return reference.maxsim_reference_varlen(Q, TOKENS, cu, cu_d)


def scatter(i, j):
    return reference.maxsim_reference_scatter(TOKENS, TOKENS, CU, CU, i, j)


def unpacked(nbits, d=4):
    return reference.unpack_residuals_reference(torch.zeros(6, 4, dtype=BYTE), nbits, d)


def residual_varlen(nbits):
    return reference.maxsim_residual_varlen_reference(TOKENS, *FLAT[:-1], nbits)


def from_hidden(W):
    return reference.maxsim_from_hidden_reference(TOKENS, DOCUMENTS[0].double(), W)


REFUSED = [
    (approx, {"scores": SCORES[0]}, r"query_centroid_scores must be \[n_centroids, Lq\]"),
    (approx, {"scores": SCORES.unsqueeze(0)}, r"query_centroid_scores must be \[n_centroids, Lq\]"),
    (approx, {"scores": SCORES[:0]}, r"query_centroid_scores must be \[n_centroids, Lq\], got \[0, 2\]"),
    (approx, {"codes": CODES[0]}, r"codes must be \[documents, Ld\]"),
    (approx, {"codes": CODES[0], "lengths": LENGTHS.repeat(2)[:3]}, r"codes must be \[documents, Ld\]"),
    (approx, {"codes": CODES.unsqueeze(2)}, r"codes must be \[documents, Ld\]"),
    (approx, {"lengths": LENGTHS[:1]}, r"doc_lengths \[documents\]"),
    (approx, {"lengths": LENGTHS.repeat(2)}, r"doc_lengths \[documents\]"),
    (plaid, {"residuals": RESIDUALS[:1]}, r"residuals must be \[2, 3, 'bytes'\]"),
    (plaid, {"residuals": RESIDUALS.repeat(2, 1, 1)}, r"residuals must be \[2, 3, 'bytes'\]"),
    (plaid, {"residuals": RESIDUALS.repeat(1, 1, 2)}, r"residuals must be \[\.\.\., 1\]"),
    (plaid, {"weights": WEIGHTS[:3]}, r"bucket_weights must be \[4\]"),
    (plaid, {"weights": WEIGHTS.repeat(2)}, r"bucket_weights must be \[4\]"),
    (padded, {"queries": QUERIES[0]}, r"queries must be \[B, Lq, d\]"),
    (padded, {"queries": DOCUMENTS}, r"queries must be \[B, Lq, d\]"),
    (padded, {"documents": QUERIES}, r"documents \[B, C, Ld, d\]"),
    (padded, {"documents": DOCUMENTS.unsqueeze(0)}, r"documents \[B, C, Ld, d\]"),
    (padded, {"query_lengths": TWO.repeat(2)}, r"query_lengths must be \[2\], got \[4\]"),
    (padded, {"query_lengths": TWO[:1]}, r"query_lengths must be \[2\], got \[1\]"),
    (padded, {"doc_lengths": TWO}, r"doc_lengths must be \[2, 1\]"),
    (varlen, {"Q": TOKENS[:, 0]}, r"Q must be \[tokens, d\]"),
    (varlen, {"Q": TOKENS.unsqueeze(0)}, r"Q must be \[tokens, d\]"),
    (varlen, {"cu": CU[0]}, r"cu_seqlens_q must be \[sequences \+ 1\]"),
    (varlen, {"cu": CU.unsqueeze(0)}, r"cu_seqlens_q must be \[sequences \+ 1\]"),
    (varlen, {"cu": CU[:0]}, r"cu_seqlens_q must be \[sequences \+ 1\]"),
    (varlen, {"cu_d": CU.flip(0)}, "cu_seqlens_d must not decrease"),
    (scatter, {"i": CU[0], "j": CU[0]}, "must be 1-D and equally long"),
    (scatter, {"i": CU[:1].view(1, 1), "j": CU[:1].view(1, 1)}, "must be 1-D and equally long"),
    (scatter, {"i": CU[:1], "j": CU[:1].repeat(2)}, "must be 1-D and equally long"),
    (scatter, {"i": CU[:1].repeat(2), "j": CU[:1]}, "must be 1-D and equally long"),
    (scatter, {"i": CU[1:2], "j": CU[:1]}, r"pair_q_idx must lie in \[0, 2\)"),
    (from_hidden, {"W": torch.ones(6, 4, dtype=F64)}, "W must be"),
    (unpacked, {"nbits": 3}, "nbits must be 1, 2, 4 or 8"),
    (unpacked, {"nbits": 2**70}, "nbits must be 1, 2, 4 or 8"),
    (residual_varlen, {"nbits": 2**70}, "nbits must be 1, 2, 4 or 8"),
    (unpacked, {"nbits": 8, "d": 5}, "residuals must be"),
]


@pytest.mark.parametrize(("call", "change", "message"), REFUSED)
def test_what_is_refused(call, change, message):
    with pytest.raises(ValueError, match=message):
        call(**change)


def test_offsets_are_integers():
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32 or int64"):
        varlen(cu=CU.float())
