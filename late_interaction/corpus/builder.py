"""Writing a corpus to a folder, shard by shard: :class:`CorpusBuilder`."""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.packed import check_sequences
from late_interaction._progress import reporter
from late_interaction._scoring.norm_warning import look
from late_interaction.corpus import _codec_files, _files, _shards, _tokens
from late_interaction.corpus._documents import Documents
from late_interaction.corpus._ids import check_ids
from late_interaction.corpus._options import BuilderOptions
from late_interaction.corpus._shards import ShardFiles

__all__ = ["CorpusBuilder"]

# Tokens are encoded in blocks of about so many bytes as stored, which bounds the memory beside the caller's.
_BLOCK_BYTES = 64 << 20


class CorpusBuilder:
    """Writes documents to a folder. :meth:`Corpus.create` makes one; see there for its options.

    As a context manager it finishes the corpus at the end of the block. When the block raises, the disk is
    full or the process is killed, the shards that were finished stay, in a folder that :meth:`Corpus.open`
    refuses; ``Corpus.create(..., resume=True)`` goes on from ``documents``. One process writes to a folder at
    a time. Its threads may share a builder: the documents of one call stay together, with their ids.

    Args:
        path, options: from :meth:`Corpus.create`.

    Attributes:
        documents: how many documents the corpus has so far. After a resumption: how many the finished shards
            have, so that adding goes on with this one.

    Raises:
        OSError: what the disk says, such as "No space left on device". The message names the file and how
            many documents are kept. The builder takes no more documents then.

    Example:
        >>> import tempfile, torch
        >>> import late_interaction as li
        >>> from late_interaction import Corpus
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Corpus.create(folder.name, d=4, codec=li.codecs.Int8()) as builder:
        ...     builder.add([torch.randn(3, 4), torch.randn(5, 4)], ids=["a", "b"])
        >>> corpus = Corpus.open(folder.name)
        >>> len(corpus), corpus.tokens, corpus.ids[1]
        (2, 8, 'b')
    """

    def __init__(self, path: Path, options: BuilderOptions) -> None:
        self.documents = 0
        self._path = path
        self._d, self._stored = options.d, options.stored
        self._normalize, self._shard_bytes = options.normalize, options.shard_bytes
        self._has_ids: bool | None = None
        self._finished: list[dict[str, Any]] = []
        self._shard: ShardFiles | None = None
        self._state = "open"
        self._ids: set[str] = set()  # of all documents
        self._one_at_a_time = threading.RLock()  # a progress function may call the builder
        self._cleanup = ExitStack()
        try:
            handle = _files.lock_folder(path)
            self._cleanup.callback(weakref.finalize(self, os.close, handle))
            self._codec = _codec_files.entry_of(self._stored.codec)
            self._start(options.resume)
            self._report = self._cleanup.enter_context(reporter(options.progress, options.total or 0))
            if self.documents:
                self._report(self.documents)
        except BaseException:
            self._cleanup.close()
            raise

    # ---- the folder, before and after ----

    def _start(self, resume: bool) -> None:
        building = self._path / _files.BUILDING
        if (self._path / _files.METADATA).exists():
            raise FileExistsError(f"{self._path} holds a finished corpus: open it, or name another folder")
        if building.exists():
            if not resume:
                raise FileExistsError(
                    f"{self._path} holds a corpus that is not finished: go on with resume=True, or delete it"
                )
            self._take_up(_files.read_metadata(building))
        elif any(path.name != "building.new" for path in self._path.iterdir()):
            raise FileExistsError(f"{self._path} must be an empty folder, or one that is not there yet")
        else:
            self._record()
        _codec_files.write(self._path, self._stored.codec)

    def _take_up(self, entries: dict[str, Any]) -> None:
        """Goes on after the shards that were finished, and cuts away the rest."""
        mine = self._entries()
        for name in ("dtype", "d", "normalized", "codec"):
            if entries.get(name) != mine.get(name):
                theirs, own = abbreviate(entries.get(name)), abbreviate(mine.get(name))
                raise ValueError(f"{name} of the corpus to resume is {theirs}, got {own}")
        self._finished, self._has_ids = entries["shards"], entries["has_ids"]
        kept = {_files.BUILDING}
        for index, shard in enumerate(self._finished):
            opened = _shards.open_shard(self._path, index, shard, self._stored)
            self._ids.update(opened.ids or ())
            kept |= {_shards.name_of(index, kind) for kind in shard["files"]}
            self.documents += shard["documents"]
        for path in self._path.iterdir():
            if path.name not in kept and path.name.startswith(("shard-", "building.", "metadata.")):
                path.unlink()

    def _entries(self) -> dict[str, Any]:
        codec = {} if self._codec is None else {"codec": self._codec}
        return codec | {
            "format": _files.FORMAT,
            "version": _files.VERSION,
            "dtype": self._stored.name,
            "d": self._d,
            "normalized": self._normalize,
            "has_ids": self._has_ids,
            "documents": sum(shard["documents"] for shard in self._finished),
            "tokens": sum(shard["tokens"] for shard in self._finished),
            "shards": self._finished,
        }

    def _record(self) -> None:
        _files.write_metadata(self._path / _files.BUILDING, self._entries())

    # ---- documents ----

    def add(self, documents: Sequence[Tensor], ids: Sequence[str] | None = None) -> None:
        """Write the next documents. All are checked before one is written.

        Args:
            documents: a list of ``[L, d]`` tensors, of one floating-point dtype and on one device. ``L`` may
                be 0.
            ids: a string for each of them, which no other document of the corpus has; they are kept in memory
                until the corpus is finished. Either all documents of a corpus have an id, or none.

        Raises:
            TypeError, ValueError: a document of another ``d``, dtype or device; a token that is not finite or
                that the corpus's dtype cannot hold; ids that are no strings, not as many, or not new. The
                message names the document. Nothing was written then.
            OSError: as the class says.
        """
        if isinstance(documents, (list, tuple)) and not documents:
            self._check_ids(0, ids)
            return
        check_sequences("documents", documents)
        if documents[0].shape[1] != self._d:
            raise ValueError(f"documents[0] must be [L, {self._d}], got {shape_of(documents[0])}")
        with torch.no_grad():
            tokens = torch.cat(tuple(documents)).cpu()
            ends = list(accumulate((len(x) for x in documents), initial=0))
            offsets = torch.tensor(ends, dtype=torch.int64, device="cpu")
            self._add_shards([_shards.Shard(tokens, offsets, None, ids)], "documents", False)

    def extend(self, corpus: Documents) -> None:
        """Write the documents of another corpus, with their ids if it has any.

        Codes of its dtype (and normalized, if it is) are copied, all others encoded anew.

        Args:
            corpus: a corpus of the same ``d``, on any device.

        Raises:
            TypeError, ValueError, OSError: as :meth:`add`: all documents are checked before one is written.
        """
        if len(corpus) and corpus.d != self._d:
            raise ValueError(f"corpus must have d = {self._d}, got {corpus.d}")
        kept = _codec_files.equal(corpus.codec, self._stored.codec)
        kept = kept and (corpus.normalized or not self._normalize)
        with torch.no_grad():
            self._add_shards(corpus.shards, "corpus", kept)

    def _add_shards(
        self, shards: Sequence[_shards.Shard], name: str, as_they_are: bool, place: int = 0
    ) -> None:
        """Add all documents of shards or, where one is refused, none. Messages call the first name[place]."""
        with self._one_at_a_time:
            if self._state != "open":
                raise RuntimeError(
                    f"the builder of {self._path} is {self._state}: it takes no more documents"
                )
            ids: set[str] = set()
            for shard in shards:
                ids |= self._check_ids(shard.documents, shard.ids, ids)
                for first, stop in self._blocks(shard):
                    self._check_tokens(shard, first, stop, name, place)
                place += shard.documents
            self._ids |= ids
            for shard in shards:
                if shard.ids is not None or shard.documents:
                    self._has_ids = shard.ids is not None
                for first, stop in self._blocks(shard):
                    self._write(shard, first, stop, as_they_are)

    def _blocks(self, shard: _shards.Shard) -> list[tuple[int, int]]:
        return list(shard.ranges(max(_BLOCK_BYTES // self._stored.row_bytes, 1), 1 << 20))

    def _check_ids(self, documents: int, ids: Sequence[str] | None, *others: set[str]) -> set[str]:
        if ids is None:
            if self._has_ids and documents:
                raise ValueError("ids must be given for all documents of the corpus or for none, got None")
            return set()
        own = check_ids(ids, documents, self._ids, *others)
        if self._has_ids is False and documents:
            raise ValueError(
                "ids must be given for all documents of the corpus or for none: others have none"
            )
        return own

    def _check_tokens(self, shard: _shards.Shard, first: int, stop: int, name: str, place: int) -> None:
        rows = shard.rows(first, stop)
        tokens = shard.floats(rows)
        bad = _tokens.find_unusable(tokens, self._stored, self._normalize)
        if bad is not None:
            at = rows.start + bad
            document = int(torch.searchsorted(shard.offsets, at, right=True)) - 1
            raise ValueError(
                f"{name}[{place + document}] must have tokens that {self._stored.name} can hold,"
                f" got NaN, an infinity or too large a value in its token {at - int(shard.offsets[document])}"
            )
        if not self._normalize:
            look("Corpus.create", tokens, called="the corpus")

    def _write(self, shard: _shards.Shard, first: int, stop: int, as_they_are: bool) -> None:
        """Write some documents of a shard, into as many shards of the corpus as they take."""
        rows = shard.rows(first, stop)
        if as_they_are:
            tokens, beside = shard.stored(rows)
            tokens, beside = tokens.cpu(), None if beside is None else beside.cpu()
        else:
            tokens, beside = _tokens.encode(shard.floats(rows).cpu(), self._stored, self._normalize)
        offsets = (shard.offsets[first : stop + 1] - shard.offsets[first]).tolist()
        for begin, end in self._parts(offsets):
            part = slice(offsets[begin], offsets[end])
            ids = None if shard.ids is None else shard.ids[first + begin : first + end]
            own = None if beside is None else beside[part]
            self._write_part(tokens[part], own, [x - part.start for x in offsets[begin + 1 : end + 1]], ids)
        self._report(self.documents)

    def _parts(self, offsets: list[int]) -> Iterator[tuple[int, int]]:
        """Documents in ranges, each of which goes to one shard: a full one is finished in between."""
        begin, used = 0, 0
        if self._shard is not None:
            used = self._shard.tokens * self._stored.row_bytes + 8 * self._shard.documents
        for i, (start, stop) in enumerate(pairwise(offsets)):
            size = (stop - start) * self._stored.row_bytes + 8
            if used and used + size > self._shard_bytes:
                if i > begin:
                    yield begin, i
                self.flush()
                begin, used = i, 0
            used += size
        yield begin, len(offsets) - 1

    def _write_part(
        self, tokens: Tensor, beside: Tensor | None, ends: list[int], ids: Sequence[str] | None
    ) -> None:
        try:
            if self._shard is None:
                kinds = ["tokens", "offsets"] + ["ids", "id_offsets"] * (ids is not None)
                self._shard = ShardFiles(self._path, len(self._finished), kinds, self._stored.beside)
            self._shard.write(tokens, beside, ends, ids)
        except OSError as error:
            raise self._failed(error) from error
        except BaseException:  # the shard may end within a document
            self._cut_away("closed, as writing was interrupted")
            raise
        self.documents += len(ends)

    # ---- the end ----

    def flush(self) -> None:
        """End the shard here: what was added survives a crash, at the cost of a few more files.

        Raises:
            OSError: as the class says.
        """
        with self._one_at_a_time:
            if self._shard is None:
                return
            try:
                entry = self._shard.finish()
                _files.sync_folder(self._path)
            except OSError as error:
                raise self._failed(error) from error
            self._shard = None  # from here on its files stay: building.json may name them already
            self._finished.append(entry)
            try:
                self._record()
            except OSError as error:
                self._finished.pop()
                raise self._failed(error) from error

    def _failed(self, error: OSError) -> OSError:
        self._cut_away("closed, as writing failed")
        return _files.writing_failed(error, self._path, self.documents)

    def _cut_away(self, state: str) -> None:
        """Close the builder without the shard that is not finished."""
        if self._shard is not None:
            self._shard.remove()
            self._shard = None
        self.documents = sum(shard["documents"] for shard in self._finished)
        self._state = state
        self._cleanup.close()

    def finish(self) -> None:
        """Write the rest and the metadata for :meth:`Corpus.open`. A second call does nothing.

        Raises:
            OSError: as the class says.
        """
        with self._one_at_a_time:
            if self._state != "open":
                return
            self.flush()
            try:
                _files.write_metadata(self._path / _files.METADATA, self._entries())
            except OSError as error:
                raise self._failed(error) from error
            (self._path / _files.BUILDING).unlink()
            self._state = "finished"
            self._cleanup.close()

    def __enter__(self) -> "CorpusBuilder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._one_at_a_time:
            if kind is None:
                self.finish()
            elif self._state == "open":
                self._cut_away("closed, as its block raised")
