"""The references against brute force, pair by pair in float64, from the definition, and what they refuse."""

import pytest
import torch

from late_interaction import reference
from late_interaction.muvera import Muvera
from tests.operators.test_plaid import unpacked
from tests.support import ref
from tests.support.cases import mask, tokens
from tests.support.coded import packed

F64, BYTE = torch.float64, torch.uint8
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# Rounding of float32 sums of products; float64 is exact to its own.
LIMIT = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 5e-6}


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def score(q, d, normalize=False):
    return ref.maxsim(q.unsqueeze(0), d.unsqueeze(0), normalize=normalize)[0].squeeze()


def grid(queries, documents, normalize=False):
    return torch.stack([torch.stack([score(q, d, normalize) for d in documents]) for q in queries])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed(dtype, normalize):
    lengths_q, lengths_d = [2, 0, 5], [3, 0, 7, 1, 0, 33]
    Q, D = tokens((sum(lengths_q), 24), dtype, "cpu"), tokens((sum(lengths_d), 24), dtype, "cpu")
    cu_q, cu_d = offsets(lengths_q), offsets(lengths_d)
    wanted = grid(Q.split(lengths_q), D.split(lengths_d), normalize)

    scores = reference.maxsim_reference_varlen(Q, D, cu_q, cu_d.int(), normalize=normalize)
    ref.assert_close(scores, wanted, LIMIT[dtype])
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)

    i, j = torch.tensor([2, 0, 2, 1, 0]), torch.tensor([5, 1, 5, 2, 0])
    scores = reference.maxsim_reference_scatter(Q, D, cu_q, cu_d, i, j.int(), normalize=normalize)
    ref.assert_close(scores, wanted[i, j], LIMIT[dtype])


def test_tokens_outside_the_offsets_are_no_sequence():
    Q = tokens((9, 4), torch.float64, "cpu")
    scores = reference.maxsim_reference_varlen(Q, Q, torch.tensor([2, 4]), torch.tensor([1, 5, 8]))
    ref.assert_close(scores, grid([Q[2:4]], [Q[1:5], Q[5:8]]), 1e-13)


@pytest.mark.parametrize("counts", [(0, 2), (2, 0), (0, 0)])
def test_no_sequences(counts):
    Q = torch.randn(0, 4)
    scores = reference.maxsim_reference_varlen(Q, Q, *(torch.zeros(n + 1, dtype=torch.int32) for n in counts))
    assert scores.shape == counts and scores.dtype == torch.float32


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded(dtype, normalize):
    queries, documents = tokens((2, 5, 24), dtype, "cpu"), tokens((2, 3, 7, 24), dtype, "cpu")
    query_lengths, doc_lengths = torch.tensor([5, 2]), torch.tensor([[7, 0, 1], [3, 6, 7]])
    wanted = torch.stack(
        [
            grid([queries[b, :n]], [documents[b, c, : doc_lengths[b, c]] for c in range(3)], normalize)[0]
            for b, n in enumerate(query_lengths)
        ]
    )
    queries[1, 2:] = torch.nan  # what lies in the padding reaches nothing
    documents[0, 1] = torch.inf
    scores = reference.maxsim_padded_reference(
        queries, documents, query_lengths.int(), doc_lengths, normalize=normalize
    )
    ref.assert_close(scores, wanted, LIMIT[dtype])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masks", ["none", "holes", "dead"])
def test_hidden(masks, bias, normalize):
    Q, H, W = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 5, 8), (4, 7, 12), (8, 12)))
    b = torch.randn(8, dtype=torch.float64) if bias else None
    d_mask = mask((4, 7), "cpu", masks)
    D = (H.unsqueeze(2) * W).sum(-1) + (b if bias else 0)
    wanted, winners = ref.maxsim(Q, ref.unit(D) if normalize else D, None, d_mask)
    if d_mask is not None:
        H[~d_mask] = torch.nan
    H.requires_grad_(), W.requires_grad_()
    scores = reference.maxsim_from_hidden_reference(Q, H, W, b, d_mask, normalize=normalize)
    ref.assert_close(scores, wanted, 1e-13)
    ref.assert_close(
        reference.maxsim_from_hidden_reference(Q[1], H, W, b, d_mask, normalize=normalize), wanted[1], 1e-13
    )
    scores.sum().backward()
    assert W.grad.isfinite().all() and H.grad.isfinite().all()
    won = torch.zeros(4, 7, dtype=torch.bool)
    for j in range(4):
        won[j, winners[:, j][winners[:, j] >= 0]] = True
    assert torch.equal(H.grad.ne(0).any(-1), won)


