"""Documents on their way into a corpus: :class:`Intake` checks and encodes them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.packed import check_sequences
from late_interaction._scoring.norm_warning import look
from late_interaction.corpus import _codec_files, _columns, _tokens
from late_interaction.corpus._ids import check_ids
from late_interaction.corpus._shards import Shard

# Tokens are encoded in blocks of about so many bytes as stored, which bounds the memory beside the caller's.
_BLOCK_BYTES = 64 << 20


class Intake:
    """What documents of a corpus must be, and how it stores them.

    Args:
        stored, normalize: how it stores tokens.
        shards: of the documents that it has already.
        has: whether they have ``ids`` and ``columns``; None for what the next ones settle.
        ids: the number of each document among those that were ever written, by its id.
    """

    def __init__(
        self,
        stored: _tokens.Stored,
        normalize: bool,
        shards: Sequence[Shard],
        has: dict[str, bool | None],
        ids: dict[str, int],
    ) -> None:
        self.stored, self.has, self.ids = stored, dict(has), ids
        self._normalize = normalize
        self._written = sum(shard.documents for shard in shards)
        known = [x.columns for x in shards if x.columns is not None]
        self._types = _columns.types_of(known) if known else None

    def blocks_of_documents(
        self, documents: Sequence[Tensor], ids: Sequence[str] | None, columns: Any
    ) -> Iterator[Shard]:
        """Pack documents, ids and columns as a user gives them, for :meth:`blocks_of`."""
        if isinstance(documents, (list, tuple)) and not documents:
            tokens = torch.empty(0, self.stored.d, device="cpu")
        else:
            check_sequences("documents", documents)
            if documents[0].shape[1] != self.stored.d:
                raise ValueError(f"documents[0] must be [L, {self.stored.d}], got {shape_of(documents[0])}")
            tokens = torch.cat(tuple(documents))
        ends = list(accumulate((len(x) for x in documents), initial=0))
        offsets = torch.tensor(ends, dtype=torch.int64, device="cpu")
        rows = None if columns is None else _columns.of_documents(columns, len(documents))
        yield from self.blocks_of([Shard(tokens, offsets, None, ids, None, rows)], "documents")

    def check(self, shards: Sequence[Shard], name: str, place: int = 0) -> list[Shard]:
        """Require that all documents can be stored, and count them among the others.

        Messages call the first of them name[place].

        Returns:
            The shards, their columns of the types that the corpus has.
        """
        ids: dict[str, int] = {}
        types, has, written, found = self._types, dict(self.has), self._written, []
        for shard in shards:
            given = {"ids": shard.ids, "columns": shard.columns}
            for kind, value in given.items():
                if shard.documents and has[kind] is (value is None):
                    got = "got None" if value is None else "but others have none"
                    raise ValueError(
                        f"{kind} must be given for all documents of the corpus or for none, {got}"
                    )
                if shard.documents or value is not None:
                    has[kind] = value is not None
            if shard.ids is not None:
                check_ids(shard.ids, shard.documents, self.ids, ids)
                ids.update((x, written + i) for i, x in enumerate(shard.ids))
            if shard.columns is not None:
                columns, types = _columns.cast(shard.columns, types or _columns.types_of([shard.columns]))
                shard = replace(shard, columns=columns)
            for first, stop in self.ranges(shard):
                self._check_tokens(shard, first, stop, name, place)
            place, written = place + shard.documents, written + shard.documents
            found.append(shard)
        self._types, self.has, self._written = types, has, written
        self.ids.update(ids)
        return found

    def release(self, ids: Sequence[Any]) -> list[int]:
        """Forget ids of documents, and return the numbers of these."""
        unknown = [x for x in ids if x not in self.ids]
        if unknown:
            raise ValueError(f"ids must be those of documents, got {abbreviate(unknown)}, which none has")
        return [self.ids.pop(x) for x in dict.fromkeys(ids)]

    def ranges(self, shard: Shard) -> list[tuple[int, int]]:
        """Return the documents of a shard that are encoded at a time."""
        return list(shard.ranges(max(_BLOCK_BYTES // self.stored.row_bytes, 1), 1 << 20))

    def blocks_of(
        self, shards: Sequence[Shard], name: str, as_they_are: bool = False, place: int = 0
    ) -> Iterator[Shard]:
        """Check all documents, as :meth:`check`, and then yield them as the corpus stores them.

        as_they_are: they are so already.
        """
        for shard in self.check(shards, name, place):
            for first, stop in self.ranges(shard):
                part = shard.part(first, stop)
                if as_they_are:
                    part = part.as_copied()
                else:
                    tokens = shard.floats(shard.rows(first, stop))
                    tokens, beside = _tokens.encode(tokens, self.stored, self._normalize)
                    offsets, codec = part.offsets - part.offsets[0], self.stored.codec
                    part = Shard(tokens, offsets, beside, part.ids, codec, part.columns)
                yield part

    def blocks_of_corpus(self, corpus: Any) -> Iterator[Shard]:
        """Check the documents of another corpus, and then yield them as this one stores them.

        Codes of its codec are copied, unless it normalizes and the other has not: all else is encoded anew.
        """
        if not hasattr(corpus, "shards"):
            raise TypeError(f"corpus must be a Corpus, got {abbreviate(corpus)}")
        corpus, stored = corpus._snapshot(), self.stored
        if len(corpus) and corpus.d != stored.d:
            raise ValueError(f"corpus must have d = {stored.d}, got {corpus.d}")
        copied = _codec_files.equal(corpus.codec, stored.codec) and (corpus.normalized or not self._normalize)
        yield from self.blocks_of(corpus.shards, "corpus", copied)

    def _check_tokens(self, shard: Shard, first: int, stop: int, name: str, place: int) -> None:
        tokens = shard.floats(shard.rows(first, stop))
        bad = _tokens.find_unusable(tokens, self.stored, self._normalize)
        if bad is not None:
            at = int(shard.offsets[first]) + bad
            document = int(torch.searchsorted(shard.offsets, at, right=True)) - 1
            raise ValueError(
                f"{name}[{place + document}] must have tokens that {self.stored.name} can hold,"
                f" got NaN, an infinity or too large a value in its token {at - int(shard.offsets[document])}"
            )
        if not self._normalize:
            look("Corpus.create", tokens, called="the corpus")
