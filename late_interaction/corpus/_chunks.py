"""Cut a corpus into chunks: ranges of documents whose tokens are scored together.

They are scored where they lie on the device of the query, or copied to it while others are scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from late_interaction._search import stream
from late_interaction.corpus import _shards
from late_interaction.corpus._shards import Shard

# The operators' offsets are int32.
_MAX_TOKENS = 1 << 30


@dataclass(frozen=True)
class Chunk:
    """Documents [first, stop) of a shard, the first of which is document `place` of the corpus."""

    shard: Shard
    first: int
    stop: int
    place: int

    @property
    def step(self) -> int:
        """2 where each document is followed by one of the deleted tokens behind it."""
        return 1 if self.shard.starts is None or self.shard.is_sparse else 2

    @cached_property
    def rows(self) -> list[slice] | Tensor:
        """Return where the tokens that are scored lie: ranges, or an index of rows."""
        if self.shard.is_sparse and self.shard.tokens.is_cuda:
            return self.shard.listed_rows(self.first, self.stop)
        rows = self.shard.rows(self.first, self.stop)
        return rows if self.step == 1 else [slice(rows[0].start, rows[-1].stop)]

    @property
    def tokens(self) -> int:
        rows = self.rows
        return len(rows) if isinstance(rows, Tensor) else sum(own.stop - own.start for own in rows)

    def sources(self, room: Sequence[Tensor | None] = (None, None)) -> list[Tensor]:
        """Return the tokens as they are stored, and what is stored beside them.

        Where they lie; ranges between deleted documents are copied, to room if there is some.
        """
        return [x for x in self.shard.stored(self.rows, room) if x is not None]

    def _own_offsets(self, device: torch.device) -> Tensor:
        """Return the shard's offsets of the documents, on the device if they lie there."""
        resident = self.shard.tokens.device == device
        every = self.shard.offsets_beside if resident else self.shard.offsets
        return every[self.first : self.stop + 1]

    def offsets(self, device: torch.device) -> Tensor:
        """Return int32 offsets, from 0."""
        own = self._own_offsets(device)
        if self.shard.starts is not None and self.step == 2:
            starts = self.shard.starts[self.first : self.stop]
            lengths = self.shard.offsets[self.first : self.stop + 1].diff()
            own = torch.stack((starts, starts + lengths), dim=1).flatten()
        return stream.to_device((own - own[0] if self.first or own.is_cpu else own).to(torch.int32), device)

    def empty_documents(self, device: torch.device) -> Tensor | None:
        """Tell which documents have no token. None where all have one."""
        if not self.shard.has_empty_documents:
            return None
        return stream.to_device(self._own_offsets(device).diff() == 0, device)

    def inverse_norms(self) -> Tensor:
        """Return those of the shard that are of these documents."""
        return _shards.at(self.shard.inverse_norms, self.rows)


def plan(shards: Sequence[Shard], most_bytes: int, most_documents: int) -> list[Chunk]:
    """Cut a corpus into chunks, each of at most so many bytes of tokens and so many documents."""
    chunks, place = [], 0
    for shard in shards:
        most_tokens = most_bytes // (shard.tokens.shape[1] * shard.tokens.element_size())
        most = _MAX_TOKENS if shard.starts is None else _MAX_TOKENS // 4  # deleted ones may be scored along
        for first, stop in shard.ranges(min(max(most_tokens, 1), most), most_documents):
            chunks.append(Chunk(shard, first, stop, place + first))
        place += shard.documents
    return chunks


def on_device(chunks: list[Chunk], device: torch.device) -> Iterator[tuple[Chunk, list[Tensor]]]:
    """Each chunk with its sources on the device: views, or copies that are valid until the next."""
    if not chunks or chunks[0].shard.tokens.device == device:
        rows = max((chunk.tokens for chunk in chunks if chunk.shard.is_sparse), default=0)
        like = [(chunk.shard.tokens, chunk.shard.beside) for chunk in chunks[:1]]
        room = [None if x is None else x.new_empty(rows, *x.shape[1:]) for pair in like for x in pair]
        for chunk in chunks:
            yield chunk, chunk.sources(room)
        return
    rows = max(chunk.tokens for chunk in chunks)
    copies = stream.copied(lambda i: chunks[i].sources(), len(chunks), rows, device)
    yield from zip(chunks, copies, strict=True)
