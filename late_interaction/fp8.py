"""MaxSim of fp8 tokens, for inference; :mod:`late_interaction._scoring.quantized` scores them.

fp8 takes a quarter of float32's memory, and half of bfloat16's.

Tokens are codes in ``torch.float8_e4m3fn`` (or ``float8_e5m2``; the formats of https://arxiv.org/abs/2209.05433)
and float32 scales, one for a tensor or one a token; a token is ``code * scale``. Scores multiply the codes as
they are and accumulate in float32::

    Q8, scale_Q = quantize_fp8_per_token(Q)
    D8, scale_D = quantize_fp8_per_token(D)
    scores = maxsim_inference_fp8(Q8, D8, scale_Q=scale_Q, scale_D=scale_D)
"""

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.quantized import check_codes
from late_interaction._checks.tensors import check_embeddings, check_rows
from late_interaction._scoring import quantized

__all__ = [
    "dequantize_fp8_per_tensor",
    "dequantize_fp8_per_token",
    "maxsim_inference_fp8",
    "quantize_fp8_per_tensor",
    "quantize_fp8_per_token",
]

_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def _check_dtype(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        raise TypeError(f"dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got {abbreviate(dtype)}")


def _codes(X: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    # Rounding may carry a row's largest value past the largest code, which e4m3 has no infinity for.
    return (X.to(torch.float32) / scale).clamp_(-largest, largest).to(dtype).contiguous()


def quantize_fp8_per_tensor(X: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """fp8 codes of ``X`` with one scale, which maps its largest magnitude to the largest code.

    Args:
        X: embeddings of any shape; bfloat16, float16, float32 or float64.
        dtype: ``torch.float8_e4m3fn`` (3 bits of mantissa) or ``torch.float8_e5m2`` (2, and a wider range).

    Returns:
        ``(codes, scale)``: ``codes`` of the shape of ``X``, contiguous; ``scale`` 0-dim, float32, > 0.
        Outside autograd. Zeros become zeros. A NaN or an infinity anywhere makes ``scale`` and every code
        NaN. An empty ``X`` has scale 1.

    Raises:
        TypeError: ``X`` is no floating-point tensor, or ``dtype`` is not fp8.

    Example:
        >>> import torch
        >>> from late_interaction.fp8 import quantize_fp8_per_tensor
        >>> codes, scale = quantize_fp8_per_tensor(torch.tensor([[1.0, -7.0]]))
        >>> codes.to(torch.float32), scale
        (tensor([[  64., -448.]]), tensor(0.0156))
    """
    check_embeddings("X", X)
    _check_dtype(dtype)
    with torch.no_grad():
        if X.numel() == 0:
            return X.to(dtype).contiguous(), torch.ones((), dtype=torch.float32, device=X.device)
        scale = quantized.scale_for(X.abs().amax(), torch.finfo(dtype).max)
        return _codes(X, scale, dtype), scale


def quantize_fp8_per_token(X: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """fp8 codes of ``X`` with a scale for each token (each row of the last dim).

    Args:
        X: ``[..., d]`` embeddings; bfloat16, float16, float32 or float64.
        dtype: as in :func:`quantize_fp8_per_tensor`.

    Returns:
        ``(codes, scale)``: ``codes`` of the shape of ``X``, contiguous; ``scale`` float32, > 0, of the shape
        of ``X`` without ``d``. Outside autograd. A row of zeros becomes zeros. A row with a NaN or an
        infinity gets the scale NaN, and the scores that it reaches are NaN.

    Raises:
        TypeError: ``X`` is no floating-point tensor, or ``dtype`` is not fp8.
        ValueError: ``X`` has no dim ``d``, or ``d`` is 0.

    Example:
        >>> import torch
        >>> from late_interaction.fp8 import quantize_fp8_per_token
        >>> codes, scale = quantize_fp8_per_token(torch.tensor([[1.0, -7.0], [0.0, 448.0]]))
        >>> codes.to(torch.float32)
        tensor([[  64., -448.],
                [   0.,  448.]])
        >>> scale
        tensor([0.0156, 1.0000])
    """
    check_rows("X", X)
    _check_dtype(dtype)
    if (found := quantized.rows_by_kernel(X, dtype)) is not None:
        return found
    with torch.no_grad():
        scale = quantized.scale_for(X.abs().amax(-1), torch.finfo(dtype).max)
        return _codes(X, scale.unsqueeze(-1), dtype), scale


def dequantize_fp8_per_tensor(X_fp8: Tensor, scale: Tensor) -> Tensor:
    """``code * scale`` in float32: the inverse of :func:`quantize_fp8_per_tensor`.

    Args:
        X_fp8: codes of any shape.
        scale: 0-dim.

    Returns:
        float32, of the shape of ``X_fp8``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Example:
        >>> import torch
        >>> from late_interaction.fp8 import dequantize_fp8_per_tensor, quantize_fp8_per_tensor
        >>> dequantize_fp8_per_tensor(*quantize_fp8_per_tensor(torch.tensor([[1.0, -7.0]])))
        tensor([[ 1., -7.]])
    """
    check_codes("X_fp8", X_fp8, scale, torch.Size(), _DTYPES)
    return X_fp8.to(torch.float32) * scale


def dequantize_fp8_per_token(X_fp8: Tensor, scale: Tensor) -> Tensor:
    """``code * scale`` in float32: the inverse of :func:`quantize_fp8_per_token`.

    Args:
        X_fp8: codes, ``[..., d]``.
        scale: the shape of ``X_fp8`` without ``d``.

    Returns:
        float32, of the shape of ``X_fp8``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Example:
        >>> import torch
        >>> from late_interaction.fp8 import dequantize_fp8_per_token, quantize_fp8_per_token
        >>> dequantize_fp8_per_token(*quantize_fp8_per_token(torch.tensor([[1.0, -7.0], [0.0, 3.0]])))
        tensor([[ 1., -7.],
                [ 0.,  3.]])
    """
    check_codes("X_fp8", X_fp8, scale, dtypes=_DTYPES)
    return X_fp8.to(torch.float32) * scale.unsqueeze(-1)


def maxsim_inference_fp8(
    Q: Tensor,
    D: Tensor,
    *,
    scale_Q: Tensor,
    scale_D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
) -> Tensor:
    """MaxSim of fp8 tokens: ``score = sum_s scale_Q[s] * max_t (scale_D[t] * <Q[s], D[t]>)``.

    The scores of :func:`late_interaction.maxsim` on the dequantized tokens, which are never stored where the
    device has a kernel for the call: a CPU, or a GPU with ``d`` a multiple of 16 (of compute capability 9.0
    and at most 2048, if no more than 64 query tokens meet a document; of others at most 256). Other calls
    make float32 copies of at most 64 MiB at a time, and multiply in TF32. No gradients.

    The tensor cores of compute capability 9.0 keep fewer bits of a sum of fp8 products than float32 has. (Of
    int8 products they keep all.) Machine code for 8.0 multiplies fp8 as float16, exactly.

    Args:
        Q: queries, ``[Nq, Lq, d]`` or ``[Lq, d]``; float8_e4m3fn or float8_e5m2.
        D: documents, of the dtype and device of ``Q``: ``[Nd, Ld, d]`` or ``[Ld, d]`` (every query meets
            every document), or ``[Nq, K, Ld, d]`` (each query meets its own ``K``).
        scale_Q: 0-dim (one scale for all tokens) or ``[Nq, Lq]``; ``[Lq]`` fits one query. float32; other
            floating-point dtypes are converted. On the device of ``Q``.
        scale_D: 0-dim, ``[Nd, Ld]`` or ``[Nq, K, Ld]``, likewise. Scales are finite and not negative. To
            check that would mean to wait for the GPU, so nothing raises; the scores that another scale
            reaches are NaN.
        q_mask: ``[Nq, Lq]``, True = keep. A masked query token adds 0.
        d_mask: ``[Nd, Ld]`` or ``[Nq, K, Ld]``, True = keep. A query token that meets no valid document token
            adds 0. What masked tokens and their scales hold does not matter.

    Returns:
        float32 scores, ``[Nq, Nd]`` or ``[Nq, K]``; a 2-D ``Q`` drops the first dim, a 2-D ``D`` the second.

    Raises:
        TypeError: an argument that is no tensor, or of a wrong dtype.
        ValueError: shapes or devices that do not fit, or a tensor that requires a gradient.

    Example:
        >>> import torch
        >>> from late_interaction.fp8 import maxsim_inference_fp8, quantize_fp8_per_token
        >>> Q, scale_Q = quantize_fp8_per_token(torch.tensor([[[7.0, 0.0], [0.0, 7.0]]]))
        >>> D, scale_D = quantize_fp8_per_token(torch.tensor([[[7.0, 0.0], [0.0, 14.0]]]))
        >>> maxsim_inference_fp8(Q, D, scale_Q=scale_Q, scale_D=scale_D)
        tensor([[147.]])
    """
    return quantized.maxsim(Q, D, scale_Q, scale_D, q_mask, d_mask, _DTYPES)
