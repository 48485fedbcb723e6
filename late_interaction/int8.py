"""MaxSim of int8 tokens, for inference; :mod:`late_interaction._scoring.quantized` scores them.

int8 takes the memory of fp8 and has a finer grid.

Tokens are int8 codes in -127 .. 127 and a float32 scale a token (symmetric: no zero point, as in
https://arxiv.org/abs/2004.09602); a token is ``code * scale``::

    Q8, scale_Q = quantize_int8_per_token(Q)
    D8, scale_D = quantize_int8_per_token(D)
    scores = maxsim_inference_int8(Q8, D8, scale_Q=scale_Q, scale_D=scale_D)
"""

import torch
from torch import Tensor

from late_interaction._checks.quantized import check_codes
from late_interaction._checks.tensors import check_rows
from late_interaction._scoring import quantized

__all__ = ["dequantize_int8_per_token", "maxsim_inference_int8", "quantize_int8_per_token"]

_LARGEST = 127


def quantize_int8_per_token(X: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of ``X`` with a scale for each token (each row of the last dim), which maps its largest
    magnitude to 127.

    Args:
        X: ``[..., d]`` embeddings; bfloat16, float16, float32 or float64.

    Returns:
        ``(codes, scale)``: ``codes`` int8, of the shape of ``X``, contiguous; ``scale`` float32, > 0, of the
        shape of ``X`` without ``d``. Outside autograd. A row of zeros becomes zeros. A row with a NaN or an
        infinity becomes zeros with the scale NaN, and the scores that it reaches are NaN.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``X`` has no dim ``d``, or ``d`` is 0.

    Example:
        >>> import torch
        >>> from late_interaction.int8 import quantize_int8_per_token
        >>> quantize_int8_per_token(torch.tensor([[127.0, -3.0], [0.0, -0.5]]))
        (tensor([[ 127,   -3],
                [   0, -127]], dtype=torch.int8), tensor([1.0000, 0.0039]))
    """
    check_rows("X", X)
    if (found := quantized.rows_by_kernel(X, torch.int8)) is not None:
        return found
    with torch.no_grad():
        scale = quantized.scale_for(X.abs().amax(-1), _LARGEST)
        codes = (X.to(torch.float32) / scale.unsqueeze(-1)).nan_to_num_(0.0).round_()
        return codes.clamp_(-_LARGEST, _LARGEST).to(torch.int8).contiguous(), scale


def dequantize_int8_per_token(X_int8: Tensor, scale: Tensor) -> Tensor:
    """``code * scale`` in float32: the inverse of :func:`quantize_int8_per_token`.

    Args:
        X_int8: codes, ``[..., d]``.
        scale: the shape of ``X_int8`` without ``d``.

    Returns:
        float32, of the shape of ``X_int8``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Example:
        >>> import torch
        >>> from late_interaction.int8 import dequantize_int8_per_token, quantize_int8_per_token
        >>> dequantize_int8_per_token(*quantize_int8_per_token(torch.tensor([[127.0, -3.0], [0.0, 2.0]])))
        tensor([[127.,  -3.],
                [  0.,   2.]])
    """
    check_codes("X_int8", X_int8, scale, dtypes=(torch.int8,))
    return X_int8.to(torch.float32) * scale.unsqueeze(-1)


def maxsim_inference_int8(
    Q: Tensor,
    D: Tensor,
    *,
    scale_Q: Tensor,
    scale_D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
) -> Tensor:
    """MaxSim of int8 tokens: :func:`late_interaction.fp8.maxsim_inference_fp8` for int8 codes.

    Args:
        Q: queries, ``[Nq, Lq, d]`` or ``[Lq, d]``, int8.
        D: documents, int8: ``[Nd, Ld, d]``, ``[Ld, d]`` or ``[Nq, K, Ld, d]``.
        scale_Q, scale_D, q_mask, d_mask: as in :func:`late_interaction.fp8.maxsim_inference_fp8`.

    Returns:
        float32 scores, ``[Nq, Nd]`` or ``[Nq, K]``; a 2-D ``Q`` drops the first dim, a 2-D ``D`` the second.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.fp8.maxsim_inference_fp8`.

    Example:
        >>> import torch
        >>> from late_interaction.int8 import maxsim_inference_int8, quantize_int8_per_token
        >>> Q, scale_Q = quantize_int8_per_token(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]))
        >>> D, scale_D = quantize_int8_per_token(torch.tensor([[[2.0, 0.0], [0.0, 3.0]]]))
        >>> maxsim_inference_int8(Q, D, scale_Q=scale_Q, scale_D=scale_D)
        tensor([[5.]])
    """
    return quantized.maxsim(Q, D, scale_Q, scale_D, q_mask, d_mask, (torch.int8,))
