"""Checks of Tokens."""

from typing import Any

from torch import Tensor

from late_interaction._checks.messages import shape_of
from late_interaction._checks.packed import check_max_length
from late_interaction._checks.tensors import (
    check_integers,
    check_mask,
    check_rising,
    check_rows,
    check_size,
    has_values_on_cpu,
)


def check_padded_tokens(values: Tensor, mask: Tensor | None) -> Tensor | None:
    """Require [N, L, d] and a mask of it, which comes back as bool."""
    check_rows("values", values)
    if values.dim() != 3:
        raise ValueError(
            f"values must be [N, L, d] (packed [tokens, d] go to Tokens.packed), got {shape_of(values)}"
        )
    return check_mask("mask", mask, "values", values)


def check_packed_tokens(values: Tensor, offsets: Tensor, max_length: Any) -> Any:
    """Require [tokens, d], and what :func:`check_extents` does."""
    check_rows("values", values)
    if values.dim() != 2:
        raise ValueError(
            f"values must be [tokens, d] (padded [N, L, d] go to Tokens), got {shape_of(values)}"
        )
    return check_extents(values, offsets, max_length)


def check_extents(values: Tensor, offsets: Tensor, max_length: Any) -> Any:
    """Require offsets that cover packed values. The longest length comes back, or None where that would wait
    for a device."""
    check_integers("offsets", offsets, 1, "[N + 1]", "values", values.device)
    check_size(offsets.shape[0] > 0, lambda: f"offsets must be [N + 1], got {shape_of(offsets)}")
    lengths = offsets
    if has_values_on_cpu(offsets):
        total = len(values)
        check_rising("offsets", offsets, total)
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != total:
            raise ValueError(
                f"offsets must begin with 0 and end with the number of tokens, {total}, got {first} and"
                f" {last}"
            )
        lengths = offsets.diff()
        if max_length is None:
            return int(lengths.amax()) if len(lengths) else 0
    if max_length is not None:
        check_max_length("max_length", max_length, lengths)
    return max_length
