"""Checks of sequences packed end to end, of listed pairs of them, and of spans of a buffer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, describe_bad_entries, describe_bad_lengths, shape_of
from late_interaction._checks.options import is_integer
from late_interaction._checks.tensors import (
    as_dtype,
    check_embeddings,
    check_integers,
    check_mask,
    check_rising,
    check_rows,
    check_same_kind,
    check_size,
    has_values,
    has_values_on_cpu,
)

_MAX_TOKENS = 1 << 30


def check_sequences(name: str, xs: Sequence[Tensor]) -> None:
    """At least one [L, d] tensor, all of one dtype, device and d."""
    if not isinstance(xs, (list, tuple)) or not xs:
        raise TypeError(f"{name} must be a list of at least one [L, d] tensor, got {type(xs).__name__}")
    check_embeddings(f"{name}[0]", xs[0])
    dtype, device, d = xs[0].dtype, xs[0].device, xs[0].shape[-1] if xs[0].dim() else 0
    for i, x in enumerate(xs):  # thousands: nothing is asked twice, and no message made for nothing
        dense = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested
        if dense and x.dtype == dtype and x.device == device and x.dim() == 2 and x.shape[1] == d:
            continue
        check_embeddings(f"{name}[{i}]", x)
        if x.dim() != 2 or x.shape[1] != d:
            raise ValueError(f"{name}[{i}] must be [L, {d}], got {shape_of(x)}")
        if x.dtype != dtype:
            raise TypeError(f"{name}[{i}] must be {dtype} as {name}[0], got {x.dtype}")
        raise ValueError(f"{name}[{i}] must be on {device} as {name}[0], got {x.device}")


def check_packed(
    Q: Tensor, D: Tensor, cu_seqlens_q: Tensor, cu_seqlens_d: Tensor, max_seqlen_q: Any, max_seqlen_d: Any
) -> tuple[Tensor, Tensor]:
    """Packed queries and documents. Their offsets come back as contiguous int32."""
    _check_tokens("Q_packed", Q, "D_packed", D)
    cu_q = check_offsets("cu_seqlens_q", cu_seqlens_q, "Q_packed", Q)
    cu_d = check_offsets("cu_seqlens_d", cu_seqlens_d, "D_packed", D)
    if max_seqlen_q is not None:
        _check_max_seqlen("max_seqlen_q", max_seqlen_q, cu_q)
    if max_seqlen_d is not None:
        _check_max_seqlen("max_seqlen_d", max_seqlen_d, cu_d)
    return cu_q, cu_d


def _check_tokens(q_name: str, Q: Tensor, d_name: str, D: Tensor) -> None:
    """Require [tokens, d] of one device, dtype (unless autocast converts them) and d."""
    check_embeddings(q_name, Q)
    check_embeddings(d_name, D)
    for name, x in ((q_name, Q), (d_name, D)):
        if x.dim() != 2:
            raise ValueError(
                f"{name} must be [tokens, d], got {shape_of(x)}: call maxsim for padded [N, L, d] tokens"
            )
        _check_at_most(name, x, "tokens")
    check_same_kind(Q, D, q_name, d_name)


def _check_at_most(name: str, x: Tensor, what: str) -> None:
    check_size(x.shape[0] <= _MAX_TOKENS, lambda: f"{name} must have at most 2**30 {what}, got {shape_of(x)}")


def check_offsets(name: str, cu: Tensor, tokens_name: str, tokens: Tensor) -> Tensor:
    """Check offsets: where each sequence begins, and the last one ends. Contiguous int32 comes back."""
    check_integers(name, cu, 1, "[sequences + 1]", tokens_name, tokens.device)
    check_size(cu.shape[0] > 0, lambda: f"{name} must be [sequences + 1], got {shape_of(cu)}")
    if has_values_on_cpu(cu):
        check_rising(name, cu, tokens.shape[0])
    return as_dtype(cu, torch.int32).contiguous()


def _check_list(name: str, x: Tensor, what: str, tokens_name: str, tokens: Tensor) -> Tensor:
    """Require ``[what]`` integers on the device of the tokens. Contiguous int32 comes back."""
    check_integers(name, x, 1, f"[{what}]", tokens_name, tokens.device)
    _check_at_most(name, x, what)
    if x.dtype is torch.int64:  # what int32 cannot hold stays out of range
        x = x.clamp(-1, _MAX_TOKENS + 1)
    return as_dtype(x, torch.int32).contiguous()


def _check_equally_long(first: str, x: Tensor, second: str, y: Tensor) -> None:
    check_size(
        x.shape[0] == y.shape[0],
        lambda: f"{first} and {second} must be equally long, got {shape_of(x)} and {shape_of(y)}",
    )


def check_pair_indices(
    pair_q: Tensor, pair_d: Tensor, Q: Tensor, queries: int, documents: int
) -> tuple[Tensor, Tensor]:
    """Check which packed queries meet which documents. Contiguous int32 indices come back."""
    names, counts, given = ("pair_q_idx", "pair_d_idx"), (queries, documents), (pair_q, pair_d)
    pair_q = _check_list(names[0], pair_q, "pairs", "Q_packed", Q)
    pair_d = _check_list(names[1], pair_d, "pairs", "Q_packed", Q)
    _check_equally_long(names[0], pair_q, names[1], pair_d)
    for name, index, count in zip(names, given, counts, strict=True):
        if has_values_on_cpu(index):
            check_indices_below(name, index, count)
    return pair_q, pair_d


def check_indices_below(name: str, index: Tensor, count: int) -> None:
    """Require indices in [0, count). Waits for the device."""
    if bool((bad := (index < 0) | (index >= count)).any()):
        raise ValueError(f"{name} must lie in [0, {count}), got {describe_bad_entries(name, index, bad)}")


def check_spans(Q: Tensor, tokens: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Check a query, and where documents lie in a buffer of tokens.

    Contiguous int32 starts and lengths come back.
    """
    _check_tokens("Q", Q, "batch_tensor", tokens)
    given = starts, lengths
    starts = _check_list("doc_offsets", starts, "documents", "batch_tensor", tokens)
    lengths = _check_list("doc_lengths", lengths, "documents", "batch_tensor", tokens)
    _check_equally_long("doc_offsets", starts, "doc_lengths", lengths)
    total = tokens.shape[0]
    if has_values_on_cpu(starts):
        bad = (starts < 0) | (lengths < 0) | (starts.long() + lengths > total)
        if bool(bad.any()):
            names = zip(("doc_offsets", "doc_lengths"), given, strict=True)
            got = " and ".join(describe_bad_entries(name, x, bad) for name, x in names)
            raise ValueError(
                f"doc_offsets and doc_lengths must lie within the {total} tokens of batch_tensor, got {got}"
            )
    return starts, lengths


