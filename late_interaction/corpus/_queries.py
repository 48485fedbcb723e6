"""Queries of a search, as the operators for what a corpus stores take them, and their scores of a chunk.

Floats go to :func:`late_interaction.maxsim` as packed Tokens, and codes to their packed operators.
"""

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from late_interaction import ops
from late_interaction._checks.options import Precision
from late_interaction._maxsim import maxsim
from late_interaction._scoring.norm_warning import unwatched
from late_interaction._scoring.precision import float32_precision
from late_interaction._search.stream import to_device
from late_interaction.codecs import Codec, Residual
from late_interaction.codecs._index_files import mirror_dims
from late_interaction.codes import Codes
from late_interaction.corpus import _tokens
from late_interaction.corpus._chunks import Chunk
from late_interaction.corpus._documents import Documents
from late_interaction.corpus._indexes import IndexShard
from late_interaction.tokens import Tokens

# What maxsim_residual_normed takes, and how many documents give every warp some.
_NORMED_DIMS, _NORMED_DOCUMENTS = 128, 4096
_UNIT = 1e-4  # how far from 1 the norm of a unit vector is


class Queries(ABC):
    """Queries in the form that what a corpus stores wants."""

    def __init__(self, Q: list[Tensor]) -> None:
        self.count, self.device = len(Q), Q[0].device

    @abstractmethod
    def scores(self, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        """Score a chunk, whose sources are on the device: ``[queries, documents]``."""


def prepare(corpus: Documents, Q: list[Tensor], normalize: bool, precision: Precision | None) -> Queries:
    if isinstance(corpus.codec, Residual):
        if isinstance(corpus.shards[0], IndexShard):
            return _OfIndexFiles(Q, corpus.shards[0], normalize, precision)
        return _OfResiduals(Q, corpus.codec, normalize, precision, len(corpus) >= _NORMED_DOCUMENTS)
    if normalize:
        Q = [_tokens.unit(x.to(torch.float32)) for x in Q]
    if corpus.codec is not None:
        return _OfCodes(Q, corpus.codec)
    return _OfFloats(Q, corpus.dtype, normalize and not corpus.normalized, precision)


class _OfFloats(Queries):
    """normalize: divide the tokens of documents by their norms; queries are normalized already."""

    def __init__(
        self, Q: list[Tensor], dtype: torch.dtype, normalize: bool, precision: Precision | None
    ) -> None:
        super().__init__(Q)
        self._normalize, self._precision = normalize, precision
        self._queries = Tokens.from_list([x.to(dtype) for x in Q])

    def scores(self, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        tokens = _tokens.unit(sources[0]) if self._normalize else sources[0]
        documents = Tokens._made(tokens, None, chunk.offsets(self.device))
        return unwatched(maxsim, self._queries, documents, precision=self._precision)


class _OfResiduals(Queries):
    """Padded with zeros, whose similarities and maxima are 0, normalized or not."""

    def __init__(
        self, Q: list[Tensor], codec: Residual, normalize: bool, precision: Precision | None, many: bool
    ) -> None:
        super().__init__(Q)
        self._codec, self._many = codec.to(self.device), many
        self._normalize = normalize
        self._precision = precision or float32_precision(self.device.type)
        self._tokens = pad_sequence([x.to(codec.centroids.dtype) for x in Q], batch_first=True)

    def scores(self, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        return self._scores_of(self._tokens, chunk, sources)

    def _scores_of(self, tokens: Tensor, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        residuals, codes = sources
        cu_seqlens = chunk.offsets(self.device)
        codec, op = self._codec, cast("Any", ops.maxsim_residual)
        if self._takes_norms(chunk):
            norms = chunk.inverse_norms() if self._normalize else None
            op = cast("Any", ops.maxsim_residual_normed)
            return op(tokens, codes, residuals, norms, cu_seqlens, codec.centroids, codec.bucket_weights)
        return op(
            tokens, codes, residuals, cu_seqlens, codec.centroids, codec.bucket_weights, codec.nbits,
            self._normalize, self._precision,
        )  # fmt: skip

    def _takes_norms(self, chunk: Chunk) -> bool:
        """Whether no token needs to be decompressed: on a GPU that holds many documents."""
        tokens, codec = chunk.shard.tokens, self._codec
        return (
            tokens.is_cuda
            and codec.nbits == 2
            and codec.d == _NORMED_DIMS
            and self._tokens.dtype in (torch.float16, torch.bfloat16)
            and self._many  # in the corpus: how it is cut into chunks changes no bit of a score
        )


class _OfIndexFiles(_OfResiduals):
    """Queries in mirrored dims, which documents of index files meet as unit vectors.

    The operator normalizes queries with documents. Where that would change them, and nobody asks for it, each
    of their tokens is a query whose scores are multiplied by its norm.
    """

    def __init__(
        self, Q: list[Tensor], shard: IndexShard, normalize: bool, precision: Precision | None
    ) -> None:
        codec = cast("Residual", shard.mirrored)
        super().__init__(Q, codec, True, precision, False)
        self._tokens = mirror_dims(self._tokens, codec.nbits)
        norms = torch.linalg.vector_norm(self._tokens, dim=-1)
        unit = ((norms - 1).abs() < _UNIT) | (norms == 0)
        self._norms = None if normalize or bool(unit.all()) else norms

    def scores(self, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        if self._norms is None:
            return super().scores(chunk, sources)
        pairs = zip(self._tokens.unsqueeze(2), self._norms.unsqueeze(2), strict=True)
        return torch.stack([(norms * self._scores_of(q, chunk, sources)).sum(0) for q, norms in pairs])


class _OfCodes(Queries):
    """Queries are padded to the longest, and encoded once."""

    def __init__(self, Q: list[Tensor], codec: Codec) -> None:
        super().__init__(Q)
        padded, lengths = pad_sequence(Q, batch_first=True), [len(x) for x in Q]
        mask = None
        if min(lengths) < max(lengths):
            ends = torch.tensor(lengths, device="cpu").unsqueeze(1)
            mask = to_device(torch.arange(padded.shape[1], device="cpu") < ends, self.device)
        self._codec, self._d = codec, padded.shape[2]
        self._codes = codec._encode_queries(Tokens._made(padded, mask))

    def scores(self, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        values, *scales = sources
        documents = Codes._made(
            self._codec, self._d, values=values, scales=scales[0] if scales else None,
            offsets=chunk.offsets(self.device),
        )  # fmt: skip
        return self._codec._score(self._codes, documents, False, False, None)
