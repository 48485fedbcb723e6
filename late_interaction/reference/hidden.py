"""MaxSim of documents that are hidden states still, by definition: project, normalize, score."""

import torch
from torch import Tensor

from late_interaction._checks.dense import check_from_hidden
from late_interaction._checks.options import check_flag
from late_interaction._checks.tensors import scores_dtype
from late_interaction._scoring.precision import without_autocast
from late_interaction.reference.dense import maxsim_reference

__all__ = ["maxsim_from_hidden_reference"]


def maxsim_from_hidden_reference(
    Q: Tensor,
    H_d: Tensor,
    W: Tensor,
    b: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
) -> Tensor:
    """Compute ``maxsim(Q, H_d @ W.T + b, d_mask=d_mask)``, by definition.

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
        >>> maxsim_from_hidden_reference(Q, H_d, torch.eye(2, 3), normalize=True)
        tensor([0.6000])
    """
    check_flag("normalize", normalize)
    _, _, d_mask = check_from_hidden(Q, H_d, W, b, None, d_mask, False)
    dtype = scores_dtype(Q)
    if d_mask is not None:  # a masked state reaches nothing, W's gradient included, whatever it holds
        H_d = H_d.masked_fill(~d_mask.unsqueeze(-1), 0.0)
    with without_autocast(Q.device.type):
        D = torch.nn.functional.linear(H_d.to(dtype), W.to(dtype), None if b is None else b.to(dtype))
        if normalize:
            D = torch.nn.functional.normalize(D, dim=-1, eps=1e-12)
    return maxsim_reference(Q.to(dtype), D, d_mask=d_mask)
