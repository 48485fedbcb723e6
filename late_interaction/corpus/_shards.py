"""A shard: documents end to end in one block of memory, their ids, and the chunks that a search takes."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import describe_bad_entries
from late_interaction.codecs import Codec
from late_interaction.corpus import _files, _ids, _tokens

_AT_ONCE = 1 << 20  # tokens that are decompressed to find their norms


@dataclass(frozen=True)
class Shard:
    """Document i has the tokens from offsets[i] up to offsets[i + 1].

    tokens: [T, d], or the codes of codec, [T, w]. offsets: [documents + 1], integers on the CPU; they may
    begin and end within the tokens. beside: what codec stores beside each token, [T]: a float32 scale, or the
    int32 index of its centroid.
    """

    tokens: Tensor
    offsets: Tensor
    beside: Tensor | None = None
    ids: Sequence[str] | None = None
    codec: Codec | None = None

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
    def inverse_norms(self) -> Tensor:
        """1 / norm of each token that codes stand for, float16 beside the tokens, found once."""
        found = torch.empty(len(self.tokens), dtype=torch.float16, device=self.tokens.device)
        for first in range(0, len(found), _AT_ONCE):
            rows = slice(first, first + _AT_ONCE)
            found[rows] = 1 / self.floats(rows).norm(dim=-1).clamp_min(1e-4)
        return found

    def part(self, first: int, stop: int) -> "Shard":
        """Documents [first, stop) over the same memory."""
        ids = None if self.ids is None else _ids.PartOfIds(self.ids, first, stop)
        return replace(self, offsets=self.offsets[first : stop + 1], ids=ids)

    def compact(self) -> "Shard":
        """Copy the documents to memory that holds no others."""
        rows = self.rows(0, self.documents)
        offsets = self.offsets - self.offsets[0] if rows.start else self.offsets
        return replace(
            self,
            tokens=_alone(self.tokens[rows]),
            offsets=_alone(offsets),
            beside=None if self.beside is None else _alone(self.beside[rows]),
            ids=None if self.ids is None else list(self.ids),
        )

    def rows(self, first: int, stop: int) -> slice:
        """Return where the tokens of these documents lie."""
        return slice(int(self.offsets[first]), int(self.offsets[stop]))

    def stored(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return these tokens as they are stored, and what is stored beside each."""
        return self.tokens[rows], None if self.beside is None else self.beside[rows]

    def floats(self, rows: slice) -> Tensor:
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


def parts(shards: Sequence[Shard], count: int) -> list[list[Shard]]:
    """Cut shards into parts of about equally many tokens: a document goes where its first token lies."""
    total, done = sum(shard.token_count for shard in shards), 0
    found: list[list[Shard]] = [[] for _ in range(count)]
    for shard in shards:
        places = done + (shard.offsets[:-1] - shard.offsets[:1])  # of each document's first token
        owners = (places * count // max(total, 1)).clamp_max(count - 1)
        edges = torch.searchsorted(owners, torch.arange(count + 1, device=owners.device)).tolist()
        for own, (first, stop) in zip(found, pairwise(edges), strict=True):
            if first < stop:
                own.append(shard.part(first, stop))
        done += shard.token_count
    return found


_TYPES = {
    "offsets": torch.int64, "scales": torch.float32, "codes": torch.int32, "ids": torch.uint8,
    "id_offsets": torch.int64,
}  # fmt: skip


def name_of(index: int, kind: str) -> str:
    """Return the name of a shard's file."""
    return f"shard-{index:05d}.{kind}"


def _check_stored(path: Path, offsets: Tensor, total: int) -> None:
    """Offsets of a file begin at 0, do not decrease and end at the total."""
    bad = torch.cat((offsets[:1] != 0, offsets[1:] < offsets[:-1]))
    bad[-1] |= offsets[-1] != total
    if bool(bad.any()):
        raise _files.CorpusError(
            f"{path} must have offsets that begin at 0, do not decrease and end at {total},"
            f" got {describe_bad_entries('offsets', offsets, bad, after=True)}: it was changed"
        )


def open_shard(folder: Path, index: int, entry: dict[str, Any], stored: _tokens.Stored) -> Shard:
    """Map a shard of a folder. Sizes and offsets are checked."""
    documents, tokens = entry["documents"], entry["tokens"]
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
    return Shard(rows, found["offsets"], beside, ids, stored.codec)


class ShardFiles:
    """The files of the shard that is being written."""

    def __init__(self, folder: Path, index: int, kinds: Sequence[str], beside: str | None) -> None:
        self.documents = self.tokens = 0
        self._beside = beside
        kinds = [*kinds, beside] if beside else kinds
        self.files: dict[str, _files.HashedFile] = {}
        try:
            for kind in kinds:
                self.files[kind] = _files.HashedFile(folder / name_of(index, kind))
            for kind in {"offsets", "id_offsets"} & set(kinds):
                self._write_integers(kind, [0])
        except OSError:
            self.remove()
            raise

    def _write_integers(self, kind: str, numbers: Sequence[int]) -> None:
        self.files[kind].write(memoryview(array("q", numbers)).cast("B"))

    def write(
        self, tokens: Tensor, beside: Tensor | None, ends: list[int], ids: Sequence[str] | None
    ) -> None:
        """Documents end to end, of which the first begins at 0 and each ends at its entry of ends."""
        self.files["tokens"].write(_files.bytes_of(tokens))
        if self._beside is not None and beside is not None:
            self.files[self._beside].write(_files.bytes_of(beside))
        self._write_integers("offsets", [self.tokens + end for end in ends])
        if ids is not None:
            texts = [text.encode() for text in ids]
            begin = self.files["ids"].bytes
            self.files["ids"].write(memoryview(b"".join(texts)))
            self._write_integers("id_offsets", list(accumulate(map(len, texts), initial=begin))[1:])
        self.documents += len(ends)
        self.tokens += tokens.shape[0]

    def finish(self) -> dict[str, Any]:
        """Return the shard's entry in the metadata, once all of it is on the disk."""
        files = {kind: file.finish() for kind, file in self.files.items()}
        return {"documents": self.documents, "tokens": self.tokens, "files": files}

    def remove(self) -> None:
        for file in self.files.values():
            file.close()
            file.path.unlink(missing_ok=True)
