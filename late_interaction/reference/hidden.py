"""MaxSim of documents that are hidden states still, by definition: project, normalize, score."""

import torch
from torch import Tensor

from late_interaction._scoring.precision import without_autocast
from late_interaction.reference.dense import maxsim_reference, working_dtype

__all__ = ["maxsim_from_hidden_reference"]


def maxsim_from_hidden_reference(
    Q: Tensor,
    H_d: Tensor,
    W: Tensor,
    b: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = True,
) -> Tensor:
    """``maxsim(Q, normalize(H_d @ W.T + b), d_mask=d_mask)``, by definition.

    Args:
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``, projected (and normalized) already.
        H_d: the documents' hidden states, ``[Nd, Ld, d_model]``.
        W: ``[d, d_model]``, as ``torch.nn.Linear.weight``.
        b: ``[d]``.
        d_mask: ``[Nd, Ld]``, True = keep.
        normalize: divide every projected token by ``max(norm, 1e-12)``.

    Returns:
        ``[Nq, Nd]`` (``[Nd]`` for a 2-D ``Q``), float32 (float64 where ``Q`` is float64).

    Raises:
        TypeError, ValueError: as :func:`late_interaction.maxsim`; shapes that do not fit.

    Example:
        >>> import torch
        >>> from late_interaction.reference import maxsim_from_hidden_reference
        >>> Q, H_d = torch.tensor([[1.0, 0.0]]), torch.tensor([[[3.0, 4.0, 7.0]]])
        >>> maxsim_from_hidden_reference(Q, H_d, torch.eye(2, 3))
        tensor([0.6000])
    """
    if H_d.dim() != 3:
        raise ValueError(f"H_d must be [Nd, Ld, d_model], got {list(H_d.shape)}")
    if W.shape != (Q.shape[-1], H_d.shape[-1]):
        raise ValueError(f"W must be [{Q.shape[-1]}, {H_d.shape[-1]}] (d, d_model), got {list(W.shape)}")
    if b is not None and b.shape != W.shape[:1]:
        raise ValueError(f"b must be [{W.shape[0]}] (d), got {list(b.shape)}")
    dtype = working_dtype(Q)
    if d_mask is not None:
        d_mask = d_mask.unsqueeze(0) if d_mask.dim() == 1 else d_mask
        # A masked state reaches nothing, W's gradient included, whatever it holds.
        H_d = H_d.masked_fill(~d_mask.bool().unsqueeze(-1), 0.0)
    with without_autocast(Q.device.type):
        D = torch.nn.functional.linear(H_d.to(dtype), W.to(dtype), None if b is None else b.to(dtype))
        if normalize:
            D = torch.nn.functional.normalize(D, dim=-1, eps=1e-12)
    return maxsim_reference(Q.to(dtype), D, d_mask=d_mask)
