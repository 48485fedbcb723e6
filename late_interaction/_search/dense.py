"""Exact search of padded tokens, or of their codes."""

from typing import Any

from torch import Tensor

from late_interaction._search import group_search
from late_interaction._search.equal_plans import enough
from late_interaction._search.prepare import Options, Search, left_out
from late_interaction._search.selection import Found
from late_interaction._search.topk import TopK
from late_interaction.codes import Codes


class DenseSearch(Search):
    """A search of documents ``[Nd, Ld, d]``, or of codes of them."""

    def __init__(self, D: Any, Q: Any, options: Options) -> None:
        options.refuse("but for a Corpus with columns", "filter")
        self._options, self.one_query = options, isinstance(Q, Tensor) and Q.dim() == 2
        self._given = Q, options.k, options.q_mask
        self._best = self._made()
        self._piece = self._best._piece(D, options.d_mask)
        documents = self._piece.documents
        self._left_out = left_out(options.subset, len(documents), None, documents.device)
        self.queries = None if isinstance(Q, Codes) else (self._piece.values, self._piece.queries[1])

    def _made(self) -> TopK:
        return TopK(*self._given, **self._options.shared())

    def run(self, documents: int | None) -> Found:
        if self._best.seen:  # a group searches again, knowing the number of all documents
            self._best = self._made()
        best, options = self._best, self._options
        best._add_checked(self._piece, options.chunk_bytes, options.progress, documents, self._left_out)
        return best._scores, best._indices

    def as_query(self) -> group_search.Query:
        piece, options = self._piece, self._options
        Q, D = piece.values, piece.documents
        return group_search.Query(
            tensors=piece.queries,
            count=Q.shape[0],
            k=options.k,
            **options.shared(),
            query_dtype=Q.dtype,
            dtype=self._best._scores.dtype,
            documents=D.shape[0],
            runs_ahead=Q.is_cuda and D.is_cuda and options.progress is False,
            needs_total=not enough(D),
        )
