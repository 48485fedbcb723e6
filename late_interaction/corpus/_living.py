"""A corpus that changes: :class:`Living`, the part of :class:`Corpus` that writes."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from late_interaction._search.prepare import left_out
from late_interaction.corpus import _columns, _files, _generations
from late_interaction.corpus._documents import Documents
from late_interaction.corpus._generations import Generation
from late_interaction.corpus._ids import check_ids
from late_interaction.corpus._memory import MemoryWriter
from late_interaction.corpus._writer import Writer

if TYPE_CHECKING:
    from typing_extensions import Self

# Corpora in memory change one after the other.
_IN_MEMORY = threading.Lock()


class Living(Documents):
    """Documents that are added, deleted and replaced. See :class:`Corpus`."""

    @classmethod
    def _of(cls, path: Path, generation: Generation) -> "Self":
        own = generation.stored
        kind = {"d": own.d, "dtype": own.dtype, "codec": own.codec}
        kind |= {"normalized": generation.entries["normalized"], "path": path, "generation": generation}
        form = generation.entries["format"]
        kind["ids"] = generation.entries.get("has", {}).get("ids")  # of no document as well
        kind["source"] = None if form == _files.FORMAT else form
        return cls(generation.live(), kind)

    @property
    def generation(self) -> int | None:
        """The number of what was written to the folder, 0 of another library's index, or None in memory."""
        return None if self._generation is None else self._generation.number

    @contextmanager
    def _edit(self) -> Iterator[Writer | MemoryWriter]:
        """Lend what changes the documents, and then have them as they are."""
        if self._source is not None:
            raise ValueError(
                f"the documents of {self._source} stay as they are: extend() another corpus by this one, and"
                " change that"
            )
        known = self._generation
        if self.path is None or known is None:
            with _IN_MEMORY:
                editor = MemoryWriter(self)
                yield editor
                self.__dict__ = type(self)(editor.shards, self._kind()).__dict__
            return
        try:
            with closing(Writer(known.folder)) as writer:
                writer.take_up(_generations.read(known.folder), known)
                yield writer
        except OSError as error:
            if error.errno is None:
                raise
            state = "the corpus has the documents that it had before"
            raise _files.writing_failed(error, known.folder, state, "call this again") from error
        self.refresh()

    def add(self, documents: Sequence[Tensor], ids: Sequence[str] | None = None, columns: Any = None) -> None:
        """Add documents behind the others.

        Args:
            documents: a list of ``[L, d]`` tensors, of one floating-point dtype and on one device; ``L`` may
                be 0. They are stored as the others: normalized if those are ``normalized``, encoded by the
                same ``codec``.
            ids: a string for each of them, which no other document has. Either all documents of a corpus have
                an id, or none.
            columns: metadata, for ``filter`` of a search: a ``pyarrow.Table`` or a dict of lists with a row
                for each document, or None, as for the other documents. Values are cast to the types that the
                first documents brought.

        Raises:
            TypeError, ValueError: a document of another ``d``, dtype or device; a token that is not finite or
                that the corpus's dtype cannot hold; ids that are no strings, not as many, or not new; columns
                that do not fit. The message names the document. Nothing was written then.
            RuntimeError: another process or thread is writing to the folder.
            OSError: as the disk says. The corpus in the folder is what it was before.
            ImportError: columns without pyarrow.

        Complexity: writes the documents, and a file of metadata whose size grows with the number of shards;
        reads all ids of the folder. Add many documents at a time.

        Example:
            >>> import torch
            >>> from late_interaction import Corpus
            >>> corpus = Corpus.from_packed(torch.eye(3), torch.tensor([0, 1, 3]), ids=["a", "b"])
            >>> corpus.add([torch.ones(2, 3)], ["c"])
            >>> corpus.delete(["a"])
            >>> list(corpus.ids), corpus["c"].shape
            (['b', 'c'], torch.Size([2, 3]))
        """
        with torch.no_grad(), self._edit() as writer:
            for block in writer.intake.blocks_of_documents(documents, ids, columns):
                writer.write(block)
            writer.commit()

    def extend(self, corpus: Documents) -> None:
        """Add the documents of another corpus behind the others, with their ids and columns.

        Codes of the same codec are copied. Other documents are decoded, and stored as this corpus does: so
        those of an index of another library, which :meth:`Corpus.open` opens, come to live here.

        Args:
            corpus: a corpus of the same ``d``, on any device. Where this one is ``normalized``, codes are
                copied from one that is, too.

        Raises:
            TypeError, ValueError, RuntimeError, OSError: as :meth:`add`.

        Complexity: as :meth:`add`. Documents are read twice, to be checked and to be written, in blocks of
        64 MiB.

        Example:
            >>> import torch
            >>> from late_interaction import Corpus
            >>> corpus = Corpus.from_packed(torch.eye(3), torch.tensor([0, 1, 3]), ids=["a", "b"])
            >>> corpus.extend(Corpus.from_packed(torch.ones(2, 3), torch.tensor([0, 2]), ids=["c"]))
            >>> list(corpus.ids)
            ['a', 'b', 'c']
        """
        with torch.no_grad(), self._edit() as writer:
            for block in writer.intake.blocks_of_corpus(corpus):
                writer.write(block)
            writer.commit()

    def delete(self, subset: Any) -> None:
        """Delete documents. Those behind them move up: indices are numbers of what is left, ids stay.

        Args:
            subset: a list of ids; or indices, or a mask, as ``subset`` of a search takes them.

        Raises:
            TypeError, ValueError: an id or index that there is not. Nothing was deleted then.
            CorpusError: indices or a mask, where the folder holds a newer generation than this corpus.
            RuntimeError, OSError: as :meth:`add`.

        Complexity: writes 8 bytes a document. Their tokens stay in the folder until :meth:`compact`. They are
        not scored where they are more than a sixth of all.
        """
        with self._edit() as writer:
            if isinstance(subset, (list, tuple)) and any(isinstance(x, str) for x in subset):
                numbers = writer.intake.release(subset)
            else:
                out = left_out(subset, len(self), None, torch.device("cpu"))
                if out is None:
                    raise TypeError("subset must be a list of ids or indices, or a mask, got None")
                numbers = writer.numbers_at(torch.logical_not(out).nonzero().squeeze(1), self._generation)
            if numbers:
                writer.delete(numbers)
                writer.commit()

    def update(self, documents: Sequence[Tensor], ids: Sequence[str], columns: Any = None) -> None:
        """Replace documents, all of them at once. They come behind the others.

        Args:
            documents: as in :meth:`add`.
            ids: those of the documents to replace.
            columns: as in :meth:`add`. None keeps what the old ones have.

        Raises:
            TypeError, ValueError, RuntimeError, OSError: as :meth:`add`; an id that no document has.
        """
        check_ids(ids, len(documents))
        with torch.no_grad(), self._edit() as writer:
            numbers = writer.intake.release(ids)
            if columns is None and writer.intake.has["columns"]:
                columns = _columns.stacked([x.columns for x in writer.blocks]).take(numbers)
            writer.delete(numbers)
            for block in writer.intake.blocks_of_documents(documents, ids, columns):
                writer.write(block)
            writer.commit()

    def compact(self) -> None:
        """Give back what deleted documents take, and join small shards. Scores, ids and indices stay.

        Other processes go on with the files that they have mapped until they :meth:`refresh`. What pickles of
        older generations name is gone: unpickling them is a CorpusError.

        Raises:
            RuntimeError, OSError: as :meth:`add`.

        Complexity: reads and writes the shards that hold deleted documents, and small ones; the folder needs
        room for both until this returns.
        """
        with self._edit() as writer:
            writer.compact()

    def refresh(self) -> bool:
        """Take up what other processes have written to the folder since.

        Returns:
            True if there was something. Searches that run meanwhile finish with the documents that they began
            with.

        Raises:
            FileNotFoundError, CorpusError: as :meth:`Corpus.open`.
        """
        own, path = self._generation, self.path
        if own is None or path is None or _generations.read(own.folder) == own.entries:
            return False
        self.__dict__ = self._of(path, _generations.load(own.folder, known=own)).__dict__
        return True
