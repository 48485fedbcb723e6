"""LanceDB (0.30 to 0.40) on these kernels: a reranker, and tables as corpora.

:func:`maxsim_reranker`, :func:`open_corpus`.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag
from late_interaction.corpus import Corpus, _arrow, _parquet, _shards
from late_interaction.corpus._columns import import_pyarrow
from late_interaction.corpus._shards import Shard

__all__ = ["maxsim_reranker", "open_corpus"]

# A search reads about so many bytes of a table at a time; so many rows where their lengths are not known.
_BLOCK_BYTES, _ROWS = 32 << 20, 256


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
    _check_name("column", column)
    if not isinstance(query, Tensor) and not callable(query):
        raise TypeError(f"query must be a function or a torch.Tensor, got {type(query).__name__}")
    if return_score not in ("relevance", "all"):
        raise ValueError(f"return_score must be 'relevance' or 'all', got {abbreviate(return_score)}")
    check_flag("normalize", normalize)
    return _reranker_class()(query, column, normalize, return_score, device)


def _check_name(name: str, column: Any) -> None:
    if not isinstance(column, str):
        raise TypeError(f"{name} must be the name of a column, got {type(column).__name__}")


def _missing(name: str) -> ImportError:
    return ImportError(f"{name} needs lancedb: pip install 'late-interaction[lancedb]'")


@functools.cache
def _reranker_class() -> Any:
    """Make the class of the rerankers, once lancedb is there to derive it from."""
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        from lancedb.rerankers.base import Reranker
    except ImportError as error:
        raise _missing("maxsim_reranker") from error

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


# ---- a table as a corpus ----


def open_corpus(
    table: Any, column: str = "vector", *, id_column: str | None = None, normalized: bool = False
) -> Corpus:
    """Open a multivector column of a table as a corpus, which reads it block by block as it is searched.

    The table is neither copied nor changed: a search holds about 32 MiB of it, and one of the same block, or
    of a table that small, reads nothing again. Documents are the rows that the table has now, in its order; a
    table at another version than now is refused when it is read. LanceDB scores cosines: search with
    ``normalize=True``. To change the documents, :meth:`~late_interaction.Corpus.extend` another corpus by
    these. A pickle holds all of them.

    Args:
        table: a ``lancedb.table.Table``, as ``lancedb.connect(...).open_table(...)`` opens it.
        column: the column that has the documents: ``list<fixed_size_list<float>[d]>`` of float32 or float16.
        id_column: a column of strings or integers that become ids, or None.
        normalized: whether every token has norm 1, which is not checked.

    Returns:
        The corpus, on the CPU.

    Raises:
        ImportError: lancedb is not installed.
        TypeError: another kind of table or of column.
        ValueError: no such column; a null document, token or id. The message names the row. While it is
            searched: the table is at another version.

    Complexity: reads the column once, for the lengths of documents.

    Example:
        >>> from late_interaction.integrations.lancedb import open_corpus
        >>> corpus = open_corpus(database.open_table("documents"), id_column="id")      # doctest: +SKIP
        >>> scores, rows = corpus.search(embeddings, k=10, normalize=True)             # doctest: +SKIP
    """
    try:
        from lancedb.table import Table
    except ImportError as error:
        raise _missing("open_corpus") from error
    if not isinstance(table, Table):
        raise TypeError(f"table must be a lancedb.table.Table, got {type(table).__name__}")
    check_flag("normalized", normalized)
    for name, own in {"column": column, "id_column": column if id_column is None else id_column}.items():
        _check_name(name, own)
        if own not in table.schema.names:
            raise ValueError(f"{name} must be one of {', '.join(table.schema.names)}, got {own!r}")
    rows = _Rows(table, column)
    lengths, ids = rows.scan(id_column)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    size = max(_BLOCK_BYTES // (rows.d * rows.dtype.itemsize), 1)
    shards = [
        TableShard(
            rows.blank.expand(int(offsets[stop] - offsets[first]), rows.d),
            offsets[first : stop + 1] - offsets[first],
            ids=None if ids is None else ids[first:stop],
            table=rows,
            span=(first, stop),
        )
        for first, stop in Shard(rows.blank, offsets).ranges(size, len(lengths))
    ]
    kind = {"d": rows.d, "dtype": rows.dtype, "normalized": normalized, "source": "a table of LanceDB"}
    return Corpus(shards, kind)


class _Rows:
    """A column of one version of a table, of which the rows that were read last are kept."""

    def __init__(self, table: Any, column: str) -> None:
        self._table, self._column, self._version = table, column, table.version
        found = table.schema.field(column).type
        d, self.dtype = _arrow.check_type(import_pyarrow(), found, 1)
        if d is None:
            raise TypeError(f"column must be list<fixed_size_list<float>>, got {found}: cast it")
        self.d = d
        self.blank = torch.empty(
            1, d, dtype=self.dtype, device="cpu"
        )  # expanded: the shape of what is not read
        self._lock = threading.Lock()
        self._last: tuple[tuple[int, int], Tensor] | None = None

    def scan(self, id_column: str | None) -> tuple[Tensor, list[str] | None]:
        """Read the lengths of all documents, and their ids."""
        names = [self._column] if id_column is None else [self._column, id_column]
        found = self._table.search().select(names).limit(max(self._table.count_rows(), 1)).to_batches(_ROWS)
        lengths, ids, row = [torch.empty(0, dtype=torch.int64, device="cpu")], list[str](), 0
        for batch in found:
            shards, _ = _arrow.shards_of(batch[self._column], self.d, row)
            lengths += [shard.offsets.diff() for shard in shards]
            if id_column is not None:
                ids += _parquet.ids_of(batch[id_column], row)
            row += len(batch)
        self._check_version()
        return torch.cat(lengths), None if id_column is None else ids

    def tokens(self, first: int, stop: int) -> Tensor:
        """Read the tokens of rows [first, stop)."""
        with self._lock:
            if self._last is None or self._last[0] != (first, stop):
                query = self._table.search().select([self._column]).offset(first).limit(stop - first)
                shards, _ = _arrow.shards_of(query.to_arrow()[self._column], self.d, first)
                self._check_version()
                parts = [shard.tokens for shard in shards]
                self._last = (first, stop), parts[0] if len(parts) == 1 else torch.cat(parts)
            return self._last[1]

    def _check_version(self) -> None:
        if self._table.version != self._version:
            raise ValueError(
                f"the table must be at version {self._version}, as when its corpus was opened, got"
                f" {self._table.version}: open it again"
            )


@dataclass(frozen=True)
class TableShard(Shard):
    """Rows span[0] up to span[1] of a table. ``tokens`` has their shape alone."""

    table: _Rows | None = None
    span: tuple[int, int] = (0, 0)

    def stored(self, rows: list[slice] | Tensor, room: Any = (None, None)) -> tuple[Tensor, Tensor | None]:
        if self.table is None or self.tokens.data_ptr() != self.table.blank.data_ptr():
            return super().stored(rows, room)  # something else that is stored of these documents
        return _shards.at(self.table.tokens(*self.span), rows, room[0]), None

    def compact(self) -> Shard:
        own = super().compact()
        return Shard(own.tokens, own.offsets, None, own.ids)
