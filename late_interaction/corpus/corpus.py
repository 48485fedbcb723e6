"""Documents packed end to end, in memory or mapped from a folder: :class:`Corpus`."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.options import Precision, check_flag
from late_interaction._progress import Progress
from late_interaction._search.prepare import FirstPass, prepare
from late_interaction._search.result import SearchResult
from late_interaction._search.search import search
from late_interaction.codecs import Codec
from late_interaction.corpus import _files, _first_pass, _generations, _indexes, _parquet, _search, _tune
from late_interaction.corpus._files import CorpusError
from late_interaction.corpus._living import Living
from late_interaction.corpus._options import SHARD_BYTES, BuilderOptions
from late_interaction.corpus.builder import CorpusBuilder
from late_interaction.tokens import TokensLike

__all__ = ["Corpus", "CorpusError"]


class Corpus(Living):
    """Documents of different lengths, their tokens end to end: searched exactly, chunk by chunk.

    Made by :meth:`open` (a folder, mapped into memory), :meth:`from_packed`, :meth:`from_codes`,
    :meth:`from_numpy` or :meth:`from_arrow` (memory, shared and not copied), or :meth:`from_parquet` (written
    to a folder, then mapped). ``len(corpus)`` is the number of documents, ``corpus[i]`` the tokens of one:
    ``[L, d]``, a view of floats, or the float32 tokens that codes stand for; ``corpus["id"]`` those of the
    document with an id, and slices and lists of either make lists.

    It changes by :meth:`add`, :meth:`delete`, :meth:`update` and :meth:`compact`, each of which is one step:
    what is in a folder after a crash is what was there before it, or after it. Other corpora that opened the
    folder keep what they had until they :meth:`refresh`.

    Args:
        shards, options: from the class methods.

    Attributes:
        d: the dims of a token; 0 where there is no document, and nothing else says it.
        dtype: ``torch.float32``, ``torch.float16``, ``torch.bfloat16``, or what the codec stores.
        codec: what decodes the tokens, or None.
        tokens: how many tokens the documents have together.
        normalized: whether tokens are known to have norm 1.
        ids: a sequence of strings, or None.
        columns: a ``pyarrow.Table`` with a row for each document, or None.
        path: the folder, or None.
        generation: the number of what was written to the folder, or None.
        shards: blocks of documents that lie in one piece of memory each.

    Example:
        >>> import torch
        >>> from late_interaction import Corpus
        >>> tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        >>> corpus = Corpus.from_packed(tokens, torch.tensor([0, 2, 3]), normalized=True)
        >>> len(corpus), corpus[1]
        (2, tensor([[0.6000, 0.8000]]))
        >>> corpus.search(torch.tensor([[0.0, 1.0]]), k=2)
        SearchResult(scores=tensor([1.0000, 0.8000]), indices=tensor([0, 1]), ids=None)

    The pickle of a corpus that was opened from a folder, and of a part of one, holds the path and the
    generation, which is opened again where it is unpickled, as in a process of ``spawn`` or ``forkserver``;
    after :meth:`compact` a CorpusError. That of a corpus in memory holds its documents. Threads may search
    one corpus at the same time.
    """

    @staticmethod
    def create(
        path: str | os.PathLike[str],
        *,
        d: int,
        dtype: torch.dtype | None = None,
        codec: Codec | None = None,
        normalize: bool = False,
        resume: bool = False,
        shard_bytes: int = SHARD_BYTES,
        progress: Progress = False,
        total: int | None = None,
    ) -> CorpusBuilder:
        """Make a :class:`CorpusBuilder`, a context manager that writes a corpus to a folder.

        Args:
            path: a folder, empty or not there yet.
            d: the dims of a token.
            dtype: how tokens are stored: ``torch.float32``, ``torch.float16`` (None) or ``torch.bfloat16``.
            codec: store tokens as codes, in the place of ``dtype``: of :class:`late_interaction.codecs.Int8`,
                :class:`~late_interaction.codecs.Fp8` in ``torch.float8_e4m3fn``, or a
                :class:`~late_interaction.codecs.Residual`, which is stored with them.
            normalize: L2-normalize every token, in float32, before it is stored.
            resume: go on with a corpus that was not finished, if the folder holds one: after the documents of
                its finished shards, of which ``builder.documents`` is the number. ``d``, ``dtype``, ``codec``
                and ``normalize`` must be those that it was begun with.
            shard_bytes: a shard ends before it is larger than this; a longer document has one of its own. At
                most so much is lost when the process is killed.
            progress: True shows a tqdm bar; a function is called with (documents done, ``total``).
            total: how many documents the corpus will have. Only ``progress`` needs it.

        Raises:
            TypeError, ValueError: an option of a wrong type or value; one that differs from the corpus's that
                is resumed; ``progress`` without ``total``.
            FileExistsError: the folder holds a finished corpus, one that is not finished while ``resume`` is
                False, or anything else.
            CorpusError: what is to be resumed was cut short or changed.
            RuntimeError: another process or thread is writing to the folder.

        Example:
            >>> import tempfile, torch
            >>> from late_interaction import Corpus
            >>> folder = tempfile.TemporaryDirectory()
            >>> with Corpus.create(folder.name, d=8, dtype=torch.float16) as builder:
            ...     for length in (3, 0, 7):
            ...         builder.add([torch.randn(length, 8)])
            >>> [len(document) for document in Corpus.open(folder.name)]
            [3, 0, 7]
        """
        options = BuilderOptions(d, dtype, codec, normalize, resume, shard_bytes, progress, total)
        return CorpusBuilder(Path(path), options)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = False) -> "Corpus":
        """Open the corpus of a folder, mapped into the host's memory: no token is read before it is scored.

        The size of every file and all offsets are checked. A file may not be cut short while it is mapped:
        the system ends a process that reads beyond its end.

        An index of ColBERT (``colbert-ai`` 0.2), fast-plaid (up to 1.7) or PyLate (either of them, with the
        ids of its documents) is opened where it lies, too: nothing is converted or copied. Scores are those
        of the tokens that the library decompresses, with norm 1, in float32, whatever ``normalize`` says of
        queries; indices are the library's own numbers, but for PyLate's deleted documents. Such documents
        stay as they are: :meth:`extend` another corpus by them. :meth:`refresh` takes up what the library has
        written since.

        Args:
            path: the folder.
            verify: compare every file with its checksum, as :meth:`verify` does, which reads all of it.

        Raises:
            FileNotFoundError: there is no corpus in the folder, and no index.
            CorpusError: the corpus is not finished, or a file of it is missing, cut short or changed; an
                index has another ``nbits`` than 1, 2, 4 or 8. The message names the file. What a file of
                unchanged size holds instead is found by ``verify`` alone.

        Complexity: reads the metadata and 8 bytes a document; of an index its lengths of documents, ids and
        tables, which are copied.

        Example:
            >>> import tempfile, torch
            >>> from late_interaction import Corpus
            >>> folder = tempfile.TemporaryDirectory()
            >>> with Corpus.create(folder.name, d=8) as builder:
            ...     builder.add([torch.randn(3, 8)])
            >>> Corpus.open(folder.name, verify=True).tokens
            3
        """
        check_flag("verify", verify)
        folder = Path(path)
        corpus = cls._of(folder, _generations.load(folder.absolute()))
        if verify:
            corpus.verify()
        return corpus

    @classmethod
    def from_parquet(
        cls,
        source: Any,
        path: str | os.PathLike[str],
        *,
        column: str,
        id_column: str | None = None,
        **options: Any,
    ) -> "Corpus":
        """Write a column of a parquet file to a folder, a row group at a time, and open it.

        Args:
            source: a parquet file: its path, or a file object, as ``pyarrow.parquet.ParquetFile`` takes it.
            path: the folder to write, as in :meth:`create`.
            column: the name of the column, of a type that :meth:`from_arrow` takes.
            id_column: the name of a column of strings or integers that become ids, or None.
            options: those of :meth:`create`, such as ``dtype``, ``normalize``, ``progress`` or ``resume``;
                ``resume=True`` reads the file from the first row that is missing in the folder. ``d`` is
                found in the file, ``total`` too.

        Raises:
            ImportError: pyarrow is missing.
            KeyError: the file has no such column.
            TypeError, ValueError, OSError: as :meth:`from_arrow`, :meth:`create` and
                :meth:`CorpusBuilder.add`.

        Example:
            >>> from late_interaction import Corpus
            >>> corpus = Corpus.from_parquet(
            ...     "embeddings.parquet", "corpus", column="vector", progress=True)     # doctest: +SKIP
        """
        d = options.pop("d", None)

        def create(**found: int) -> CorpusBuilder:
            found["d"] = found["d"] or getattr(options.get("codec"), "d", 0)
            return cls.create(path, **(found | options))

        _parquet.copy(source, column, id_column, create, d)
        return cls.open(path)

    def verify(self) -> None:
        """Compare every file with the checksum that it was written with.

        Returns:
            None. A corpus in memory has no checksums, and nothing is compared; nor has an index of another
            library, of which every token must have a centroid.

        Raises:
            CorpusError: a file is missing, cut short or changed. The message names it.

        Complexity: reads every byte once, at about 1 GB/s.
        """
        own = self._generation
        if own is None or self.path is None:
            return
        if self._source is not None:
            _indexes.check_codes(own.folder, own.blocks)
            return
        _generations.at(own.folder, _generations.read(own.folder), own.number)  # an error after compact
        for name, entry in _generations.files_of(own.entries).items():
            _files.check_checksum(own.folder / name, entry)
        _first_pass.verify(own.folder, own.entries)

    def search(
        self,
        Q: TokensLike,
        k: int = 10,
        *,
        q_mask: Tensor | None = None,
        subset: Any = None,
        filter: Any = None,
        normalize: bool = False,
        largest: bool = True,
        keep_empty: bool = False,
        precision: Precision | None = None,
        coarse: FirstPass | None = None,
        candidates: int | None = None,
        chunk_bytes: int | None = None,
        progress: Progress = False,
        group: Any = None,
    ) -> SearchResult:
        """Call :func:`late_interaction.search` of this corpus.

        Args:
            Q, k, q_mask, subset, filter, normalize, largest, keep_empty, precision: as there.
            coarse: the first pass that chooses the documents that are scored exactly:

                - ``"bits"``: the signs of all tokens, ``ceil(d / 8)`` bytes a token, with those of queries;
                - ``"centroids"``: lists of the documents of each centroid, 4 bytes a token, of a corpus of
                  :class:`~late_interaction.codecs.Residual`: those of the 16 best of each query token;
                - ``"muvera"``: an encoding of each document in int8, 1,284 bytes.

                The first search that wants them makes them, in a file for each shard of a folder, or else in
                memory. Later ones make those of new shards alone. None: score every document.
            candidates: how many documents of each query are scored exactly then, as there; see :meth:`tune`.
            chunk_bytes, progress, group: as there; no group with ``coarse``.

        Example:
            >>> import torch
            >>> import late_interaction as li
            >>> ids = ["first", "second"]
            >>> corpus = li.Corpus.from_packed(torch.eye(3), torch.tensor([0, 1, 3]), ids=ids)
            >>> corpus.search(torch.tensor([[[0.0, 0.6, 0.8]]]), k=1)
            SearchResult(scores=tensor([[0.8000]]), indices=tensor([[1]]), ids=[['second']])
            >>> corpus.search(torch.tensor([[[0.0, 0.6, 0.8]]]), k=1, coarse="bits", candidates=2).ids
            [['second']]
        """
        return search(
            Q, self, k, q_mask=q_mask, subset=subset, filter=filter, normalize=normalize, largest=largest,
            keep_empty=keep_empty, precision=precision, coarse=coarse, candidates=candidates,
            chunk_bytes=chunk_bytes, progress=progress, group=group,
        )  # fmt: skip

    def tune(
        self,
        Q: TokensLike,
        k: int = 10,
        *,
        recall: float = 0.99,
        q_mask: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Find the cheapest first pass whose recall reaches a target, on this machine and these queries.

        Searches for one query at a time: by every document, and by each first pass that this corpus can have
        with twice as many candidates each time, until its recall@k, by
        :func:`late_interaction.evaluate_recall`, reaches ``recall``, or it takes longer than the best so far.
        Prints a row of a table for each.

        Args:
            Q, q_mask: a sample of queries, as of a search; some tens at least.
            k: how many documents the searches to come want.
            recall: the share of the best k that they are to find, above 0 and up to 1.
            options: those of the searches to come, such as ``normalize``, ``subset`` or ``filter``.

        Returns:
            ``coarse`` and ``candidates`` of :meth:`search`, None both where no first pass is faster than to
            score every document.

        Raises:
            TypeError, ValueError: an argument of a wrong kind or value, or no query.

        Example:
            >>> import torch
            >>> from late_interaction import Corpus
            >>> tokens = torch.nn.functional.normalize(torch.randn(4000, 64), dim=-1)
            >>> corpus = Corpus.from_packed(tokens, torch.arange(0, 4001, 10))
            >>> chosen = corpus.tune(tokens.view(400, 10, 64)[:3], k=5)  # doctest: +ELLIPSIS
            coarse      candidates  recall@5  ms a query
            ...
            >>> corpus.search(tokens[:10], 5, **chosen).indices[0]
            tensor(0)
        """
        return _tune.tune(self, Q, k, recall, q_mask, options)


prepare.register(Corpus, _search.CorpusSearch)
