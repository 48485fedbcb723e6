"""The one that writes to a folder: :class:`Writer`, for builders and for corpora that change."""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction.corpus import _codec_files, _files, _generations, _shards
from late_interaction.corpus._generations import Generation
from late_interaction.corpus._intake import Intake
from late_interaction.corpus._options import BuilderOptions
from late_interaction.corpus._shards import Shard, ShardFiles

# Names of files that a writer may remove where no generation names them.
_OWN = ("shard-", "deleted-", "metadata.")


class Writer:
    """Holds a folder: writes new files, and then a generation that names them.

    While a corpus is not complete, each shard makes a generation as soon as it is full. What no generation
    names when the writer is closed is removed.

    Attributes:
        entries: the metadata of the newest generation.
        generation: it, as it was when the writer came.
        intake: what checks documents, and knows their ids.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Any] = {}
        self._shards: list[dict[str, Any]] = []
        self._deleted: list[int] = []
        self._shard: ShardFiles | None = None
        self._made: list[Path] = []
        handle = _files.lock_folder(folder)
        self._unlock = weakref.finalize(self, _files.unlock, handle, os.getpid())

    # ---- the folder, before and after ----

    def begin(self, options: BuilderOptions) -> None:
        """Make the first generation of a corpus, which has no document."""
        self.entries = first_entries(options)
        none = torch.zeros(0, dtype=torch.bool, device="cpu")
        self._use(Generation(self.folder, self.entries, options.stored, [], none), {})
        self.commit()
        _codec_files.write(self.folder, options.stored.codec)

    def take_up(self, entries: dict[str, Any], known: Generation | None = None) -> None:
        """Go on with a corpus, without what no generation names."""
        _files.sync_folder(self.folder)  # a writer that met an error may have left it undone
        self.entries = entries
        self._remove_others()
        generation = _generations.opened(self.folder, entries, known)
        ids: dict[str, int] = {}
        done = 0
        for block in generation.blocks:
            ids.update((x, done + i) for i, x in enumerate(block.ids or ()) if not generation.dead[done + i])
            done += block.documents
        self._use(generation, ids)

    def _use(self, generation: Generation, ids: dict[str, int]) -> None:
        self.generation, self._shards = generation, list(self.entries["shards"])
        self._next: int = self.entries["next_shard"]
        normalize, has = self.entries["normalized"], self.entries["has"]
        self.intake = Intake(generation.stored, normalize, generation.blocks, has, ids)

    def _remove_others(self) -> None:
        kept = {_files.METADATA, *_generations.files_of(self.entries)}
        for path in self.folder.iterdir():
            if path.name not in kept and path.name.startswith(_OWN):
                path.unlink()

    def close(self) -> None:
        """Let other writers in. What is not committed is removed."""
        if self._shard is not None:
            self._shard.remove()
            self._shard = None
        if self._made:
            with suppress(OSError, _files.CorpusError):
                # After an error the newest generation on the disk may be this writer's own.
                kept = _generations.files_of(_files.read_metadata(self.folder / _files.METADATA))
                for path in self._made:
                    if path.name not in kept:
                        path.unlink(missing_ok=True)
        self._shards, self._made = list(self.entries.get("shards", ())), []
        self._unlock()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- documents ----

    @property
    def documents(self) -> int:
        """Count the documents that were written, deleted or not."""
        written = [int(shard["documents"]) for shard in self._shards]
        return sum(written) + (0 if self._shard is None else self._shard.documents)

    def add(self, shards: Sequence[Shard], name: str) -> None:
        """Check documents, and write them."""
        for shard in self.intake.check(shards, name):
            for first, stop in self.intake.blocks(shard):
                self.write(self.intake.encode(shard, first, stop, False))

    def write(self, block: Shard) -> None:
        """Write documents that are encoded, into as many shards as they take."""
        for first, stop in self._parts(block.offsets.tolist()):
            part, rows = block.part(first, stop), block.rows(first, stop)
            tokens, beside = part.stored(rows)
            if self._shard is None:
                self._shard = ShardFiles(self.folder, self._next, part, self.generation.stored.beside)
                self._next += 1
                self._made += [file.path for file in self._shard.files.values()]
            offsets = part.offsets - part.offsets[0]
            self._shard.write(Shard(tokens, offsets, beside, part.ids, part.codec, part.columns))

    def _parts(self, offsets: list[int]) -> Iterator[tuple[int, int]]:
        """Documents in ranges, each of which goes to one shard: a full one is finished in between."""
        begin, used, row_bytes = 0, 0, self.generation.stored.row_bytes
        if self._shard is not None:
            used = self._shard.tokens * row_bytes + 8 * self._shard.documents
        for i, (start, stop) in enumerate(pairwise(offsets)):
            size = (stop - start) * row_bytes + 8
            if used and used + size > self.entries["shard_bytes"]:
                if i > begin:
                    yield begin, i
                self.end_shard()
                begin, used = i, 0
            used += size
        yield begin, len(offsets) - 1

    def end_shard(self) -> None:
        """Make the shard durable. A corpus that is not complete has a generation of it, too."""
        if self._shard is not None:
            self._shards.append(self._shard.finish() | {"generation": self.entries["generation"] + 1})
            self._shard = None
            if not self.entries["complete"]:
                self.commit()

    @property
    def blocks(self) -> list[Shard]:
        """Return the shards that were there when the writer came, deleted documents among them."""
        return self.generation.blocks

    def numbers_at(self, indices: Tensor, generation: Generation | None) -> list[int]:
        """Return the numbers, among all that were ever written, of documents at indices of a generation."""
        if generation is None or generation.entries != self.entries:
            raise _files.CorpusError(
                f"{self.folder} holds a newer generation than the one that is open, and its indices may be"
                " others: refresh() first, or name ids"
            )
        numbers: list[int] = torch.logical_not(generation.dead).nonzero().squeeze(1)[indices].tolist()
        return numbers

    def delete(self, numbers: list[int]) -> None:
        """Delete documents by their numbers."""
        self._deleted += numbers

    # ---- generations ----

    def commit(self, **changes: Any) -> None:
        """Put the next generation in force: on the disk once this returns, and for whoever reads it then."""
        if self.entries["complete"]:
            self.end_shard()
        number, deleted = self.entries["generation"] + 1, list(self.entries["deleted"])
        if self._deleted:
            path = self.folder / _generations.name_of(number)
            self._made.append(path)
            gone = torch.tensor(sorted(self._deleted), dtype=torch.int64, device="cpu")
            entry = {"generation": number, "documents": len(gone), "file": _files.write_file(path, gone)}
            deleted.append(entry)
        made = {"generation": number, "next_shard": self._next, "has": self.intake.has}
        made |= {"shards": list(self._shards), "deleted": deleted}
        entries = self.entries | made | changes
        _files.sync_folder(self.folder)
        _files.write_metadata(self.folder / _files.METADATA, entries)
        self.entries, self._deleted, self._made = entries, [], []

    def compact(self) -> None:
        """Put a generation in force whose shards hold no deleted document, small ones joined."""
        generation = self.generation
        live, entries = generation.live(), self._shards
        whole = [x is block for x, block in zip(live, generation.blocks, strict=True)]
        kept = _shards.to_keep(live, whole, generation.stored.row_bytes, self.entries["shard_bytes"])
        if all(kept):
            return
        self._shards = []
        for entry, shard, keep in zip(entries, live, kept, strict=True):
            if keep:
                self.end_shard()
                self._shards.append(entry)
            else:
                for first, stop in self.intake.blocks(shard):
                    self.write(self.intake.encode(shard, first, stop, True))
        self.commit(deleted=[], compacted=generation.number + 1)
        with suppress(OSError):
            self._remove_others()


def first_entries(options: BuilderOptions) -> dict[str, Any]:
    """Return the metadata of a corpus before its first generation."""
    stored, codec = options.stored, _codec_files.entry_of(options.stored.codec)
    return ({} if codec is None else {"codec": codec}) | {
        "format": _files.FORMAT,
        "version": _files.VERSION,
        "dtype": stored.name,
        "d": stored.d,
        "normalized": options.normalize,
        "shard_bytes": options.shard_bytes,
        "has": {"ids": None, "columns": None},
        "complete": False,
        "generation": -1,
        "compacted": 0,
        "next_shard": 0,
        "shards": [],
        "deleted": [],
    }
