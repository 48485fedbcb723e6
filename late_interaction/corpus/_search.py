"""The search of a corpus: its arguments checked, its chunks scored, the best kept."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.tensors import check_not_meta, check_rising, check_same_dtype_and_d
from late_interaction._progress import reporter
from late_interaction._scoring.sequences import as_tokens, of_tensor
from late_interaction._search import group_search
from late_interaction._search.prepare import Options, Search, left_out
from late_interaction._search.selection import MOST_SCORES, Found, select_next
from late_interaction._search.stream import to_device
from late_interaction.codecs import Residual
from late_interaction.codes import Codes
from late_interaction.corpus import _chunks, _queries
from late_interaction.corpus._documents import Documents
from late_interaction.corpus._shards import Shard
from late_interaction.tokens import Tokens

# A search scores chunks of at most this many bytes of tokens; where a CPU makes a copy of each, of fewer, so
# that the copy stays in its caches and in memory that the process has already.
_BYTES, _BYTES_COPIED = 256 << 20, 4 << 20
_ALL_BYTES = 1 << 62  # where documents lie on the GPU that scores them, and no copy is made
# Where documents between deleted ones are put together, of so many, in memory that chunks share.
_BYTES_GATHERED = 16 << 20


class CorpusSearch(Search):
    """A search of documents that are packed in shards."""

    def __init__(self, corpus: Documents, Q: Any, options: Options) -> None:
        options.refuse("for a Corpus", "d_mask", "coarse", "candidates")
        corpus = corpus._snapshot()
        self._corpus, self._options, self.ids = corpus, options, corpus.ids
        # Whether documents are normalized in a copy.
        self._unit = options.normalize and not corpus.normalized and not isinstance(corpus.codec, Residual)
        if self._unit and corpus.codec is not None:
            raise ValueError(
                f"normalize must be False for codes of {corpus.codec} of tokens that were not normalized, got"
                " True"
            )
        self.one_query = isinstance(Q, Tensor) and Q.dim() == 2
        tokens = _tokens_of(Q, options.q_mask, corpus.d)
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
        with torch.no_grad():
            queries = _queries.prepare(corpus, self._found, options.normalize, options.precision)
            most = max(MOST_SCORES // max(queries.count, 1), 1)
            gathered = any(shard.is_sparse for shard in corpus.shards)
            copied = self._unit and queries.device.type == "cpu"
            own = _BYTES_COPIED if copied else _BYTES_GATHERED if gathered else _BYTES
            resident = queries.device.type == "cuda" and corpus.shards[0].tokens.is_cuda
            size = options.chunk_bytes or (own if self._unit or gathered or not resident else _ALL_BYTES)
            chunks = _chunks.plan(corpus.shards, size, most)
            with reporter(options.progress, len(corpus)) as report:
                return self._best(queries, chunks, report)

    def _best(self, queries: _queries.Queries, chunks: list[_chunks.Chunk], report: Any) -> Found:
        device, options = queries.device, self._options
        scores = torch.empty(queries.count, 0, dtype=torch.float32, device=device)
        indices = torch.empty(queries.count, 0, dtype=torch.int64, device=device)
        for chunk, sources in _chunks.on_device(chunks, device):
            found = queries.scores(chunk, sources)[:, :: chunk.step].contiguous()
            end = chunk.place + found.shape[1]
            out = None if self._left_out is None else self._left_out[chunk.place : end]
            out = None if out is None else to_device(out, device)
            empty = None if options.keep_empty else chunk.empty_documents(device)
            if empty is not None:
                out = empty if out is None else empty | out
            scores, indices = select_next(
                found, chunk.place, (scores, indices), options.k, options.largest, out
            )
            report(end)
        return scores, indices


class PackedSearch(CorpusSearch):
    """A search of packed Tokens, by queries of their dtype, or of packed Codes; None: of no document."""

    def __init__(self, D: Tokens | Codes | None, Q: Any, options: Options) -> None:
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


def _tokens_of(Q: Any, q_mask: Tensor | None, d: int) -> Tokens:
    """Return queries as Tokens of so many dims; d of 0: of any."""
    tokens = as_tokens("Q", Q, q_mask=q_mask)
    if isinstance(tokens, Tensor):
        tokens = of_tensor("Q", tokens, q_mask, (3, 2))
    if tokens.d != (d or tokens.d):
        raise ValueError(f"Q must have the d of the corpus, {d}, got {tokens.d}")
    return tokens  # type: ignore[no-any-return]


def _check_device(corpus: Documents, device: torch.device) -> None:
    for own in {shard.tokens.device for shard in corpus.shards}:
        if own != device and not (device.type == "cuda" and own.type == "cpu"):
            raise ValueError(
                "Q must be on the device of the corpus (or on a GPU where that is on the CPU), got"
                f" {device} and {own}"
            )
