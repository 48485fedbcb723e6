"""Documents packed end to end in shards: their counts, their tokens, and how they come from memory."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from late_interaction._checks.options import check_flag, check_integer, check_positive
from late_interaction._checks.tensors import check_integers
from late_interaction.codecs import Codec
from late_interaction.codes import Codes
from late_interaction.corpus import _arrow, _columns, _generations, _ids, _memory, _shards
from late_interaction.corpus._files import CorpusError

if TYPE_CHECKING:
    from typing_extensions import Self


def _reopened(
    kind: "type[Documents]", folder: Path, number: int, identity: str, edges: tuple[int, int] | None
) -> "Documents":
    generation = _generations.load(folder, number)
    if generation.identity != identity:
        raise CorpusError(f"{folder} holds another corpus than the one that was pickled")
    corpus: Documents = kind._of(folder, generation)  # type: ignore[attr-defined]  # Corpus has it
    return corpus if edges is None else corpus._between(*edges)


class Documents:
    """Hold the documents of a :class:`Corpus`. See there."""

    def __init__(self, shards: Sequence[_shards.Shard], options: dict[str, Any]) -> None:
        self.shards = tuple(shards)
        self.d: int = options["d"]
        self.dtype: torch.dtype = options["dtype"]
        self.codec: Codec | None = options.get("codec")
        self.normalized: bool = options["normalized"]
        # What of another library they are read from, as they are; None for documents that may change.
        self._source: str | None = options.get("source")
        self.path: Path | None = options.get("path")
        self._generation: _generations.Generation | None = options.get("generation")
        # Which of its documents these are; None for all.
        self._edges: tuple[int, int] | None = options.get("edges")
        self._ends = list(accumulate(shard.documents for shard in self.shards))
        self.tokens = sum(shard.token_count for shard in self.shards)
        self.ids: _ids.JoinedIds | None = None
        # Empty shards may lack what the others have.
        self._labelled = [shard for shard in self.shards if shard.documents] or self.shards
        parts = [shard.ids for shard in self._labelled if shard.ids is not None]
        if len(parts) == len(self._labelled) and (parts or options.get("ids")):
            self.ids = _ids.JoinedIds(parts)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int | str) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice | list[int] | list[str] | Tensor) -> list[Tensor]: ...
    def __getitem__(self, index: Any) -> Tensor | list[Tensor]:
        own = self._snapshot()
        if isinstance(index, slice):
            index = range(len(own))[index]
        elif isinstance(index, Tensor):
            check_integers("index", index, 1, "[n]", "index", index.device)
            index = index.tolist()
        if isinstance(index, (list, range)):
            return [own[i] for i in index]
        if isinstance(index, str):
            if own.ids is None or index not in own.ids.places:
                raise KeyError(f"no document has the id {index!r}")
            index = own.ids.places[index]
        check_integer("index", index)
        shard, rows = own._stored_at(range(len(own))[index])
        return shard.floats([rows])

    def _snapshot(self) -> "Self":
        """Return the documents that there are now: writing, and refreshing, gives the corpus others."""
        own = object.__new__(type(self))
        own.__dict__ = self.__dict__
        return own

    @property
    def columns(self) -> Any:
        """A ``pyarrow.Table`` with a row for each document, or None."""
        parts = [shard.columns for shard in self._labelled]
        return _columns.stacked(parts) if parts and all(x is not None for x in parts) else None

    def _where(self, condition: Any) -> Tensor:
        """Tell which documents meet a condition on their columns: bool, on the CPU."""
        parts = [x.columns for x in self._labelled if x.columns is not None]
        if len(parts) < len(self._labelled):
            raise ValueError("filter must be None for documents without columns")
        types = _columns.types_of(parts) if parts else None
        none = torch.empty(0, dtype=torch.bool, device="cpu")
        return torch.cat([none, *(x.where(condition, types) for x in parts)])

    def _stored_at(self, index: int) -> tuple[_shards.Shard, slice]:
        """Return the shard of a document, and where its tokens lie in it."""
        part = bisect_right(self._ends, index)
        first = index - (self._ends[part - 1] if part else 0)
        (rows,) = self.shards[part].rows(first, first + 1)
        return self.shards[part], rows

    def _length(self, index: int) -> int:
        _, rows = self._stored_at(index)
        return int(rows.stop - rows.start)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path of documents that were opened from a folder, and other documents whole."""
        own = self._snapshot()
        if (made := own._generation) is not None:
            return _reopened, (type(self), made.folder, made.number, made.identity, own._edges)
        if not all(shard.is_alone for shard in own.shards):
            # Kept, as a process that is spawned maps the memory of these tensors once it has started.
            shards = [shard if shard.is_alone else shard.compact() for shard in own.shards]
            own.__dict__.update(type(self)(shards, own._kind()).__dict__)
        return type(self), (own.shards, own._kind())

    def _kind(self) -> dict[str, Any]:
        names = ("d", "dtype", "codec", "normalized")
        own = {"source": self._source, "ids": self.ids is not None}
        return {name: getattr(self, name) for name in names} | own

    def _between(self, first: int, stop: int) -> "Self":
        """Documents [first, stop), over the same memory."""
        begin, _ = self._edges or (0, 0)
        own = {"generation": self._generation, "edges": (begin + first, begin + stop)}
        return type(self)(_shards.between(self.shards, first, stop), self._kind() | own)

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else f"in {str(self.path)!r}"
        kind = self.codec or self.dtype
        return f"Corpus({len(self)} documents, {self.tokens} tokens, d={self.d}, {kind}, {where})"

    def to(self, device: torch.device | str) -> "Self":
        """Copy the documents to the memory of a device, such as a GPU that is to search them many times.

        Args:
            device: where their tokens are to lie.

        Returns:
            A corpus in memory with the same documents, ids and columns, or this one if its tokens are there
            already. What is added to either later is not in the other.

        Raises:
            TypeError, RuntimeError: a ``device`` that PyTorch does not have.
            torch.OutOfMemoryError: a GPU without enough memory for ``tokens`` as they are stored.

        Complexity: reads and copies every byte.

        Example:
            >>> import torch
            >>> from late_interaction import Corpus
            >>> corpus = Corpus.from_packed(torch.eye(3), torch.tensor([0, 1, 3]))
            >>> corpus.to("cpu") is corpus
            True
        """
        device, own = torch.empty(0, device=device).device, self._snapshot()
        if all(shard.tokens.device == device for shard in own.shards):
            return self
        return type(self)([shard.to(device) for shard in own.shards], own._kind())

    def parts(self, count: int) -> "list[Self]":
        """Cut the corpus into parts over the same memory, in order, with about equally many tokens each.

        There is one for each process of a group or each GPU.

        Args:
            count: how many. Where there are fewer documents, the last parts are empty.

        Returns:
            ``count`` corpora, without a ``path``.

        Raises:
            TypeError, ValueError: a ``count`` that is no number above 0.

        Complexity: reads the offsets.

        Example:
            >>> import torch
            >>> from late_interaction import Corpus
            >>> corpus = Corpus.from_packed(torch.ones(6, 4), torch.tensor([0, 3, 4, 6]))
            >>> [part.tokens for part in corpus.parts(2)]
            [3, 3]
        """
        check_positive("count", count)
        own = self._snapshot()
        return [own._between(*edges) for edges in pairwise(_shards.edges_of_parts(own.shards, count))]

    @classmethod
    def from_packed(
        cls,
        tokens: Tensor,
        offsets: Tensor,
        *,
        ids: Sequence[str] | None = None,
        normalized: bool = False,
    ) -> "Self":
        """Make a corpus over tensors. Tokens are shared, not copied.

        Args:
            tokens: ``[tokens, d]``, contiguous, on the CPU or a GPU; float32, float16 or bfloat16.
            offsets: ``[documents + 1]``, int32 or int64: document ``i`` has the tokens from ``offsets[i]`` up
                to ``offsets[i + 1]``. On a GPU they are copied to the host, which waits for it.
            ids: a string for each document, or None.
            normalized: whether every token has norm 1, which is not checked. A search that normalizes need
                not do it again then.

        Raises:
            TypeError, ValueError: an argument of a wrong kind, dtype, shape, device or value.

        Example:
            >>> import torch
            >>> from late_interaction import Corpus
            >>> Corpus.from_packed(torch.ones(5, 4), torch.tensor([0, 2, 5]))
            Corpus(2 documents, 5 tokens, d=4, torch.float32, in memory)
        """
        check_flag("normalized", normalized)
        shard = _memory.packed_shard(tokens, offsets, ids)
        return cls([shard], {"d": tokens.shape[1], "dtype": tokens.dtype, "normalized": normalized})

    @classmethod
    def from_codes(
        cls, codes: Codes, *, ids: Sequence[str] | None = None, normalized: bool = False
    ) -> "Self":
        """Make a corpus over codes. Packed ones are shared, not copied.

        Args:
            codes: of :class:`late_interaction.codecs.Int8`, :class:`~late_interaction.codecs.Fp8` in
                ``torch.float8_e4m3fn``, or a :class:`~late_interaction.codecs.Residual`; on the CPU or a GPU,
                whose offsets are copied to the host.
            ids, normalized: as in :meth:`from_packed`, of the tokens that were encoded.

        Raises:
            TypeError, ValueError: codes of another codec, or an argument of a wrong kind or value.

        Example:
            >>> import torch
            >>> import late_interaction as li
            >>> codes = li.codecs.Int8().encode([torch.eye(4), torch.ones(1, 4)])
            >>> li.corpus.Corpus.from_codes(codes)
            Corpus(2 documents, 5 tokens, d=4, Int8(), in memory)
        """
        check_flag("normalized", normalized)
        shard = _memory.shard_of_codes(codes, ids)
        options = {"d": codes.d, "dtype": codes.values.dtype, "codec": codes.codec, "normalized": normalized}
        return cls([shard], options)

    @classmethod
    def from_numpy(
        cls, tokens: Any, offsets: Any, *, ids: Sequence[str] | None = None, normalized: bool = False
    ) -> "Self":
        """Make a corpus over NumPy arrays or mapped files (``numpy.memmap``), by :meth:`from_packed`.

        Tokens are shared.

        Args:
            tokens: ``[tokens, d]``, float32 or float16, in C order.
            offsets: ``[documents + 1]``, int32 or int64, as in :meth:`from_packed`.
            ids, normalized: as in :meth:`from_packed`.

        Raises:
            TypeError, ValueError: an argument of a wrong kind, dtype, shape or value.

        Example:
            >>> import numpy as np
            >>> from late_interaction import Corpus
            >>> Corpus.from_numpy(np.ones((5, 4), np.float16), np.array([0, 2, 5]))
            Corpus(2 documents, 5 tokens, d=4, torch.float16, in memory)
        """
        tensors = _memory.from_array("tokens", tokens), _memory.from_array("offsets", offsets)
        return cls.from_packed(*tensors, ids=ids, normalized=normalized)

    @classmethod
    def from_arrow(
        cls,
        documents: Any,
        *,
        d: int | None = None,
        ids: Sequence[str] | None = None,
        normalized: bool = False,
    ) -> "Self":
        """Make a corpus over a column of Arrow: a document a row. Tokens are shared, not copied.

        Args:
            documents: a ``pyarrow.Array`` or ``pyarrow.ChunkedArray`` of ``list<fixed_size_list<float>[d]>``,
                as LanceDB stores multivectors, or of ``list<list<float>>`` whose inner lists all have ``d``
                values. Values are float32 or float16, lists large or not, arrays slices or whole.
            d: the dims of a token. Only inner lists without a single token leave it open.
            ids: a string for each row, or None.
            normalized: as in :meth:`from_packed`.

        Returns:
            The corpus, on the CPU, a shard for each chunk.

        Raises:
            ImportError: pyarrow is missing.
            TypeError: an array of another type.
            ValueError: a null document, token or value; tokens of another ``d``. The message names the row.

        Example:
            >>> import pyarrow as pa                                        # doctest: +SKIP
            >>> from late_interaction import Corpus
            >>> column = pa.array([[[1.0, 0.0]], [[0.0, 1.0], [1.0, 1.0]]],
            ...                   pa.list_(pa.list_(pa.float32(), 2)))      # doctest: +SKIP
            >>> Corpus.from_arrow(column)                                   # doctest: +SKIP
            Corpus(2 documents, 3 tokens, d=2, torch.float32, in memory)
        """
        check_flag("normalized", normalized)
        shards, found = _arrow.shards_of(documents, d)
        kind = {"d": found, "dtype": shards[0].tokens.dtype, "normalized": normalized}
        return cls(_memory.with_ids(shards, ids), kind)
