"""Checks of a search of tensors."""

import torch
from torch import Tensor

from late_interaction._checks.messages import shape_of
from late_interaction._checks.quantized import check_scale
from late_interaction._checks.tensors import (
    CODES,
    check_embeddings,
    check_mask,
    check_same_dtype_and_d,
    refuse_tokens,
)

# Q, D, q_mask, d_mask, scale_Q, scale_D.
CheckedCorpus = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def check_tokens_or_codes(name: str, x: Tensor, scale: Tensor | None) -> None:
    """Embeddings, or codes with their scales."""
    if not isinstance(x, Tensor) or x.dtype not in CODES:
        check_embeddings(name, x)
        if scale is not None:
            raise ValueError(
                f"scale_{name} must be None unless {name} holds float8 or int8 codes, got {x.dtype} {name}"
            )
        return
    if x.layout != torch.strided or x.is_nested:
        refuse_tokens(name, x, CODES)
    if scale is None:
        raise TypeError(
            f"scale_{name} must be a torch.Tensor (0-dim or one scale a token) for {name} of {x.dtype},"
            " got None"
        )


def check_corpus(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    scale_Q: Tensor | None = None,
    scale_D: Tensor | None = None,
) -> CheckedCorpus:
    """A search of D by Q. D may be on the CPU while Q is on a GPU; 2-D Q or D get a leading dim of 1."""
    check_tokens_or_codes("Q", Q, scale_Q)
    check_tokens_or_codes("D", D, scale_D)
    if Q.dtype != D.dtype and (Q.dtype in CODES or D.dtype in CODES):
        raise TypeError(f"Q and D must share a dtype, got {Q.dtype} and {D.dtype}")
    if Q.dim() not in (2, 3):
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d], got {shape_of(Q)}")
    if D.dim() not in (2, 3):
        raise ValueError(f"D must be [Nd, Ld, d] or [Ld, d], got {shape_of(D)}")
    if Q.device != D.device and not (Q.is_cuda and D.device.type == "cpu"):
        raise ValueError(
            f"Q and D must be on the same device (or Q on a GPU and D on the CPU),"
            f" got {Q.device} and {D.device}"
        )
    check_same_dtype_and_d(Q, D)
    Q = Q.unsqueeze(0) if Q.dim() == 2 else Q
    D = D.unsqueeze(0) if D.dim() == 2 else D
    if scale_Q is not None and scale_D is not None:
        scale_Q, scale_D = check_scale("scale_Q", scale_Q, "Q", Q), check_scale("scale_D", scale_D, "D", D)
    q_mask, d_mask = check_mask("q_mask", q_mask, "Q", Q), check_mask("d_mask", d_mask, "D", D)
    return Q, D, q_mask, d_mask, scale_Q, scale_D
