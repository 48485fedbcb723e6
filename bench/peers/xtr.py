"""XTR scores by the grid of all similarities, as Sentence Transformers 6.2 computes them in PyTorch.

`sentence_transformers.multi_vector_encoder.scoring.xtr.xtr_scores` is written out here, so the package need
not be installed. What it does about masks is left out: it would take time, and all tokens count here.
"""

from __future__ import annotations

import torch


def grid_scores(Q: torch.Tensor, D: torch.Tensor, k: int) -> torch.Tensor:
    """Scores ``[Nq, Nd]``, float32, of ``Q [Nq, Lq, d]`` and ``D [Nd, Ld, d]``; products and selection are of
    the inputs' dtype."""
    (Nq, Lq, d), (Nd, Ld) = Q.shape, D.shape[:2]
    grid = (Q.reshape(Nq * Lq, d) @ D.reshape(Nd * Ld, d).T).view(Nq, Lq, Nd * Ld)
    values, tokens = grid.topk(min(k, Nd * Ld), dim=-1, sorted=False)
    kept = grid.fill_(torch.finfo(grid.dtype).min).scatter_(-1, tokens, values)
    selected = torch.zeros(Nq, Lq, Nd, dtype=torch.bool, device=Q.device).scatter_(-1, tokens // Ld, True)
    maxima = kept.view(Nq, Lq, Nd, Ld).max(dim=-1).values.float().masked_fill(~selected, 0.0)
    return maxima.sum(dim=1) / selected.float().sum(dim=1).clamp_(min=1)
