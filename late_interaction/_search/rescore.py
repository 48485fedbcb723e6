"""Exact scores of the candidates of a first pass: each query with documents of its own."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import scores_dtype
from late_interaction._maxsim import maxsim
from late_interaction._scoring.norm_warning import unwatched
from late_interaction.score_pairs import rerank_direct

# Copies of candidates take at most so many bytes at a time; on a CPU as many as the process has memory for
# already.
_BYTES, _GATHERED_BYTES = 256 << 20, 8 << 20


def fitting(bytes_each: int, most: int) -> int:
    """Return how many take at most so many bytes together; at least one."""
    return max(most // max(bytes_each, 1), 1)


def exact_scores(
    Q: Tensor, D: Tensor, found: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Scores of each query with its documents ``found`` [Nq, K].

    A CPU scores documents where they lie if their kept tokens come first; others are copied, some at a time.
    """
    Nq, K = found.shape
    scores = torch.empty(Nq, K, dtype=scores_dtype(Q), device=Q.device)
    on_cpu = D.is_cpu and Q.is_cpu
    spans = spans_of(D, d_mask) if on_cpu and not options["normalize"] else None
    if spans is not None:
        starts, lengths = spans
        for i, own in enumerate(found):
            query = Q[i] if q_mask is None else Q[i][q_mask[i]]
            where = starts[own], lengths[own]
            tokens, precision = D.flatten(0, 1), options["precision"]
            scores[i] = unwatched(rerank_direct, query, tokens, *where, precision=precision)
        return scores
    at_once = fitting(D.shape[1] * D.shape[2] * D.element_size(), _GATHERED_BYTES if on_cpu else _BYTES)
    queries, documents = max(at_once // max(K, 1), 1), min(at_once, max(K, 1))
    for i in range(0, Nq, queries):
        for j in range(0, K, documents):
            part = slice(i, i + queries), slice(j, j + documents)
            index = found[part].to(D.device)
            mask = None if d_mask is None else d_mask[index]
            tokens = D if mask is None or not on_cpu else D[:, : longest(mask)]
            scores[part] = unwatched(
                maxsim,
                Q[part[0]],
                tokens[index].to(Q.device),
                None if q_mask is None else q_mask[part[0]],
                None if mask is None else mask[..., : tokens.shape[1]].to(Q.device),
                **options,
            )
    return scores


def spans_of(D: Tensor, d_mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return where the kept tokens of each document begin and how many they are, if they lie together."""
    Nd, Ld = D.shape[:2]
    if not D.is_contiguous():
        return None
    starts = torch.arange(Nd, device="cpu") * Ld
    if d_mask is None:
        return starts, torch.full_like(starts, Ld)
    lengths = d_mask.sum(1)
    return (
        (starts, lengths)
        if torch.equal(d_mask, torch.arange(Ld, device="cpu") < lengths.unsqueeze(1))
        else None
    )


def longest(d_mask: Tensor) -> int:
    """Count the tokens of these documents up to the last one that is kept."""
    kept = d_mask.flatten(0, -2).any(0).nonzero()
    return int(kept[-1]) + 1 if len(kept) else 1
