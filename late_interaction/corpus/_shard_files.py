"""The files of a shard: what they are called, how they are mapped and how they are written."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import describe_bad_entries
from late_interaction.corpus import _columns, _files, _ids, _tokens
from late_interaction.corpus._columns import Columns
from late_interaction.corpus._shards import Shard

_TYPES = {
    "offsets": torch.int64, "scales": torch.float32, "codes": torch.int32, "ids": torch.uint8,
    "id_offsets": torch.int64, "columns": torch.uint8,
}  # fmt: skip
# Kinds of files that first passes add to a shard, and that no generation names.
KEPT = ("bits", "muvera", "muvera_unit", "lists")


def name_of(number: int, kind: str) -> str:
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

    def __init__(self, folder: Path, number: int, like: Shard, beside: str | None) -> None:
        self.documents = self.tokens = 0
        self._number, self._columns, self._beside = number, list[Columns](), beside
        kinds = ["tokens", "offsets", *([beside] if beside else [])]
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
            columns = _columns.of_table(_columns.stacked(self._columns))
            self.files["columns"].write(_files.bytes_of(columns.data))
        files = {kind: file.finish() for kind, file in self.files.items()}
        return {"number": self._number, "documents": self.documents, "tokens": self.tokens, "files": files}

    def remove(self) -> None:
        for file in self.files.values():
            file.close()
            file.path.unlink(missing_ok=True)
