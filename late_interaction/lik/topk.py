"""``late_interaction_kernels.topk``: the best documents of each query."""

from torch import Tensor

from late_interaction import topk
from late_interaction._checks.options import check_positive

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
    """Call :func:`late_interaction.topk.maxsim_topk`."""
    chunk_bytes = bytes_of("chunk_size", chunk_size, D)
    return topk.maxsim_topk(
        Q, D, k, q_mask, d_mask,
        normalize=normalize, chunk_bytes=chunk_bytes, largest=largest, sorted=sorted,
    )  # fmt: skip


def bytes_of(name: str, documents: int | None, D: Tensor) -> int | None:
    """Return the bytes of so many documents of ``D``; name: of the argument that says how many."""
    if documents is None:
        return None
    check_positive(name, documents)
    return documents * max(D[:1].nbytes, 1) if isinstance(D, Tensor) else documents
