"""``late_interaction_kernels.retrieve``: the ways in for retrieval, which normalize by default."""

from torch import Tensor

from late_interaction._checks.choices import Backward
from late_interaction._checks.options import check_positive
from late_interaction.lik.topk import bytes_of
from late_interaction.retrieve import MaxSimScorer as _MaxSimScorer
from late_interaction.retrieve import retrieve as _retrieve

__all__ = ["MaxSimScorer", "retrieve"]


class MaxSimScorer(_MaxSimScorer):
    """Hold a model's choices as :class:`late_interaction.MaxSimScorer` does."""

    def __init__(
        self,
        *,
        normalize: bool = True,
        backward: Backward = "auto",
        mask_pad_token: int | None = None,
    ) -> None:
        super().__init__(normalize=normalize, backward=backward, mask_pad_token=mask_pad_token)

    def retrieve(  # type: ignore[override]
        self,
        Q: Tensor,
        D: Tensor,
        top_k: int,
        q_mask: Tensor | None = None,
        d_mask: Tensor | None = None,
        *,
        chunk: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Call :func:`retrieve` with this module's ``normalize``."""
        return retrieve(Q, D, top_k, q_mask, d_mask, normalize=self.normalize, chunk=chunk)


def retrieve(
    Q: Tensor,
    D: Tensor,
    top_k: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = True,
    chunk: int | None = None,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Tensor, Tensor]:
    """Call :func:`late_interaction.retrieve`."""
    check_positive("top_k", top_k)
    return _retrieve(
        Q, D, top_k, q_mask, d_mask,
        normalize=normalize, chunk_bytes=bytes_of("chunk", chunk, D), largest=largest, sorted=sorted,
    )  # fmt: skip
