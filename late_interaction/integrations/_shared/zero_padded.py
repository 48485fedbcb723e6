"""Scores of lists as if their documents were padded by rows of zeros that take part in the maximum.

That is what Transformers and mteb compute: a padded document scores at least 0 for each query token. Here a
document that would be padded gets one row of zeros, and none is multiplied more often than that. (A padded
query token scores 0 with everything, and is left out.)
"""

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from late_interaction._maxsim import maxsim
from late_interaction.integrations._shared.ragged import blocks
from late_interaction.varlen import maxsim_varlen

__all__ = ["ELEMENTS", "Side", "scores"]

Side = Tensor | Sequence[Tensor]  # [N, L, d], or sequences [L_i, d] of one dtype, device and d

ELEMENTS = 100_000_000  # of documents that are copied at a time


def scores(queries: Side, documents: Side, padded_to: Sequence[int], place: torch.device) -> Tensor:
    """``[Nq, Nd]`` on ``place``, differentiable.

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
        Q, cu_q = _packed(queries, place)
        columns = []
        for start, end in parts:
            D, cu_d = _packed(documents[start:end], place, padded_to[start:end])
            columns.append(maxsim_varlen(Q, D, cu_q, cu_d))
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def _parts(documents: Side, place: torch.device) -> list[tuple[int, int]]:
    """Documents that are scored in one call: all of a tensor on ``place``, else as many as ELEMENTS
    allows."""
    if not isinstance(documents, Tensor):
        return [*blocks([x.numel() for x in documents], ELEMENTS)]
    if documents.device == place:
        return [(0, len(documents))]
    return [*blocks([documents[0].numel()] * len(documents), ELEMENTS)]


def _packed(side: Side, place: torch.device, padded_to: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """The tokens of sequences end to end on ``place``, and the offsets between them. A sequence that is
    shorter than it is to be gets one row of zeros."""
    if isinstance(side, Tensor):
        N, L, _ = side.shape
        return side.to(place).flatten(0, 1), torch.arange(0, N * L + 1, L, dtype=torch.int32, device=place)
    zeros, offsets = side[0].new_zeros(1, side[0].shape[1]), [0]
    pieces: list[Tensor] = []
    for x, length in zip(side, padded_to or repeat(0), strict=False):
        short = len(x) < length
        pieces += [x, zeros] if short else [x]
        offsets.append(offsets[-1] + len(x) + short)
    return torch.cat(pieces).to(place), torch.tensor(offsets, dtype=torch.int32, device=place)
