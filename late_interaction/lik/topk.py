"""``late_interaction_kernels.topk``: the best documents of each query."""

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
    """Call :func:`late_interaction.search`, whose results are sorted either way."""
    chunk_bytes = None
    if chunk_size is not None:
        check_positive("chunk_size", chunk_size)
        chunk_bytes = chunk_size * max(D[:1].nbytes, 1) if isinstance(D, Tensor) else chunk_size
    check_flag("sorted", sorted)
    scores, indices = search(
        Q, D, k, q_mask=q_mask, d_mask=d_mask,
        normalize=normalize, chunk_bytes=chunk_bytes, largest=largest,
    )  # fmt: skip
    return scores, indices
