"""A real index: built and searched by fast-plaid, read from its files, and scored here.

fast-plaid's compiled part belongs to one version of PyTorch; with another one these tests are skipped.
"""

import importlib.metadata
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from late_interaction import plaid


def missing():
    """Why fast-plaid cannot run here, or None."""
    try:
        wants = importlib.metadata.requires("fast-plaid") or []
    except importlib.metadata.PackageNotFoundError:
        return "fast-plaid is not installed"
    for requirement in wants:
        found = re.fullmatch(r"torch==([\d.]+)", requirement)
        if found and not torch.__version__.startswith(found.group(1)):
            return f"this fast-plaid is built for torch {found.group(1)}, not {torch.__version__}"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@dataclass
class Files:
    """An index as fast-plaid leaves it on disk: documents end to end."""

    codes: torch.Tensor
    residuals: torch.Tensor
    offsets: torch.Tensor
    centroids: torch.Tensor
    weights: torch.Tensor
    nbits: int

    @classmethod
    def read(cls, folder, device):
        numpy = pytest.importorskip("numpy")
        metadata = json.loads((folder / "metadata.json").read_text())
        chunks = range(metadata["num_chunks"])
        counts = [n for i in chunks for n in json.loads((folder / f"doclens.{i}.json").read_text())]
        total = sum(counts)

        def table(name):
            return torch.from_numpy(numpy.load(folder / f"{name}.npy"))

        def rows(name):  # merged into one file, with rows of padding behind, or still in pieces
            if (folder / f"merged_{name}.npy").exists():
                return table(f"merged_{name}")[:total].to(device)
            return torch.cat([table(f"{i}.{name}") for i in chunks]).to(device)

        return cls(
            rows("codes"),
            plaid.reverse_bits(rows("residuals")),
            torch.tensor([0, *counts], device=device).cumsum(0),
            table("centroids").to(device),
            table("bucket_weights").float().to(device),
            metadata["nbits"],
        )

    def score(self, Q):
        return plaid.maxsim_residual_varlen(
            Q,
            self.codes,
            self.residuals,
            self.offsets,
            self.centroids.to(Q.dtype),
            self.weights,
            self.nbits,
            normalize=True,
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
def test_the_same_ranking(nbits, device, tmp_path):
    from fast_plaid.search import FastPlaid

    tokens, queries = corpus()
    engine = FastPlaid(index=str(tmp_path), device=device)
    engine.create(documents_embeddings=tokens, nbits=nbits)
    # Many cells, and every document in them decompressed.
    wide = {"n_ivf_probe": 64, "n_full_scores": 4 * len(tokens), "show_progress": False}
    found = engine.search(queries, top_k=10, **wide)
    files = Files.read(Path(tmp_path), device)
    decompressed = plaid_tokens(files)
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


def plaid_tokens(files):
    from late_interaction.reference import unpack_residuals_reference

    buckets = unpack_residuals_reference(files.residuals, files.nbits, files.centroids.shape[1]).long()
    x = files.centroids.double()[files.codes.long()] + files.weights.double()[buckets]
    return torch.nn.functional.normalize(x, dim=-1).cpu()


def brute_force(Q, tokens, offsets):
    similarity = Q.double() @ tokens.T
    ends = offsets.tolist()
    best = [similarity[:, a:b].amax(1).sum() for a, b in pairwise(ends)]
    return torch.stack(best).float()


@pytest.mark.parametrize("nbits", [2, 4])
def test_decompression_is_theirs(nbits, device, tmp_path):
    from fast_plaid.search import FastPlaid

    tokens, _ = corpus(60)
    engine = FastPlaid(index=str(tmp_path), device=device)
    engine.create(documents_embeddings=tokens, nbits=nbits)
    files = Files.read(Path(tmp_path), device)
    theirs = engine.get_embeddings(list(range(60)))
    ours = plaid_tokens(files).split(files.offsets.diff().tolist())
    for mine, embeddings in zip(ours, theirs, strict=True):
        embeddings = torch.nn.functional.normalize(embeddings.double().cpu(), dim=-1)
        torch.testing.assert_close(mine, embeddings, rtol=0, atol=2e-3)
