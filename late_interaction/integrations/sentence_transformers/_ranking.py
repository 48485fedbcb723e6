"""Sentence Transformers' retrieval evaluator, ranking as it scores.

Its own ``compute_all_metrics`` scores a chunk of 5,000 documents at a time and merges each query's hits in
Python. Here the best documents of each query stay on the device until the corpus has passed, in the same
order: by descending score, and equal scores by ascending id.
"""

import inspect
import logging
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from late_interaction._search.selection import MOST_SCORES, NO_DOCUMENT, select
from late_interaction.integrations._shared import calls
from late_interaction.integrations._shared.compat import TURNED_OFF
from late_interaction.integrations.sentence_transformers import _similarity as ours
from late_interaction.integrations.sentence_transformers._originals import (
    PACKAGE,
    SIMILARITY,
    disabled,
    module,
)

Score = Callable[[Any, Any], Tensor]
Hits = list[list[dict[str, Any]]]


def ranked_on_the_device(original: FunctionType) -> Callable[..., Any]:
    """Take the place of ``InformationRetrievalEvaluator.compute_all_metrics``."""

    def compute_all_metrics(
        self: Any,
        model: Any,
        corpus_model: Any = None,
        corpus_embeddings: Any = None,
        output_path: str | None = None,
    ) -> Any:
        known = all(map(_is_maxsim, self.score_functions.values()))
        written = self.write_predictions and output_path is not None
        listed = corpus_embeddings is None or isinstance(corpus_embeddings, list)
        reason = TURNED_OFF if disabled() else None if known else "other score functions"
        if reason is None and (written or not listed):
            reason = "predictions to write" if written else "corpus embeddings that are no list"
        if reason is not None:
            calls.left(PACKAGE, type(self).__name__, reason)
            return original(self, model, corpus_model, corpus_embeddings, output_path)
        hits = _ranked(self, original, model, corpus_model or model, corpus_embeddings)
        return _reported(self, original, hits)

    compute_all_metrics.__doc__ = original.__doc__
    return compute_all_metrics


def signature_fits(function: Any) -> bool:
    """Tell whether a method is what :func:`ranked_on_the_device` takes the place of."""
    if not isinstance(function, FunctionType) or not {"trange", "logger"} <= function.__globals__.keys():
        return False
    return [*inspect.signature(function).parameters] == [
        "self", "model", "corpus_model", "corpus_embeddings", "output_path",
    ]  # fmt: skip


def _is_maxsim(score: Any) -> bool:
    """Tell whether a score is of a query and a document alone, so that any part of the corpus has its own."""
    if isinstance(score, partial):
        if score.args or not score.keywords.keys() <= {"chunk_elements", "length_normalize", "device"}:
            return False
        score = score.func
    theirs = module(SIMILARITY)
    known = (theirs.maxsim, theirs.mean_maxsim, ours.maxsim, ours.mean_maxsim)
    return any(score is function for function in known)


class _Best:
    """The k best documents of each query so far.

    Documents are named by the rank of their ids, which breaks ties.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.scores: Tensor | None = None
        self.ranks: Tensor | None = None

    def add(self, scores: Tensor, ranks: Tensor) -> None:
        """Scores ``[Nq, documents]`` of documents with these ranks, ``[documents]``."""
        places = ranks.to(scores.device).expand(scores.shape)
        if self.scores is not None and self.ranks is not None:
            scores = torch.cat((self.scores, scores), dim=1)
            places = torch.cat((self.ranks, places), dim=1)
        self.scores, self.ranks = select(scores, places, self.k, True)


def _ranked(
    evaluator: Any, original: FunctionType, model: Any, corpus_model: Any, corpus_embeddings: Any
) -> dict[str, Hits]:
    """Each score function's hits, by query, best first."""
    queries = evaluator.embed_inputs(
        model, evaluator.queries, encode_fn_name="query", prompt_name=evaluator.query_prompt_name,
        prompt=evaluator.query_prompt,
    )  # fmt: skip
    count, size = len(evaluator.corpus), evaluator.corpus_chunk_size
    ranks, k = evaluator.get_corpus_id_ranks(), _most_hits(evaluator)
    best = {name: _Best(k) for name in evaluator.score_functions}
    bar = original.__globals__["trange"]
    for start in bar(0, count, size, desc="Corpus Chunks", disable=not evaluator.show_progress_bar):
        end = min(start + size, count)
        if corpus_embeddings is None:
            documents = evaluator.embed_inputs(
                corpus_model, evaluator.corpus[start:end], encode_fn_name="document",
                prompt_name=evaluator.corpus_prompt_name, prompt=evaluator.corpus_prompt,
            )  # fmt: skip
        else:
            documents = corpus_embeddings[start:end]
        step = max(MOST_SCORES // max(len(queries), 1), 1)
        for name, score in evaluator.score_functions.items():
            for first in range(0, end - start, step):
                part = documents[first : first + step]
                best[name].add(score(queries, part), ranks[start + first : start + first + len(part)])
    names = [evaluator.corpus_ids[i] for i in ranks.argsort().tolist()]
    return {name: _listed(found, names, len(queries)) for name, found in best.items()}


def _most_hits(evaluator: Any) -> int:
    metrics = ("mrr", "ndcg", "accuracy", "precision_recall", "map")
    return max(k for metric in metrics for k in getattr(evaluator, f"{metric}_at_k"))


def _listed(best: _Best, names: list[str], queries: int) -> Hits:
    """Convert them as the evaluator's metrics take them."""
    if best.scores is None or best.ranks is None:
        return [[] for _ in range(queries)]
    return [
        [
            {"corpus_id": names[rank], "score": score}
            for rank, score in zip(ranks, scores, strict=True)
            if rank != NO_DOCUMENT
        ]
        for ranks, scores in zip(best.ranks.tolist(), best.scores.tolist(), strict=True)
    ]


def _reported(evaluator: Any, original: FunctionType, hits: dict[str, Hits]) -> dict[str, Any]:
    """Return the metrics, with the evaluator's own lines in the log."""
    logger: logging.Logger = original.__globals__["logger"]
    logger.info(f"Queries: {len(evaluator.queries)}")
    logger.info(f"Corpus: {len(evaluator.corpus)}\n")
    scores = {name: evaluator.compute_metrics(found) for name, found in hits.items()}
    for name in evaluator.score_function_names:
        logger.info(f"Score-Function: {name}")
        evaluator.output_scores(scores[name])
    return scores
