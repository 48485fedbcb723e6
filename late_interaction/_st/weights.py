"""Query masks that are weights: Sentence Transformers multiplies each query token's maximum by its mask.

The kernels sum the maxima unweighted, so these scores go by the maxima themselves.
"""

import torch
from torch import Tensor

from late_interaction._maxsim import maxsim, maxsim_with_winners

__all__ = ["split", "weighted_grid", "weighted_pairs"]


def split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A query mask as (what is kept, weights), one of which is None. On a CPU numbers that are all 0 or 1 are
    a mask; a GPU's are not waited for."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    readable = mask.device.type == "cpu" and not mask.requires_grad and not torch.compiler.is_compiling()
    if readable and bool(((mask == 0) | (mask == 1)).all()):
        return mask.bool(), None
    return None, mask


def weighted_grid(Q: Tensor, D: Tensor, weights: Tensor, d_mask: Tensor | None) -> Tensor:
    """``sum_s weights[i, s] * max_t <Q[i, s], D[j, t]>``, ``[Nq, Nd]``: each query token is a query."""
    Nq, Lq, d = Q.shape
    maxima = maxsim(Q.reshape(Nq * Lq, 1, d), D, None, d_mask).float().view(Nq, Lq, -1)
    return (maxima * weights.unsqueeze(-1)).sum(1)


def weighted_pairs(Q: Tensor, D: Tensor, weights: Tensor, d_mask: Tensor | None) -> Tensor:
    """The same of the pairs ``(Q[i], D[i])``, ``[B]``: the winners' products are formed again."""
    with torch.no_grad():
        own_mask = None if d_mask is None else d_mask.unsqueeze(1)
        winners = maxsim_with_winners(Q, D.unsqueeze(1), None, own_mask)[1].squeeze(1).long()
    matched = D.gather(1, winners.clamp_min(0).unsqueeze(-1).expand(-1, -1, D.shape[-1]))
    maxima = (Q.float() * matched.float()).sum(-1).masked_fill(winners < 0, 0.0)
    return (maxima * weights).sum(-1)
