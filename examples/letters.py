"""What the other examples share: real text, and an encoder that has no weights to download.

The text is the docstrings of Python's standard library: the first sentence is a query, the rest the document
to find. A word's embedding is the mean of the vectors of its groups of letters, so that "sorting" is near
"sorts" before any training. The vectors can be trained, as a model's weights are.
"""

from __future__ import annotations

import math
import re
import sys
import zlib
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

sys.path.append(str(Path(__file__).resolve().parents[1]))  # demo lies beside this folder

from demo.corpus import build_pairs

BUCKETS, DIM = 1 << 14, 128
LONGEST = 64  # words of a text


def texts() -> tuple[list[str], list[str]]:
    """Queries and their documents, in the same order."""
    pairs = build_pairs()
    return [pair.query for pair in pairs], [pair.document for pair in pairs]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())[:LONGEST] or ["-"]


def groups(word: str) -> list[int]:
    """The numbers of a word's groups of three and four letters."""
    framed = f"<{word}>"
    found = [framed[i : i + n] for n in (3, 4) for i in range(len(framed) - n + 1)]
    return [zlib.crc32(group.encode()) % BUCKETS for group in found or [framed]]


class LetterEncoder(nn.Module):
    """One unit vector for each word. The same vectors in every process: they are drawn from a seed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        start = torch.randn(BUCKETS, DIM, generator=torch.Generator().manual_seed(seed))
        self.vectors = nn.EmbeddingBag(BUCKETS, DIM, mode="mean", _weight=start)

    def forward(self, batch: list[str]) -> tuple[Tensor, Tensor]:
        """Packed: the words of all texts, ``[words, DIM]``, and the offsets ``[texts + 1]``."""
        lists = [words(text) for text in batch]
        numbers = [groups(word) for row in lists for word in row]
        device = self.vectors.weight.device
        flat = torch.tensor([x for row in numbers for x in row], device=device)
        starts = torch.tensor([0, *map(len, numbers[:-1])], device=device).cumsum(0)
        counts = torch.tensor([0, *map(len, lists)], dtype=torch.int32, device=device)
        return normalize(self.vectors(flat, starts), dim=-1), counts.cumsum(0, dtype=torch.int32)


def padded(tokens: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Packed tokens as ``[texts, longest, DIM]`` with a mask."""
    rows = tokens.split(offsets.diff().tolist())
    lengths = offsets.diff().to(tokens.device)
    together = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return together, torch.arange(together.shape[1], device=tokens.device) < lengths[:, None]


def mrr(ranking: Tensor, cut: int = 10) -> float:
    """The mean of 1 / rank of document ``i`` in row ``i`` of ``[queries, k]``, 0 below the cut."""
    hits = ranking[:, :cut] == torch.arange(len(ranking), device=ranking.device)[:, None]
    return float((hits / torch.arange(1, hits.shape[1] + 1, device=ranking.device)).sum(1).mean())


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def word_scores(queries: list[str], documents: list[str]) -> Tensor:
    """``[queries, documents]`` cosines of tf-idf vectors: a first stage, or a teacher, without a model."""
    counts = [Counter(words(text)) for text in documents]
    holds = Counter(word for count in counts for word in count)
    rarity = {word: math.log(len(documents) / n) for word, n in holds.items()}
    column = {word: i for i, word in enumerate(rarity)}

    def vectors(rows: list[Counter[str]]) -> Tensor:
        found = torch.zeros(len(rows), len(column))
        for row, count in zip(found, rows, strict=True):
            for word in count.keys() & column.keys():
                row[column[word]] = (1 + math.log(count[word])) * rarity[word]
        return normalize(found, dim=-1)

    return vectors([Counter(words(text)) for text in queries]) @ vectors(counts).T
