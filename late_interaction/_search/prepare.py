"""The one place where a search meets what documents may be: :func:`prepare`, and what it returns.

A new kind of documents registers here what makes a :class:`Search` of them::

    @prepare.register
    def _of_table(D: Table, Q: Any, options: Options) -> Search: ...
"""

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, no_tensor, shape_of
from late_interaction._checks.options import (
    Precision,
    check_flag,
    check_integer,
    check_positive,
    check_precision,
)
from late_interaction._checks.tensors import check_integers, check_not_meta
from late_interaction._progress import Progress
from late_interaction._scoring.sequences import as_tokens, is_sequences
from late_interaction._search.selection import Found
from late_interaction.codes import Codes
from late_interaction.tokens import Tokens

if TYPE_CHECKING:
    from late_interaction._search.group_search import Query

# What a Corpus keeps for first passes, by name.
FirstPass = Literal["bits", "centroids", "muvera"]


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`late_interaction.search` but queries and documents."""

    k: int
    q_mask: Tensor | None = None
    d_mask: Tensor | None = None
    subset: Any = None
    filter: Any = None
    normalize: bool = False
    largest: bool = True
    keep_empty: bool = False
    precision: Precision | None = None
    coarse: Any = None
    candidates: int | None = None
    chunk_bytes: int | None = None
    progress: Progress = False
    group: Any = None

    def __post_init__(self) -> None:
        check_positive("k", self.k)
        for name in ("normalize", "largest", "keep_empty"):
            check_flag(name, getattr(self, name))
        check_precision(self.precision)
        if self.chunk_bytes is not None:
            check_positive("chunk_bytes", self.chunk_bytes)

    def refuse(self, where: str, *names: str) -> None:
        """Raise an error for those options of these names that are given."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in names and value is not field.default:
                raise ValueError(f"{field.name} must be {field.default} {where}, got {abbreviate(value)}")

    def shared(self) -> dict[str, Any]:
        """Return what all processes of a group pass alike, beside k."""
        names = ("normalize", "largest", "keep_empty", "precision")
        return {name: getattr(self, name) for name in names}


class Search(ABC):
    """A search whose arguments are checked.

    Attributes:
        one_query: results lose their first dim.
        queries: tokens with their mask, or a list of tokens and None: at whose norms to look. None: at none.
        ids: of the documents.
    """

    one_query: bool
    queries: tuple[Tensor | Sequence[Tensor], Tensor | None] | None = None
    ids: Sequence[str] | None = None

    @abstractmethod
    def run(self, documents: int | None) -> Found:
        """Return the best, [Nq, min(k, N)]. documents: how many all processes of a group have."""

    def as_query(self) -> "Query":
        """Return what the processes of a group tell each other. Only where ``group`` may be given."""
        raise NotImplementedError


@singledispatch
def prepare(D: Any, Q: Any, options: Options) -> Search:
    """Check the arguments of a search of what ``D`` is."""
    data = sys.modules.get("ray.data")
    if data is not None and isinstance(D, data.Dataset):
        return prepare(importlib.import_module("late_interaction.ray").Documents(D), Q, options)
    raise TypeError(
        "D must be a torch.Tensor, Tokens, a list of tensors, Codes, a Corpus or a Ray dataset, got"
        f" {no_tensor('D', D)}"
    )


def padded(name: str, x: Any, mask: Tensor | None) -> tuple[Any, Tensor | None]:
    """Return Tokens or a list as a padded tensor and its mask, padded Codes, or anything else as it is."""
    if isinstance(x, Codes):
        if mask is not None:
            raise ValueError(
                f"{name.lower()}_mask must be None where {name} is Codes, which say which tokens there are,"
                f" got {abbreviate(mask)}"
            )
        return x.to_padded(), None
    if not is_sequences(x):
        return x, mask
    tokens: Tokens = as_tokens(name, x, **{f"{name.lower()}_mask": mask}).to_padded()
    return tokens.values, tokens.mask


def left_out(subset: Any, count: int, ids: Sequence[str] | None, device: torch.device) -> Tensor | None:
    """Return which of ``count`` documents a search may not find, bool ``[count]``, or None."""
    if subset is None:
        return None
    if not isinstance(subset, Tensor):
        subset = torch.tensor(_numbers(subset, ids), dtype=torch.int64, device="cpu")
    check_not_meta("subset", subset)
    if subset.dtype == torch.bool:
        if subset.shape != (count,):
            raise ValueError(f"subset must be [{count}], a bool a document, got {shape_of(subset)}")
        return torch.logical_not(subset.to(device))
    check_integers("subset", subset, 1, "[n]", "subset", subset.device)
    if len(subset) and not 0 <= int(subset.min()) <= int(subset.max()) < count:
        raise ValueError(f"subset must lie in [0, {count}), got {int(subset.min())} to {int(subset.max())}")
    out = torch.ones(count, dtype=torch.bool, device=device)
    out[subset.long().to(device)] = False
    return out


def _numbers(subset: Any, ids: Sequence[str] | None) -> list[int]:
    if isinstance(subset, str) or not isinstance(subset, Sequence):
        raise TypeError(f"subset must be a tensor, or a list of indices or ids, got {abbreviate(subset)}")
    if not any(isinstance(x, str) for x in subset):
        for x in subset:
            check_integer("subset", x, "a list of indices")
        return list(subset)
    if ids is None:
        raise ValueError(f"subset must hold indices of documents without ids, got {abbreviate(subset)}")
    # Those of a corpus know their places.
    places = getattr(ids, "places", None) or {x: i for i, x in enumerate(ids)}
    unknown = [x for x in subset if x not in places]
    if unknown:
        raise ValueError(f"subset must hold ids of documents, got {abbreviate(unknown)}, which none has")
    return [places[x] for x in subset]
