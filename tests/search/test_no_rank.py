"""Documents that take no rank: empty ones, unless they are kept, and those whose score is NaN."""

import math

import pytest
import torch

import late_interaction as li
from late_interaction import TopK, codecs
from tests.support.coded import BITS, FOUR
from tests.support.corpora import created, in_memory, stored_as

K = 6


def inputs(device="cpu", dtype=torch.float32):
    """Queries, documents of negative scores, and a mask that leaves nothing of documents 1 and 4."""
    generator = torch.Generator().manual_seed(0)
    Q = 0.1 + torch.rand(3, 5, 16, generator=generator)
    D = -0.1 - torch.rand(8, 4, 16, generator=generator)
    d_mask = torch.rand(8, 4, generator=generator) < 0.7
    d_mask[:, 0] = True
    d_mask[[1, 4]] = False
    return Q.to(device, dtype), D.to(device, dtype), d_mask.to(device)


def by_definition(scores, k, largest, no_rank):
    """The k best of scores, without the documents that take no rank: [Nq, Nd] bool."""
    worst = -math.inf if largest else math.inf
    best, places = [], []
    for row, out in zip(scores.tolist(), no_rank.expand(scores.shape).tolist(), strict=True):
        order = [i for i in range(len(row)) if not out[i] and not math.isnan(row[i])]
        order = sorted(order, key=lambda i: -row[i] if largest else row[i])[:k]
        missing = min(k, len(row)) - len(order)
        best.append([row[i] for i in order] + [worst] * missing)
        places.append(order + [-1] * missing)
    return torch.tensor(best), torch.tensor(places)


def same(found, expected, **tolerance):
    scores, indices = found
    torch.testing.assert_close(
        scores.float().cpu(), expected[0], **(tolerance or {"rtol": 1e-5, "atol": 1e-5})
    )
    assert torch.equal(indices.cpu(), expected[1])


def by_topk(Q, D, k, d_mask, **options):
    best, again = TopK(Q, k, **options), TopK(Q, k, **options)
    for i in range(0, len(D), 3):
        best.add(D[i : i + 3], None if d_mask is None else d_mask[i : i + 3])
    again.load_state_dict(best.state_dict())
    return li.SearchResult(again.scores, again.indices)


def by_merging(Q, D, k, d_mask, **options):
    parts = []
    for i in range(0, len(D), 3):
        parts.append(TopK(Q, k, first=i, **options))
        parts[-1].add(D[i : i + 3], None if d_mask is None else d_mask[i : i + 3])
    best = TopK(Q, k, **options)
    best.merge(*parts[1:], *parts[:1])
    return li.SearchResult(best.scores, best.indices)


def by_corpus(Q, D, k, d_mask, **options):
    corpus = in_memory(list(li.Tokens(D, d_mask)), D.device)
    return corpus.search(Q, k, normalize=False, chunk_bytes=500, **options)


def searched(chunk_bytes=None, form=None, **first_pass):
    """A search of documents in some form, for whose first pass all of them are candidates."""

    def search(Q, D, k, d_mask, **options):
        if form is not None:
            D, d_mask = form(li.Tokens(D, d_mask)), None
        return li.search(Q, D, k, d_mask=d_mask, chunk_bytes=chunk_bytes, **first_pass, **options)

    return search


