"""How much of the exact search an approximate index finds: :func:`evaluate_recall`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag, check_integer, check_positive, is_integer
from late_interaction._checks.tensors import check_not_meta
from late_interaction._search.result import SearchResult

__all__ = ["evaluate_recall"]

# So many comparisons are made at a time.
_COMPARED = 1 << 24
# In the place of no document; an exact search has none of this number.
_NONE = -(1 << 40)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def evaluate_recall(
    found: SearchResult | Tensor | Sequence[Sequence[int]],
    exact: SearchResult,
    k: int | Sequence[int] = 10,
    *,
    per_query: bool = False,
) -> dict[int, Any]:
    """Give recall@k of ranked lists: how many of the ``k`` best documents the first ``k`` of a list hold.

    The best documents are those of an exact search by :func:`late_interaction.search`, which is done once and
    may be saved. A document whose score equals that of rank ``k`` counts as one of the best, wherever the tie
    broke: search for some more than ``k``, so that these are known.

    Args:
        found: what the index whose recall is asked for found, best first: a
            :class:`late_interaction.SearchResult`, document indices ``[Nq, n]`` (``[n]`` for one query), or a
            list for each query. -1 stands for no document. A document that is listed twice counts once.
        exact: what the exact search found (that of a :class:`late_interaction.TopK` as
            ``SearchResult(best.scores, best.indices)``), ``[Nq, m]`` (``[m]``) with ``m`` of at least the
            largest ``k``, or all documents of a smaller corpus.
        k: one rank or several.
        per_query: the recall of each query, and not the mean.

    Returns:
        ``{k: recall}`` in the order of ``k``: numbers between 0 and 1, or float64 tensors ``[Nq]`` on the
        CPU. The recall is the share of the ``k`` best documents, or of all that the exact search ranks where
        those are fewer; 1 where it ranks none. NaN for no query at all.

    Raises:
        TypeError, ValueError: arguments of a wrong kind, dtype or shape; ``exact`` of another number of
            queries, or not ordered best first; a document below -1.

    Complexity: ``Nq * k * m`` comparisons, on the CPU.

    Example:
        >>> import torch
        >>> from late_interaction import evaluate_recall, search
        >>> D = torch.nn.functional.normalize(torch.randn(100, 20, 16), dim=-1)
        >>> exact = search(D[:4], D, k=30)  # each document is its own best
        >>> evaluate_recall(exact, exact, k=(1, 10))
        {1: 1.0, 10: 1.0}
        >>> evaluate_recall([[0, 99], [1], [98, 2], []], exact, k=1)
        {1: 0.5}
    """
    check_flag("per_query", per_query)
    sequence: Any = (k,) if is_integer(k) else k
    if not isinstance(sequence, (tuple, list, range)):
        raise TypeError(f"k must be an int or a sequence of ints, got {abbreviate(k)}")
    ranks: list[int] = list(sequence)
    if not ranks:
        raise ValueError("k must be one rank at least, got none")
    for rank in ranks:
        check_positive("k", rank)
    scores, indices = _checked_exact(exact)
    lists = _checked_found(found.indices if isinstance(found, SearchResult) else found, len(scores))
    out: dict[int, Any] = {}
    for rank in ranks:
        recall = _recall(lists[:, :rank], scores, indices, rank)
        out[rank] = recall if per_query else float(recall.mean())
    return out


def _recall(lists: Tensor, scores: Tensor, indices: Tensor, rank: int) -> Tensor:
    """Recall ``[Nq]`` of lists that are cut at the rank."""
    ranked = (indices >= 0) & ~scores.isnan()
    wanted = ranked.sum(1).clamp_max(rank)
    if scores.shape[1] == 0:  # there is nothing to find
        return torch.ones(len(scores), dtype=torch.float64, device="cpu")
    place = ranked.cumsum(1)
    last = scores.gather(1, (place >= wanted.unsqueeze(1)).int().argmax(1, keepdim=True))
    best = ranked & ((place <= rank) | (scores == last))  # and those that tie with the last
    size = max(_COMPARED // max(lists.shape[1] * scores.shape[1], 1), 1)
    hits = [
        ((own.unsqueeze(-1) == exact.unsqueeze(1)).any(1) & counts).sum(1)
        for own, exact, counts in zip(lists.split(size), indices.split(size), best.split(size), strict=True)
    ]
    found = torch.cat([x[:0] for x in hits[:1]] + hits).minimum(wanted)
    return torch.where(wanted > 0, found.double() / wanted, 1.0)


def _checked_exact(exact: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(exact, SearchResult):
        raise TypeError(f"exact must be a SearchResult, got {abbreviate(exact)}")
    scores, indices = exact
    for name, x in (("scores", scores), ("indices", indices)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} of exact must be a torch.Tensor, got {type(x).__name__}")
        check_not_meta(f"{name} of exact", x)
    if not scores.is_floating_point() or indices.dtype not in _INTEGERS:
        raise TypeError(
            f"exact must be floating-point scores and integer indices, got {scores.dtype} and {indices.dtype}"
        )
    if scores.dim() not in (1, 2) or scores.shape != indices.shape:
        raise ValueError(
            f"exact must be two tensors [Nq, m] or [m], got {shape_of(scores)} and {shape_of(indices)}"
        )
    scores, indices = (torch.atleast_2d(x.detach().cpu()) for x in (scores, indices))
    ordered = torch.where(scores.isnan(), torch.inf, scores)
    before, after = ordered[:, :-1], ordered[:, 1:]
    if not bool((before >= after).all()) and not bool((before <= after).all()):
        raise ValueError("exact must be ordered best first, as the searches return it")
    return scores, indices.long()


def _checked_found(found: Any, queries: int) -> Tensor:
    """Return lists as integers ``[Nq, n]``, filled up with a number that no document has."""
    if isinstance(found, Tensor):
        if found.dtype not in _INTEGERS:
            raise TypeError(f"found must be integers, got {found.dtype}")
        check_not_meta("found", found)
        if found.dim() not in (1, 2):
            raise ValueError(f"found must be [Nq, n] or [n], got {shape_of(found)}")
        lists = torch.atleast_2d(found.detach().cpu()).long()
    elif isinstance(found, Sequence) and all(isinstance(own, Sequence) for own in found):
        longest = max(map(len, found), default=0)
        rows = [[_document(x) for x in own] + [-1] * (longest - len(own)) for own in found]
        lists = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), longest)
    else:
        raise TypeError(f"found must be a tensor or a list for each query, got {abbreviate(found)}")
    if len(lists) != queries:
        raise ValueError(f"found must have the {queries} queries of exact, got {len(lists)}")
    if lists.numel() and int(lists.min()) < -1:
        raise ValueError(f"found must hold documents from 0 on, or -1, got {int(lists.min())}")
    return torch.where(lists < 0, _NONE, lists)


def _document(x: Any) -> int:
    check_integer("found", x, "integers")
    return int(x)
