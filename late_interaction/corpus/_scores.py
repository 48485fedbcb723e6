"""Scores of a corpus, chunk by chunk: ranges of documents whose tokens are scored where they lie on the
device of the query, or copied to it while others are scored.

Floats go to :func:`late_interaction.maxsim_varlen`. Codes have no packed operator: documents of a chunk that
are about equally long are copied beside each other and scored by :mod:`late_interaction._quantized`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from late_interaction import _quantized, _stream
from late_interaction._checks.tensors import CODES
from late_interaction.corpus import _tokens
from late_interaction.corpus._shards import Shard
from late_interaction.varlen import maxsim_varlen, pack_sequences

# A chunk's documents are copied into rows of at most this many lengths between two powers of two, so that
# padding takes at most a sixteenth of the copy.
_LENGTHS_AN_OCTAVE = 16
# The operators' offsets are int32.
_MAX_TOKENS = 1 << 30
# On a CPU a copy takes at most so many bytes, and stays in its caches.
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Documents [first, stop) of a shard, the first of which is document `place` of the corpus."""

    shard: Shard
    first: int
    stop: int
    place: int

    @property
    def tokens(self) -> int:
        offsets = self.shard.offsets
        return int(offsets[self.stop]) - int(offsets[self.first])

    def sources(self) -> list[Tensor]:
        """The tokens, and the scales of codes, where they lie."""
        rows = self.shard.rows(self.first, self.stop)
        found = [self.shard.tokens[rows]]
        return found if self.shard.scales is None else [*found, self.shard.scales[rows]]

    def offsets(self) -> Tensor:
        """int32, from 0, on the CPU."""
        own = self.shard.offsets[self.first : self.stop + 1]
        return (own - own[0]).to(torch.int32)


def plan(shards: Sequence[Shard], most_bytes: int, most_documents: int) -> list[Chunk]:
    """The chunks of a corpus, each of at most so many bytes of tokens and so many documents."""
    chunks, place = [], 0
    for shard in shards:
        most_tokens = most_bytes // (shard.tokens.shape[1] * shard.tokens.element_size())
        for first, stop in shard.ranges(min(max(most_tokens, 1), _MAX_TOKENS), most_documents):
            chunks.append(Chunk(shard, first, stop, place + first))
        place += shard.documents
    return chunks


def on_device(chunks: list[Chunk], device: torch.device) -> Iterator[tuple[Chunk, list[Tensor]]]:
    """Each chunk with its tokens and scales on the device: views, or copies that are valid until the next."""
    if not chunks or chunks[0].shard.tokens.device == device:
        for chunk in chunks:
            yield chunk, chunk.sources()
        return
    rows = max(chunk.tokens for chunk in chunks)
    copies = _stream.copied(lambda i: chunks[i].sources(), len(chunks), rows, device)
    yield from zip(chunks, copies, strict=True)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on the device. The host waits for nothing."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class Queries:
    """Queries as the operators take them, in the dtype of a corpus."""

    def __init__(self, Q: list[Tensor], dtype: torch.dtype, normalize: bool, precision: str | None) -> None:
        self.count, self.device = len(Q), Q[0].device
        self._precision = precision
        if dtype in _tokens.CODES:
            self._pad(Q, dtype, normalize)
        else:
            Q = [(_tokens.unit(x.to(torch.float32)) if normalize else x).to(dtype) for x in Q]
            self._tokens, self._cu_seqlens = pack_sequences(Q)

    def _pad(self, Q: list[Tensor], dtype: torch.dtype, normalize: bool) -> None:
        """Codes of the queries, padded to the longest, with their scales and mask."""
        floats = [_tokens.unit(x.to(torch.float32)) if normalize else x for x in Q]
        padded = pad_sequence(floats, batch_first=True)
        lengths = torch.tensor([len(x) for x in Q], device="cpu")
        kept = torch.arange(padded.shape[1], device="cpu") < lengths.unsqueeze(1)
        self._tokens, self._scales = _tokens.quantize(padded, dtype)
        self._mask = None if bool(kept.all()) else to_device(kept, self.device)

    def scores(self, chunk: Chunk, sources: list[Tensor], normalize: bool) -> Tensor:
        """[queries, documents] of a chunk. normalize: whether its tokens are to be normalized first."""
        offsets = chunk.offsets()
        if len(sources) == 2:
            return self._of_codes(offsets, sources[0], sources[1])
        tokens = _tokens.unit(sources[0]) if normalize else sources[0]
        cu_seqlens = to_device(offsets, self.device)
        return maxsim_varlen(self._tokens, tokens, self._cu_seqlens, cu_seqlens, precision=self._precision)

    def _of_codes(self, offsets: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        out = torch.zeros(self.count, len(offsets) - 1, device=self.device)
        most = max(_COPY_BYTES // codes.shape[1], 1) if self.device.type == "cpu" else codes.shape[0]
        for documents, longest in _groups(offsets.diff()):
            for some in documents.split(max(most // longest, 1)):
                scores = self._of_group(offsets, some, longest, codes, scales)
                out[:, to_device(some, self.device)] = scores
        return out

    def _of_group(
        self, offsets: Tensor, documents: Tensor, longest: int, codes: Tensor, scales: Tensor
    ) -> Tensor:
        """Documents that have at most so many tokens each."""
        first, last = int(documents[0]), int(documents[-1])
        begin, end = int(offsets[first]), int(offsets[last + 1])
        shape, mask = (len(documents), longest), None
        if last - first + 1 == len(documents) and end - begin == len(documents) * longest:
            # Neighbours that all are so long: they lie as they are wanted.
            codes, scales = codes[begin:end], scales[begin:end]
        else:
            own = torch.stack((offsets[documents], offsets[documents + 1]))
            starts, ends = to_device(own, self.device).unsqueeze(-1)
            within = torch.arange(longest, dtype=torch.int32, device=self.device)
            mask = within < ends - starts
            rows = (starts + within).minimum(ends - 1).flatten()  # the last token again where it has ended
            bits = codes.view(torch.uint8)  # what float8 tensors lack operators for
            codes = bits.index_select(0, rows).view(codes.dtype)
            scales = scales.index_select(0, rows)
        tokens = codes.view(*shape, -1), scales.view(shape)
        return _quantized.maxsim(self._tokens, tokens[0], self._scales, tokens[1], self._mask, mask, CODES)


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
