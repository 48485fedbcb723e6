"""How good a ranking is, and whether two scorers agree on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
TOP = 10


@dataclass(frozen=True)
class Quality:
    """Means over the queries: 1 / rank of the wanted document (0 below the cut), and whether it is in."""

    mrr: float
    recall: float


def quality(ranking: Tensor, wanted: Tensor) -> Quality:
    """MRR@k and recall@k of `ranking` [Nq, k] (document indices, best first) for `wanted` [Nq].

    >>> quality(torch.tensor([[7, 3], [1, 2]]), torch.tensor([3, 9]))
    Quality(mrr=0.25, recall=0.5)
    """
    hits = ranking == wanted[:, None]
    ranks = torch.arange(1, ranking.shape[1] + 1, device=ranking.device)
    return Quality(mrr=(hits / ranks).sum(1).mean().item(), recall=hits.any(1).double().mean().item())


def same_rankings(ranking: Tensor, scores: Tensor, tie: float = 0.0) -> int:
    """How many rows of `ranking` [Nq, k] are the top k of `scores` [Nq, Nd].

    Documents whose scores are at most `tie` apart may stand in either order.
    """
    best = scores.topk(ranking.shape[1]).values
    return int(((scores.gather(1, ranking) - best).abs() <= tie).all(1).sum())


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result of `work` and the seconds it took, the device's queue included."""
    _drain(device)
    start = time.perf_counter()
    result = work()
    _drain(device)
    return result, time.perf_counter() - start


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
