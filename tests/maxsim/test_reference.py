"""The references against brute force, pair by pair in float64, from the definition."""

import pytest
import torch

from late_interaction import reference
from tests.operators.test_plaid import unpacked
from tests.support import ref
from tests.support.cases import mask, tokens
from tests.support.coded import packed

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LENGTHS = [3, 0, 7, 1, 0, 33]
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
    lengths_q, lengths_d = [2, 0, 5], LENGTHS
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
