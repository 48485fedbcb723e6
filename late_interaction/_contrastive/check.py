"""What the losses ask of their arguments, and what they make of them."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.choices import REDUCTIONS, Precision
from late_interaction._checks.messages import abbreviate, describe_bad_entries, no_tensor, shape_of
from late_interaction._checks.options import check_flag, check_integer, check_precision, is_one_of
from late_interaction._checks.tensors import (
    as_dtype,
    check_rising,
    check_same_kind,
    has_values_on_cpu,
    is_autocasting,
)
from late_interaction._contrastive.labels import IGNORED, ignored
from late_interaction._contrastive.own_options import OwnOptions, read_own_options
from late_interaction._contrastive.tokens import Tokens, pack_kept
from late_interaction._scoring.normalized import unit
from late_interaction._scoring.precision import float32_precision
from late_interaction._scoring.sequences import as_tokens
from late_interaction.tokens import Tokens as PublicTokens

_OF_AUTOCAST = {torch.bfloat16: "medium", torch.float16: "fp16"}


@dataclass(frozen=True)
class Sides:
    """Queries, documents, and hard negatives with how many each query has."""

    q: Tokens
    d: Tokens
    h: Tokens | None
    each: int


@dataclass(frozen=True)
class Options:
    """The options of a call, checked."""

    labels: Tensor | None
    temperature: Tensor | float
    symmetric: bool
    normalize: bool
    precision: str
    smoothing: float
    tail: float
    reduction: str
    kept_bytes: int | None
    own: OwnOptions | None


def sides(Q: Any, D: Any, H: Any) -> Sides:
    """Queries, documents and hard negatives, all padded or all packed."""
    given = {"Q": Q, "D": D} | ({} if H is None else {"hard_negatives": H})
    named = {name: as_tokens(name, x) for name, x in given.items()}
    for name, x in named.items():
        own = name == "hard_negatives"
        if isinstance(x, Tensor) and x.dim() != 3 + own:
            wanted = "[B, K, Ld, d]" if own else "[B, L, d]"
            raise ValueError(f"{name} must be {wanted}, Tokens or a list, got {shape_of(x)}")
    queries = len(named["Q"])
    h = named.get("hard_negatives")
    if isinstance(h, Tensor) and h.shape[0] != queries:
        raise ValueError(
            f"hard_negatives must be [B, K, Ld, d] with B = {queries} queries, got {shape_of(h)}"
        )
    found = {
        name: PublicTokens._made(x.flatten(0, -3)) if isinstance(x, Tensor) else x
        for name, x in named.items()
    }
    check_same_kind(found["Q"].values, found["D"].values)
    each = 0
    if h is not None:
        _alike("hard_negatives", found["hard_negatives"].values, found["Q"].values)
        count = len(found["hard_negatives"])
        each = h.shape[1] if isinstance(h, Tensor) else count // max(queries, 1)
        if count != each * queries:
            raise ValueError(
                f"hard_negatives must hold as many documents for each of the {queries} queries, got {count}"
                " in all"
            )
    if any(x.is_packed for x in found.values()):
        sides = {name: _with_bounds(name, x.pack()) for name, x in found.items()}
    else:
        sides = {name: Tokens(x.values, x.mask) for name, x in found.items()}
    return Sides(*_one_dtype(sides["Q"], sides["D"], sides.get("hard_negatives")), each)


def _with_bounds(name: str, x: PublicTokens) -> Tokens:
    """Packed tokens with their offsets on the host, where blocks are cut: the one wait for a device."""
    assert x.offsets is not None
    on_host = x.offsets.cpu()
    if x.offsets.is_cuda:
        _check_ends(name, on_host, x.values.shape[0])
    return Tokens(x.values, None, as_dtype(x.offsets, torch.int32).contiguous(), tuple(on_host.tolist()))


def _check_ends(name: str, offsets: Tensor, total: int) -> None:
    """What Tokens ask of offsets on a CPU, of those of a GPU."""
    check_rising(f"{name}.offsets", offsets, total)
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != total:
        raise ValueError(
            f"{name}.offsets must begin with 0 and end with the number of tokens, {total}, got {first} and"
            f" {last}"
        )


def _alike(name: str, x: Tensor, Q: Tensor) -> None:
    if x.device != Q.device:
        raise ValueError(f"{name} must be on the device of Q, {Q.device}, got {x.device}")
    mixed = is_autocasting(Q) and torch.float64 not in (x.dtype, Q.dtype)
    if x.dtype != Q.dtype and not mixed:
        raise TypeError(f"{name} must be {Q.dtype} as Q, got {x.dtype}")
    if x.shape[-1] != Q.shape[-1]:
        raise ValueError(f"{name} and Q must share the embedding dim d, got {x.shape[-1]} and {Q.shape[-1]}")


def _one_dtype(q: Tokens, d: Tokens, h: Tokens | None) -> tuple[Tokens, Tokens, Tokens | None]:
    """Under autocast inputs of two dtypes come in the autocast dtype, as for ``maxsim``."""
    found = {x.values.dtype for x in (q, d, h) if x is not None}
    if len(found) == 1:
        return q, d, h
    dtype = torch.get_autocast_dtype(q.values.device.type)
    q, d = (_with_values(x, x.values.to(dtype)) for x in (q, d))
    return q, d, None if h is None else _with_values(h, h.values.to(dtype))


def _with_values(x: Tokens, values: Tensor) -> Tokens:
    return Tokens(values, x.mask, x.offsets, x.bounds)


def options(s: Sides, given: dict[str, Any]) -> Options:
    """Everything beside the tokens."""
    for name in ("symmetric", "normalize", "scale_by_world"):
        check_flag(name, given[name])
    if not is_one_of(given["reduction"], REDUCTIONS):
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {abbreviate(given['reduction'])}")
    smoothing = _share("label_smoothing", given["label_smoothing"])
    tail = _share("tail", given["tail"])
    if smoothing and tail:
        raise ValueError(
            f"tail must be 0 with label_smoothing, which weighs every pair, got {tail} and {smoothing}"
        )
    if given["group"] is None and len(s.d) + s.each == 0:
        raise ValueError("D must hold at least one document, got none")
    labels = _labels(given["labels"], s)
    if given["symmetric"]:
        _symmetric(labels, s)
    return Options(
        labels,
        temperature(given["temperature"], s.q.values),
        given["symmetric"],
        given["normalize"],
        _precision(given["precision"], s.q.values),
        smoothing,
        tail,
        given["reduction"],
        _kept_bytes(given["kept_bytes"]),
        read_own_options(given, s.q.values),
    )


def _kept_bytes(value: Any) -> int | None:
    if value is None:
        return None
    check_integer("kept_bytes", value, "an int or None")
    if value < 0:
        raise ValueError(f"kept_bytes must be at least 0, got {abbreviate(value)}")
    return int(value)


def _share(name: str, value: Any) -> float:
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    return float(value)


def temperature(value: Any, Q: Tensor | None) -> Tensor | float:
    """A number above 0, or (beside queries) a tensor of one element, which comes back 0-dim."""
    if isinstance(value, Tensor) and Q is not None:
        if value.numel() != 1 or not value.is_floating_point():
            raise ValueError(
                f"temperature must be a float or one floating-point number, got {abbreviate(value)}"
            )
        if value.device != Q.device:
            raise ValueError(f"temperature must be on the device of Q, {Q.device}, got {value.device}")
        if has_values_on_cpu(value) and bool(value <= 0):  # a GPU's is not waited for
            raise ValueError(f"temperature must be above 0, got {value.item()}")
        dtype = torch.float64 if Q.dtype is torch.float64 else torch.float32
        return value.reshape(()).to(dtype)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"temperature must be a float or a torch.Tensor, got {type(value).__name__}")
    try:
        found = float(value)
    except OverflowError:  # of an int
        found = math.inf
    if not found > 0 or math.isinf(found):
        raise ValueError(f"temperature must be above 0, got {abbreviate(value)}")
    return found


def _precision(precision: Precision | None, Q: Tensor) -> str:
    check_precision(precision)
    if precision is not None:
        return precision
    if Q.dtype is not torch.float32:
        return "highest"
    if is_autocasting(Q):
        named = _OF_AUTOCAST.get(torch.get_autocast_dtype(Q.device.type))
        if named is not None:
            return named
    return float32_precision(Q.device.type)


def _labels(labels: Tensor | None, s: Sides) -> Tensor | None:
    queries, documents = len(s.q), len(s.d)
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
    if labels.device != s.q.values.device:
        raise ValueError(f"labels must be on the device of Q, {s.q.values.device}, got {labels.device}")
    if labels.device.type == "cpu":
        bad = ((labels < 0) | (labels >= documents)) & (labels != IGNORED)
        if bool(bad.any()):
            raise ValueError(
                f"labels must lie in [0, {documents}), or be {IGNORED} for a query that is left out, got"
                f" {describe_bad_entries('labels', labels, bad)}"
            )
    return labels.long()


def _symmetric(labels: Tensor | None, s: Sides) -> None:
    if len(s.q) != len(s.d):
        raise ValueError(
            f"symmetric needs as many documents as queries, got {len(s.d)} documents and {len(s.q)} queries"
        )
    if labels is not None and labels.device.type == "cpu":
        used = labels[labels != IGNORED]
        if len(used.unique()) != len(used):
            raise ValueError("symmetric needs labels that no two queries share")


# ---- what the blocks need done beforehand ----


def prepared(s: Sides, options: Options, alone: bool, listed: bool) -> tuple[Sides, bool]:
    """The tokens as their blocks are scored, and whether the operators normalize them still. Packed tokens,
    single ones and those of listed pairs are normalized here; the latter lose what a mask leaves out, in a
    group only once it is known whether any process has a mask."""
    s = _without_left_out(s, options)
    single = alone and is_single(s.q) and is_single(s.d)
    here = options.normalize and (s.q.packed or single or listed)
    if here:
        h = None if s.h is None else _normalized(s.h)
        s = Sides(_normalized(s.q), _normalized(s.d), h, s.each)
    if listed and alone and any(x is not None and x.mask is not None for x in (s.q, s.d, s.h)):
        s = packed(s)
    return s, options.normalize and not here


def _without_left_out(s: Sides, options: Options) -> Sides:
    """Zeros in place of queries that are left out and of their hard negatives, since a weight of 0 times NaN
    is NaN. Documents of a symmetric loss are compared with these queries still. A GPU's labels are not waited
    for: any may leave a query out."""
    left_out = ignored(options.labels)
    if left_out is None or (left_out.device.type == "cpu" and not bool(left_out.any())):
        return s
    q = s.q if options.symmetric else _zeroed(s.q, left_out)
    h = None if s.h is None else _zeroed(s.h, left_out.repeat_interleave(s.each))
    return replace(s, q=q, h=h)


def _zeroed(x: Tokens, sequences: Tensor) -> Tokens:
    """The same with zeros in some of the sequences."""
    if x.offsets is None or len(x) == 0:
        rows = sequences.view(-1, *[1] * (x.values.dim() - 1))
    else:
        token = torch.arange(x.values.shape[0], dtype=x.offsets.dtype, device=x.values.device)
        of_token = torch.bucketize(token, x.offsets[1:].contiguous(), right=True).clamp_max(len(x) - 1)
        rows = sequences[of_token].unsqueeze(1)
    return _with_values(x, x.values.masked_fill(rows, 0.0))


def packed(s: Sides) -> Sides:
    """All tokens packed, without those that a mask leaves out."""
    return Sides(_kept(s.q), _kept(s.d), None if s.h is None else _kept(s.h), s.each)


def is_single(x: Tokens) -> bool:
    """Whether these are padded to one token each."""
    return not x.packed and x.values.shape[1] == 1


def _kept(x: Tokens) -> Tokens:
    return x.as_packed() if x.mask is None else pack_kept(x)


def _normalized(x: Tokens) -> Tokens:
    x = x.part((0, len(x)))  # without tokens of no sequence, whose gradient is 0, whatever they hold
    values = x.values if x.mask is None else x.values.masked_fill(~x.mask.unsqueeze(-1), 0.0)
    return _with_values(x, unit(values))
