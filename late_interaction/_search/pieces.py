"""Queries and some documents, checked: what :class:`late_interaction.TopK` adds, embeddings or codes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.dense import check_corpus, check_places, check_queries
from late_interaction._checks.messages import shape_of
from late_interaction._checks.tensors import check_mask
from late_interaction._maxsim import maxsim
from late_interaction._scoring.norm_warning import unwatched
from late_interaction._search.prepare import padded
from late_interaction.codes import Codes


@dataclass(frozen=True)
class Piece:
    """Padded documents, all of whose tensors have a row a document, and their scores."""

    queries: tuple[Tensor | None, ...]
    """Values ``[Nq, Lq, w]``, mask, and scales of codes."""
    documents: Tensor
    """``[Nd, Ld, w]``, on the device of the queries or on the CPU."""
    beside: tuple[Tensor | None, ...]
    """The mask of the documents; of codes their scales and centroids, too."""
    score: Callable[..., Tensor]
    """Scores ``[Nq, documents]`` of some of the documents, and what is beside these."""

    @property
    def values(self) -> Tensor:
        values = self.queries[0]
        assert values is not None
        return values


def piece_of(Q: Any, D: Any, q_mask: Any, d_mask: Any, options: dict[str, Any]) -> Piece:
    """Check padded queries, and documents, which it pads. options: ``normalize`` and ``precision``."""
    D, d_mask = padded("D", D, d_mask)
    if isinstance(D, Codes):
        return _of_codes(Q, D, q_mask, options)
    Q, D, q_mask, d_mask = check_corpus(Q, D, q_mask, d_mask)

    def score(some: Tensor, mask: Tensor | None) -> Tensor:
        return unwatched(maxsim, Q, some, q_mask, mask, **options)

    return Piece((Q, q_mask), D, (d_mask,), score)


def _of_codes(Q: Any, D: Codes, q_mask: Any, options: dict[str, Any]) -> Piece:
    if D.values.dim() != 3:
        raise ValueError(f"D must be Codes [N, L, w] or packed, got values {shape_of(D.values)}")
    if isinstance(Q, Codes):
        queries: tuple[Tensor | None, ...] = Q.values, Q.mask, Q.scales
    else:
        check_queries(Q)
        Q = Q.unsqueeze(0) if Q.dim() == 2 else Q
        q_mask = check_mask("q_mask", q_mask, "Q", Q)
        queries = Q, q_mask
    check_places(Q.device, D.device)
    codec = D.codec.to(Q.device)

    def score(values: Tensor, *beside: Tensor | None) -> Tensor:
        return unwatched(maxsim, Q, codes_of(codec, D.d, values, *beside), q_mask, **options)

    piece = Piece(queries, D.values, (D.mask, D.scales, D.centroids), score)
    with torch.no_grad():  # what scores of no documents refuse is refused before any travel
        none = (x if x is None else x[:0].to(Q.device) for x in (D.values, *piece.beside))
        score(*none)  # type: ignore[arg-type]
    return piece


def codes_of(codec: Any, d: int, values: Tensor, *beside: Tensor | None) -> Codes:
    """Return padded codes of checked tensors: values, mask, scales and centroids."""
    mask, scales, centroids = beside
    return Codes._made(codec, d, values=values, mask=mask, scales=scales, centroids=centroids)
