"""A first pass over codes of a few bits: what it finds, in which order, and with which scores."""

import pytest
import torch

import late_interaction as li
from late_interaction import coarse, codecs
from late_interaction._search import first_pass, rescore
from late_interaction.coarse import KINDS, Codes, encode
from late_interaction.score_pairs import rerank_direct
from tests.cases import mask


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
@pytest.mark.parametrize("kind", KINDS)
def test_all_documents_as_candidates_are_the_exact_search(kind, masks, normalize, largest, corpus):
    Q, D, *both = corpus
    options = {"normalize": normalize, "largest": largest}
    options |= dict(zip(("q_mask", "d_mask"), both, strict=True)) if masks else {}
    exact = li.search(Q, D, 6, **options)
    for given in (kind, encode(D, kind, normalize=normalize)):
        scores, documents = li.search(Q, D, 6, coarse=given, candidates=120, **options)
        # A score is a sum of nine similarities of up to 70, of either sign.
        torch.testing.assert_close(scores, exact.scores, rtol=1e-6, atol=2e-5)
        assert torch.equal(documents, exact.indices)


@pytest.mark.parametrize("form", ["padded", "whole", "strided", "float64", "empty query"])
@pytest.mark.parametrize("normalize", [True, False])
def test_documents_whose_kept_tokens_come_first(form, normalize, corpus):
    Q, D, q_mask, _ = corpus
    lengths = torch.arange(120, device=D.device) % 18
    d_mask = None if form == "whole" else torch.arange(17, device=D.device) < lengths.unsqueeze(1)
    if form == "strided":
        D = D.transpose(0, 1).contiguous().transpose(0, 1)
    if form == "float64":
        Q, D = Q.double(), D.double()
    if form == "empty query":
        q_mask[2] = False
    D = D.masked_fill(~d_mask.unsqueeze(-1), torch.nan) if d_mask is not None and not normalize else D
    options = {"normalize": normalize}
    exact = li.search(Q, D, 6, q_mask=q_mask, d_mask=d_mask, **options)
    codes = encode(D.nan_to_num(), "4bit", normalize=normalize)
    scores, documents = li.search(
        Q, D, 6, q_mask=q_mask, d_mask=d_mask, coarse=codes, candidates=120, **options
    )
    torch.testing.assert_close(scores, exact.scores, rtol=1e-6, atol=1e-6)
    assert torch.equal(documents, exact.indices)


