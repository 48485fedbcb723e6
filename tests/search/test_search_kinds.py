"""What a search takes: every kind of queries and documents by definition, subsets, ids, what is refused."""

import math

import pytest
import torch

import late_interaction as li
from late_interaction import codecs, reference
from late_interaction._search import group_search
from tests.search.test_search import CODECS, close, corpus
from tests.support.coded import BITS, FOUR, FP8, INT8


def spoiled(device):
    """Queries and documents with masks, NaN in every token that they leave out, a document without a kept
    token, two that tie, and the scores by definition in float64."""
    Q, D, q_mask, d_mask = corpus(device)
    D[20], d_mask[20], d_mask[4] = D[11], d_mask[11], False
    q_mask[:, 0] = True
    clean = reference.maxsim_reference(Q.double(), D.double(), q_mask, d_mask)
    Q[~q_mask], D[~d_mask] = torch.nan, torch.nan
    return li.Tokens(Q, q_mask), li.Tokens(D, d_mask), clean


QUERIES = {"padded": li.Tokens.to_padded, "packed": li.Tokens.pack, "list": list}
DOCUMENTS = QUERIES | {
    "float64": lambda D: li.Tokens(D.values.double(), D.mask).pack(),
    "Corpus": lambda D: li.Corpus.from_packed(D.pack().values, D.pack().offsets),
}


@pytest.mark.parametrize("subset", [None, "bool", "indices", "list", "none"])
@pytest.mark.parametrize("k", [3, 100])
@pytest.mark.parametrize("of_documents", DOCUMENTS)
@pytest.mark.parametrize("of_queries", QUERIES)
def test_every_kind_is_searched_by_definition(of_queries, of_documents, k, subset, device):
    Q, D, scores = spoiled(device)
    chosen = torch.zeros(37, dtype=torch.bool) if subset else torch.ones(37, dtype=torch.bool)
    if subset != "none":
        chosen[[0, 4, 11, 20, 33]] = True
    places = chosen.nonzero().flatten()
    given = {None: None, "bool": chosen.to(device), "indices": places.int(), "list": places.tolist()}
    ranked = scores.cpu().masked_fill(~chosen, -torch.inf)
    ranked[:, 4] = -torch.inf  # it has no token
    wanted = ranked.sort(dim=-1, descending=True, stable=True)
    indices = wanted.indices.where(wanted.values.isfinite(), -1)[:, :k]
    if of_documents == "float64":
        Q = Q.to(torch.float64)
    queries, documents = QUERIES[of_queries](Q), DOCUMENTS[of_documents](D)
    found = li.search(queries, documents, k, subset=given.get(subset, []))
    assert found.indices.tolist() == indices.tolist() and found.ids is None
    torch.testing.assert_close(found.scores.double().cpu(), wanted.values[:, :k], rtol=1e-5, atol=1e-4)


def test_one_query_and_one_document(device):
    Q, D, *_ = corpus(device)
    batch = li.search(Q[:1], D, 3)
    for documents in (D, list(D), li.Tokens(D), li.Tokens(D).pack()):
        scores, indices = li.search(Q[0], documents, 3)
        assert scores.shape == indices.shape == (3,)
        close((scores.unsqueeze(0), indices.unsqueeze(0)), batch)
    scores, indices = li.search(Q, D[0], 3)
    assert scores.shape == (5, 1) and not indices.any()
    torch.testing.assert_close(scores, li.maxsim(Q, D[:1]))


OF_D_16 = codecs.Residual.train(torch.randn(400, 16, generator=torch.Generator().manual_seed(1)), 16)
ALL_CODECS = CODECS | {"Bits(4)": FOUR, "Residual": OF_D_16}
LAYOUTS = {"padded": lambda D: D, "packed": li.Tokens.pack, "list": list}


@pytest.mark.parametrize("chunk_bytes", [None, 100])
@pytest.mark.parametrize("of_documents", LAYOUTS)
@pytest.mark.parametrize("codec", ALL_CODECS)
def test_codes_are_searched_by_their_scores(codec, of_documents, chunk_bytes, device):
    Q, D, _ = spoiled(device)
    D, codec = li.Tokens(D.values.nan_to_num(), D.mask), ALL_CODECS[codec].to(device)
    codes = codec.encode(LAYOUTS[of_documents](D))
    scores = li.maxsim(Q, codes)
    scores[:, 4] = -torch.inf  # it has no token
    scores[:, 30:] = -torch.inf
    wanted = scores.sort(dim=-1, descending=True, stable=True)
    indices = wanted.indices.where(wanted.values.isfinite(), -1)
    options = {"subset": range(30), "chunk_bytes": chunk_bytes}
    for queries in (Q, Q.pack(), list(Q), *([codec.encode(Q)] if codec in (INT8, FP8) else [])):
        found = li.search(queries, codes, 40, **options)
        close(found, (wanted.values, indices))
    close(li.search(Q.values[1][Q.mask[1]], codes, 40, **options), (wanted.values[1], indices[1]))
    best = li.TopK(Q, 40)
    best.add(codes[:10])
    best.add(codes[10:30])
    close((best.scores, best.indices), (wanted.values[:, :30], indices[:, :30]))


