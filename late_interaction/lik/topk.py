"""``late_interaction_kernels.topk``: the best documents of each query."""

from typing import Any

from torch import Tensor

from late_interaction._checks.options import check_flag, check_positive
from late_interaction._search.search import search

__all__ = ["maxsim_topk"]


def maxsim_topk(
    Q: Tensor,
    D: Tensor,
    k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    chunk_size: int | None = None,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Tensor, Tensor]:
    """Call :func:`late_interaction.search`."""
    chunk_bytes = bytes_of("chunk_size", chunk_size, D)
    return best_of(
        Q, D, k, q_mask, d_mask,
        normalize=normalize, chunk_bytes=chunk_bytes, largest=largest, sorted=sorted,
    )  # fmt: skip


def best_of(
    Q: Tensor,
    D: Tensor,
    k: int,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    *,
    sorted: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return a search's scores and indices, which are sorted either way."""
    check_flag("sorted", sorted)
    scores, indices = search(Q, D, k, q_mask=q_mask, d_mask=d_mask, **options)
    return scores, indices


def bytes_of(name: str, documents: int | None, D: Tensor) -> int | None:
    """Return the bytes of so many documents of ``D``; name: of the argument that says how many."""
    if documents is None:
        return None
    check_positive(name, documents)
    return documents * max(D[:1].nbytes, 1) if isinstance(D, Tensor) else documents
