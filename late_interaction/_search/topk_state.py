"""The state of a search, which is checked before it is taken; and the ranges of documents that it saw."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import check_integer
from late_interaction._checks.tensors import check_not_meta
from late_interaction._search.selection import NO_DOCUMENT, select
from late_interaction.ops.topk import MOST_DOCUMENTS

Ranges = list[list[int]]  # [first, stop] of documents, rising, with gaps between them

_FOUND = ("scores", "indices", "seen", "next", "ranges")


def joined(ranges: Ranges, others: Ranges) -> Ranges:
    """Both, where they have no document in common."""
    found: Ranges = []
    for first, stop in sorted([*ranges, *others]):
        if found and first < found[-1][1]:
            common = min(stop, found[-1][1])
            raise ValueError(f"documents {first} to {common - 1} were searched twice: they would count twice")
        if found and first == found[-1][1]:
            found[-1] = [found[-1][0], stop]
        else:
            found.append([first, stop])
    return found


def check_first(first: Any) -> None:
    check_integer("first", first)
    if not 0 <= first <= MOST_DOCUMENTS:
        raise ValueError(f"first must be at least 0 and at most 2**32, got {abbreviate(first)}")


def check_alike(of: str, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """Require the options and shapes of this search of a state, or of a search to merge."""
    for name, wanted in mine.items():
        got = theirs[name]
        if type(got) is not type(wanted) or got != wanted:
            raise ValueError(f"{name} of {of} must be {wanted!r}, as in this search, got {got!r}")


def coming(first: int, count: int) -> Ranges:
    """Return the range of so many documents from ``first`` on."""
    if first + count > MOST_DOCUMENTS:
        raise ValueError(f"D must bring the documents to at most 2**32, got {first} + {count}")
    return [[first, first + count]] if count else []


def checked_state(state: Any, search: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a state, once those that name the search are compared."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict from TopK.state_dict(), got {type(state).__name__}")
    found: dict[str, Any] = dict(state)
    wanted = (*_FOUND, *search)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"state must have the entries {', '.join(wanted)}: {', '.join(missing)} missing")
    unknown = [str(name) for name in found if name not in wanted]
    if unknown:
        raise ValueError(f"state must have no entries but {', '.join(wanted)}: got {', '.join(unknown)}")
    check_alike("the state", found, search)
    return found


def check_found(state: dict[str, Any], mine: Tensor, k: int) -> None:
    """Check what a search for k documents has found once it has seen so many. mine: its scores so far."""
    scores, indices, seen = state["scores"], state["indices"], state["seen"]
    _check_count("seen", seen)
    _check_count("next", state["next"])
    shape = [mine.shape[0], min(k, seen)]
    for name, x, wanted in (("scores", scores, mine.dtype), ("indices", indices, torch.int64)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} of the state must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name} of the state must be a dense tensor, got {x.layout}")
        if list(x.shape) != shape or x.dtype != wanted:
            raise ValueError(
                f"{name} of the state must be {wanted} {shape} after {seen} documents,"
                f" got {x.dtype} {list(x.shape)}"
            )
        if not mine.is_meta:
            check_not_meta(f"{name} of the state", x)
    _check_ranges(state["ranges"], seen)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} of the state must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} of the state must not be negative, got {value}")


def _check_ranges(ranges: Any, seen: int) -> None:
    """Rising pairs of documents, as many as were seen."""
    count, before = 0, -1
    for entry in ranges if isinstance(ranges, Sequence) else [None]:
        if not isinstance(entry, Sequence) or [type(x) for x in entry] != [int, int]:
            raise TypeError("ranges of the state must be a list of [first, stop] documents")
        first, stop = entry
        if not before < first < stop <= MOST_DOCUMENTS:
            raise ValueError(f"ranges of the state must rise, got {[list(x) for x in ranges]}")
        count, before = count + stop - first, stop
    if count != seen:
        raise ValueError(f"ranges of the state must hold the {seen} documents that were seen, got {count}")


def check_order(state: dict[str, Any], k: int, largest: bool) -> None:
    """Documents that were seen, best first."""
    scores, indices = state["scores"], state["indices"]
    if scores.numel() == 0:
        return
    indices = indices.to(scores.device)
    edges = torch.tensor(state["ranges"], dtype=torch.int64, device=scores.device).flatten()
    outside = torch.searchsorted(edges, indices.contiguous(), right=True) % 2 == 0
    worst = -torch.inf if largest else torch.inf
    if bool((outside & ((indices != NO_DOCUMENT) | (scores != worst))).any()):
        low, high = (int(x) for x in indices.aminmax())
        raise ValueError(f"indices of the state must lie in {_shown(state['ranges'])}, got {low} to {high}")
    _, ordered = select(scores, indices, k, largest)
    if not torch.equal(ordered, indices):
        order = "highest" if largest else "lowest"
        raise ValueError(f"scores of the state must begin with the {order}, as largest={largest} orders them")


def _shown(ranges: Ranges) -> str:
    return " and ".join(f"[{first}, {stop})" for first, stop in ranges)
