"""The search of a corpus: its arguments checked, its chunks scored, the best kept."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import check_not_meta, check_rising, check_same_dtype_and_d
from late_interaction._progress import reporter
from late_interaction._scoring.sequences import as_tokens, of_tensor
from late_interaction._search import group_search
from late_interaction._search.first_pass import check_candidates
from late_interaction._search.prepare import Options, Search, left_out
from late_interaction._search.selection import MOST_SCORES, NO_DOCUMENT, Found, select_next
from late_interaction._search.stream import to_device
from late_interaction.codecs import Residual
from late_interaction.codes import Codes
from late_interaction.corpus import _chunks, _first_pass, _queries, _shards
from late_interaction.corpus._documents import Documents
from late_interaction.corpus._shards import Shard
from late_interaction.tokens import Tokens

# A search scores chunks of at most this many bytes of tokens; where a CPU makes a copy of each, of fewer, so
# that the copy stays in its caches and in memory that the process has already.
_BYTES, _BYTES_COPIED = 256 << 20, 4 << 20
_ALL_BYTES = 1 << 62  # where documents lie on the GPU that scores them, and no copy is made
# Where a CPU puts documents between deleted ones together, of so many, in memory that chunks share.
_BYTES_GATHERED = 16 << 20
# A GPU scores so many queries with the candidates of all of them: what it multiplies in vain takes less than
# a call for each.
_QUERIES_AT_ONCE = 32


def _quiet(_: int) -> None:
    """Report nothing."""


class CorpusSearch(Search):
    """A search of documents that are packed in shards."""

    def __init__(self, corpus: Documents, Q: Any, options: Options) -> None:
        options.refuse("for a Corpus", "d_mask")
        corpus = corpus._snapshot()
        if options.coarse is None:
            options.refuse("without coarse", "candidates")
        else:
            options.refuse("with coarse", "group")
            _first_pass.check_coarse(options.coarse, corpus.codec)
            self._candidates = check_candidates(options.candidates, options.k)
        self._corpus, self._options, self.ids = corpus, options, corpus.ids
        # Whether documents are normalized in a copy.
        self._unit = options.normalize and not corpus.normalized and not isinstance(corpus.codec, Residual)
        if self._unit and corpus.codec is not None:
            raise ValueError(
                f"normalize must be False for codes of {corpus.codec} of tokens that were not normalized, got"
                " True"
            )
        self.one_query = isinstance(Q, Tensor) and Q.dim() == 2
        tokens = tokens_of(Q, options.q_mask, corpus.d)
        self._device = tokens.device
        if len(tokens):
            _check_device(corpus, tokens.device)
        self._found = list(tokens)
        self.queries = (self._found, None) if self._found and len(corpus) else None
        self._left_out = left_out(options.subset, len(corpus), corpus.ids, torch.device("cpu"))
        if options.filter is not None:
            out = torch.logical_not(corpus._where(options.filter))
            self._left_out = out if self._left_out is None else self._left_out | out

    def as_query(self) -> group_search.Query:
        lengths = torch.tensor([len(x) for x in self._found], device="cpu")
        return group_search.Query(
            tensors=[lengths, *self._found],
            count=len(self._found),
            k=self._options.k,
            **self._options.shared(),
            query_dtype=self._found[0].dtype if self._found else torch.float32,
            dtype=torch.float32,
            documents=len(self._corpus),
        )

    def run(self, documents: int | None) -> Found:
        corpus, options = self._corpus, self._options
        if not self._found or not len(corpus):
            shape = len(self._found), min(options.k, len(corpus))
            none = torch.empty(shape, dtype=torch.float32, device=self._device)
            return none, none.to(torch.int64)
        with torch.no_grad(), reporter(options.progress, len(corpus)) as report:
            if options.coarse is not None:
                return self._among_candidates(self._rough(report))
            queries = self._prepared(self._found)
            return self._best(queries, corpus.shards, options.k, self._left_out, report)

    def _prepared(self, Q: list[Tensor]) -> _queries.Queries:
        return _queries.prepare(self._corpus, Q, self._options.normalize, self._options.precision)

    def _rough(self, report: Any) -> Tensor:
        """Return the candidates of each query, rising, on the CPU; -1, first, for no document."""
        corpus, options, out = self._corpus, self._options, self._left_out
        if not options.keep_empty and any(shard.has_empty_documents for shard in corpus.shards):
            empty = torch.cat([shard.offsets.diff() == 0 for shard in corpus.shards])
            out = empty if out is None else empty | out
        # Lists of centroids are looked through for one query after the other.
        groups = [[x] for x in self._found] if options.coarse == "centroids" else [self._found]
        found: list[Tensor] = []
        for Q in groups:
            queries, shards = _first_pass.prepare(corpus, Q, options)
            own = _quiet if found else report  # it counts documents, once
            found.append(self._best(queries, shards, self._candidates, out, own)[1])
        return torch.cat(found).cpu().sort(dim=1).values

    def _among_candidates(self, candidates: Tensor) -> Found:
        """Score each query with its own candidates, as if the corpus had no other documents."""
        k, shape = self._options.k, (len(self._found), min(self._options.k, len(self._corpus)))
        worst = -torch.inf if self._options.largest else torch.inf
        scores = torch.full(shape, worst, dtype=torch.float32, device=self._device)
        indices = torch.full(shape, NO_DOCUMENT, dtype=torch.int64, device=self._device)
        at_once = _QUERIES_AT_ONCE if self._device.type == "cuda" else 1
        for first in range(0, len(self._found), at_once):
            queries, own = self._found[first : first + at_once], candidates[first : first + at_once]
            numbers = own[own != NO_DOCUMENT].unique()
            shards = _shards.chosen(self._corpus.shards, numbers)
            if not shards:
                continue
            others = _others(own, numbers) if len(queries) > 1 else None
            found, places = self._best(self._prepared(queries), shards, k, others, _quiet)
            numbers = to_device(numbers, self._device)
            some = slice(first, first + len(queries)), slice(found.shape[1])
            scores[some] = found
            indices[some] = numbers[places].where(places != NO_DOCUMENT, NO_DOCUMENT)
        return scores, indices

    def _plan(self, queries: _queries.Queries, shards: Sequence[Shard]) -> list[_chunks.Chunk]:
        most = max(MOST_SCORES // max(queries.count, 1), 1)
        gathered = any(shard.is_sparse for shard in shards)
        copied = self._unit and queries.device.type == "cpu"
        by_cpu = gathered and shards[0].tokens.is_cpu
        own = _BYTES_COPIED if copied else _BYTES_GATHERED if by_cpu else _BYTES
        resident = queries.device.type == "cuda" and shards[0].tokens.is_cuda
        whole = resident and not self._unit and not gathered
        size = self._options.chunk_bytes or (_ALL_BYTES if whole else own)
        return _chunks.plan(shards, size, most)

    def _best(
        self, queries: _queries.Queries, shards: Sequence[Shard], k: int, left_out: Tensor | None, report: Any
    ) -> Found:
        """Find the k best documents of shards, numbered from the first of these.

        left_out: bool, ``[documents]``, or a row for each query.
        """
        device, options = queries.device, self._options
        scores = torch.empty(queries.count, 0, dtype=torch.float32, device=device)
        indices = torch.empty(queries.count, 0, dtype=torch.int64, device=device)
        for chunk, sources in _chunks.on_device(self._plan(queries, shards), device):
            found = queries.scores(chunk, sources)[:, :: chunk.step].contiguous()
            end = chunk.place + found.shape[1]
            out = None if left_out is None else left_out[..., chunk.place : end]
            out = None if out is None else to_device(out, device)
            empty = None if options.keep_empty else chunk.empty_documents(device)
            if empty is not None:
                out = empty if out is None else empty | out
            scores, indices = select_next(found, chunk.place, (scores, indices), k, options.largest, out)
            report(end)
        return scores, indices


def _others(candidates: Tensor, numbers: Tensor) -> Tensor:
    """Tell which of all candidates, rising, are none of each query's own; -1 is no document."""
    places = torch.searchsorted(numbers, candidates).masked_fill(candidates == NO_DOCUMENT, len(numbers))
    others = torch.ones(len(candidates), len(numbers) + 1, dtype=torch.bool, device="cpu")
    return others.scatter_(1, places, False)[:, :-1]


