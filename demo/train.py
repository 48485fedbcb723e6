"""A projection head on frozen token embeddings, trained with in-batch negatives through `maxsim`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo.encode import Tokens
from demo.show import BAR
from late_interaction import maxsim
from late_interaction._progress import bar as progress_bar

DIM = 128
HELD_OUT = 0.3

Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of (Q, D, q_mask, d_mask), normalizing


def maxsim_scores(Q: Tensor, D: Tensor, q_mask: Tensor, d_mask: Tensor) -> Tensor:
    """`maxsim`. lowmem: the same bits on every run, on a GPU too."""
    return maxsim(Q, D, q_mask, d_mask, normalize=True, backward="lowmem")


def new_head(width: int, device: torch.device, seed: int = 0) -> nn.Linear:
    """A bias-free map to DIM numbers that starts as a random rotation: it keeps angles as they were."""
    head = nn.Linear(width, DIM, bias=False)
    nn.init.orthogonal_(head.weight, generator=torch.Generator().manual_seed(seed))
    return head.to(device)


def split(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices of the pairs to train on and of those held out, the same on every run."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    cut = count - int(HELD_OUT * count)
    return order[:cut], order[cut:].sort().values


def train_head(
    head: nn.Linear,
    queries: Tokens,
    documents: Tokens,
    pairs: Tensor,
    *,
    score: Score = maxsim_scores,
    steps: int = 60,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> list[float]:
    """Train `head` in place on `pairs` and return the loss of every step.

    Each query of a batch must score its own document above the batch's other documents: cross-entropy
    over the rows of `score`, whose backward sends gradients to the winning tokens alone.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(head.parameters(), lr=learning_rate)
    batch_size = min(batch_size, len(pairs))
    losses: list[float] = []
    waiting = pairs[:0]
    with progress_bar(steps, desc="   training", unit="steps", **BAR) as bar:
        for _ in range(steps):
            if len(waiting) < batch_size:
                waiting = pairs[torch.randperm(len(pairs), generator=generator)]
            batch, waiting = waiting[:batch_size], waiting[batch_size:]
            Q, q_mask = _take(queries, batch)
            D, d_mask = _take(documents, batch)
            scores = score(head(Q), head(D), q_mask, d_mask)
            loss = F.cross_entropy(scores, torch.arange(len(batch), device=scores.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update()
    return losses


def _take(tokens: Tokens, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings and masks of a batch, cut to its longest text."""
    batch = batch.to(tokens.mask.device)
    mask = tokens.mask[batch]
    longest = int(mask.sum(1).max())
    return tokens.embeddings[batch, :longest], mask[:, :longest]
