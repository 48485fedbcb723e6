"""The smooth maximum by definition: the similarities of all tokens, their logsumexp, its sum."""

import torch
from torch import Tensor

from late_interaction._checks.dense import as_given, check_maxsim
from late_interaction._checks.options import check_flag, check_tau
from late_interaction._checks.tensors import scores_dtype
from late_interaction._scoring.precision import without_autocast

__all__ = ["smooth_maxsim_reference"]


def smooth_maxsim_reference(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    tau: float = 0.1,
    normalize: bool = False,
) -> Tensor:
    """Compute what :func:`late_interaction.smooth_maxsim` does, by definition.

    Args:
        Q, D, q_mask, d_mask, tau, normalize: as in :func:`late_interaction.smooth_maxsim`. Half precision is
            widened to float32 first; float64 stays.

    Returns:
        Scores of the shapes that :func:`late_interaction.smooth_maxsim` returns.

    Raises:
        TypeError, ValueError: as :func:`late_interaction.smooth_maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.reference import smooth_maxsim_reference
        >>> Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> D = torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]])
        >>> smooth_maxsim_reference(Q, D, tau=0.1)
        tensor([[5.0000, 2.1386]])
    """
    Q3, DN, q_mask, d_mask = check_maxsim(Q, D, q_mask, d_mask)
    check_flag("normalize", normalize)
    tau = check_tau(tau)
    dtype = scores_dtype(Q)
    with without_autocast(Q.device.type):
        scores = _score(Q3.to(dtype), DN.to(dtype), q_mask, d_mask, tau, normalize)
    return as_given(scores, Q, D)


def _score(
    Q: Tensor, D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, tau: float, normalize: bool
) -> Tensor:
    # Whatever a masked token holds, NaN included, must reach neither a score nor a gradient.
    if q_mask is not None:
        Q = Q.masked_fill(~q_mask.unsqueeze(-1), 0.0)
    if d_mask is not None:
        D = D.masked_fill(~d_mask.unsqueeze(-1), 0.0)
    if normalize:
        Q = torch.nn.functional.normalize(Q, dim=-1, eps=1e-12)
        D = torch.nn.functional.normalize(D, dim=-1, eps=1e-12)
    similarity = torch.einsum("isd,ijtd->ijst" if D.dim() == 4 else "isd,jtd->ijst", Q, D)
    if similarity.shape[-1] == 0:
        return similarity.sum((2, 3))
    if d_mask is not None:
        some = d_mask.any(-1, keepdim=True)
        # A document without a token that counts keeps them all, so that no gradient is NaN, and adds 0.
        similarity = similarity.masked_fill(~(d_mask | ~some).unsqueeze(-2), -torch.inf)
    each = tau * torch.logsumexp(similarity / tau, -1)
    if d_mask is not None:
        each = each.masked_fill(~some, 0.0)
    if q_mask is not None:
        each = each.masked_fill(~q_mask.unsqueeze(1), 0.0)
    return each.sum(-1)
