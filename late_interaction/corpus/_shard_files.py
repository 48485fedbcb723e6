"""The files of the shard that a builder is writing."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from late_interaction.corpus import _files, _shards


class ShardFiles:
    """The files of the shard that is being written."""

    def __init__(self, folder: Path, index: int, kinds: Sequence[str], beside: str | None) -> None:
        self.documents = self.tokens = 0
        self._beside = beside
        kinds = [*kinds, beside] if beside else kinds
        self.files: dict[str, _files.HashedFile] = {}
        try:
            for kind in kinds:
                self.files[kind] = _files.HashedFile(folder / _shards.name_of(index, kind))
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
