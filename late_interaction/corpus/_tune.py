"""The choice of a first pass by what it finds and how long it takes: :func:`tune`."""

import time
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._search.result import SearchResult
from late_interaction.corpus import _first_pass
from late_interaction.corpus._search import tokens_of
from late_interaction.evaluation import evaluate_recall

# So many documents more than k are searched exactly, for those that tie with the last of k.
_TIES = 20


def tune(
    corpus: Any, Q: Any, k: int, recall: float, q_mask: Tensor | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Do what :meth:`late_interaction.Corpus.tune` says."""
    if isinstance(recall, bool) or not isinstance(recall, (int, float)):
        raise TypeError(f"recall must be a number, got {abbreviate(recall)}")
    if not 0 < recall <= 1:
        raise ValueError(f"recall must be above 0 and at most 1, got {recall}")
    for name in ("coarse", "candidates"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name} must be None for tune, which chooses it, got {abbreviate(options[name])}"
            )
    corpus = corpus._snapshot()
    queries = [x.unsqueeze(0) for x in tokens_of(Q, q_mask, corpus.d)]
    if not queries:
        raise ValueError("Q must be one query at least, got none")
    exact, best = _timed(corpus, queries, k + _TIES, options)
    chosen: dict[str, Any] = {"coarse": None, "candidates": None}
    print(f"coarse      candidates  recall@{k}  ms a query")
    _print("none", len(corpus), k, 1.0, best)
    for coarse in _first_pass.passes_of(corpus.codec):
        candidates, found = 2 * k, 0.0
        while found < recall and candidates < len(corpus):
            setting = {"coarse": coarse, "candidates": candidates}
            result, took = _timed(corpus, queries, k, options | setting)
            found = evaluate_recall(result, exact, k)[k]
            _print(coarse, candidates, k, found, took)
            if found >= recall and took < best:
                chosen, best = setting, took
            if took >= best:  # and more candidates take longer
                break
            candidates *= 2
    return chosen


def _print(coarse: str, candidates: int, k: int, recall: float, took: float) -> None:
    print(f"{coarse:10}  {candidates:10}  {recall:{len(f'recall@{k}')}.3f}  {took:10.2f}", flush=True)


def _timed(corpus: Any, queries: list[Tensor], k: int, options: dict[str, Any]) -> tuple[SearchResult, float]:
    """Search for one query after the other: what is found, and the median of milliseconds."""
    corpus.search(queries[0], k, **options)  # makes what the first pass keeps
    found, times = [], []
    for query in queries:
        start = time.perf_counter()
        result = corpus.search(query, k, **options)
        found.append((result.scores.cpu(), result.indices.cpu()))  # waits for a GPU
        times.append(1000 * (time.perf_counter() - start))
    scores, indices = zip(*found, strict=True)
    return SearchResult(torch.cat(scores), torch.cat(indices)), sorted(times)[len(times) // 2]
