"""The ids of documents: checked, and read from where they are stored."""

from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, compress, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction.corpus import _files


def check_ids(ids: Any, documents: int, *known: Container[str]) -> None:
    """Check that ids are a string for each document, which no other one has, nor one of the known."""
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise TypeError(f"ids must be a list of strings or None, got {type(ids).__name__}")
    if len(ids) != documents:
        raise ValueError(f"ids must be as many as the {documents} documents, got {len(ids)}")
    own: set[str] = set()
    for i, x in enumerate(ids):
        if not isinstance(x, str):
            raise TypeError(f"ids[{i}] must be a string, got {type(x).__name__}")
        if x in own or any(x in others for others in known):
            raise ValueError(f"ids must differ, got ids[{i}] = {abbreviate(x)}, which another document has")
        try:
            x.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"ids[{i}] must be a string that UTF-8 can hold, got {abbreviate(x)}: {error}"
            ) from None
        own.add(x)


class _Ids(Sequence[str]):
    """A sequence of ids by :meth:`_at`, which takes an index from 0 on."""

    def _at(self, index: int) -> str:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        return self._at(places) if isinstance(places, int) else [self._at(i) for i in places]


class StoredIds(_Ids):
    """Ids in UTF-8, end to end in a mapped file."""

    def __init__(self, text: Tensor, offsets: Tensor, path: Path) -> None:
        self._text, self._offsets, self._path = text, offsets, path

    def __len__(self) -> int:
        return self._offsets.shape[0] - 1

    def __iter__(self) -> Iterator[str]:
        text = _files.bytes_of(self._text)
        for index, (begin, end) in enumerate(pairwise(self._offsets.tolist())):
            yield self._decoded(index, text[begin:end])

    def _at(self, index: int) -> str:
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        return self._decoded(index, _files.bytes_of(self._text[begin:end]))

    def _decoded(self, index: int, text: memoryview) -> str:
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            raise _files.CorpusError(
                f"{self._path} must have ids in UTF-8, and its id {index} is not: it was changed ({error})"
            ) from None


class JoinedIds(_Ids):
    """The ids of several shards, one after the other."""

    def __init__(self, parts: Sequence[Sequence[str]]) -> None:
        self._parts = parts
        self._ends = torch.tensor(list(accumulate(map(len, parts))), dtype=torch.int64, device="cpu")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._parts)

    def _at(self, index: int) -> str:
        part = int(torch.searchsorted(self._ends, index, right=True))
        return self._parts[part][index - int(self._ends[part - 1]) if part else index]

    @cached_property
    def places(self) -> dict[str, int]:
        return {x: i for i, x in enumerate(self)}


class SelectedIds(_Ids):
    """Some ids of others: those at rising places."""

    def __init__(self, ids: Sequence[str], places: Tensor) -> None:
        if isinstance(ids, SelectedIds):
            places = ids._places[places]
            ids = ids._ids
        self._ids: Sequence[str] = ids
        self._places: Tensor = places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        chosen = torch.zeros(len(self._ids), dtype=torch.bool, device="cpu")
        chosen[self._places] = True
        return compress(self._ids, chosen.tolist())

    def _at(self, index: int) -> str:
        return self._ids[int(self._places[index])]
