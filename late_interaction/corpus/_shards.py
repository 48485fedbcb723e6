"""A shard: documents end to end in one block of memory, their ids, and the chunks that a search takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction._search.stream import to_device
from late_interaction.codecs import Codec
from late_interaction.corpus import _columns, _ids, _tokens
from late_interaction.corpus._columns import Columns

_AT_ONCE = 1 << 20  # tokens that are decompressed to find their norms


@dataclass(frozen=True)
class Shard:
    """Document i has offsets[i + 1] - offsets[i] tokens: those from offsets[i] on, or from starts[i] on.

    tokens: [T, d], or the codes of codec, [T, w]. offsets: [documents + 1], integers on the CPU; they may
    begin and end within the tokens. beside: what codec stores beside each token, [T]: a float32 scale, or the
    int32 index of its centroid. starts: [documents], where tokens of no document lie between those of others.
    block: the shard that these documents are a part of, with places, [documents], in it. origin: the folder,
    the number and the checksum of a shard that lies in files.
    """

    tokens: Tensor
    offsets: Tensor
    beside: Tensor | None = None
    ids: Sequence[str] | None = None
    codec: Codec | None = None
    columns: Columns | None = None
    starts: Tensor | None = None
    block: "Shard | None" = None
    places: Tensor | None = None
    origin: "tuple[Path, int, str] | None" = None

    @property
    def documents(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def token_count(self) -> int:
        return int(self.offsets[-1]) - int(self.offsets[0])

    @cached_property
    def has_empty_documents(self) -> bool:
        return bool((self.offsets[1:] == self.offsets[:-1]).any())

    @cached_property
    def is_alone(self) -> bool:
        """Tell whether these documents are all that their memory holds."""
        tensors = [x for x in (self.tokens, self.offsets, self.beside) if x is not None]
        whole = self.block is None and self.origin is None and self.token_count == len(self.tokens)
        return whole and all(x.untyped_storage().nbytes() == x.nbytes for x in tensors)

    @cached_property
    def is_sparse(self) -> bool:
        """Tell whether so many deleted tokens lie between that a copy of the others is scored faster."""
        if self.starts is None or not self.documents:
            return False
        end = int(self.starts[-1] + self.offsets[-1] - self.offsets[-2])
        most = 4 if self.tokens.is_cuda else 1.2  # a GPU scores tokens nearly as fast as it copies them
        return end - int(self.starts[0]) > most * self.token_count

    @cached_property
    def offsets_beside(self) -> Tensor:
        """The offsets, from 0, on the device of the tokens: a search sends none."""
        return (self.offsets - self.offsets[0]).to(self.tokens.device)

    @cached_property
    def inverse_norms(self) -> Tensor:
        """1 / norm of each token that codes stand for, float16 beside the tokens, found once."""
        if self.block is not None:
            return self.block.inverse_norms
        found = torch.empty(len(self.tokens), dtype=torch.float16, device=self.tokens.device)
        for first in range(0, len(found), _AT_ONCE):
            rows = slice(first, min(first + _AT_ONCE, len(found)))
            found[rows] = 1 / self.floats([rows]).norm(dim=-1).clamp_min(1e-4)
        return found

    @cached_property
    def kept(self) -> dict[str, Tensor]:
        """Keep what first passes have made of this block, by its kind (:mod:`._first_pass`)."""
        return {}

    @cached_property
    def stand_ins(self) -> dict[str, "Shard"]:
        """Keep what stands for these documents in first passes, by its kind (:mod:`._first_pass`)."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        own = {x.name: getattr(self, x.name) for x in fields(self)}
        return own if self.codec is None else own | {"tokens": self.tokens.view(torch.uint8)}  # no float8

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.codec is not None:
            self.__dict__["tokens"] = self.tokens.view(self.codec.stored)

    def part(self, first: int, stop: int) -> "Shard":
        """Documents [first, stop) over the same memory."""
        part = self._labelled(torch.arange(first, stop, device="cpu"))
        starts = None if self.starts is None else self.starts[first:stop]
        return replace(part, offsets=self.offsets[first : stop + 1], starts=starts)

    def select(self, places: Tensor) -> "Shard":
        """Documents at these rising places, over the same memory."""
        begins = self.offsets[:-1] if self.starts is None else self.starts
        lengths = self.offsets[places + 1] - self.offsets[places]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return replace(self._labelled(places), offsets=offsets, starts=begins[places].to(torch.int64))

    def _labelled(self, places: Tensor) -> "Shard":
        """Replace the ids and the columns by those of the documents at these places."""
        ids = None if self.ids is None else _ids.SelectedIds(self.ids, places)
        columns = None if self.columns is None else self.columns.select(places)
        own = places if self.places is None else self.places[places]
        return replace(self, ids=ids, columns=columns, block=self.block or self, places=own)

    def compact(self) -> "Shard":
        """Copy the documents to memory that holds no others."""
        return self.to(self.tokens.device)

    def to(self, device: torch.device) -> "Shard":
        """Copy the documents to memory of a device that holds no others."""
        tokens, beside = self.stored(self.rows(0, self.documents))
        return replace(
            self,
            tokens=_alone(tokens.to(device)),
            offsets=_alone(self.offsets - self.offsets[0] if int(self.offsets[0]) else self.offsets),
            beside=None if beside is None else _alone(beside.to(device)),
            ids=None if self.ids is None else list(self.ids),
            columns=None if self.columns is None else _columns.of_table(self.columns.table()),
            starts=None,
            block=None,
            places=None,
            origin=None,
        )

    def as_copied(self) -> "Shard":
        """Return the documents as a corpus of the same codec stores them."""
        return self

    def rows(self, first: int, stop: int) -> list[slice]:
        """Return where the tokens of these documents lie: a range, or several if others lie between."""
        own = self.offsets[first : stop + 1]
        if self.starts is None or first == stop:
            return [slice(int(own[0]), int(own[-1]))]
        starts = self.starts[first:stop]
        ends = starts + own.diff()
        cuts = (starts[1:] != ends[:-1]).nonzero().squeeze(1)
        begins = [int(starts[0]), *starts[cuts + 1].tolist()]
        return [slice(*edges) for edges in zip(begins, [*ends[cuts].tolist(), int(ends[-1])], strict=True)]

    def listed_rows(self, first: int, stop: int) -> Tensor:
        """Return the rows of :meth:`rows` one by one, on their device: a GPU gathers them at once."""
        own = self.offsets[first : stop + 1]
        starts = own[:-1] if self.starts is None else self.starts[first:stop]
        moved = (starts - own[:-1] + own[0]).repeat_interleave(own.diff())
        return to_device(moved + torch.arange(len(moved), device="cpu"), self.tokens.device)

    def stored(
        self, rows: list[slice] | Tensor, room: Sequence[Tensor | None] = (None, None)
    ) -> tuple[Tensor, Tensor | None]:
        """Return these tokens as they are stored, and what is stored beside each.

        rows: ranges, or an index of rows. room: tensors like these, with more rows, for what is copied.
        """
        beside = None if self.beside is None else at(self.beside, rows, room[1])
        return at(self.tokens, rows, room[0]), beside

    def floats(self, rows: list[slice]) -> Tensor:
        """Return these tokens: a view of floats, or the float32 tokens that codes stand for."""
        return _tokens.decode(*self.stored(rows), self.codec)

    def ranges(self, most_tokens: int, most_documents: int) -> Iterator[tuple[int, int]]:
        """Documents, in order, in ranges of at most so many tokens and documents.

        A longer document has a range of its own.
        """
        first, count = 0, self.documents
        last = int(self.offsets[-1])
        while first < count:
            end = min(int(self.offsets[first]) + most_tokens, last)
            stop = int(torch.searchsorted(self.offsets, end, right=True)) - 1
            stop = min(max(stop, first + 1), first + most_documents, count)
            yield first, stop
            first = stop


