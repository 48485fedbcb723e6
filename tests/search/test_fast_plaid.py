"""A real index: built and searched by fast-plaid, and opened and searched here.

fast-plaid's compiled part belongs to one version of PyTorch. ``make fast-plaid`` makes an environment that
has both; under another PyTorch tests/search/test_environments.py runs this file over there.
"""

import pytest
import torch

from late_interaction import Corpus
from tests.lancedb_environment import fast_plaid_missing

pytestmark = pytest.mark.skipif(
    fast_plaid_missing() is not None, reason=f"{fast_plaid_missing()}: make fast-plaid runs these"
)


def corpus(documents=300, d=128):
    """Unit tokens around common centres, and queries of tokens near those of one document each."""
    generator = torch.Generator().manual_seed(0)

    def noise(*size):
        return torch.randn(*size, generator=generator)

    centres = noise(200, d)
    lengths = torch.randint(5, 80, (documents,), generator=generator).tolist()
    tokens = [centres[torch.randint(200, (n,), generator=generator)] + 0.6 * noise(n, d) for n in lengths]
    tokens = [torch.nn.functional.normalize(x, dim=-1) for x in tokens]
    picked = [x[torch.randint(len(x), (16,), generator=generator)] for x in tokens[:20]]
    queries = torch.nn.functional.normalize(torch.stack(picked) + 0.05 * noise(20, 16, d), dim=-1)
    return tokens, queries


@pytest.mark.parametrize("nbits", [2, 4])
def test_a_corpus_over_the_index_as_it_changes(nbits, device, tmp_path):
    from fast_plaid.search import FastPlaid

    tokens, queries = corpus()
    engine = FastPlaid(index=str(tmp_path), device=device)
    engine.create(documents_embeddings=tokens[:250], nbits=nbits, start_from_scratch=0)
    opened = Corpus.open(tmp_path, verify=True)
    check(opened, engine, queries.to(device), 250)
    engine.update(documents_embeddings=tokens[250:], start_from_scratch=0)
    assert opened.refresh()
    check(opened, engine, queries.to(device), 300)
    engine.delete([0, 7, 299])
    assert opened.refresh()
    check(opened, engine, queries.to(device), 297)


def check(opened, engine, queries, documents):
    """Tokens, scores and ranking are those of the engine, which computes in half precision."""
    assert len(opened) == documents
    for mine, theirs in zip(opened, engine.get_embeddings(list(range(documents))), strict=True):
        torch.testing.assert_close(mine, theirs.float().cpu(), rtol=0, atol=2e-3)
    # Many cells, and every document in them decompressed.
    wide = {"n_ivf_probe": 64, "n_full_scores": 4 * documents, "show_progress": False}
    found = engine.search(queries, top_k=10, **wide)
    scores, order = opened.search(queries, documents)
    for own, places, theirs in zip(scores, order, found, strict=True):
        mine = dict(zip(places.tolist(), own.tolist(), strict=True))
        for rank, (document, score) in enumerate(theirs):
            assert abs(mine[document] - score) <= 2e-3 * abs(score)
            # The same order, but for documents that half precision cannot tell apart.
            assert document == places[rank] or abs(own[rank] - score) <= 2e-3 * abs(score)
        assert theirs[0][0] == places[0]
