"""Writing a corpus to a folder, shard by shard: :class:`CorpusBuilder`."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._progress import reporter
from late_interaction.corpus import _codec_files, _files, _indexes
from late_interaction.corpus._documents import Documents
from late_interaction.corpus._options import BuilderOptions
from late_interaction.corpus._shards import Shard
from late_interaction.corpus._writer import Writer

__all__ = ["CorpusBuilder"]


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
        self._path = path
        self._state = "open"
        self._one_at_a_time = threading.RLock()  # a progress function may call the builder
        path.mkdir(parents=True, exist_ok=True)
        self._writer = Writer(path)
        self._cleanup = ExitStack()
        self._cleanup.callback(self._writer.close)
        try:
            self._start(options)
            self._report = self._cleanup.enter_context(reporter(options.progress, options.total or 0))
            if self.documents:
                self._report(self.documents)
        except BaseException:
            self._cleanup.close()
            raise

    @property
    def documents(self) -> int:
        """How many documents the corpus has so far."""
        return self._writer.documents

    def _start(self, options: BuilderOptions) -> None:
        metadata, mine = self._path / _files.METADATA, options.entries()
        if (index := _indexes.read(self._path)) is not None:
            raise FileExistsError(f"{self._path} holds {index['format']}: open it, or name another folder")
        if not metadata.exists():
            if any(path.name != "metadata.new" for path in self._path.iterdir()):
                raise FileExistsError(f"{self._path} must be an empty folder, or one that is not there yet")
            _files.write_metadata(metadata, mine)
        elif _files.read_metadata(metadata)["complete"]:
            raise FileExistsError(f"{self._path} holds a finished corpus: open it, or name another folder")
        elif not options.resume:
            raise FileExistsError(
                f"{self._path} holds a corpus that is not finished: go on with resume=True, or delete it"
            )
        entries = _files.read_metadata(metadata)
        for name in ("dtype", "d", "normalized", "codec"):
            if entries[name] != mine[name]:
                theirs, own = abbreviate(entries[name]), abbreviate(mine[name])
                raise ValueError(f"{name} of the corpus to resume is {theirs}, got {own}")
        _codec_files.write(self._path, options.stored.codec)
        self._writer.take_up(entries | {"shard_bytes": options.shard_bytes})

    def add(self, documents: Sequence[Tensor], ids: Sequence[str] | None = None, columns: Any = None) -> None:
        """Write the next documents. All are checked before one is written.

        Args:
            documents, ids, columns: as in :meth:`Corpus.add`. Ids are kept in memory until the corpus is
                finished.

        Raises:
            TypeError, ValueError: as :meth:`Corpus.add`. Nothing was written then.
            OSError: as the class says.
        """
        with torch.no_grad():
            self._add_blocks(self._writer.intake.blocks_of_documents(documents, ids, columns))

    def extend(self, corpus: Documents) -> None:
        """Write the documents of another corpus, with their ids if it has any.

        Codes of its dtype (and normalized, if it is) are copied, all others encoded anew.

        Args:
            corpus: a corpus of the same ``d``, on any device.

        Raises:
            TypeError, ValueError, OSError: as :meth:`add`: all documents are checked before one is written.
        """
        with torch.no_grad():
            self._add_blocks(self._writer.intake.blocks_of_corpus(corpus))

    def _add_shards(self, shards: Sequence[Shard], name: str, place: int = 0) -> None:
        """Add all documents of shards or, where one is refused, none. Messages call the first name[place]."""
        self._add_blocks(self._writer.intake.blocks_of(shards, name, place=place))

    def _add_blocks(self, blocks: Iterable[Shard]) -> None:
        """Write documents that are checked when the first of them is asked for."""
        with self._one_at_a_time:
            if self._state != "open":
                raise RuntimeError(
                    f"the builder of {self._path} is {self._state}: it takes no more documents"
                )
            for block in blocks:
                with self._writing():
                    self._writer.write(block)
                self._report(self.documents)

    def flush(self) -> None:
        """End the shard here: what was added survives a crash, at the cost of a few more files.

        Raises:
            OSError: as the class says.
        """
        with self._one_at_a_time, self._writing():
            self._writer.end_shard()

    def finish(self) -> None:
        """Write the rest and the metadata for :meth:`Corpus.open`. A second call does nothing.

        Raises:
            OSError: as the class says.
        """
        with self._one_at_a_time:
            if self._state != "open":
                return
            with self._writing():
                self._writer.end_shard()
                self._writer.commit(complete=True)
            self._state = "finished"
            self._cleanup.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep what was finished alone if writing fails."""
        try:
            yield
        except OSError as error:
            self._cut_away("closed, as writing failed")
            state = f"the corpus is not finished. The first {self.documents} documents are kept"
            then = "go on from them with Corpus.create(..., resume=True)"
            raise _files.writing_failed(error, self._path, state, then) from error
        except BaseException:  # the shard may end within a document
            self._cut_away("closed, as writing was interrupted")
            raise

    def _cut_away(self, state: str) -> None:
        """Close the builder without the shard that is not finished."""
        self._state = state
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
