"""MaxSim of quantized tokens, by definition: in float64 on what the codes stand for."""

import torch
from torch import Tensor

from late_interaction._checks.dense import as_given
from late_interaction._checks.quantized import check_quantized
from late_interaction._checks.tensors import CODES
from late_interaction.reference.dense import score_batches

__all__ = ["maxsim_quantized_reference"]


def maxsim_quantized_reference(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    scale_Q: Tensor,
    scale_D: Tensor,
) -> Tensor:
    """Compute what ``torch.ops.late_interaction.maxsim_quantized`` does, by definition.

    Args:
        Q: codes, ``[Nq, Lq, d]`` or ``[Lq, d]``; float8_e4m3fn, float8_e5m2 or int8. A token is
            ``code * scale``, in float64 here.
        D: codes of the same dtype, ``[Nd, Ld, d]``, ``[Ld, d]`` or ``[Nq, K, Ld, d]``.
        q_mask, d_mask: as in :func:`maxsim_reference`.
        scale_Q, scale_D: 0-dim, or the shape of their tokens without ``d``. One that is negative, infinite or
            NaN counts as NaN.

    Returns:
        float32 scores of the shapes that :func:`late_interaction.maxsim` returns.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_quantized_reference
        >>> Q = torch.tensor([[[1, 0], [0, 1]]], dtype=torch.int8)
        >>> D = torch.tensor([[[2, 0], [0, 3]]], dtype=torch.int8)
        >>> scale_D = torch.tensor([[1.0, 0.5]])
        >>> maxsim_quantized_reference(Q, D, scale_Q=torch.tensor(10.0), scale_D=scale_D)
        tensor([[35.]])
    """
    Q3, DN, scale_Q, scale_D, q_mask, d_mask = check_quantized(Q, D, scale_Q, scale_D, q_mask, d_mask, CODES)
    scores, _ = score_batches(_dequantized(Q3, scale_Q), _dequantized(DN, scale_D), q_mask, d_mask, False)
    return as_given(scores, Q, D).to(torch.float32)


def _dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    scale = torch.where((scale >= 0) & scale.isfinite(), scale, torch.nan)
    return codes.to(torch.float64) * scale.to(torch.float64).unsqueeze(-1)
