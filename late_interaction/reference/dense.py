"""MaxSim in plain PyTorch: the definition that the kernels are held to.

Slow, and it stores every similarity. Runs on any device, differentiates twice, and keeps float64.
"""

import torch
from torch import Tensor

from late_interaction import _checks

__all__ = ["maxsim_quantized_reference", "maxsim_reference", "maxsim_with_winners_reference"]


def maxsim_reference(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
) -> Tensor:
    """What :func:`late_interaction.maxsim` computes, by definition.

    Args:
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``. Half precision is widened to float32 first; float64 stays.
        D: ``[Nd, Ld, d]``, ``[Ld, d]`` or ``[Nq, K, Ld, d]``.
        q_mask: ``[Nq, Lq]``, True = keep. A masked query token adds 0.
        d_mask: ``D``'s shape without ``d``, True = keep. A masked document token is -inf before the maximum.
        normalize: divide every token by ``max(norm, 1e-12)`` first.

    Returns:
        Scores of the shapes that :func:`late_interaction.maxsim` returns.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_reference
        >>> Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> D = torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 1.0], [0.0, 0.0]]])
        >>> maxsim_reference(Q, D)
        tensor([[5., 2.]])
    """
    return maxsim_with_winners_reference(Q, D, q_mask, d_mask, normalize=normalize)[0]


def maxsim_with_winners_reference(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """What :func:`late_interaction.maxsim_with_winners` computes, by definition.

    Args:
        Q, D, q_mask, d_mask, normalize: as in :func:`maxsim_reference`.

    Returns:
        ``(scores, winners)``, winners int32 with -1 for a query token that is masked or met no valid token.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_with_winners_reference
        >>> Q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> D = torch.tensor([[0.0, 3.0], [2.0, 0.0], [1.0, 1.0]])
        >>> maxsim_with_winners_reference(Q, D)
        (tensor(5.), tensor([1, 0], dtype=torch.int32))
    """
    Q3, DN, q_mask, d_mask = _checks.batched(Q, D, q_mask, d_mask)
    with torch.autocast(Q.device.type, enabled=False):
        scores, winners = _batched(Q3, DN, q_mask, d_mask, normalize)
    for dim, x in ((1, D), (0, Q)):
        if x.dim() == 2:
            scores, winners = scores.squeeze(dim), winners.squeeze(dim)
    return scores, winners


def maxsim_quantized_reference(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    scale_Q: Tensor,
    scale_D: Tensor,
) -> Tensor:
    """What :func:`late_interaction.fp8.maxsim_inference_fp8` and its like for int8 compute, by definition.

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
        TypeError, ValueError: as :func:`late_interaction.fp8.maxsim_inference_fp8`.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_quantized_reference
        >>> Q = torch.tensor([[[1, 0], [0, 1]]], dtype=torch.int8)
        >>> D = torch.tensor([[[2, 0], [0, 3]]], dtype=torch.int8)
        >>> scale_D = torch.tensor([[1.0, 0.5]])
        >>> maxsim_quantized_reference(Q, D, scale_Q=torch.tensor(10.0), scale_D=scale_D)
        tensor([[35.]])
    """
    Q3, DN, scale_Q, scale_D, q_mask, d_mask = _checks.quantized(
        Q, D, scale_Q, scale_D, q_mask, d_mask, _checks.CODES
    )
    scores, _ = _batched(_dequantized(Q3, scale_Q), _dequantized(DN, scale_D), q_mask, d_mask, False)
    for dim, x in ((1, D), (0, Q)):
        scores = scores.squeeze(dim) if x.dim() == 2 else scores
    return scores.to(torch.float32)


def _dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    scale = torch.where((scale >= 0) & scale.isfinite(), scale, torch.nan)
    return codes.to(torch.float64) * scale.to(torch.float64).unsqueeze(-1)


def _batched(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor]:
    Nq, Lq, N, Ld = Q.shape[0], Q.shape[1], D.shape[-3], D.shape[-2]
    dtype = torch.float64 if Q.dtype == torch.float64 else torch.float32
    Q, D = Q.to(dtype), D.to(dtype)
    # Whatever a masked token holds, NaN included, must reach neither a score nor a gradient.
    if q_mask is not None:
        Q = Q.masked_fill(~q_mask.unsqueeze(-1), 0.0)
    if d_mask is not None:
        D = D.masked_fill(~d_mask.unsqueeze(-1), 0.0)
    if normalize:
        Q = torch.nn.functional.normalize(Q, dim=-1, eps=1e-12)
        D = torch.nn.functional.normalize(D, dim=-1, eps=1e-12)

    per_query = D.dim() == 4
    counts = torch.full((Nq, N, Lq), Ld > 0, device=Q.device)  # which maxima are part of a score
    if q_mask is not None:
        counts = counts & q_mask.unsqueeze(1)
    if d_mask is not None:
        counts = counts & d_mask.any(-1).unsqueeze(-1)
    if Ld == 0:  # max needs something to look at: one token that does not count
        D, d_mask = torch.nn.functional.pad(D, (0, 0, 0, 1)), None
    similarity = torch.einsum("isd,ijtd->ijst" if per_query else "isd,jtd->ijst", Q, D)
    if d_mask is not None:
        similarity = similarity.masked_fill(~d_mask.unsqueeze(-2), float("-inf"))
    best, index = similarity.max(dim=-1)  # the first of equals, and the first NaN
    scores = torch.where(counts, best, 0.0).sum(-1)
    winners = torch.where(counts, index, -1).to(torch.int32)
    return scores, winners
