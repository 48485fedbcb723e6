"""Checks of codes with scales: float8 and int8 tokens."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.dense import as_batch, check_batch
from late_interaction._checks.messages import abbreviate, no_tensor, shape_of
from late_interaction._checks.options import check_positive, is_integer
from late_interaction._checks.tensors import CODES, FLOATS, check_device, check_embeddings, check_has_d
from late_interaction._torch import forward_ad

_Quantized = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def check_quantized(
    Q: Tensor,
    D: Tensor,
    scale_Q: Tensor,
    scale_D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> _Quantized:
    """Check a call on codes in one of these dtypes.

    2-D Q or D come back with a leading dim of 1, scales as float32, 0-dim or shaped as masks.
    """
    for name, x in (("Q", Q), ("D", D)):
        check_embeddings(name, x, dtypes)
        _check_no_gradient(name, x)
    if Q.dtype != D.dtype:
        raise TypeError(f"Q and D must share a dtype, got {Q.dtype} and {D.dtype}")
    Q, D, q_mask, d_mask = check_batch(Q, D, q_mask, d_mask)
    scale_Q, scale_D = check_scale("scale_Q", scale_Q, "Q", Q), check_scale("scale_D", scale_D, "D", D)
    return Q, D, scale_Q, scale_D, q_mask, d_mask


def check_scale(name: str, s: Tensor, tokens_name: str, tokens: Tensor) -> Tensor:
    """Check one scale for all tokens, 0-dim, or one a token, shaped as a mask. float32 comes back."""
    if not isinstance(s, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor (0-dim or one scale a token), got {no_tensor(name, s)}"
        )
    if s.dtype not in FLOATS or s.layout != torch.strided:
        raise TypeError(f"{name} must be a dense float32 tensor, got {s.dtype}, {s.layout}")
    check_device(name, s, tokens_name, tokens.device)
    _check_no_gradient(name, s)
    fitted = s
    if s.dim() == 1:
        fitted = s.squeeze(0) if s.shape[0] == 1 else s.unsqueeze(0)
    if fitted.dim() != 0 and fitted.shape != tokens.shape[:-1]:
        raise ValueError(
            f"{name} must be 0-dim or have the shape of {tokens_name} without d, {list(tokens.shape[:-1])},"
            f" got {shape_of(s)}"
        )
    return fitted.to(torch.float32)


def check_codes(
    name: str,
    codes: Any,
    scale: Any,
    shape: torch.Size | None = None,
    dtypes: tuple[torch.dtype, ...] = CODES,
) -> None:
    """Codes to convert back, and their scales: of the given shape, or one a token."""
    check_embeddings(name, codes, dtypes)
    if not isinstance(scale, Tensor):
        raise TypeError(f"scale must be a torch.Tensor, got {no_tensor('scale', scale)}")
    if scale.dtype not in FLOATS or scale.layout != torch.strided:
        raise TypeError(f"scale must be a dense floating-point tensor, got {scale.dtype}, {scale.layout}")
    check_device("scale", scale, name, codes.device)
    if shape is None:
        check_has_d(name, codes)
    wanted = codes.shape[:-1] if shape is None else shape
    if scale.shape != wanted:
        raise ValueError(f"scale must be {list(wanted)} for {name} {shape_of(codes)}, got {shape_of(scale)}")


def _check_no_gradient(name: str, x: Tensor) -> None:
    tangent = forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
    if tangent or (x.requires_grad and torch.is_grad_enabled()):
        raise ValueError(
            f"{name} must not require a gradient, for scores of quantized tokens have none: detach it, or"
            " call under torch.no_grad()"
        )


BITS = (1, 4)

_Hamming = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_Asymmetric = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def check_nbits(nbits: int) -> None:
    if not is_integer(nbits) or nbits not in BITS:
        raise ValueError(f"nbits must be 1 or 4, got {abbreviate(nbits)}")


def check_packed(name: str, x: Tensor, d: int, nbits: int) -> None:
    """Require uint8 with the bytes that d codes of nbits take."""
    check_embeddings(name, x, (torch.uint8,))
    wanted = -(-d * nbits // 8)
    if x.dim() == 0 or x.shape[-1] != wanted:
        raise ValueError(
            f"{name} must have {abbreviate(wanted)} bytes a token (its last dim) for {abbreviate(d)} codes of"
            f" {'1 bit' if nbits == 1 else f'{nbits} bits'}, got {shape_of(x)}"
        )


def check_hamming(Q: Tensor, D: Tensor, d: int, q_mask: Tensor | None, d_mask: Tensor | None) -> _Hamming:
    """Check a call on bits. 2-D Q or D come back with a leading dim of 1, masks as bool."""
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
    """Check a call on int8 queries and packed documents. Scales come back as float32."""
    check_nbits(nbits)
    check_embeddings("Q", Q, (torch.int8,))
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
    return as_batch(Q, D, q_mask, d_mask)