SEARCHES = {
    "search": searched(chunk_bytes=100),
    "list": searched(form=list),
    "Tokens": searched(form=lambda D: D),
    "TopK": by_topk,
    "merged": by_merging,
    "Corpus": by_corpus,
    "hamming": searched(coarse=codecs.Bits(1, scales=False), candidates=100),
    "4bit": searched(coarse=FOUR, candidates=100),
    "MUVERA": searched(coarse=li.Muvera(16, k_sim=2, repetitions=4), candidates=100),
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("k", [1, K, 100])
@pytest.mark.parametrize("largest", [True, False])
def test_empty_documents_take_no_rank_unless_they_are_kept(name, k, largest, device):
    Q, D, d_mask = inputs(device)
    scores, empty = li.maxsim(Q, D, d_mask=d_mask), ~d_mask.any(dim=1).cpu()
    assert (scores[:, ~empty] < 0).all() and (scores[:, empty] == 0).all()
    options = {} if largest else {"largest": False}
    same(SEARCHES[name](Q, D, k, d_mask, **options), by_definition(scores, k, largest, empty))
    kept = SEARCHES[name](Q, D, k, d_mask, keep_empty=True, **options)
    same(kept, by_definition(scores, k, largest, torch.zeros_like(empty)))


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nothing_but_empty_documents(name, dtype, device):
    if (name, dtype) == ("Corpus", torch.float64):
        dtype = torch.float16
    Q, D, _ = inputs(device, dtype)
    nothing = torch.zeros(D.shape[:2], dtype=torch.bool, device=device)
    expected = torch.full((3, K), -math.inf), torch.full((3, K), -1)
    same(SEARCHES[name](Q, D, K, nothing), expected)
    if name != "4bit":
        same(SEARCHES[name](Q, D[:, :0], K, None), expected)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("largest", [True, False])
def test_a_score_of_nan_takes_no_rank(name, dtype, largest, device):
    if (name, dtype) == ("Corpus", torch.float64):
        return
    Q, D, d_mask = inputs(device, dtype)
    D[2, 0, 3], D[7], Q[1, 2] = math.nan, math.nan, math.nan
    D[0, ~d_mask[0]] = math.nan  # masked tokens do not count
    options = {} if largest else {"largest": False}
    found = SEARCHES[name](Q, D, K, d_mask, **options)
    scores = li.maxsim(Q, D, d_mask=d_mask)
    assert scores[[0, 2]].isnan().sum() == 4 and scores[1].isnan().any()
    same(found, by_definition(scores, K, largest, ~d_mask.any(dim=1).cpu()))
    assert found.indices[1].tolist() == [-1] * K
    assert sorted(found.indices[0].tolist()) == [-1, -1, 0, 3, 5, 6]


@pytest.mark.parametrize("largest", [True, False])
def test_infinite_scores_keep_their_ranks(largest, device):
    """Before documents that take none, whose score they share."""
    Q = torch.ones(1, 1, 1, device=device)
    D = torch.tensor([math.nan, -math.inf, 1.0, math.inf, -math.inf], device=device).view(5, 1, 1)
    for dtype in (torch.float32, torch.float64):
        scores, indices = li.search(Q.to(dtype), D.to(dtype), 5, largest=largest, chunk_bytes=60)
        assert indices.tolist() == [[3, 2, 1, 4, -1] if largest else [1, 4, 2, 3, -1]]
        assert scores[0, -1] == (-math.inf if largest else math.inf)


@pytest.mark.parametrize("kind", [torch.float16, torch.int8, "residuals"], ids=str)
def test_empty_documents_of_a_corpus_of_codes(kind, device, tmp_path):
    Q, D, d_mask = inputs(device)
    docs = [x[kept].cpu() for x, kept in zip(D, d_mask, strict=True)]
    corpus = created(tmp_path / "corpus", docs, shard_bytes=100, **stored_as(kind, docs))
    assert len(corpus.shards) > 1
    kept = corpus.search(Q, 8, keep_empty=True)
    assert all({1, 4} == set(own[:2]) for own in kept.indices.tolist())
    found = corpus.search(Q, 8)
    assert torch.equal(found.indices[:, :6], kept.indices[:, 2:]) and torch.equal(
        found.scores[:, :6], kept.scores[:, 2:]
    )
    assert (found.indices[:, 6:] == -1).all() and (found.scores[:, 6:] == -math.inf).all()


def test_a_first_pass_gives_no_candidate_to_empty_documents(device):
    Q, D, _ = inputs(device)
    D = D.repeat(20, 1, 1)
    d_mask = torch.ones(D.shape[:2], dtype=torch.bool, device=device)
    d_mask[8:] = False  # each of them scores 0 in the first pass, more than all others
    for kind in (BITS, FOUR.encode(D), li.Muvera(16, k_sim=2, repetitions=4)):
        options = {"coarse": kind, "candidates": 10, "normalize": False}
        found = li.search(Q, D, 10, d_mask=d_mask, **options)
        scores = li.maxsim(Q, D[:8])
        expected = by_definition(scores, 8, True, torch.zeros(8, dtype=torch.bool))
        same([x[:, :8] for x in found], expected)
        assert (found.indices[:, 8:] == -1).all()


def test_no_flag_but_a_bool(device):
    Q, D, d_mask = inputs(device)
    for search in SEARCHES.values():
        with pytest.raises(TypeError, match="keep_empty must be True or False"):
            search(Q, D, 3, d_mask, keep_empty=1)


# ---- mining ----


@pytest.mark.parametrize("count", [1, 3, 50])
def test_documents_of_nan_take_no_negatives_from_a_query(count, device):
    torch.manual_seed(0)
    D = torch.nn.functional.normalize(torch.randn(1000, 4, 16), dim=-1).to(device)
    Q = D[:5].clone()
    D[500 : 500 + count] = math.nan
    found = li.hard_negatives(Q, D, [[i] for i in range(5)], num_negatives=3)
    scores = li.maxsim(Q, D, normalize=True)
    scores[:, 500 : 500 + count], scores[range(5), range(5)] = -math.inf, -math.inf
    assert torch.equal(found.indices, scores.topk(3).indices)
    torch.testing.assert_close(found.scores, scores.topk(3).values)


def test_a_positive_that_does_not_count_sets_no_margin(device):
    D = torch.eye(4, device=device).unsqueeze(1).repeat(3, 1, 1)
    D[5] = math.nan
    docs = [*D, D[0, :0]]
    options = {"absolute_margin": 0.5, "range_max": 12}
    for positives in ([0, 5], [0, 12]):
        found = li.hard_negatives(D[:1], docs, [positives], num_negatives=4, **options)
        assert found.indices.tolist() == [[1, 2, 3, 6]]
    options["keep_empty"] = True
    assert li.hard_negatives(D[:1], docs, [[0, 12]], **options).indices.tolist() == [[-1] * 3]


@pytest.mark.parametrize("output_format", ["triplet", "n-tuple", "labeled-pair", "labeled-list"])
def test_texts_whose_embeddings_are_nan_or_empty_are_not_mined(output_format):
    class Model:
        def encode_query(self, texts, batch_size):
            return [torch.eye(8)[[ord(x) - ord("a") for x in text]] for text in texts]

        def encode_document(self, texts, batch_size):
            vectors = -torch.eye(8)
            vectors[6] = math.nan  # the letter g
            return [vectors[[ord(x) - ord("a") for x in text]] for text in texts]

    data = {"q": ["a", "b"], "p": ["ca", "cb"]}
    mined = li.mine_hard_negatives(
        data, Model(), corpus=["g", "", "cd", "eg", "ce", "f"], num_negatives=4, output_format=output_format
    )
    found = [x for name, column in mined.items() if name not in ("q", "label", "labels") for x in column]
    texts = {text for x in found for text in ([x] if isinstance(x, str) else x)}
    assert texts == {"ca", "cb", "cd", "ce", "f"}
    rows = {"triplet": 8, "n-tuple": 2, "labeled-pair": 10, "labeled-list": 2}
    assert len(mined["q"]) == rows[output_format]
