"""A shard: documents end to end in one block of memory, their ids, and the chunks that a search takes."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import describe_bad_entries
from late_interaction.codecs import Codec
from late_interaction.corpus import _columns, _files, _ids, _tokens
from late_interaction.corpus._columns import Columns

_AT_ONCE = 1 << 20  # tokens that are decompressed to find their norms


@dataclass(frozen=True)
class Shard:
    """Document i has offsets[i + 1] - offsets[i] tokens: those from offsets[i] on, or from starts[i] on.

    tokens: [T, d], or the codes of codec, [T, w]. offsets: [documents + 1], integers on the CPU; they may
    begin and end within the tokens. beside: what codec stores beside each token, [T]: a float32 scale, or the
    int32 index of its centroid. starts: [documents], where tokens of no document lie between those of others.
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
    def is_sparse(self) -> bool:
        """Tell whether so many deleted tokens lie between that a copy of the others is scored faster."""
        if self.starts is None or not self.documents:
            return False
        end = int(self.starts[-1] + self.offsets[-1] - self.offsets[-2])
        most = 4 if self.tokens.is_cuda else 1.2  # a GPU copies ranges one by one
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
        tokens, beside = self.stored(self.rows(0, self.documents))
        return replace(
            self,
            tokens=_alone(tokens),
            offsets=_alone(self.offsets - self.offsets[0] if int(self.offsets[0]) else self.offsets),
            beside=None if beside is None else _alone(beside),
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

    def stored(
        self, rows: list[slice], room: Sequence[Tensor | None] = (None, None)
    ) -> tuple[Tensor, Tensor | None]:
        """Return these tokens as they are stored, and what is stored beside each.

        room: tensors like these, with more rows, for what is copied.
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


def at(x: Tensor, rows: list[slice], room: Tensor | None = None) -> Tensor:
    """Return a view of one range of rows, or a copy of several."""
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
    """Copy documents of several shards into one."""
    if len(shards) == 1:
        return shards[0].compact()
    tokens, beside = zip(*(x.stored(x.rows(0, x.documents)) for x in shards), strict=True)
    first, lengths = shards[0], torch.cat([x.offsets.diff() for x in shards]).to(torch.int64)
    return Shard(
        tokens=torch.cat(tokens),
        offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        beside=None if first.beside is None else torch.cat(beside),
        ids=None if first.ids is None else [x for shard in shards for x in shard.ids or ()],
        codec=first.codec,
        columns=None
        if first.columns is None
        else _columns.of_table(_columns.stacked([x.columns for x in shards])),
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
    edges: list[int] = torch.searchsorted(owners, torch.arange(count + 1, device="cpu")).tolist()
    return edges


_TYPES = {
    "offsets": torch.int64, "scales": torch.float32, "codes": torch.int32, "ids": torch.uint8,
    "id_offsets": torch.int64, "columns": torch.uint8,
}  # fmt: skip


# Kinds of files that first passes add to a shard, and that no generation names.
KEPT = ("bits", "muvera", "muvera_unit", "lists")


def name_of(number: int, kind: str) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05d}.{kind}"


def _check_stored(path: Path, offsets: Tensor, total: int) -> None:
    """Offsets of a file begin at 0, do not decrease and end at the total."""
    bad = torch.cat((offsets[:1] != 0, offsets[1:] < offsets[:-1]))
    bad[-1] |= offsets[-1] != total
    if bool(bad.any()):
        raise _files.CorpusError(
            f"{path} must have offsets that begin at 0, do not decrease and end at {total},"
            f" got {describe_bad_entries('offsets', offsets, bad, after=True)}: it was changed"
        )


def open_shard(folder: Path, entry: dict[str, Any], stored: _tokens.Stored) -> Shard:
    """Map a shard of a folder. Sizes and offsets are checked."""
    documents, tokens, index = entry["documents"], entry["tokens"], entry["number"]
    wanted = {
        "tokens": tokens * stored.width * stored.dtype.itemsize,
        "scales": 4 * tokens,
        "codes": 4 * tokens,
    }
    wanted |= dict.fromkeys(("offsets", "id_offsets"), 8 * (documents + 1))
    found: dict[str, Tensor] = {}
    for kind, file in entry["files"].items():
        path = folder / name_of(index, kind)
        _files.check_size(path, file)
        if file["bytes"] != wanted.get(kind, file["bytes"]):
            raise _files.CorpusError(
                f"{path} must have {wanted[kind]} bytes for its {documents} documents of {tokens} tokens,"
                f" got {file['bytes']}"
            )
        found[kind] = _files.mapped(path, file["bytes"], _TYPES.get(kind, stored.dtype))
    _check_stored(folder / name_of(index, "offsets"), found["offsets"], tokens)
    ids = None
    if "ids" in found:
        _check_stored(folder / name_of(index, "id_offsets"), found["id_offsets"], len(found["ids"]))
        ids = _ids.StoredIds(found["ids"], found["id_offsets"], folder / name_of(index, "ids"))
    rows = found["tokens"].view(tokens, stored.width)
    beside = None if stored.beside is None else found[stored.beside]
    columns = Columns(found["columns"]) if "columns" in found else None
    origin = folder, index, _files.checksum_of_entries(entry["files"])
    return Shard(rows, found["offsets"], beside, ids, stored.codec, columns, origin=origin)


class ShardFiles:
    """The files of the shard that is being written, with the number that their names have."""

    def __init__(self, folder: Path, number: int, like: Shard) -> None:
        self.documents = self.tokens = 0
        self._number, self._columns = number, list[Columns]()
        self._beside = (
            None if like.beside is None else "scales" if like.beside.is_floating_point() else "codes"
        )
        kinds = ["tokens", "offsets", *([self._beside] if self._beside else [])]
        kinds += ["ids", "id_offsets"] * (like.ids is not None) + ["columns"] * (like.columns is not None)
        self.files: dict[str, _files.HashedFile] = {}
        try:
            for kind in kinds:
                self.files[kind] = _files.HashedFile(folder / name_of(number, kind))
            for kind in {"offsets", "id_offsets"} & set(kinds):
                self._write_integers(kind, [0])
        except OSError:
            self.remove()
            raise

    def _write_integers(self, kind: str, numbers: Sequence[int]) -> None:
        self.files[kind].write(memoryview(array("q", numbers)).cast("B"))

    def write(self, part: Shard) -> None:
        """Write documents that are stored as those of the corpus are."""
        tokens, beside = part.stored(part.rows(0, part.documents))
        self.files["tokens"].write(_files.bytes_of(tokens.cpu()))
        if self._beside is not None and beside is not None:
            self.files[self._beside].write(_files.bytes_of(beside.cpu()))
        self._write_integers("offsets", (part.offsets[1:] - part.offsets[0] + self.tokens).tolist())
        if part.ids is not None:
            texts = [text.encode() for text in part.ids]
            begin = self.files["ids"].bytes
            self.files["ids"].write(memoryview(b"".join(texts)))
            self._write_integers("id_offsets", list(accumulate(map(len, texts), initial=begin))[1:])
        if part.columns is not None:
            self._columns.append(part.columns)
        self.documents += part.documents
        self.tokens += part.token_count

    def finish(self) -> dict[str, Any]:
        """Return the shard's entry in the metadata, once all of it is on the disk."""
        if self._columns:
            self.files["columns"].write(
                _files.bytes_of(_columns.of_table(_columns.stacked(self._columns)).data)
            )
        files = {kind: file.finish() for kind, file in self.files.items()}
        return {"number": self._number, "documents": self.documents, "tokens": self.tokens, "files": files}

    def remove(self) -> None:
        for file in self.files.values():
            file.close()
            file.path.unlink(missing_ok=True)