class PackedSearch(CorpusSearch):
    """A search of packed Tokens, by queries of their dtype, or of packed Codes; None: of no document."""

    def __init__(self, D: Tokens | Codes | None, Q: Any, options: Options) -> None:
        options.refuse("for packed documents", "coarse", "candidates")
        if D is None:
            documents = Documents([], {"d": 0, "dtype": torch.float32, "normalized": False})
        elif isinstance(D, Codes):
            documents = _documents_of(D)
        else:
            documents = Documents.from_packed(D.values.contiguous(), D.offsets)  # type: ignore[arg-type]
        super().__init__(documents, Q, options)
        if isinstance(D, Tokens) and self._found:
            check_same_dtype_and_d(self._found[0], D.values)


def _documents_of(D: Codes) -> Documents:
    """Return documents over packed codes, of codecs as well that no corpus stores."""
    assert D.offsets is not None
    check_not_meta("D", D.values)
    offsets, beside = D.offsets.cpu(), D.scales if D.centroids is None else D.centroids
    check_rising("offsets", offsets, D.values.shape[0])
    beside = None if beside is None else beside.contiguous()
    shard = Shard(D.values.contiguous(), offsets, beside, None, D.codec)
    return Documents([shard], {"d": D.d, "dtype": D.values.dtype, "codec": D.codec, "normalized": False})


def tokens_of(Q: Any, q_mask: Tensor | None, d: int) -> Tokens:
    """Return queries as Tokens of so many dims; d of 0: of any."""
    tokens = as_tokens("Q", Q, q_mask=q_mask)
    if isinstance(tokens, Tensor):
        tokens = of_tensor("Q", tokens, q_mask, (3, 2))
    if tokens.d != (d or tokens.d):
        raise ValueError(f"Q must have the d of the corpus, {d}, got {tokens.d}")
    return tokens


def _check_device(corpus: Documents, device: torch.device) -> None:
    for own in {shard.tokens.device for shard in corpus.shards}:
        if own != device and not (device.type == "cuda" and own.type == "cpu"):
            raise ValueError(
                "Q must be on the device of the corpus (or on a GPU where that is on the CPU), got"
                f" {device} and {own}"
            )
