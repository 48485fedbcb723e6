"""A first pass over codes: what it finds, in which order, and with which scores."""

from itertools import product

import pytest
import torch
from torch.nn.functional import normalize as normalized

import late_interaction as li
from late_interaction import codecs
from late_interaction._search import first_pass
from late_interaction.muvera import Encodings, encoder
from tests.support.cases import mask
from tests.support.coded import BITS, FOUR

SIGNS = codecs.Bits(1, scales=False)
CODECS = [SIGNS, BITS, FOUR]
MUVERA = li.Muvera(72, 3, 4)


def encoded(coarse, D, normalize):
    """The codes of documents, or what a Muvera encodes them to."""
    if coarse is MUVERA:
        return MUVERA.encode_corpus(D, normalize=normalize)
    return coarse.encode(normalized(D.values, dim=-1) if normalize else D.values)


@pytest.fixture
def corpus(device):
    """120 documents, and 5 queries made of tokens of five of them, with some noise."""
    D = torch.randn(120, 17, 72, device=device)
    D[7] = D[3]
    Q = D[[3, 50, 119, 0, 60], ::2] + 0.3 * torch.randn(5, 9, 72, device=device)
    return Q, D, mask((5, 9), device, "holes"), mask((120, 17), device, "dead")


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("coarse", [*CODECS, MUVERA], ids=str)
def test_all_documents_as_candidates_are_the_exact_search(coarse, chunk, masks, normalize, largest, corpus):
    Q, D, q_mask, d_mask = corpus
    options = {"normalize": normalize, "largest": largest, "chunk_bytes": chunk and chunk * D[0].nbytes}
    options |= {"q_mask": q_mask, "d_mask": d_mask} if masks else {}
    exact = li.search(Q, D, 6, **options)
    # A score is a sum of nine similarities of up to 70, of either sign.
    limit = 1e-6 if normalize else 2e-5
    for given in (coarse, encoded(coarse, li.Tokens(D, options.get("d_mask")), normalize)):
        scores, documents = li.search(Q, D, 6, coarse=given, candidates=120, **options)
        torch.testing.assert_close(scores, exact.scores, rtol=1e-6, atol=limit)
        assert torch.equal(documents, exact.indices)


@pytest.mark.parametrize("form", ["padded", "whole", "strided", "float64", "empty query"])
@pytest.mark.parametrize("normalize", [True, False])
def test_documents_whose_kept_tokens_come_first(form, normalize, corpus):
    Q, D, q_mask, _ = corpus
    lengths = torch.arange(120, device=D.device) % 18
    d_mask = None if form == "whole" else torch.arange(17, device=D.device) < lengths.unsqueeze(1)
    if form == "float64":
        Q, D = Q.double(), D.double()
    if form == "empty query":
        q_mask[2] = False
    D = D.masked_fill(~d_mask.unsqueeze(-1), torch.nan) if d_mask is not None and not normalize else D
    if form == "strided":
        D = D.transpose(0, 1).contiguous().transpose(0, 1)
    options = {"normalize": normalize}
    exact = li.search(Q, D, 6, q_mask=q_mask, d_mask=d_mask, **options)
    codes = FOUR.encode(D.nan_to_num())
    scores, documents = li.search(
        Q, D, 6, q_mask=q_mask, d_mask=d_mask, coarse=codes, candidates=120, **options
    )
    torch.testing.assert_close(scores, exact.scores, rtol=1e-6, atol=1e-6)
    assert torch.equal(documents, exact.indices)


def rough_scores(coarse, Q, D):
    """The scores of the first pass, and how far below the last candidate's those of others may be."""
    unit_Q, unit_D = (li.Tokens(normalized(x.values, dim=-1), x.mask) for x in (Q, D))
    if coarse is MUVERA:
        return MUVERA.encode_queries(unit_Q) @ MUVERA.encode_documents(unit_D).t(), lambda last: 0.02
    if coarse == SIGNS:
        scores = li.maxsim(Q, SIGNS.encode(D))
    else:
        back = coarse.decode(coarse.encode(unit_D.values)).values
        scores = li.maxsim(unit_Q, li.Tokens(back, D.mask))
    return scores, lambda last: 0.02 * last.abs()


