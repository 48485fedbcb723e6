"""Scores of lists as if their documents were padded by rows of zeros that take part in the maximum.

That is what Transformers and mteb compute: a padded document scores at least 0 for each query token. Here a
document that would be padded gets one row of zeros, and none is multiplied more often than that. (A padded
query token scores 0 with everything, and is left out.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from late_interaction._maxsim import maxsim
from late_interaction.integrations._shared.compat import has_kernels, why_left
from late_interaction.tokens import Tokens


@dataclass(frozen=True)
class Ragged:
    items: list[Tensor]  # each [L_i, d]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> list[int]:
        return [len(x) for x in self.items]

    def packed(self, start: int, end: int, device: torch.device) -> Tokens:
        items = self.items[start:end]
        lengths = [len(x) for x in items]
        offsets = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)
        return Tokens._made(torch.cat(items).to(device), None, offsets, offsets.new_empty((max(lengths), 0)))


def blocks(sizes: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Consecutive items whose sizes sum to at most ``most``, or one item: (start, end)."""
    start = total = 0
    for index, size in enumerate(sizes):
        if total + size > most and index > start:
            yield start, index
            start, total = index, 0
        total += size
    yield start, len(sizes)


Side = Tensor | Sequence[Tensor]  # [N, L, d], or sequences [L_i, d] of one dtype, device and d

# The elements of documents that are copied at a time. Those of a CPU stay in its cache until they are scored.
ELEMENTS = {"cpu": 8_000_000, "cuda": 100_000_000}


def scores(queries: Side, documents: Side, padded_to: Sequence[int], place: torch.device) -> Tensor:
    """Compute ``[Nq, Nd]`` on ``place``, differentiable.

    Args:
        queries: not empty.
        documents: not empty. Those that are elsewhere than ``place`` are copied a block at a time.
        padded_to: how long each document is with its padding; of a tensor, which has none, nothing.
        place: where to score.
    """
    parts = _parts(documents, place)
    if isinstance(queries, Tensor) and isinstance(documents, Tensor):
        Q = queries.to(place)
        columns = [maxsim(Q, documents[start:end].to(place)) for start, end in parts]
    else:
        packed = _packed(queries, place)
        columns = []
        for start, end in parts:
            columns.append(maxsim(packed, _packed(documents[start:end], place, padded_to[start:end])))
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def scores_by_batches(
    queries: Any, documents: Any, batch_size: int, package: str, place: torch.device | None = None
) -> Tensor | str:
    """Compute ``[Nq, Nd]`` where a library pads documents to the longest of each batch, or say why not.

    Args:
        queries, documents: whatever the library's function was called with.
        batch_size: how many documents it pads together.
        package: of the library.
        place: where to score; None is the documents' device.
    """
    Q, D = _side(queries), _side(documents)
    if Q is None or D is None or batch_size <= 0:
        return "arguments of another form"
    place = place or D[0].device
    padded_to = _longest_of_batches(D, batch_size)
    if reason := why_left(Q[0], D[0], package):
        return reason
    if not has_kernels(place):
        return f"no kernels for {place.type} tensors"
    return scores(Q, D, padded_to, place) if all(padded_to) else "empty documents"


def _side(embeddings: Any) -> Side | None:
    if isinstance(embeddings, Tensor):
        return embeddings if embeddings.dim() == 3 and len(embeddings) else None
    if not isinstance(embeddings, list) or not all(
        isinstance(x, Tensor) and x.dim() == 2 for x in embeddings
    ):
        return None
    kinds = {(x.dtype, x.device, x.layout, x.shape[1]) for x in embeddings}
    return embeddings if len(kinds) == 1 else None


def _longest_of_batches(documents: Side, batch_size: int) -> list[int]:
    """Return how long each document of a list is padded: to the longest of its batch."""
    if isinstance(documents, Tensor):
        return []
    lengths = [*map(len, documents)]
    longest = [max(lengths[j : j + batch_size]) for j in range(0, len(lengths), batch_size)]
    return [longest[i // batch_size] for i in range(len(lengths))]


def _parts(documents: Side, place: torch.device) -> list[tuple[int, int]]:
    """Return ranges of documents that are scored in one call.

    They are all of a tensor on ``place``, else as many as ELEMENTS allows.
    """
    if isinstance(documents, Tensor) and documents.device == place:
        return [(0, len(documents))]
    return [*blocks([x.numel() for x in documents], ELEMENTS[place.type])]


def _packed(side: Side, place: torch.device, padded_to: Sequence[int] = ()) -> Tensor | Tokens:
    """Pack sequences on ``place``. One that is shorter than it is to be gets one row of zeros."""
    if isinstance(side, Tensor):
        return side.to(place)
    zeros = side[0].new_zeros(1, side[0].shape[1])
    lengths = padded_to or [0] * len(side)
    items = [torch.cat((x, zeros)) if len(x) < n else x for x, n in zip(side, lengths, strict=True)]
    return Tokens.from_list(items).to(place)
