"""Checks of packed codes: several dims to a byte."""

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_positive, is_integer
from late_interaction._checks.quantized import check_scale
from late_interaction._checks.tensors import check_device, check_mask, refuse_tokens

BITS = (1, 4)

_Hamming = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_Asymmetric = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def check_nbits(nbits: int) -> None:
    if not is_integer(nbits) or nbits not in BITS:
        raise ValueError(f"nbits must be 1 or 4, got {abbreviate(nbits)}")


def check_packed(name: str, x: Tensor, d: int, nbits: int) -> None:
    """uint8 with the bytes that d codes of nbits take."""
    if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.layout != torch.strided or x.is_nested:
        refuse_tokens(name, x, (torch.uint8,))
    wanted = -(-d * nbits // 8)
    if x.dim() == 0 or x.shape[-1] != wanted:
        raise ValueError(
            f"{name} must have {abbreviate(wanted)} bytes a token (its last dim) for {abbreviate(d)} codes of"
            f" {'1 bit' if nbits == 1 else f'{nbits} bits'}, got {shape_of(x)}"
        )


def check_hamming(Q: Tensor, D: Tensor, d: int, q_mask: Tensor | None, d_mask: Tensor | None) -> _Hamming:
    """A call on bits. 2-D Q or D come back with a leading dim of 1, masks as bool."""
    check_positive("d", d)
    check_packed("Q", Q, d, 1)
    check_packed("D", D, d, 1)
    return _batch(Q, D, q_mask, d_mask)


def check_asymmetric(
    Q: Tensor,
    D: Tensor,
    scale_Q: Tensor,
    scale_D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    nbits: int,
) -> _Asymmetric:
    """A call on int8 queries and packed documents. Scales come back as float32."""
    check_nbits(nbits)
    if not isinstance(Q, Tensor) or Q.dtype != torch.int8 or Q.layout != torch.strided or Q.is_nested:
        refuse_tokens("Q", Q, (torch.int8,))
    if Q.dim() not in (2, 3) or Q.shape[-1] == 0:
        raise ValueError(f"Q must be [Nq, Lq, d] or [Lq, d] with d of at least 1, got {shape_of(Q)}")
    check_packed("D", D, Q.shape[-1], nbits)
    Q, D, q_mask, d_mask = _batch(Q, D, q_mask, d_mask)
    scale_Q, scale_D = check_scale("scale_Q", scale_Q, "Q", Q), check_scale("scale_D", scale_D, "D", D)
    return Q, D, scale_Q, scale_D, q_mask, d_mask


def _batch(Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None) -> _Hamming:
    if Q.dim() not in (2, 3):
        raise ValueError(f"Q must be [Nq, Lq, bytes] or [Lq, bytes], got {shape_of(Q)}")
    if D.dim() not in (2, 3, 4):
        raise ValueError(f"D must be [Nd, Ld, bytes], [Ld, bytes] or [Nq, K, Ld, bytes], got {shape_of(D)}")
    check_device("D", D, "Q", Q.device)
    if D.dim() == 4 and (Q.dim() != 3 or Q.shape[0] != D.shape[0]):
        raise ValueError(
            f"D [Nq, K, Ld, bytes] (documents of each query's own) needs Q to be 3-D with"
            f" D.shape[0] == Q.shape[0], got Q {shape_of(Q)} and D {shape_of(D)}"
        )
    Q = Q.unsqueeze(0) if Q.dim() == 2 else Q
    D = D.unsqueeze(0) if D.dim() == 2 else D
    return Q, D, check_mask("q_mask", q_mask, "Q", Q), check_mask("d_mask", d_mask, "D", D)
