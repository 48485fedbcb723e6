"""``late_interaction_kernels.topk``: the best documents of each query."""

from torch import Tensor

from late_interaction import topk

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
    return topk.maxsim_topk(
        Q, D, k, q_mask, d_mask,
        normalize=normalize, chunk_bytes=bytes_of(chunk_size, D), largest=largest, sorted=sorted,
    )  # fmt: skip


def bytes_of(documents: int | None, D: Tensor) -> int | None:
    """The bytes of so many documents of ``D``."""
    return None if documents is None else documents * max(D[:1].nbytes, 1)
