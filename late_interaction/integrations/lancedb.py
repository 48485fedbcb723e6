"""A LanceDB reranker on these kernels: :func:`maxsim_reranker`, for lancedb 0.30 to 0.40."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag
from late_interaction.corpus import Corpus

__all__ = ["maxsim_reranker"]


def maxsim_reranker(
    query: Tensor | Callable[[str], Any],
    column: str = "vector",
    *,
    normalize: bool = False,
    return_score: Literal["relevance", "all"] = "relevance",
    device: torch.device | str | None = None,
) -> Any:
    """Make a ``lancedb.rerankers.base.Reranker`` that orders results by exact MaxSim of a multivector column.

    For ``.rerank(...)`` of a vector, full-text or hybrid search of LanceDB, synchronous or not. The column is
    scored where LanceDB put it, without a copy (on a GPU: with one). Equal scores stay in LanceDB's order; so
    do documents without tokens or with a score of NaN, behind all others and with a score of -inf.

    Args:
        query: what the results are scored with: a function that makes ``[L, d]`` embeddings of the query's
            text (a tensor, an array or lists), or one ``[L, d]`` tensor whatever the text is.
        column: the column of the results that has the documents: ``list<fixed_size_list<float>[d]>`` (or
            lists of lists) of float32 or float16, which ``select`` must keep.
        normalize: L2-normalize every token first.
        return_score: ``"relevance"``: results lose the scores of the search; ``"all"``: they keep them, and
            in a hybrid search a result has those of both searches, where both found it.
        device: where to score, such as ``"cuda"``. None: on the device of a tensor ``query``, else on the
            CPU.

    Returns:
        The reranker. Results get a float32 column ``_relevance_score``, the highest first.

    Raises:
        ImportError: lancedb is not installed.
        TypeError, ValueError: an argument of a wrong type or value; while it reranks: results without the
            column or with a null in it, and embeddings that are not ``[L, d]``.

    Example:
        >>> from late_interaction.integrations.lancedb import maxsim_reranker
        >>> reranker = maxsim_reranker(lambda text: model.encode_query(text))       # doctest: +SKIP
        >>> search = table.search(query_type="hybrid").vector(embeddings).text(text)  # doctest: +SKIP
        >>> best = search.rerank(reranker).limit(10).to_arrow()                     # doctest: +SKIP
    """
    if not isinstance(column, str):
        raise TypeError(f"column must be the name of a column, got {type(column).__name__}")
    if not isinstance(query, Tensor) and not callable(query):
        raise TypeError(f"query must be a function or a torch.Tensor, got {type(query).__name__}")
    if return_score not in ("relevance", "all"):
        raise ValueError(f"return_score must be 'relevance' or 'all', got {abbreviate(return_score)}")
    check_flag("normalize", normalize)
    return _reranker_class()(query, column, normalize, return_score, device)


@functools.cache
def _reranker_class() -> Any:
    """Make the class of the rerankers, once lancedb is there to derive it from."""
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        from lancedb.rerankers.base import Reranker
    except ImportError as error:
        raise ImportError("maxsim_reranker needs lancedb: pip install 'late-interaction[lancedb]'") from error

    class MaxSimReranker(Reranker):  # type: ignore[misc]  # lancedb is not typed
        """Made by :func:`late_interaction.integrations.lancedb.maxsim_reranker`."""

        def __init__(self, query: Any, column: str, normalize: bool, return_score: str, device: Any) -> None:
            super().__init__(return_score)
            self._query, self._column = query, column
            self._normalize, self._device = normalize, device

        def rerank_vector(self, query: str, vector_results: Any) -> Any:
            return self._rerank(query, vector_results)

        def rerank_fts(self, query: str, fts_results: Any) -> Any:
            return self._rerank(query, fts_results)

        def rerank_hybrid(self, query: str, vector_results: Any, fts_results: Any) -> Any:
            found = [x for x in (vector_results, fts_results) if len(x)]
            if len(found) < 2:
                return self._rerank(query, found[0] if found else vector_results)
            both = self.merge_results(vector_results, fts_results)
            if self.score == "all":  # a row of both searches came from the first of them
                rows = pc.index_in(both["_rowid"], fts_results["_rowid"])
                scores = pc.take(fts_results["_score"], rows)
                both = both.set_column(both.column_names.index("_score"), "_score", scores)
            return self._rerank(query, both)

        def _rerank(self, query: str, results: Any) -> Any:
            scores, order = self._score(query, results)
            if self.score == "relevance":
                kept = [name for name in results.column_names if name not in ("_distance", "_score")]
                results = results.select(kept)
            relevance = pa.array(scores.tolist(), pa.float32())
            return results.take(pa.array(order.tolist(), pa.int64())).append_column(
                "_relevance_score", relevance
            )

        def _score(self, query: str, results: Any) -> tuple[Tensor, Tensor]:
            """Return the scores of all results, best first, and the row of each."""
            if self._column not in results.column_names:
                raise ValueError(
                    f"results must have the column {self._column!r} to be reranked by it, got"
                    f" {', '.join(results.column_names)}: name it in select()"
                )
            if not len(results):
                return torch.empty(0, device="cpu"), torch.empty(0, device="cpu")
            Q = _embeddings(self._query, query, self._device)
            corpus = Corpus.from_arrow(results[self._column], d=Q.shape[1])
            scores, order = corpus.search(Q, len(results), normalize=self._normalize)
            return scores, _with_all_rows(order.cpu())

    return MaxSimReranker


def _with_all_rows(order: Tensor) -> Tensor:
    """Return the rows that a search ranked, and in the places of no document the others, rising."""
    ranked = order[order >= 0]
    rest = torch.ones(len(order), dtype=torch.bool, device="cpu")
    rest[ranked] = False
    return torch.cat((ranked, rest.nonzero().flatten()))


def _embeddings(query: Any, text: str, device: Any) -> Tensor:
    """Return the query's ``[L, d]`` tokens on the device."""
    found = query if isinstance(query, Tensor) else query(text)
    Q = found.detach() if isinstance(found, Tensor) else torch.as_tensor(found)
    if Q.dim() != 2:
        raise ValueError(f"query must be, or make, [L, d] embeddings, got {shape_of(Q)}")
    if not Q.is_floating_point():
        raise TypeError(f"query must be, or make, floating-point embeddings, got {Q.dtype}")
    return Q.to("cpu" if device is None and not isinstance(query, Tensor) else device or Q.device)
