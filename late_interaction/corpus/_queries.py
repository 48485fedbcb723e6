"""Queries of a search, as the operators for what a corpus stores take them, and their scores of a chunk.

Floats go to :func:`late_interaction.maxsim` as packed Tokens, residuals to their packed operator. Codes have
no packed operator: documents of a chunk that are about equally long are copied beside each other and scored
by :mod:`late_interaction._scoring.quantized`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from late_interaction import ops
from late_interaction._checks.choices import Precision
from late_interaction._checks.tensors import CODES
from late_interaction._maxsim import maxsim
from late_interaction._scoring import quantized
from late_interaction._scoring.norm_warning import unwatched
from late_interaction._scoring.precision import float32_precision
from late_interaction._search.stream import to_device
from late_interaction.codecs import Codec, Residual
from late_interaction.corpus import _tokens
from late_interaction.corpus._chunks import Chunk
from late_interaction.corpus._documents import Documents
from late_interaction.tokens import Tokens

# A chunk's documents are copied into rows of at most this many lengths between two powers of two, so that
# padding takes at most a sixteenth of the copy.
_LENGTHS_AN_OCTAVE = 16
# On a CPU a copy takes at most so many bytes, and stays in its caches.
_COPY_BYTES = 1 << 20


class Queries(ABC):
    """Queries in the form that what a corpus stores wants."""

    def __init__(self, Q: list[Tensor]) -> None:
        self.count, self.device = len(Q), Q[0].device

    @abstractmethod
    def scores(self, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        """Score a chunk, whose sources are on the device: ``[queries, documents]``."""


def prepare(corpus: Documents, Q: list[Tensor], normalize: bool, precision: Precision | None) -> Queries:
    if isinstance(corpus.codec, Residual):
        return _OfResiduals(Q, corpus.codec, normalize, precision)
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
        documents = Tokens._made(tokens, None, to_device(chunk.offsets(), self.device))
        scores: Tensor = unwatched(maxsim, self._queries, documents, precision=self._precision)
        return scores


class _OfResiduals(Queries):
    """Padded with zeros, whose similarities and maxima are 0, normalized or not."""

    def __init__(
        self, Q: list[Tensor], codec: Residual, normalize: bool, precision: Precision | None
    ) -> None:
        super().__init__(Q)
        self._codec = codec.to(self.device)
        self._normalize = normalize
        self._precision = precision or float32_precision(self.device.type)
        self._tokens = pad_sequence([x.to(codec.centroids.dtype) for x in Q], batch_first=True)

    def scores(self, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        residuals, codes = sources
        cu_seqlens = to_device(chunk.offsets(), self.device)
        codec, op = self._codec, cast("Any", ops.maxsim_residual)
        scores: Tensor = op(
            self._tokens, codes, residuals, cu_seqlens, codec.centroids, codec.bucket_weights, codec.nbits,
            self._normalize, self._precision,
        )  # fmt: skip
        return scores


class _OfCodes(Queries):
    """Codes of the queries, padded to the longest, with their scales and mask."""

    def __init__(self, Q: list[Tensor], codec: Codec) -> None:
        super().__init__(Q)
        padded = pad_sequence(Q, batch_first=True)
        lengths = torch.tensor([len(x) for x in Q], device="cpu")
        kept = torch.arange(padded.shape[1], device="cpu") < lengths.unsqueeze(1)
        codes = codec.encode(padded)
        assert codes.scales is not None
        self._tokens, self._scales = codes.values, codes.scales
        self._mask = None if bool(kept.all()) else to_device(kept, self.device)

    def scores(self, chunk: Chunk, sources: list[Tensor]) -> Tensor:
        codes, scales = sources
        offsets = chunk.offsets()
        out = torch.zeros(self.count, len(offsets) - 1, dtype=torch.float32, device=self.device)
        most = max(_COPY_BYTES // codes.shape[1], 1) if self.device.type == "cpu" else codes.shape[0]
        for documents, longest in _groups(offsets.diff()):
            copied = _together(offsets, documents, longest) is None
            for some in documents.split(max(most // longest, 1) if copied else len(documents)):
                scores = self._of_group(offsets, some, longest, codes, scales)
                out[:, to_device(some, self.device)] = scores
        return out

    def _of_group(
        self, offsets: Tensor, documents: Tensor, longest: int, codes: Tensor, scales: Tensor
    ) -> Tensor:
        """Score documents that have at most ``longest`` tokens each."""
        shape, mask = (len(documents), longest), None
        rows = _together(offsets, documents, longest)
        if rows is not None:
            codes, scales = codes[rows], scales[rows]
        else:
            own = torch.stack((offsets[documents], offsets[documents + 1]))
            starts, ends = to_device(own, self.device).unsqueeze(-1)
            within = torch.arange(longest, dtype=torch.int32, device=self.device)
            mask = within < ends - starts
            places = (starts + within).minimum(ends - 1).flatten()  # the last token again where it has ended
            bits = codes.view(torch.uint8)  # what float8 tensors lack operators for
            codes = bits.index_select(0, places).view(codes.dtype)
            scales = scales.index_select(0, places)
        tokens = codes.view(*shape, -1), scales.view(shape)
        return quantized.maxsim(self._tokens, tokens[0], self._scales, tokens[1], self._mask, mask, CODES)


def _together(offsets: Tensor, documents: Tensor, longest: int) -> slice | None:
    """Return the tokens of neighbours that all have ``longest``, which need no copy. None for others."""
    first, last = int(documents[0]), int(documents[-1])
    rows = slice(int(offsets[first]), int(offsets[last + 1]))
    neighbours = last - first + 1 == len(documents) and rows.stop - rows.start == len(documents) * longest
    return rows if neighbours else None


def _groups(lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Documents that are about equally long, and the length to pad them to. Empty ones are in none."""
    octave = torch.log2(lengths.clamp_min(1).double()).floor().to(torch.int64)
    step = ((1 << octave) // _LENGTHS_AN_OCTAVE).clamp_min(1)
    padded = (lengths + step - 1) // step * step
    order = padded.argsort(stable=True)
    sizes, counts = padded[order].unique_consecutive(return_counts=True)
    for size, documents in zip(sizes.tolist(), order.split(counts.tolist()), strict=True):
        if size:
            yield documents, size
