"""Define :class:`SearchResult`, which every search returns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best documents of each query, best first. ``scores, indices = result`` unpacks the two tensors.

    Args:
        scores: ``[Nq, min(k, N)]``, float32, or float64 of float64 tokens; one dim less for a 2-D query.
        indices: int64, of the shape of ``scores``: numbers of documents. Where fewer documents take a rank
            than there are places, the last ones hold a score of -inf (inf where the lowest were asked for),
            the index -1 and the id None.
        ids: a list of ids for each query (one list for a 2-D query), where the documents have ids.

    Example:
        >>> import torch
        >>> import late_interaction as li
        >>> D = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
        >>> result = li.search(D[:1], D, k=1)
        >>> result
        SearchResult(scores=tensor([[1.]]), indices=tensor([[0]]), ids=None)
        >>> scores, indices = result
    """

    scores: Tensor
    indices: Tensor
    ids: list[Any] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        yield self.scores
        yield self.indices


def ids_at(ids: Sequence[str], indices: Any) -> Any:
    """Return the ids of documents in the nesting of a list of their indices, None for -1."""
    if isinstance(indices, list):
        return [ids_at(ids, x) for x in indices]
    return None if indices < 0 else ids[indices]