@pytest.mark.parametrize("coarse", [*CODECS, MUVERA], ids=str)
def test_the_candidates_are_the_best_by_their_codes(coarse, corpus, monkeypatch):
    Q, D, q_mask, d_mask = corpus
    rough, slack = rough_scores(coarse, li.Tokens(Q, q_mask), li.Tokens(D, d_mask))
    forms = [coarse]
    if coarse is MUVERA:
        monkeypatch.setattr(encoder, "_BYTES", 20000)
        forms.append(encoded(MUVERA, li.Tokens(D, d_mask), True))
        forms.append(Encodings(MUVERA, forms[1].documents.half()).to(D.device))
    exact = li.maxsim(Q, D, q_mask, d_mask, normalize=True)
    options = {"q_mask": q_mask, "d_mask": d_mask, "candidates": 10, "normalize": True}
    for given, chunk in product(forms, (None, 1, 50 * D[0].nbytes)):
        scores, documents = li.search(Q, D, 3, coarse=given, chunk_bytes=chunk, **options)
        torch.testing.assert_close(scores, exact.gather(1, documents), rtol=1e-6, atol=1e-6)
        assert (scores.diff(dim=-1) <= 0).all()
        # All but rounding: a document found has a rough score near the ten best, or above.
        tenth = rough.topk(10).values[:, -1:]
        assert (rough.gather(1, documents) >= tenth - slack(tenth)).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_equal_documents_come_in_their_order(codec, corpus):
    Q, D, *_ = corpus
    scores, documents = li.search(Q[:1], D, 2, coarse=codec, candidates=20)
    assert documents.tolist() == [[3, 7]] and scores[0, 0] == scores[0, 1]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_gathered_in_any_pieces(codec, corpus, monkeypatch):
    Q, D, q_mask, d_mask = corpus
    options = {"q_mask": q_mask, "d_mask": d_mask, "candidates": 12}
    expected = li.search(Q, D, 6, coarse=codec, **options)
    for size in (1, 17 * 72 * 4 * 5, 17 * 72 * 4 * 30):
        monkeypatch.setattr(first_pass, "_BYTES", size)
        monkeypatch.setattr(first_pass, "_EXACT_BYTES", size)
        monkeypatch.setattr(first_pass, "_GATHERED_BYTES", size)
        for given in (codec, codec.encode(D), codec.encode(li.Tokens(D, d_mask).pack())):
            found = li.search(Q, D, 6, coarse=given, **options)
            torch.testing.assert_close(found.scores, expected.scores, rtol=1e-6, atol=1e-6)
            assert torch.equal(found.indices, expected.indices)


# ---- sizes of parts, on which no result depends ----


@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize("coarse", [li.codecs.Int8(), li.Muvera(2, k_sim=0, repetitions=1)], ids=str)
def test_a_first_pass_normalizes_queries_and_documents(coarse, made_before):
    """By tokens as they are the first document is the candidate: a token of the query outweighs another."""
    Q, D = torch.tensor([[[100.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[3.0, 0.0]], [[0.8, 0.6]]])
    unit = torch.nn.functional.normalize(D, dim=-1)
    if made_before:
        coarse = coarse.encode_corpus(unit) if isinstance(coarse, li.Muvera) else coarse.encode(unit)
    found = li.search(Q, D, 1, coarse=coarse, candidates=1, normalize=True)
    assert found.indices.tolist() == [[1]] and found.scores.tolist() == [[pytest.approx(1.4)]]
    plain = li.search(Q, D, 1, coarse=coarse, candidates=1)
    assert plain.indices.tolist() == [[0]]


def test_shapes_and_dtypes(device):
    D = torch.randn(30, 5, 16, device=device, dtype=torch.float64)
    scores, documents = li.search(D[4], D, 3, coarse=FOUR)
    assert scores.shape == documents.shape == (3,) and scores.dtype == torch.float64
    assert documents[0] == 4 and documents.dtype == torch.int64
    scores, documents = li.search(D[:2].bfloat16(), D.bfloat16(), 50, coarse=BITS)
    assert scores.shape == documents.shape == (2, 30) and scores.dtype == torch.float32
    scores, documents = li.search(D[:2], D[:0], 5, coarse=SIGNS)
    assert scores.shape == documents.shape == (2, 0)


def test_progress_and_autograd(device):
    seen = []
    D = torch.randn(30, 5, 16, device=device, requires_grad=True)
    options = {"chunk_bytes": 10 * D[0].nbytes, "progress": lambda *x: seen.append(x)}
    scores, _ = li.search(D[:1], D, 3, coarse=BITS, **options)
    assert seen == [(10, 30), (20, 30), (30, 30)] and not scores.requires_grad
    seen.clear()  # of codes, a document has 5 tokens of 2 bytes
    li.search(D[:1], D, 3, coarse=BITS.encode(D), **options | {"chunk_bytes": 100})
    assert seen == [(10, 30), (20, 30), (30, 30)]


@pytest.mark.gpu
def test_a_corpus_on_the_host():
    D = torch.randn(300, 20, 64)
    Q = D[:4].cuda()
    expected = li.search(Q, D.cuda(), 5, coarse=FOUR.encode(D.cuda()))
    for given in (FOUR, FOUR.encode(D), FOUR.encode(li.Tokens(D).pack())):
        scores, documents = li.search(Q, D, 5, coarse=given, chunk_bytes=50_000)
        assert scores.is_cuda and torch.equal(documents, expected.indices)
        torch.testing.assert_close(scores, expected.scores, rtol=1e-5, atol=1e-5)
