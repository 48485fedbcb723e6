"""A real index: built and searched by fast-plaid, read from its files, and scored here.

fast-plaid's compiled part belongs to one version of PyTorch. ``make fast-plaid`` makes an environment that
has both; under another PyTorch a test runs this file over there.
"""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from late_interaction import Corpus
from tests.fast_plaid_index import Files, missing

THERE = Path(sys.prefix) / "env" / "fast-plaid"
here = pytest.mark.skipif(missing() is not None, reason=f"{missing()}: make fast-plaid runs these")


@pytest.mark.skipif(missing() is None, reason="fast-plaid runs in this environment")
def test_all_of_these_in_the_environment_of_fast_plaid():
    if not (THERE / ".installed").exists():
        pytest.skip(f"{missing()}, and {THERE} is not there: make fast-plaid makes it")
    command = [THERE / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and "failed" not in result.stdout, result.stdout


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


@here
@pytest.mark.parametrize("nbits", [2, 4])
def test_the_same_ranking(nbits, device, tmp_path):
    from fast_plaid.search import FastPlaid

    tokens, queries = corpus()
    engine = FastPlaid(index=str(tmp_path), device=device)
    engine.create(documents_embeddings=tokens, nbits=nbits)
    # Many cells, and every document in them decompressed.
    wide = {"n_ivf_probe": 64, "n_full_scores": 4 * len(tokens), "show_progress": False}
    found = engine.search(queries, top_k=10, **wide)
    files = Files.read(Path(tmp_path), device)
    decompressed = files.tokens().cpu()
    for scores, theirs, Q in zip(files.score(queries.to(device)).cpu(), found, queries, strict=True):
        # fast-plaid does not normalize queries, which have unit length already; it scores in half precision.
        exact = brute_force(Q, decompressed, files.offsets)
        torch.testing.assert_close(scores, exact, rtol=1e-4, atol=1e-4)
        ours = scores.topk(10)
        for rank, (document, score) in enumerate(theirs):
            assert abs(scores[document] - score) <= 2e-3 * abs(score)
            # The same order, but for documents that half precision cannot tell apart.
            assert document == ours.indices[rank] or abs(ours.values[rank] - score) <= 2e-3 * abs(score)
        assert theirs[0][0] == ours.indices[0]


def brute_force(Q, tokens, offsets):
    similarity = Q.double() @ tokens.T
    ends = offsets.tolist()
    best = [similarity[:, a:b].amax(1).sum() for a, b in pairwise(ends)]
    return torch.stack(best).float()


@here
@pytest.mark.parametrize("nbits", [2, 4])
def test_decompression_is_theirs(nbits, device, tmp_path):
    from fast_plaid.search import FastPlaid

    tokens, _ = corpus(60)
    engine = FastPlaid(index=str(tmp_path), device=device)
    engine.create(documents_embeddings=tokens, nbits=nbits)
    files = Files.read(Path(tmp_path), device)
    theirs = engine.get_embeddings(list(range(60)))
    ours = files.tokens().cpu().split(files.offsets.diff().tolist())
    for mine, embeddings in zip(ours, theirs, strict=True):
        embeddings = torch.nn.functional.normalize(embeddings.double().cpu(), dim=-1)
        torch.testing.assert_close(mine, embeddings, rtol=0, atol=2e-3)


@here
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
    """Tokens and scores are those of the engine, which computes in half precision."""
    assert len(opened) == documents
    for mine, theirs in zip(opened, engine.get_embeddings(list(range(documents))), strict=True):
        torch.testing.assert_close(mine, theirs.float().cpu(), rtol=0, atol=2e-3)
    found = engine.search(queries, top_k=10, n_ivf_probe=64, n_full_scores=4 * documents, show_progress=False)
    scores, order = opened.search(queries, documents)
    for own, places, theirs in zip(scores, order, found, strict=True):
        mine = dict(zip(places.tolist(), own.tolist(), strict=True))
        assert all(abs(mine[document] - score) <= 2e-3 * abs(score) for document, score in theirs)
        assert theirs[0][0] == places[0]