@pytest.mark.parametrize("kind", KINDS)
def test_the_candidates_are_the_best_by_their_codes(kind, corpus):
    Q, D, q_mask, d_mask = corpus
    unit = torch.nn.functional.normalize(D, dim=-1)
    if kind == "hamming":
        codec = codecs.Bits(1, scales=False)
        rough = li.maxsim(li.Tokens(Q, q_mask), codec.encode(li.Tokens(D, d_mask)))
    else:
        codec = codecs.Bits(int(kind[0]))
        back = codec.decode(codec.encode(unit)).values
        rough = li.maxsim(torch.nn.functional.normalize(Q, dim=-1), back, q_mask, d_mask)
    for chunk in (None, 1, 50 * D[0].nbytes):
        scores, documents = li.search(
            Q,
            D,
            3,
            q_mask=q_mask,
            d_mask=d_mask,
            coarse=kind,
            candidates=10,
            chunk_bytes=chunk,
            progress=False,
            normalize=True,
        )
        exact = li.maxsim(Q, D, q_mask, d_mask, normalize=True)
        torch.testing.assert_close(scores, exact.gather(1, documents), rtol=1e-6, atol=1e-6)
        assert (scores.diff(dim=-1) <= 0).all()
        # All but rounding: a document found has a rough score near the ten best, or above.
        tenth = rough.topk(10).values[:, -1:]
        assert (rough.gather(1, documents) >= tenth - 0.02 * tenth.abs()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_documents_come_in_their_order(kind, corpus):
    Q, D, *_ = corpus
    scores, documents = li.search(Q[:1], D, 2, coarse=kind, candidates=20)
    assert documents.tolist() == [[3, 7]] and scores[0, 0] == scores[0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_in_any_pieces(kind, corpus, monkeypatch):
    Q, D, q_mask, d_mask = corpus
    options = {"q_mask": q_mask, "d_mask": d_mask, "candidates": 12}
    expected = li.search(Q, D, 6, coarse=kind, **options)
    for size in (1, 17 * 72 * 4 * 5, 17 * 72 * 4 * 30):
        monkeypatch.setattr(coarse, "_BYTES", size)
        monkeypatch.setattr(first_pass, "_BYTES", size)
        monkeypatch.setattr(rescore, "_BYTES", size)
        monkeypatch.setattr(rescore, "_GATHERED_BYTES", size)
        monkeypatch.setattr(coarse, "_CACHED_BYTES", size)
        found = li.search(Q, D, 6, coarse=encode(D, kind), **options)
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-6, atol=1e-6)
        assert torch.equal(found.indices, expected.indices)


# ---- sizes of parts, on which no result depends ----


@pytest.mark.parametrize("each, most, count", [(3, 10, 3), (1, 5, 5), (0, 5, 5), (11, 10, 1)])
def test_as_many_as_fit_and_at_least_one(each, most, count):
    assert rescore.fitting(each, most) == count


@pytest.mark.parametrize(
    "room, candidates, parts",
    [(5, 12, [(1, 5), (1, 5), (1, 2)] * 5), (30, 12, [(2, 12), (2, 12), (1, 12)]), (3, 1, [(3, 1), (2, 1)])],
)
@pytest.mark.parametrize("masked", [False, True])
def test_copies_of_candidates_are_no_larger_than_they_may_be(room, candidates, parts, masked, monkeypatch):
    D = torch.randn(60, 7, 16)
    lengths = torch.arange(60) % 4 + 1
    d_mask = torch.arange(7) < lengths.unsqueeze(1) if masked else None
    seen = []
    monkeypatch.setattr(rescore, "_GATHERED_BYTES", room * 7 * 16 * 4)
    monkeypatch.setattr(
        rescore, "maxsim", lambda Q, D, *x, **y: seen.append(D.shape) or li.maxsim(Q, D, *x, **y)
    )
    li.search(D[:5], D, 1, d_mask=d_mask, coarse="1bit", candidates=candidates, normalize=True)
    assert [tuple(shape[:2]) for shape in seen] == parts
    assert all(shape[2] <= 4 if masked else shape[2] == 7 for shape in seen)


def test_where_kept_tokens_lie_together():
    D = torch.randn(3, 4, 2)
    lengths = torch.tensor([2, 0, 4])
    prefix = torch.arange(4) < lengths.unsqueeze(1)
    assert [x.tolist() for x in rescore.spans_of(D, None)] == [[0, 4, 8], [4, 4, 4]]
    assert [x.tolist() for x in rescore.spans_of(D, prefix)] == [[0, 4, 8], [2, 0, 4]]
    assert rescore.spans_of(D, ~prefix) is None
    assert rescore.spans_of(D.transpose(0, 1).contiguous().transpose(0, 1), None) is None


@pytest.mark.parametrize("normalize", [False, True])
def test_a_cpu_copies_no_documents_that_lie_together(normalize, monkeypatch):
    D, scored = torch.randn(30, 5, 16), []
    monkeypatch.setattr(rescore, "rerank_direct", lambda *x, **y: scored.append(x) or rerank_direct(*x, **y))
    li.search(D[:4], D, 3, coarse="1bit", normalize=normalize)
    assert len(scored) == (0 if normalize else 4)


def test_a_part_is_encoded_at_a_time(monkeypatch):
    D, sizes, codes_of = torch.randn(30, 5, 16), [], coarse._codes_of
    monkeypatch.setattr(coarse, "_CACHED_BYTES", 4 * 5 * 16 * 12)
    monkeypatch.setattr(coarse, "_codes_of", lambda D, *x: sizes.append(len(D)) or codes_of(D, *x))
    encode(D, "4bit")
    assert sizes == [12, 12, 6]


def chunks_of_first_pass(Q, D, given):
    return [len(tokens) for _, tokens, *_ in first_pass.CodesPass(Q, None, given, True).chunks(D, None, None)]


@pytest.mark.parametrize("queries, scores, chunk", [(5, 100, 20), (1, 100, 100), (0, 100, 100), (5, 1, 1)])
def test_scores_of_a_chunk_of_codes(queries, scores, chunk, monkeypatch):
    """Codes that need not travel: however many bytes they have."""
    D = torch.randn(120, 3, 8)
    monkeypatch.setattr(first_pass, "MOST_SCORES", scores)
    monkeypatch.setattr(first_pass, "_BYTES", 1)
    seen = chunks_of_first_pass(D[:queries], D, encode(D, "1bit"))
    assert seen == [min(chunk, 120 - start) for start in range(0, 120, chunk)]


def test_bytes_of_a_chunk_that_is_encoded(monkeypatch):
    D = torch.randn(120, 3, 8)
    monkeypatch.setattr(first_pass, "_BYTES", 4 * 3 * 8 * 50)
    assert chunks_of_first_pass(D[:2], D, "1bit") == [50, 50, 20]


@pytest.mark.parametrize(
    "k, candidates, wanted", [(3, None, 100), (10, None, 100), (11, None, 110), (3, 3, 3)]
)
def test_how_many_candidates(k, candidates, wanted):
    assert first_pass._check_candidates(candidates, k) == wanted


def test_a_cpu_gathers_tokens_up_to_the_last_one_that_is_kept():
    kept = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    assert rescore.longest(kept.unsqueeze(0)) == 2 and rescore.longest(torch.zeros_like(kept)) == 1
    assert rescore.longest(~kept) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_one_document_of_empty_ones_and_of_small_tokens(kind):
    D = torch.randn(3, 4, 16)
    D[1, 2] = 0
    codes, one = encode(D, kind, normalize=True), encode(D[0], kind, normalize=True)
    assert torch.equal(one.tokens, codes.tokens[:1])
    for small in (D[:0], D[:, :0], D[..., :1]):
        assert encode(small, kind, normalize=True).tokens.shape[:2] == small.shape[:2]
    with pytest.raises(ValueError, match=r"D must be .* with d of at least 1"):
        encode(D[..., :0], kind, normalize=True)
    again = codes.to("cpu")
    assert torch.equal(again.tokens, codes.tokens) and (again.scale is None) == (kind == "hamming")
    if kind != "hamming":
        torch.testing.assert_close(encode(D * 2**-10, kind, normalize=True).scale, codes.scale)
        assert torch.equal(again.scale, codes.scale) and codes.scale.isfinite().all()


def test_shapes_and_dtypes(device):
    D = torch.randn(30, 5, 16, device=device, dtype=torch.float64)
    scores, documents = li.search(D[4], D, 3, coarse="4bit")
    assert scores.shape == documents.shape == (3,) and scores.dtype == torch.float64
    assert documents[0] == 4 and documents.dtype == torch.int64
    scores, documents = li.search(D[:2].bfloat16(), D.bfloat16(), 50, coarse="1bit")
    assert scores.shape == documents.shape == (2, 30) and scores.dtype == torch.float32
    scores, documents = li.search(D[:2], D[:0], 5, coarse="hamming")
    assert scores.shape == documents.shape == (2, 0)


def test_progress_and_autograd(device):
    seen = []
    D = torch.randn(30, 5, 16, device=device, requires_grad=True)
    options = {"chunk_bytes": 10 * D[0].nbytes, "progress": lambda *x: seen.append(x)}
    scores, _ = li.search(D[:1], D, 3, coarse="1bit", **options)
    assert seen == [(10, 30), (20, 30), (30, 30)] and not scores.requires_grad
    seen.clear()  # of codes, a document has 5 tokens of 2 bytes
    li.search(D[:1], D, 3, coarse=encode(D, "1bit"), **options | {"chunk_bytes": 100})
    assert seen == [(10, 30), (20, 30), (30, 30)]
    assert not encode(D, "4bit").scale.requires_grad


@pytest.mark.gpu
def test_a_corpus_on_the_host():
    D = torch.randn(300, 20, 64)
    Q = D[:4].cuda()
    expected = li.search(Q, D.cuda(), 5, coarse=encode(D.cuda(), "4bit"))
    for given in ("4bit", encode(D, "4bit")):
        scores, documents = li.search(Q, D, 5, coarse=given, chunk_bytes=50_000)
        assert scores.is_cuda and torch.equal(documents, expected.indices)
        torch.testing.assert_close(scores, expected.scores, rtol=1e-5, atol=1e-5)
    assert encode(D, "4bit").to("cuda").tokens.is_cuda


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"coarse": "2bit"}, ValueError, r"coarse must be one of \('hamming', '1bit', '4bit'\), got '2bit'"),
        ({"coarse": 1}, TypeError, r"coarse must be one of .*, Codes of coarse.* Muvera .*, got int"),
        ({"candidates": 20}, ValueError, "candidates must be None without coarse, got 20"),
        ({"coarse": "1bit", "candidates": 2}, ValueError, "candidates must be at least k, 3, got 2"),
        ({"coarse": "1bit", "candidates": 9.0}, TypeError, "candidates must be an int, got float"),
        ({"coarse": "1bit", "scale_D": torch.ones(())}, ValueError, "scale_D must be None with coarse"),
        ({"coarse": "1bit", "normalize": 1}, TypeError, "normalize must be True or False, got 1"),
        ({"coarse": "1bit", "largest": 1}, TypeError, "largest must be True or False, got 1"),
        ({"coarse": "1bit", "precision": "low"}, ValueError, "precision must be one of"),
    ],
)
def test_bad_options(options, error, message):
    D = torch.randn(30, 5, 16)
    with pytest.raises(error, match=message):
        li.search(D[:2], D, 3, **options)


