"""Generations of the corpus in a folder: each is metadata that names files which never change.

Between two calls of ``compact`` files are only added, and metadata says which generation added each: what an
older one had can be opened until then.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction.corpus import _codec_files, _files, _indexes, _shard_files, _shards, _tokens
from late_interaction.corpus._files import CorpusError
from late_interaction.corpus._shards import Shard

_GROWING = ("shards", "deleted")


@dataclass(frozen=True)
class Generation:
    """What a folder held at one time, mapped.

    blocks: all documents that were written, a shard each. dead: which of them are deleted, bool.
    """

    folder: Path
    entries: dict[str, Any]
    stored: _tokens.Stored
    blocks: list[Shard]
    dead: Tensor

    @property
    def number(self) -> int:
        return int(self.entries["generation"])

    @property
    def identity(self) -> str:
        """Return a checksum of all that the documents are made of."""
        names = ("dtype", "d", "normalized", "codec", *_GROWING)
        return _files.checksum_of_entries({name: self.entries[name] for name in names})

    def live(self) -> list[Shard]:
        return _shards.without(self.blocks, self.dead)


def name_of(generation: int) -> str:
    return f"deleted-{generation:05d}"


def files_of(entries: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entry of each file, beside those of the codec, by its name."""
    shards = {
        _shard_files.name_of(shard["number"], kind): file
        for shard in entries["shards"]
        for kind, file in shard["files"].items()
    }
    return shards | {name_of(x["generation"]): x["file"] for x in entries["deleted"]}


def read(folder: Path) -> dict[str, Any]:
    """Read the metadata of the newest generation of a corpus that was finished, or of an index."""
    index = _indexes.read(folder)
    if index is not None:
        return index
    path = folder / _files.METADATA
    if not path.exists():
        raise FileNotFoundError(f"there is no corpus in {folder}: it has no {_files.METADATA}")
    entries = _files.read_metadata(path)
    if not entries["complete"]:
        documents = sum(shard["documents"] for shard in entries["shards"])
        raise CorpusError(
            f"{folder} holds a corpus that is not finished, with {documents} documents so far: go on with"
            " Corpus.create(..., resume=True)"
        )
    return entries


def at(folder: Path, entries: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the entries of an older generation."""
    if number < entries["compacted"]:
        raise CorpusError(
            f"generation {number} of {folder} was removed by compact(), which made generation"
            f" {entries['compacted']}: open the folder again"
        )
    older = {name: [x for x in entries[name] if x["generation"] <= number] for name in _GROWING}
    return entries | older | {"generation": number}


def load(folder: Path, number: int | None = None, known: Generation | None = None) -> Generation:
    """Open the newest generation, or an older one. known: one whose files are mapped already."""
    entries = read(folder)
    while True:
        try:
            own = entries if number is None else at(folder, entries, number)
            return opened(folder, own, known)
        except (CorpusError, RuntimeError, FileNotFoundError):  # a writer may have removed files meanwhile
            newer = read(folder)
            if newer["generation"] == entries["generation"]:
                raise
            entries = newer


def opened(folder: Path, entries: dict[str, Any], known: Generation | None = None) -> Generation:
    """Map the files of a generation. Sizes and offsets are checked."""
    if entries["format"] != _files.FORMAT:
        return Generation(folder, entries, *_indexes.open_index(entries))
    mapped: dict[str, Shard] = {}
    if known is not None and all(known.entries[x] == entries[x] for x in ("dtype", "d", "codec")):
        stored = known.stored
        mapped = {repr(x): block for x, block in zip(known.entries["shards"], known.blocks, strict=True)}
    else:
        codec = _codec_files.open_codec(folder, entries)
        dtype = codec.stored if codec else _tokens.NAMES[entries["dtype"]]
        stored = _tokens.Stored(entries["d"], dtype, codec)
    blocks = [mapped.get(repr(x)) or _shard_files.open_shard(folder, x, stored) for x in entries["shards"]]
    dead = torch.zeros(sum(block.documents for block in blocks), dtype=torch.bool, device="cpu")
    for deleted in entries["deleted"]:
        path = folder / name_of(deleted["generation"])
        _files.check_checksum(path, deleted["file"])
        dead[_files.mapped(path, deleted["file"]["bytes"], torch.int64)] = True
    return Generation(folder, entries, stored, blocks, dead)
