"""Checks of what losses take beside tokens: labels and numbers."""

import math
import sys
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, describe_bad_entries, no_tensor, shape_of
from late_interaction._checks.options import as_float, check_integer
from late_interaction._checks.tensors import check_device, check_mask_kind, has_values_on_cpu, scores_dtype

IGNORED = -100  # as torch.nn.functional.cross_entropy's ignore_index
_MOST_RANK = 1 << 53  # beyond all documents; a float64 holds it


def check_labels(labels: Any, queries: int, documents: int, device: torch.device) -> Tensor | None:
    """Require documents for each query, or None where they are those of the same number."""
    if labels is None:
        if documents < queries:
            raise ValueError(
                f"labels must say which of the {documents} documents each of the {queries} queries belongs"
                " to, got None, which is document i for query i"
            )
        return None
    return check_documents("labels", labels, queries, documents, device)


def check_documents(name: str, value: Any, queries: int, documents: int, device: torch.device) -> Tensor:
    """Require documents of each query: int ``[queries]`` or ``[queries, P]``, two tensors or a list of lists.

    int64 ``[queries, P]`` comes back, with each document once, or IGNORED. A GPU's are not waited for, but
    for how many a query has where two tensors name pairs.
    """
    if isinstance(value, list):
        index = _padded(name, *_pairs_of_lists(name, value, queries), queries)
    elif isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, Tensor) for x in value):
        for x in value:
            _check_whole_numbers(name, x, device)
        if value[0].dim() != 1 or value[0].shape != value[1].shape:
            got = " and ".join(shape_of(x) for x in value)
            raise ValueError(f"{name} as pairs must be two tensors [n], queries and documents, got {got}")
        index = _padded(name, *value, queries)
    elif isinstance(value, Tensor):
        _check_whole_numbers(name, value, device)
        if value.dim() not in (1, 2) or value.shape[0] != queries:
            raise ValueError(f"{name} must be [{queries}] or [{queries}, P], got {shape_of(value)}")
        index = value.reshape(queries, -1) if value.numel() else value.new_full((queries, 1), IGNORED)
    else:
        raise TypeError(
            f"{name} must be a torch.Tensor, two of them (queries and documents), or a list of lists, got"
            f" {no_tensor(name, value)}"
        )
    if index.device.type == "cpu":
        bad = ((index < 0) | (index >= documents)) & (index != IGNORED)
        if bool(bad.any()):
            raise ValueError(
                f"{name} must lie in [0, {documents}), or be {IGNORED} for none, got"
                f" {describe_bad_entries(name, index, bad)}"
            )
    index = index.long().to(device, non_blocking=True)
    if index.shape[1] > 1:
        index = index.sort(1).values
        again = index[:, 1:] == index[:, :-1]
        index[:, 1:].masked_fill_(again, IGNORED)
    return index


def _check_whole_numbers(name: str, x: Tensor, device: torch.device) -> None:
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int64 (or int32), got {x.dtype}")
    check_device(name, x, "Q", device)


def _pairs_of_lists(name: str, value: list[Any], queries: int) -> tuple[Tensor, Tensor]:
    for each in value:
        if not isinstance(each, list | tuple | range) or any(type(x) is not int for x in each):
            got = no_tensor(name, value) if isinstance(each, int) else abbreviate(each)
            raise TypeError(f"{name} must hold a list of ints for each query, got {got}")
    if len(value) != queries:
        raise ValueError(f"{name} must hold a list for each of the {queries} queries, got {len(value)}")
    rows = [i for i, each in enumerate(value) for _ in each]
    columns = [x for each in value for x in each]
    return tuple(torch.tensor(x, dtype=torch.int64, device="cpu") for x in (rows, columns))  # type: ignore


def _padded(name: str, rows: Tensor, columns: Tensor, queries: int) -> Tensor:
    if rows.device.type == "cpu" and bool(((rows < 0) | (rows >= queries)).any()):
        bad = (rows < 0) | (rows >= queries)
        got = describe_bad_entries(f"{name}[0]", rows, bad)
        raise ValueError(f"{name} must name queries in [0, {queries}), got {got}")
    counts = torch.bincount(rows, minlength=queries)
    most = int(counts.amax()) if len(rows) else 1
    order = rows.argsort(stable=True)
    rows, columns = rows[order].long(), columns[order].long()
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    index = torch.full((queries, most), IGNORED, dtype=torch.int64, device=rows.device)
    return index.index_put_((rows, place), columns)