def at(x: Tensor, rows: list[slice] | Tensor, room: Tensor | None = None) -> Tensor:
    """Return rows, copied to room if there is some and they are not one range."""
    if isinstance(rows, Tensor):
        return torch.index_select(x, 0, rows, out=None if room is None else room[: len(rows)])
    if len(rows) == 1:
        return x[rows[0]]
    out = None if room is None else room[: sum(own.stop - own.start for own in rows)]
    return torch.cat([x[own] for own in rows], out=out)


def _alone(x: Tensor) -> Tensor:
    """Return the tensor, or a copy of it where it is a part of a larger block of memory."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def between(shards: Sequence[Shard], first: int, stop: int) -> list[Shard]:
    """Documents [first, stop) of all the shards, over the same memory."""
    found, done = [], 0
    for shard in shards:
        begin, end = max(first - done, 0), min(stop - done, shard.documents)
        if begin < end:
            found.append(shard.part(begin, end))
        done += shard.documents
    return found


def chosen(shards: Sequence[Shard], numbers: Tensor) -> list[Shard]:
    """Documents of these rising numbers among those of all the shards, over the same memory."""
    ends = torch.tensor([x.documents for x in shards], device="cpu").cumsum(0)
    counts = torch.searchsorted(numbers, ends).diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(shards, ends.tolist(), numbers.split(counts), strict=True)
    return [shard.select(own - (end - shard.documents)) for shard, end, own in parts if len(own)]


def without(shards: Sequence[Shard], dead: Tensor) -> list[Shard]:
    """Take away deleted documents: bool, of all the shards. Shards without one stay as they are."""
    found = []
    for shard, own in zip(shards, dead.split([x.documents for x in shards]), strict=True):
        found.append(shard.select(torch.logical_not(own).nonzero().squeeze(1)) if bool(own.any()) else shard)
    return found


def joined(shards: Sequence[Shard]) -> Shard:
    if len(shards) == 1:
        return shards[0].compact()
    tokens, beside = zip(*(x.stored(x.rows(0, x.documents)) for x in shards), strict=True)
    first, lengths = shards[0], torch.cat([x.offsets.diff() for x in shards]).to(torch.int64)
    columns = [x.columns for x in shards]
    return Shard(
        tokens=torch.cat(tokens),
        offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        beside=None if first.beside is None else torch.cat(beside),
        ids=None if first.ids is None else [x for shard in shards for x in shard.ids or ()],
        codec=first.codec,
        columns=None if first.columns is None else _columns.of_table(_columns.stacked(columns)),
    )


def to_keep(shards: Sequence[Shard], whole: Sequence[bool], row_bytes: int, shard_bytes: int) -> list[bool]:
    """Tell which shards compaction leaves as they are.

    Those are whole, without deleted documents, and are large or have no other beside them to be joined with.
    """
    sizes = [shard.token_count * row_bytes + 8 * shard.documents for shard in shards]
    large = [True, *(a and 2 * b >= shard_bytes for a, b in zip(whole, sizes, strict=True)), True]
    return [own and (large[i + 1] or (large[i] and large[i + 2])) for i, own in enumerate(whole)]


def edges_of_parts(shards: Sequence[Shard], count: int) -> list[int]:
    """Cut documents into parts of about equally many tokens: one goes where its first token lies."""
    none = torch.zeros(0, dtype=torch.int64, device="cpu")
    lengths = torch.cat([none, *(shard.offsets.diff() for shard in shards)])
    places = lengths.cumsum(0) - lengths  # of each document's first token
    owners = (places * count // max(int(lengths.sum()), 1)).clamp_max(count - 1)
    return torch.searchsorted(owners, torch.arange(count + 1, device="cpu")).tolist()