def _check_max_seqlen(name: str, length: Any, offsets: Tensor) -> None:
    """No packed sequence exceeds the given length, likewise."""
    check_max_length(name, length, offsets.diff() if has_values_on_cpu(offsets) else offsets)


def check_max_length(name: str, length: Any, lengths: Tensor) -> None:
    """No length exceeds the given one, as far as that shows without waiting for a device."""
    number = torch.compiler.is_compiling() or is_integer(length)  # it may be a symbol
    if isinstance(length, (bool, Tensor)) or not number:
        raise TypeError(f"{name} must be an int or None, got {type(length).__name__}")
    if has_values_on_cpu(lengths):
        most = int(lengths.amax()) if lengths.numel() else 0
        if length < most:
            raise ValueError(
                f"{name} must be at least {most}, the longest sequence, got {abbreviate(length)}"
            )
    check_size(length >= 0, lambda: f"{name} must not be negative, got {abbreviate(length)}")


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
    """Require offsets that cover packed values.

    The longest length comes back, or None where that would wait for a device.
    """
    check_integers("offsets", offsets, 1, "[N + 1]", "values", values.device)
    check_size(offsets.shape[0] > 0, lambda: f"offsets must be [N + 1], got {shape_of(offsets)}")
    lengths = offsets
    if has_values_on_cpu(offsets):
        check_cover("offsets", offsets, len(values))
        lengths = offsets.diff()
        if max_length is None:
            return int(lengths.amax()) if len(lengths) else 0
    if max_length is not None:
        check_max_length("max_length", max_length, lengths)
    return max_length


def check_cover(name: str, offsets: Tensor, total: int) -> None:
    """Require offsets on the host that cover so many tokens."""
    check_rising(name, offsets, total)
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != total:
        raise ValueError(
            f"{name} must begin with 0 and end with the number of tokens, {total}, got {first} and {last}"
        )


class LengthError(ValueError, RuntimeError):
    """Report lengths that are found to be wrong only once they have been waited for."""


def read_longest(name: str, lengths: Tensor, longest: int) -> int:
    """Return the longest of lengths, which lie within [0, longest]. Waits for the device."""
    if lengths.is_meta:
        raise ValueError(
            f"{name} must hold values, for they decide how many tokens are packed: got a meta tensor"
        )
    if lengths.numel() == 0:
        return 0
    if not has_values(lengths):  # the traced graph asserts it
        shortest, most = lengths.amin().item(), lengths.amax().item()
        torch._check(shortest >= 0)
        torch._check(most >= 0)
        torch._check(most <= longest)
        return most  # type: ignore[return-value]
    least, most = torch.stack(lengths.aminmax()).tolist()
    if least < 0 or most > longest:
        bad = (lengths < 0) | (lengths > longest)
        raise LengthError(describe_bad_lengths(name, lengths, bad, 0, longest))
    return int(most)