@pytest.mark.parametrize("of_documents", LAYOUTS)
@pytest.mark.parametrize("of_codes", [*LAYOUTS, "on the way"])
@pytest.mark.parametrize("codec", [*ALL_CODECS, "Muvera"])
def test_a_first_pass_finds_the_subset_alone(codec, of_codes, of_documents, device):
    Q, D, _ = spoiled(device)
    D = li.Tokens(D.values.nan_to_num(), D.mask)
    if codec == "Muvera":
        coarse = li.Muvera(16, k_sim=2, repetitions=4)
    else:
        coarse = ALL_CODECS[codec].to(device)
        coarse = coarse if of_codes == "on the way" else coarse.encode(LAYOUTS[of_codes](D))
    exact = li.search(list(Q), D, 4, subset=range(5, 15))
    documents = LAYOUTS[of_documents](D)
    found = li.search(Q, documents, 4, subset=range(5, 15), coarse=coarse, candidates=30)
    torch.testing.assert_close(found.scores, exact.scores, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.indices, exact.indices)


def test_ids_of_a_corpus(device):
    Q, D, *_ = corpus(device)
    names = [f"document {i}" for i in range(37)]
    named = li.Corpus.from_packed(D.flatten(0, 1), torch.arange(38) * 11, ids=names)
    found = li.search(Q, named, 4)
    assert found.ids == [[names[i] for i in row] for row in found.indices.tolist()]
    one = named.search(Q[0], 4, subset=["document 7", "document 2"])
    assert set(one.ids[:2]) == {"document 7", "document 2"} and one.ids[2:] == [None, None]
    assert one.indices[2:].tolist() == [-1, -1] and one.scores[2:].tolist() == [-math.inf] * 2


@pytest.mark.parametrize("none", ["list", "tensor", "Tokens", "packed", "Codes", "packed Codes", "Corpus"])
def test_no_documents_of_any_kind(none, device):
    Q, D, *_ = corpus(device)
    kinds = {"list": [], "tensor": D[:0], "Tokens": li.Tokens(D[:0]), "packed": li.Tokens(D[:0]).pack()}
    kinds |= {"Codes": INT8.encode(D[:0]), "packed Codes": INT8.encode(D[:0]).pack()}
    D = kinds.get(none, li.Corpus.from_packed(D[:0, 0].contiguous(), torch.tensor([0])))
    for queries in (Q, list(Q), li.Tokens(Q), Q[:0]):
        scores, indices = li.search(queries, D, subset=[])
        assert scores.shape == indices.shape == (len(queries), 0)
        assert (scores.dtype, indices.dtype) == (torch.float32, torch.int64) and scores.device == Q.device
        if none in ("list", "tensor", "Tokens", "packed"):
            found = li.search(queries, D, coarse=BITS, candidates=10)
            assert found.indices.shape == (len(queries), 0)
            best = li.TopK(queries)
            best.add(D)
            assert best.seen == 0 and best.scores.shape == (len(queries), 0)


def test_topk_of_tokens_and_lists(device):
    Q, D, _ = spoiled(device)
    wanted = li.search(Q, D, 9)
    for queries in (Q, Q.pack(), list(Q)):
        best = li.TopK(queries, 9)
        best.add(D[:10])
        best.add(D[10:20].pack())
        best.add(list(D[20:]))
        close((best.scores, best.indices), wanted)


@pytest.mark.parametrize("D", [None, torch.ones(3, 2, 4), [torch.ones(2, 4)], li.Tokens(torch.ones(3, 2, 4))])
@pytest.mark.parametrize("Q", [5, [], torch.ones(2, 3, 5), [torch.ones(3, 5, device="meta")]])
def test_the_others_of_a_group_hear_of_any_wrong_argument(Q, D, monkeypatch):
    """On the device of the queries, where these have one."""
    devices = []

    def alone(group, device, prepared, run):
        devices.append(device.type)
        prepared()

    monkeypatch.setattr(group_search, "search", alone)
    with pytest.raises((TypeError, ValueError), match=r"^[QD]"):
        li.search(Q, D, group="group")
    assert devices == ["meta" if isinstance(Q, list) and Q else "cpu"]
