"""The one that writes to a folder: :class:`Writer`, for builders and for corpora that change."""

import os
import weakref
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction.corpus import _files, _generations, _shard_files, _shards
from late_interaction.corpus._generations import Generation
from late_interaction.corpus._intake import Intake
from late_interaction.corpus._shard_files import ShardFiles
from late_interaction.corpus._shards import Shard

# Names of files that a writer may remove where no generation names them.
_OWN = ("shard-", "deleted-", "metadata.")


class Writer:
    """Holds a folder: writes new files, and then a generation that names them.

    While a corpus is not complete, each shard makes a generation as soon as it is full. What no generation
    names when the writer is closed is removed.

    Attributes:
        entries: the metadata of the newest generation.
        generation: it, as it was when the writer came, and its blocks.
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

    def take_up(self, entries: dict[str, Any], known: Generation | None = None) -> None:
        """Go on with a corpus, without files that no generation names."""
        _files.sync_folder(self.folder)  # a writer that met an error may have left it undone
        self.entries, self._shards = entries, list(entries["shards"])
        self._next: int = entries["next_shard"]
        self._remove_others()
        self.generation = own = _generations.opened(self.folder, entries, known)
        self.blocks = own.blocks
        numbers = torch.logical_not(own.dead).nonzero().squeeze(1).tolist()
        ids = chain.from_iterable(shard.ids or () for shard in own.live())
        known_ids = dict(zip(ids, numbers, strict=False))
        self.intake = Intake(own.stored, entries["normalized"], own.blocks, entries["has"], known_ids)

    def _remove_others(self) -> None:
        kept = {_files.METADATA, *_generations.files_of(self.entries)}
        numbers = [shard["number"] for shard in self.entries["shards"]]
        kept |= {_shard_files.name_of(number, kind) for number in numbers for kind in _shard_files.KEPT}
        for path in self.folder.iterdir():
            if path.name not in kept and path.name.startswith(_OWN):
                path.unlink(missing_ok=True)  # a search may just have renamed what it wrote

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

    @property
    def documents(self) -> int:
        written = [int(shard["documents"]) for shard in self._shards]
        return sum(written) + (0 if self._shard is None else self._shard.documents)

    def write(self, block: Shard) -> None:
        """Write documents as the corpus stores them, into as many shards as they take."""
        first = 0
        while first < block.documents:
            stop = self._stop(block, first)
            if stop == first:
                self.end_shard()
                continue
            part = block.part(first, stop)
            if self._shard is None:
                self._shard = ShardFiles(self.folder, self._next, part, self.generation.stored.beside)
                self._next += 1
                self._made += [file.path for file in self._shard.files.values()]
            self._shard.write(part)
            first = stop

    def _stop(self, block: Shard, first: int) -> int:
        """Return how far the documents from the first one on fit into the open shard; a new one takes one."""
        row_bytes, used = self.generation.stored.row_bytes, 0
        if self._shard is not None:
            used = self._shard.tokens * row_bytes + 8 * self._shard.documents
        own = block.offsets[first:].to(torch.int64)
        sizes = (own - own[0]) * row_bytes + 8 * torch.arange(len(own), device="cpu")
        count = int(torch.searchsorted(sizes, self.entries["shard_bytes"] - used, right=True)) - 1
        return first + max(count, 0 if used else 1)

    def end_shard(self) -> None:
        """Make the shard durable. A corpus that is not complete has a generation of it, too."""
        if self._shard is not None:
            self._shards.append(self._shard.finish() | {"generation": self.entries["generation"] + 1})
            self._shard = None
            if not self.entries["complete"]:
                self.commit()

    def numbers_at(self, indices: Tensor, generation: Generation | None) -> list[int]:
        """Return the numbers, among all that were ever written, of documents at indices of a generation."""
        if generation is None or generation.entries != self.entries:
            raise _files.CorpusError(
                f"{self.folder} holds a newer generation than the one that is open, and its indices may be"
                " others: refresh() first, or name ids"
            )
        return torch.logical_not(generation.dead).nonzero().squeeze(1)[indices].tolist()

    def delete(self, numbers: list[int]) -> None:
        self._deleted += numbers

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
                for edges in self.intake.ranges(shard):
                    self.write(shard.part(*edges))
        self.commit(deleted=[], compacted=generation.number + 1)
        with suppress(OSError):
            self._remove_others()
