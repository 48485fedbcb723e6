"""``late_interaction_kernels.fp8``: fp8 codes with one scale for a tensor or one a token, and their MaxSim.

:class:`late_interaction.codecs.Fp8` has the same codes with a scale a token.
"""

import torch
from torch import Tensor

from late_interaction._checks.quantized import check_codes
from late_interaction._checks.tensors import check_embeddings, check_rows
from late_interaction._scoring import quantized
from late_interaction.codecs import Fp8

__all__ = [
    "dequantize_fp8_per_tensor",
    "dequantize_fp8_per_token",
    "maxsim_inference_fp8",
    "quantize_fp8_per_tensor",
    "quantize_fp8_per_token",
]

_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantize_fp8_per_tensor(X: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Give codes of the shape of ``X``, and a 0-dim scale that maps its largest magnitude to the largest one.

    Outside autograd. Zeros become zeros. A NaN or an infinity anywhere makes ``scale`` and every code NaN. An
    empty ``X`` has scale 1.
    """
    check_embeddings("X", X)
    largest = torch.finfo(Fp8(dtype).dtype).max
    with torch.no_grad():
        if X.numel() == 0:
            return X.to(dtype).contiguous(), torch.ones((), dtype=torch.float32, device=X.device)
        scale = quantized.scale_for(X.abs().amax(), largest)
        return (X.to(torch.float32) / scale).clamp_(-largest, largest).to(dtype).contiguous(), scale


def quantize_fp8_per_token(X: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Give codes of the shape of ``X`` ``[..., d]``, and float32 scales of its shape without ``d``.

    They are those of :class:`late_interaction.codecs.Fp8`.
    """
    check_rows("X", X)
    return quantized.quantize_rows(X, Fp8(dtype).dtype)


def dequantize_fp8_per_tensor(X_fp8: Tensor, scale: Tensor) -> Tensor:
    """Give ``code * scale`` in float32."""
    check_codes("X_fp8", X_fp8, scale, torch.Size(), _DTYPES)
    return X_fp8.to(torch.float32) * scale


def dequantize_fp8_per_token(X_fp8: Tensor, scale: Tensor) -> Tensor:
    """Give ``code * scale`` in float32, with a scale for each row of the last dim."""
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
    """Score fp8 codes: ``sum_s scale_Q[s] * max_t (scale_D[t] * <Q[s], D[t]>)``, without gradients.

    ``Q`` and ``D`` as in :func:`late_interaction.maxsim`, of one fp8 dtype; scales 0-dim or of their shapes
    without ``d``.
    """
    return quantized.maxsim(Q, D, scale_Q, scale_D, q_mask, d_mask, _DTYPES)