def check_excluded(value: Any, queries: int, documents: int | None, device: torch.device) -> Tensor:
    """Require documents of each query, or bool ``[queries, documents]``. documents: None where not known."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        return check_documents(
            "exclude", value, queries, sys.maxsize if documents is None else documents, device
        )
    check_mask_kind("exclude", value, "Q", device)
    wanted = (queries, value.shape[-1] if documents is None else documents)
    if value.shape != wanted:
        raise ValueError(f"exclude must be [Nq, Nd] = {list(wanted)} as a mask, got {shape_of(value)}")
    return value


def check_candidates(mask: Any, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    """Require bool (or integer) ``[B, K]``, which comes back as bool."""
    if mask is None:
        return None
    check_mask_kind("candidate_mask", mask, "Q", device)
    if mask.shape != shape and (shape[0] or mask.dim() != 2 or len(mask)):  # without a query any K will do
        raise ValueError(f"candidate_mask must be [B, K] = {list(shape)}, got {shape_of(mask)}")
    return (mask if mask.dtype == torch.bool else mask != 0).reshape(shape)


def check_number(name: str, value: Any) -> float:
    found = as_float(name, value)
    if not -math.inf < found < math.inf:  # math.isfinite cannot be traced
        raise ValueError(f"{name} must be finite, got {abbreviate(value)}")
    return found


def check_above_0(name: str, value: Any) -> float:
    found = as_float(name, value)
    if not 0 < found < math.inf:
        raise ValueError(f"{name} must be above 0, got {abbreviate(value)}")
    return found


def check_learned(name: str, value: Any, Q: Tensor, *, positive: bool) -> Tensor | float:
    """Require a number, or a tensor of one element, which comes back 0-dim in the dtype of sums."""
    if not isinstance(value, Tensor):
        return check_above_0(name, value) if positive else check_number(name, value)
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(f"{name} must be a float or one floating-point number, got {abbreviate(value)}")
    check_device(name, value, "Q", Q.device)
    if positive and has_values_on_cpu(value) and bool(value <= 0):  # a GPU's is not waited for
        raise ValueError(f"{name} must be above 0, got {value.item()}")
    return value.reshape(()).to(scores_dtype(Q))


def check_share(name: str, value: Any) -> float:
    found = as_float(name, value)
    if not 0 <= found < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {abbreviate(value)}")
    return found


def check_kept_bytes(value: Any) -> int | None:
    if value is None:
        return None
    check_integer("kept_bytes", value, "an int or None")
    if value < 0:
        raise ValueError(f"kept_bytes must be at least 0, got {abbreviate(value)}")
    return int(value)


def check_mixup(value: Any, generator: Any, group: Any, reduction: str) -> int | None:
    """Require the size of a group of examples, or None, and what mixes of them allow."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if value is None:
        if generator is not None:
            raise ValueError("generator must be None without mixup")
        return None
    check_integer("mixup", value, "an int or None")
    if value < 2:
        raise ValueError(f"mixup must be at least 2, got {abbreviate(value)}")
    if group is not None:
        raise ValueError("mixup must be None with group: examples of different processes are not mixed")
    if reduction == "none":
        raise ValueError('mixup must be None with reduction="none": virtual queries have losses, too')
    return int(value)


def check_ranks(k: Any) -> tuple[int, ...]:
    """Require ranks of at least 1: one, or a sequence of them."""
    found = (k,) if isinstance(k, int) else k
    if not isinstance(found, (tuple, list, range)):
        raise TypeError(f"k must be an int or a sequence of ints, got {type(k).__name__}")
    if not found or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in found):
        raise ValueError(f"k must be a positive int or a non-empty sequence of them, got {abbreviate(k)}")
    return tuple(min(x, _MOST_RANK) for x in found)