@pytest.mark.parametrize("d", [1, 8, 21, 128])
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_residuals(nbits, d):
    lengths = [5, 0, 7, 1]
    Q = torch.randn(2, 3, d, dtype=torch.float64)
    centroids, weights = torch.randn(11, d), torch.randn(2**nbits)
    codes, residuals = torch.randint(11, (4, 7)), packed((4, 7), d, nbits, "cpu")
    buckets = unpacked(residuals, nbits, d)
    assert torch.equal(reference.unpack_residuals_reference(residuals, nbits, d), buckets.int())

    D = centroids.double()[codes] + weights.double()[buckets]
    for normalize in (False, True):
        wanted = grid(Q, [D[j, :n] for j, n in enumerate(lengths)], normalize)
        options = {"normalize": normalize}
        stored = (centroids, weights, nbits)
        scores = reference.maxsim_residual_reference(
            Q, codes, residuals, torch.tensor(lengths), *stored, **options
        )
        ref.assert_close(scores, wanted, 1e-13)
        keep = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
        flat = (codes[keep].int(), residuals[keep], offsets(lengths))
        scores = reference.maxsim_residual_varlen_reference(Q, *flat, *stored, **options)
        ref.assert_close(scores, wanted, 1e-13)
        scores = reference.maxsim_residual_varlen_reference(Q[0].float(), *flat, *stored, **options)
        ref.assert_close(scores, wanted[0], 3e-6)


def test_centroid_scores():
    Q, centroids = torch.randn(5, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    codes, lengths = torch.randint(11, (4, 7)), torch.tensor([7, 0, 3, 1])
    wanted = grid([Q], [centroids[codes[j, :n]] for j, n in enumerate(lengths)])[0]
    codes[2, 3:] = 99  # padding is not looked up
    scores = reference.plaid_approx_score_reference(centroids @ Q.T, codes, lengths)
    ref.assert_close(scores, wanted, 1e-13)


def test_a_code_of_no_centroid_counts_as_the_first():
    Q, centroids = torch.randn(5, 8), torch.randn(11, 8)
    codes, legal = torch.tensor([[3, -1, 11]]), torch.tensor([[3, 0, 0]])
    lengths, weights = torch.tensor([3]), torch.randn(4)
    residuals = torch.randint(256, (1, 3, 2), dtype=torch.uint8)
    for function, before, after in (
        (reference.plaid_approx_score_reference, (centroids @ Q.T,), (lengths,)),
        (reference.maxsim_residual_reference, (Q,), (residuals, lengths, centroids, weights, 2)),
    ):
        assert torch.equal(function(*before, codes, *after), function(*before, legal, *after))


def test_gradients():
    Q, D = torch.randn(5, 3, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    Q.requires_grad_(), D.requires_grad_()
    cu_q, cu_d = offsets([2, 0, 3]), offsets([4, 5, 0])
    assert torch.autograd.gradcheck(reference.maxsim_reference_varlen, (Q, D, cu_q, cu_d))
    i, j = torch.tensor([2, 0, 2]), torch.tensor([1, 0, 1])
    assert torch.autograd.gradcheck(reference.maxsim_reference_scatter, (Q, D, cu_q, cu_d, i, j))


# ---- ranks, scales, defaults ----


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

CODES, RESIDUALS, DOC_LENGTHS, CENTROIDS, WEIGHTS, _ = PLAID
SCORES = torch.randn(3, 2)
QUERIES, DOCUMENTS = torch.randn(2, 3, 4), torch.randn(2, 1, 3, 4)
TWO, ONE_EACH, CU = torch.tensor([2, 3]), torch.tensor([[2], [3]]), torch.tensor([0, 2, 7])


def plaid(codes=CODES, residuals=RESIDUALS, lengths=DOC_LENGTHS, weights=WEIGHTS):
    return reference.maxsim_residual_reference(TOKENS, codes, residuals, lengths, CENTROIDS, weights, 2)


def approx(scores=SCORES, codes=CODES, lengths=DOC_LENGTHS):
    return reference.plaid_approx_score_reference(scores, codes, lengths)


def padded(queries=QUERIES, documents=DOCUMENTS, query_lengths=TWO, doc_lengths=ONE_EACH):
    return reference.maxsim_padded_reference(queries, documents, query_lengths, doc_lengths)


def varlen(Q=TOKENS, cu=CU, cu_d=CU):
    return reference.maxsim_reference_varlen(Q, TOKENS, cu, cu_d)


def scatter(i, j):
    return reference.maxsim_reference_scatter(TOKENS, TOKENS, CU, CU, i, j)


def unpack(nbits, d=4):
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
    (approx, {"codes": CODES[0], "lengths": DOC_LENGTHS.repeat(2)[:3]}, r"codes must be \[documents, Ld\]"),
    (approx, {"codes": CODES.unsqueeze(2)}, r"codes must be \[documents, Ld\]"),
    (approx, {"lengths": DOC_LENGTHS[:1]}, r"doc_lengths \[documents\]"),
    (approx, {"lengths": DOC_LENGTHS.repeat(2)}, r"doc_lengths \[documents\]"),
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
    (unpack, {"nbits": 3}, "nbits must be 1, 2, 4 or 8"),
    (unpack, {"nbits": 2**70}, "nbits must be 1, 2, 4 or 8"),
    (residual_varlen, {"nbits": 2**70}, "nbits must be 1, 2, 4 or 8"),
    (unpack, {"nbits": 8, "d": 5}, "residuals must be"),
]


@pytest.mark.parametrize(("call", "change", "message"), REFUSED)
def test_what_is_refused(call, change, message):
    with pytest.raises(ValueError, match=message):
        call(**change)


def test_offsets_are_integers():
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32 or int64"):
        varlen(cu=CU.float())
