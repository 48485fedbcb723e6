"""MaxSim of codes of 1 to 8 bits, by definition: in float64 on what the codes stand for."""

import torch
from torch import Tensor

from late_interaction._checks.dense import as_given
from late_interaction._checks.quantized import check_asymmetric, check_hamming, check_quantized
from late_interaction._checks.tensors import CODES
from late_interaction.reference.dense import score_batches

__all__ = ["maxsim_asymmetric_reference", "maxsim_hamming_reference", "maxsim_quantized_reference"]


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
    queries, documents = Q3.to(torch.float64) * _usable(scale_Q), DN.to(torch.float64) * _usable(scale_D)
    scores, _ = score_batches(queries, documents, q_mask, d_mask, False)
    return as_given(scores, Q, D).to(torch.float32)


def maxsim_hamming_reference(
    Q: Tensor, D: Tensor, d: int, *, q_mask: Tensor | None = None, d_mask: Tensor | None = None
) -> Tensor:
    """Compute what ``torch.ops.late_interaction.maxsim_hamming`` does, by definition.

    Args:
        Q: bits of queries, uint8 ``[Nq, Lq, ceil(d / 8)]`` or ``[Lq, ceil(d / 8)]``, as
            :class:`late_interaction.codecs.Bits` packs them.
        D: bits of documents, ``[Nd, Ld, ceil(d / 8)]``, ``[Ld, ceil(d / 8)]`` or ``[Nq, K, Ld, ceil(d / 8)]``
            (each query's own ``K``).
        d: dims of a token.
        q_mask, d_mask: as in :func:`maxsim_reference`.

    Returns:
        float32 scores of the same shape.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_hamming_reference
        >>> Q, D = torch.tensor([[5]], dtype=torch.uint8), torch.tensor([[7], [4]], dtype=torch.uint8)
        >>> maxsim_hamming_reference(Q, D, 3)
        tensor(1.)
    """
    Q3, DN, q_mask, d_mask = check_hamming(Q, D, d, q_mask, d_mask)
    scores, _ = score_batches(_values(Q3, 1, d), _values(DN, 1, d), q_mask, d_mask, False)
    return as_given(scores, Q, D).to(torch.float32)


def maxsim_asymmetric_reference(
    Q: Tensor,
    D: Tensor,
    scale_Q: Tensor,
    scale_D: Tensor,
    *,
    nbits: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
) -> Tensor:
    """Compute what ``torch.ops.late_interaction.maxsim_asymmetric`` does, by definition.

    Args:
        Q: int8 codes of queries, ``[Nq, Lq, d]`` or ``[Lq, d]``.
        D: codes of ``nbits``, uint8 of ``ceil(d * nbits / 8)`` bytes a token, as in
            :func:`maxsim_hamming_reference`.
        scale_Q, scale_D: 0-dim, or the shape of their codes without the last dim. One that is negative,
            infinite or NaN counts as NaN.
        nbits: 1 or 4.
        q_mask, d_mask: as in :func:`maxsim_reference`.

    Returns:
        float32 scores of the same shape.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_asymmetric_reference
        >>> Q, D = torch.tensor([[2, 1, 1]], dtype=torch.int8), torch.tensor([[5]], dtype=torch.uint8)
        >>> maxsim_asymmetric_reference(Q, D, torch.tensor(10.0), torch.tensor(0.5), nbits=1)
        tensor(10.)
    """
    checked = check_asymmetric(Q, D, scale_Q, scale_D, q_mask, d_mask, nbits)
    codes, packed, scale_Q, scale_D, q_mask, d_mask = checked
    queries = codes.to(torch.float64) * _usable(scale_Q)
    documents = _values(packed, nbits, codes.shape[-1]) * _usable(scale_D)
    scores, _ = score_batches(queries, documents, q_mask, d_mask, False)
    return as_given(scores, Q, D).to(torch.float32)


def _values(packed: Tensor, nbits: int, d: int) -> Tensor:
    """Dim by dim: +1 or -1 of a bit, the value - 8 of four."""
    each = 8 // nbits
    fields = [packed[..., k // each] >> k % each * nbits & (2**nbits - 1) for k in range(d)]
    codes = torch.stack(fields, dim=-1).to(torch.float64)
    return 2 * codes - 1 if nbits == 1 else codes - 8


def _usable(scale: Tensor) -> Tensor:
    return torch.where((scale >= 0) & scale.isfinite(), scale, torch.nan).to(torch.float64).unsqueeze(-1)
