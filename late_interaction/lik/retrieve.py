"""``late_interaction_kernels.retrieve``: the ways in for retrieval, which normalize by default."""

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import (
    Backward,
    check_backward,
    check_flag,
    check_integer,
    check_positive,
)
from late_interaction._checks.tensors import MASK_DTYPES
from late_interaction._maxsim import maxsim
from late_interaction.lik.topk import maxsim_topk

__all__ = ["MaxSimScorer", "retrieve"]


class MaxSimScorer(torch.nn.Module):
    """Call :func:`late_interaction.maxsim` as a module without parameters, which holds a model's choices."""

    def __init__(
        self,
        *,
        normalize: bool = True,
        backward: Backward = "auto",
        mask_pad_token: int | None = None,
    ) -> None:
        super().__init__()
        check_flag("normalize", normalize)
        if mask_pad_token is not None:
            check_integer("mask_pad_token", mask_pad_token, "the id of the padding token, an int, or None")
            if not -(1 << 63) <= mask_pad_token < 1 << 63:
                raise ValueError(f"mask_pad_token must fit int64, got {abbreviate(mask_pad_token)}")
        self.normalize, self.mask_pad_token = normalize, mask_pad_token
        self.backward = check_backward(backward)

    def extra_repr(self) -> str:
        """Name the options that differ from the defaults."""
        return (
            f"normalize={self.normalize}, backward={self.backward!r}, mask_pad_token={self.mask_pad_token!r}"
        )

    def forward(
        self, Q: Tensor, D: Tensor, q_mask: Tensor | None = None, d_mask: Tensor | None = None
    ) -> Tensor:
        """Score, with gradients."""
        return maxsim(Q, D, q_mask, d_mask, normalize=self.normalize, backward=self.backward)

    def score(
        self, Q: Tensor, D: Tensor, q_mask: Tensor | None = None, d_mask: Tensor | None = None
    ) -> Tensor:
        """Score without gradients, whatever the inputs require."""
        with torch.no_grad():
            return self.forward(Q, D, q_mask, d_mask)

    def retrieve(
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

    def forward_with_ids(self, Q: Tensor, D: Tensor, q_ids: Tensor, d_ids: Tensor) -> Tensor:
        """Score with masks from token ids: a token is kept where its id is not ``mask_pad_token``."""
        if self.mask_pad_token is None:
            raise ValueError("forward_with_ids needs MaxSimScorer(mask_pad_token=...), got None")
        for name, ids in (("q_ids", q_ids), ("d_ids", d_ids)):
            if not isinstance(ids, Tensor) or ids.dtype not in MASK_DTYPES[1:]:
                raise TypeError(
                    f"{name} must be an integer tensor, got {getattr(ids, 'dtype', type(ids).__name__)}"
                )
        return self.forward(Q, D, q_ids != self.mask_pad_token, d_ids != self.mask_pad_token)


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
    """Call :func:`late_interaction.search`."""
    check_positive("top_k", top_k)
    if chunk is not None:
        check_positive("chunk", chunk)
    return maxsim_topk(
        Q, D, top_k, q_mask, d_mask,
        normalize=normalize, chunk_size=chunk, largest=largest, sorted=sorted,
    )  # fmt: skip
