"""Exact search of padded tokens, or of their codes."""

from typing import Any

from torch import Tensor

from late_interaction._checks.search import check_corpus
from late_interaction._search import group_search
from late_interaction._search.prepare import Options, Search, left_out, padded
from late_interaction._search.selection import Found
from late_interaction._search.topk import TopK


class DenseSearch(Search):
    """A search of documents ``[Nd, Ld, d]``."""

    def __init__(self, D: Any, Q: Any, options: Options) -> None:
        self._options, self.one_query = options, isinstance(Q, Tensor) and Q.dim() == 2
        Q, q_mask = padded("Q", Q, options.q_mask)
        D, d_mask = padded("D", D, options.d_mask)
        self._given, self._scales = (Q, options.k, q_mask), (options.scale_Q, options.scale_D)
        self._best = self._made()
        self._corpus = check_corpus(Q, D, q_mask, d_mask, *self._scales)
        Q, D, q_mask, *_ = self._corpus
        self._left_out = left_out(options.subset, len(D), None, D.device)
        self.queries = None if options.scale_Q is not None else (Q, q_mask)

    def _made(self) -> TopK:
        return TopK(*self._given, scale_Q=self._scales[0], **self._options.shared())

    def run(self, documents: int | None) -> Found:
        if self._best.seen:  # a group searches again, knowing the number of all documents
            self._best = self._made()
        best, options = self._best, self._options
        best._add_checked(self._corpus, options.chunk_bytes, options.progress, documents, self._left_out)
        return best._scores, best._indices

    def as_query(self) -> group_search.Query:
        options = self._options
        return group_search.query_of(
            self._corpus, self._best._scores.dtype, options.k, options.progress is False, options.shared()
        )
