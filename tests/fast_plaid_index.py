"""An index of fast-plaid, as it leaves it on disk."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch


def missing() -> str | None:
    """Why fast-plaid, whose compiled part belongs to one version of PyTorch, cannot run here, or None."""
    try:
        wants = importlib.metadata.requires("fast-plaid") or []
    except importlib.metadata.PackageNotFoundError:
        return "fast-plaid is not installed"
    for requirement in wants:
        found = re.fullmatch(r"torch==([\d.]+)", requirement)
        if found and not torch.__version__.startswith(found.group(1)):
            return f"this fast-plaid is built for torch {found.group(1)}, not {torch.__version__}"
    return None


@dataclass
class Files:
    """Documents end to end."""

    codes: torch.Tensor
    residuals: torch.Tensor
    offsets: torch.Tensor
    centroids: torch.Tensor
    weights: torch.Tensor
    nbits: int

    @classmethod
    def read(cls, folder: Path, device: torch.device | str) -> Files:
        numpy = importlib.import_module("numpy")
        metadata = json.loads((folder / "metadata.json").read_text())
        chunks = range(metadata["num_chunks"])
        counts = [n for i in chunks for n in json.loads((folder / f"doclens.{i}.json").read_text())]
        total = sum(counts)

        def table(name: str) -> torch.Tensor:
            return torch.from_numpy(numpy.load(folder / f"{name}.npy"))

        def rows(name: str) -> torch.Tensor:
            # Merged into one file, with rows of padding behind, or still in pieces.
            if (folder / f"merged_{name}.npy").exists():
                return table(f"merged_{name}")[:total].to(device)
            return torch.cat([table(f"{i}.{name}") for i in chunks]).to(device)

        reverse_bits = importlib.import_module("late_interaction.codecs").reverse_bits
        return cls(
            rows("codes"),
            reverse_bits(rows("residuals")),
            torch.tensor([0, *counts], device=device).cumsum(0),
            table("centroids").to(device),
            table("bucket_weights").float().to(device),
            metadata["nbits"],
        )

    def score(self, Q: torch.Tensor) -> torch.Tensor:
        score = importlib.import_module("late_interaction.lik.plaid").maxsim_residual_varlen
        scores: torch.Tensor = score(
            Q, self.codes, self.residuals, self.offsets, self.centroids.to(Q.dtype), self.weights,
            self.nbits, normalize=True,
        )  # fmt: skip
        return scores

    def tokens(self) -> torch.Tensor:
        """Decompressed, in fp64."""
        unpack = importlib.import_module("late_interaction.reference").unpack_residuals_reference
        buckets = unpack(self.residuals, self.nbits, self.centroids.shape[1]).long()
        x = self.centroids.double()[self.codes.long()] + self.weights.double()[buckets]
        return torch.nn.functional.normalize(x, dim=-1)

    def exact(self, Q: torch.Tensor) -> torch.Tensor:
        """fp64 scores [Nq, documents] of queries [Nq, Lq, d]."""
        similarity = Q.double() @ self.tokens().T
        parts = similarity.split(self.offsets.diff().tolist(), dim=-1)
        return torch.stack([part.amax(-1).sum(-1) for part in parts], dim=-1)
