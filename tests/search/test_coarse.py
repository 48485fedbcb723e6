"""A first pass over codes of a few bits: what it finds, in which order, and with which scores."""

import pytest
import torch

import late_interaction as li
from late_interaction import bits, coarse
from late_interaction._search import rescore
from late_interaction.coarse import KINDS, Codes, encode
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
    both = both if masks else [None, None]
    options = {"normalize": normalize, "largest": largest}
    exact = li.retrieve(Q, D, 6, *both, **options)
    for given in (kind, encode(D, kind, normalize=normalize)):
        scores, documents = li.retrieve(Q, D, 6, *both, coarse=given, candidates=120, **options)
        torch.testing.assert_close(scores, exact[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(documents, exact[1])


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
    exact = li.retrieve(Q, D, 6, q_mask, d_mask, **options)
    codes = encode(D.nan_to_num(), "4bit", normalize=normalize)
    scores, documents = li.retrieve(Q, D, 6, q_mask, d_mask, coarse=codes, candidates=120, **options)
    torch.testing.assert_close(scores, exact[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(documents, exact[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_candidates_are_the_best_by_their_codes(kind, corpus):
    Q, D, q_mask, d_mask = corpus
    unit = torch.nn.functional.normalize(D, dim=-1)
    if kind == "hamming":
        options = {"q_mask": q_mask, "d_mask": d_mask}
        rough = bits.maxsim_hamming(bits.to_bits(Q)[0], bits.to_bits(D)[0], 72, **options)
    else:
        codes, scale = (bits.to_bits if kind == "1bit" else bits.to_int4)(unit)
        back = (bits.from_bits if kind == "1bit" else bits.from_int4)(codes, scale, 72)
        rough = li.maxsim(torch.nn.functional.normalize(Q, dim=-1), back, q_mask, d_mask)
    for chunk in (None, 1, 50):
        scores, documents = li.retrieve(
            Q, D, 3, q_mask, d_mask, coarse=kind, candidates=10, chunk=chunk, progress=False
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
    scores, documents = li.retrieve(Q[:1], D, 2, coarse=kind, candidates=20)
    assert documents.tolist() == [[3, 7]] and scores[0, 0] == scores[0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_in_any_pieces(kind, corpus, monkeypatch):
    Q, D, *masks = corpus
    expected = li.retrieve(Q, D, 6, *masks, coarse=kind, candidates=12)
    for size in (1, 17 * 72 * 4 * 5, 17 * 72 * 4 * 30):
        monkeypatch.setattr(coarse, "_BYTES", size)
        monkeypatch.setattr(rescore, "_BYTES", size)
        monkeypatch.setattr(rescore, "_GATHERED_BYTES", size)
        monkeypatch.setattr(coarse, "_CACHED_BYTES", size)
        found = li.retrieve(Q, D, 6, *masks, coarse=encode(D, kind), candidates=12)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(found[1], expected[1])


def test_a_cpu_gathers_tokens_up_to_the_last_one_that_is_kept():
    kept = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    assert rescore.longest(kept.unsqueeze(0)) == 2 and rescore.longest(torch.zeros_like(kept)) == 1
    assert rescore.longest(~kept) == 4


def test_shapes_and_dtypes(device):
    D = torch.randn(30, 5, 16, device=device, dtype=torch.float64)
    scores, documents = li.retrieve(D[4], D, 3, coarse="4bit")
    assert scores.shape == documents.shape == (3,) and scores.dtype == torch.float64
    assert documents[0] == 4 and documents.dtype == torch.int64
    scores, documents = li.retrieve(D[:2].bfloat16(), D.bfloat16(), 50, coarse="1bit")
    assert scores.shape == documents.shape == (2, 30) and scores.dtype == torch.float32
    scores, documents = li.retrieve(D[:2], D[:0], 5, coarse="hamming")
    assert scores.shape == documents.shape == (2, 0)


def test_progress_and_autograd(device):
    seen = []
    D = torch.randn(30, 5, 16, device=device, requires_grad=True)
    scores, _ = li.retrieve(D[:1], D, 3, coarse="1bit", chunk=10, progress=lambda *x: seen.append(x))
    assert seen[-1] == (30, 30) and not scores.requires_grad
    assert not encode(D, "4bit").scale.requires_grad


@pytest.mark.gpu
def test_a_corpus_on_the_host():
    D = torch.randn(300, 20, 64)
    Q = D[:4].cuda()
    expected = li.retrieve(Q, D.cuda(), 5, coarse=encode(D.cuda(), "4bit"))
    for given in ("4bit", encode(D, "4bit")):
        scores, documents = li.retrieve(Q, D, 5, coarse=given, chunk=70)
        assert scores.is_cuda and torch.equal(documents, expected[1])
        torch.testing.assert_close(scores, expected[0], rtol=1e-5, atol=1e-5)
    assert encode(D, "4bit").to("cuda").tokens.is_cuda


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"coarse": "2bit"}, ValueError, r"coarse must be one of \('hamming', '1bit', '4bit'\), got '2bit'"),
        (
            {"coarse": 1},
            TypeError,
            r"coarse must be one of .*, Codes of coarse.* Muvera .*, got int",
        ),
        ({"candidates": 20}, ValueError, "candidates must be None without coarse, got 20"),
        ({"coarse": "1bit", "candidates": 2}, ValueError, "candidates must be at least top_k, 3, got 2"),
        ({"coarse": "1bit", "candidates": 9.0}, TypeError, "candidates must be an int, got float"),
        ({"coarse": "1bit", "scale_D": torch.ones(())}, ValueError, "scale_D must be None with coarse"),
        ({"coarse": "1bit", "normalize": 1}, TypeError, "normalize must be True or False, got 1"),
        ({"coarse": "1bit", "sorted": 1}, TypeError, "sorted must be True or False, got 1"),
        ({"coarse": "1bit", "largest": 1}, TypeError, "largest must be True or False, got 1"),
        ({"coarse": "1bit", "precision": "low"}, ValueError, "precision must be one of"),
    ],
)
def test_bad_options(options, error, message):
    D = torch.randn(30, 5, 16)
    with pytest.raises(error, match=message):
        li.retrieve(D[:2], D, 3, **options)


def test_bad_codes():
    D = torch.randn(30, 5, 16)
    codes = encode(D, "4bit")
    with pytest.raises(
        ValueError, match=r"coarse must be the codes of D \[29, 5, 16\], got those of \[30, 5, 16\]"
    ):
        li.retrieve(D[:2], D[:29], 3, coarse=codes)
    with pytest.raises(TypeError, match=r"Q must be bfloat16, .* got torch.int8"):
        li.retrieve(D[:2].char(), D.char(), 3, coarse="1bit")
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
    with pytest.raises(TypeError, match=r"scale must be a torch.Tensor for kind='4bit', got None"):
        Codes("4bit", codes.tokens, None, 16)
    with pytest.raises(ValueError, match="scale must be None for kind='hamming'"):
        Codes("hamming", encode(D, "hamming").tokens, codes.scale, 16)
    with pytest.raises(ValueError, match=r"scale must be 0-dim or have the shape of tokens without d"):
        Codes("4bit", codes.tokens, codes.scale[1:], 16)
