"""Checks of what losses take beside tokens: labels and numbers."""

import math
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.choices import REDUCTIONS
from late_interaction._checks.messages import abbreviate, describe_bad_entries, no_tensor, shape_of
from late_interaction._checks.options import check_integer, is_one_of
from late_interaction._checks.tensors import check_mask_kind, has_values_on_cpu

IGNORED = -100  # as torch.nn.functional.cross_entropy's ignore_index
_MOST_RANK = 1 << 53  # beyond all documents; a float64 holds it


def check_labels(labels: Any, queries: int, documents: int, device: torch.device) -> Tensor | None:
    """Require a document for each query, or IGNORED. int64 comes back; a GPU's are not waited for."""
    if labels is None:
        if documents < queries:
            raise ValueError(
                f"labels must say which of the {documents} documents each of the {queries} queries belongs"
                " to, got None, which is document i for query i"
            )
        return None
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a torch.Tensor or None, got {no_tensor('labels', labels)}")
    if labels.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"labels must be int64 (or int32), got {labels.dtype}")
    if labels.shape != (queries,):
        raise ValueError(f"labels must be [{queries}], a document for each query, got {list(labels.shape)}")
    if labels.device != device:
        raise ValueError(f"labels must be on the device of Q, {device}, got {labels.device}")
    if labels.device.type == "cpu":
        bad = ((labels < 0) | (labels >= documents)) & (labels != IGNORED)
        if bool(bad.any()):
            raise ValueError(
                f"labels must lie in [0, {documents}), or be {IGNORED} for a query that is left out, got"
                f" {describe_bad_entries('labels', labels, bad)}"
            )
    return labels.long()


def check_symmetric(labels: Tensor | None, queries: int, documents: int) -> None:
    """Require what the other direction of a loss needs."""
    if queries != documents:
        raise ValueError(
            f"symmetric needs as many documents as queries, got {documents} documents and {queries} queries"
        )
    if labels is not None and labels.device.type == "cpu":
        used = labels[labels != IGNORED]
        if len(used.unique()) != len(used):
            raise ValueError("symmetric needs labels that no two queries share")


def check_candidates(mask: Any, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    """Require bool (or integer) ``[B, K]``, which comes back as bool."""
    if mask is None:
        return None
    check_mask_kind("candidate_mask", mask, "Q", device)
    if mask.shape != shape:
        raise ValueError(f"candidate_mask must be [B, K] = {list(shape)}, got {shape_of(mask)}")
    found: Tensor = mask if mask.dtype == torch.bool else mask != 0
    return found


def check_reduction(reduction: Any) -> None:
    if not is_one_of(reduction, REDUCTIONS):
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {abbreviate(reduction)}")


def check_number(name: str, value: Any) -> float:
    """Require a finite number."""
    found = _as_float(name, value)
    if not -math.inf < found < math.inf:  # math.isfinite cannot be traced
        raise ValueError(f"{name} must be finite, got {abbreviate(value)}")
    return found


def check_above_0(name: str, value: Any) -> float:
    """Require a finite number above 0."""
    found = _as_float(name, value)
    if not 0 < found < math.inf:
        raise ValueError(f"{name} must be above 0, got {abbreviate(value)}")
    return found


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:  # of an int
        return math.inf


def check_learned(name: str, value: Any, Q: Tensor, *, positive: bool) -> Tensor | float:
    """Require a number, or a tensor of one element, which comes back 0-dim in the dtype of sums."""
    if not isinstance(value, Tensor):
        return check_above_0(name, value) if positive else check_number(name, value)
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(f"{name} must be a float or one floating-point number, got {abbreviate(value)}")
    if value.device != Q.device:
        raise ValueError(f"{name} must be on the device of Q, {Q.device}, got {value.device}")
    if positive and has_values_on_cpu(value) and bool(value <= 0):  # a GPU's is not waited for
        raise ValueError(f"{name} must be above 0, got {value.item()}")
    return value.reshape(()).to(torch.float64 if Q.dtype is torch.float64 else torch.float32)


def check_share(name: str, value: Any) -> float:
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    return float(value)


def check_kept_bytes(value: Any) -> int | None:
    if value is None:
        return None
    check_integer("kept_bytes", value, "an int or None")
    if value < 0:
        raise ValueError(f"kept_bytes must be at least 0, got {abbreviate(value)}")
    return int(value)


def check_ranks(k: Any) -> tuple[int, ...]:
    """Require ranks of at least 1: one, or a sequence of them."""
    found = (k,) if isinstance(k, int) else k
    if not isinstance(found, (tuple, list, range)):
        raise TypeError(f"k must be an int or a sequence of ints, got {type(k).__name__}")
    if not found or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in found):
        raise ValueError(f"k must be a positive int or a non-empty sequence of them, got {abbreviate(k)}")
    return tuple(min(x, _MOST_RANK) for x in found)