def test_bad_codes():
    D = torch.randn(30, 5, 16)
    codes = encode(D, "4bit")
    with pytest.raises(
        ValueError, match=r"coarse must be the codes of D \[29, 5, 16\], got those of \[30, 5, 16\]"
    ):
        li.search(D[:2], D[:29], 3, coarse=codes)
    with pytest.raises(ValueError, match=r"coarse must be the codes of D \[30, 5, 16\], got those of \[29"):
        li.search(D[:2], D, 3, coarse=encode(D[:29], "4bit"))
    with pytest.raises(TypeError, match=r"Q must be bfloat16, .* got torch.int8"):
        li.search(D[:2].char(), D.char(), 3, coarse="1bit")
    with pytest.raises(ValueError, match="kind must be one of"):
        encode(D, "8bit")
    with pytest.raises(ValueError, match=r"D must be \[Nd, Ld, d\] or \[Ld, d\] with d of at least 1"):
        encode(D[None], "1bit")
    with pytest.raises(TypeError, match="normalize must be True or False"):
        encode(D, "1bit", normalize=1)
    with pytest.raises(ValueError, match=r"tokens must have 2 bytes a token"):
        Codes("1bit", codes.tokens, codes.scale, 16)
    with pytest.raises(ValueError, match=r"tokens must be \[Nd, Ld, bytes\], got \[5, 8\]"):
        Codes("4bit", codes.tokens[0], codes.scale[0], 16)
    with pytest.raises(ValueError, match=r"tokens must be \[Nd, Ld, bytes\], got \[1, 30, 5, 8\]"):
        Codes("4bit", codes.tokens[None], codes.scale[None], 16)
    with pytest.raises(TypeError, match=r"scale must be a torch.Tensor for kind='4bit', got None"):
        Codes("4bit", codes.tokens, None, 16)
    with pytest.raises(ValueError, match="scale must be None for kind='hamming'"):
        Codes("hamming", encode(D, "hamming").tokens, codes.scale, 16)
    with pytest.raises(ValueError, match=r"scale must be 0-dim or have the shape of tokens without d"):
        Codes("4bit", codes.tokens, codes.scale[1:], 16)
