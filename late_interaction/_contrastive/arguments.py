"""The arguments of a public loss: checked, prepared for the blocks, and agreed on with the process group."""

import math
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks import losses as check
from late_interaction._checks.messages import shape_of
from late_interaction._checks.options import (
    MULTI_POSITIVES,
    REDUCTIONS,
    check_flag,
    check_one_of,
    check_precision,
)
from late_interaction._checks.tensors import (
    check_not_sharded,
    check_same_kind,
    has_values_on_cpu,
    scores_dtype,
)
from late_interaction._contrastive.blocks import Grid
from late_interaction._contrastive.call import Call, fits_whole
from late_interaction._contrastive.forward import label_logits
from late_interaction._contrastive.kernels import choose
from late_interaction._contrastive.labels import Candidates, Labels
from late_interaction._contrastive.mixup import Mixup
from late_interaction._contrastive.ring import Ring, join
from late_interaction._contrastive.sequences import is_single, with_bounds, with_values, zeroed
from late_interaction._group import gathered
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.normalized import unit
from late_interaction._scoring.precision import multiplying_now, without_autocast
from late_interaction._scoring.sequences import as_tokens, is_sequences
from late_interaction.tokens import Tokens

# Options that some losses do not have.
_NONE: dict[str, Any] = {
    "symmetric": False, "label_smoothing": 0.0, "tail": 0.0, "kept_bytes": None, "multi_positive": "mean",
}  # fmt: skip


def read(name: str, given: dict[str, Any], *, listed: bool = False) -> Call:
    """Make a call from a loss's arguments. ``listed``: its backward takes listed pairs, unless kept whole."""
    given, group = _NONE | given, given["group"]
    alone = group is None
    try:
        call = _checked(name, given)
        listed = listed or call.tail > 0
        call = replace(call, whole=alone and fits_whole(call, listed))
    except (TypeError, ValueError):
        if not alone:  # the others learn that this process refused its arguments
            with suppress(RuntimeError):  # its message says so
                join(name, group, None, {}, _device_of(given["Q"], given["D"], given["hard_negatives"]))
        raise
    if not alone:
        call = _joined(call, given)
    call = _prepared(call, given["normalize"], listed and not call.whole)
    if not given["normalize"]:
        look(name, call.q.values, call.q.mask)
    return call if call.candidates.margin is None else _bounded(call)


def _bounded(call: Call) -> Call:
    """Bound the logits of each query's negatives by its lowest label logit less the margin."""
    assert call.candidates.margin is not None
    with torch.no_grad(), without_autocast(call.q.device.type):
        of_labels = label_logits(call, Grid.of(call.kernels, call.q, call.d), call.no_logits())
        bound = call.labels.kept(of_labels, math.inf).amin(1) - call.candidates.margin / call.temperature
    return replace(call, candidates=replace(call.candidates, bound=bound))


# ---- tokens ----


def _sides(caller: str, Q: Any, D: Any, H: Any) -> tuple[Tokens, Tokens, Tokens | None, int]:
    """Convert queries, documents and hard negatives to Tokens of one form; count hard negatives a query."""
    given = {"Q": Q, "D": D} | ({} if H is None else {"hard_negatives": H})
    given = {name: as_tokens(name, x) for name, x in given.items()}
    for name, x in given.items():
        check_not_sharded(caller, name, x if isinstance(x, Tensor) else x.values)
        own = name == "hard_negatives"
        if isinstance(x, Tensor) and x.dim() != 3 + own:
            wanted = "[B, K, Ld, d]" if own else "[B, L, d]"
            raise ValueError(f"{name} must be {wanted}, Tokens or a list, got {shape_of(x)}")
    h, queries, each = given.get("hard_negatives"), len(given["Q"]), 0
    if isinstance(h, Tensor) and h.shape[0] != queries:
        raise ValueError(
            f"hard_negatives must be [B, K, Ld, d] with B = {queries} queries, got {shape_of(h)}"
        )
    found = {k: Tokens._made(x.flatten(0, -3)) if isinstance(x, Tensor) else x for k, x in given.items()}
    check_same_kind(found["Q"].values, found["D"].values)
    if h is not None:
        check_same_kind(found["Q"].values, found["hard_negatives"].values, "Q", "hard_negatives")
        count = len(found["hard_negatives"])
        each = h.shape[1] if isinstance(h, Tensor) else count // max(queries, 1)
        if count != each * queries:
            raise ValueError(
                f"hard_negatives must hold as many documents for each of the {queries} queries, got {count}"
                " in all"
            )
    if any(x.is_packed for x in found.values()):
        found = {name: with_bounds(name, x.pack()) for name, x in found.items()}
    if len({x.dtype for x in found.values()}) > 1:  # under autocast, as for maxsim
        dtype = torch.get_autocast_dtype(found["Q"].device.type)
        found = {name: with_values(x, x.values.to(dtype)) for name, x in found.items()}
    return found["Q"], found["D"], found.get("hard_negatives"), each


def _device_of(*tokens: Any) -> torch.device:
    """Return the device of the first tensor among unchecked arguments, or the CPU."""
    for x in tokens:
        first = x[0] if is_sequences(x) and not isinstance(x, Tokens) else x
        if isinstance(first, (Tensor, Tokens)):
            return first.device
    return torch.device("cpu")


# ---- options ----


def _checked(name: str, given: dict[str, Any]) -> Call:
    """Check all arguments, and return this process's call before tokens are normalized."""
    q, d, h, each = _sides(name, given["Q"], given["D"], given["hard_negatives"])
    h, own_candidates = _own_candidates(given["candidate_mask"], h, (len(q), each), q.device)
    for flag in ("symmetric", "normalize", "scale_by_world"):
        check_flag(flag, given[flag])
    check_one_of("reduction", given["reduction"], REDUCTIONS)
    check_one_of("multi_positive", given["multi_positive"], MULTI_POSITIVES)
    smoothing = check.check_share("label_smoothing", given["label_smoothing"])
    tail = check.check_share("tail", given["tail"])
    if tail and smoothing:
        raise ValueError(
            f"tail must be 0 with label_smoothing, which weighs every pair, got {tail} and {smoothing}"
        )
    if given["group"] is None and len(d) + each == 0:
        raise ValueError("D must hold at least one document, got none")
    labels = Labels(check.check_labels(given["labels"], len(q), len(d), q.device))
    excluded = given["exclude"]
    if excluded is not None:
        documents = len(d) if given["group"] is None else None
        excluded = check.check_excluded(excluded, len(q), documents, q.device)
        excluded = excluded if excluded.dtype is torch.bool else Labels(excluded)
    margin = given["exclude_above"]
    margin = None if margin is None else check.check_number("exclude_above", margin)
    temperature = check.check_learned("temperature", given["temperature"], q.values, positive=True)
    check_precision(given["precision"])
    precision = given["precision"] or multiplying_now(q.values)
    kernels = choose(q, is_single(q) and is_single(d), False, precision)
    kept = check.check_kept_bytes(given["kept_bytes"])
    own = _own_options(given, q.values, labels, len(d))
    numbers = _learns(temperature) or _learns(own.get("bias"))
    keeps = torch.is_grad_enabled() and (
        numbers or any(x.values.requires_grad for x in (q, d, h) if x is not None)
    )
    return Call(
        name, kernels, q, d, h, each, labels, temperature, given["reduction"], Ring.alone(q, d, h),
        Candidates(own_candidates, excluded, margin), keeps, numbers and keeps, given["symmetric"],
        given["multi_positive"], smoothing, tail, kept, **own,
    )  # fmt: skip


def _own_candidates(
    mask: Any, h: Tokens | None, shape: tuple[int, int], device: torch.device
) -> tuple[Tokens | None, Tensor | None]:
    """Clear the hard negatives that the mask leaves out, and return which ones are candidates.

    Candidates are kept by the mask and have tokens. None: all are, as far as the host knows.
    """
    kept = check.check_candidates(mask, shape, device)
    if h is None:
        if kept is not None:
            raise ValueError("candidate_mask must be None without hard_negatives")
        return None, None
    if h.offsets is not None:
        if kept is None and not any(a == b for a, b in pairwise(h._bounds)):
            return h, None
        found = h.offsets.diff().view(shape) > 0
        if kept is not None:
            h, found = zeroed(h, ~kept.flatten()), found & kept
    else:
        tokens = h.mask
        if tokens is None and kept is None and h.values.shape[1]:
            return h, None
        if tokens is None:
            tokens = torch.ones(h.values.shape[:2], dtype=torch.bool, device=device)
        if kept is not None:
            tokens = tokens & kept.flatten().unsqueeze(1)
        h, found = Tokens._made(h.values, tokens), tokens.any(1).view(shape)
    return h, None if found.device.type == "cpu" and bool(found.all()) else found


def _own_options(given: dict[str, Any], Q: Tensor, labels: Labels, documents: int) -> dict[str, Any]:
    if "bias" in given:
        return {"bias": check.check_learned("bias", given["bias"], Q, positive=False)}
    if "k" not in given:
        return {}
    if _learns(given["temperature"]):
        raise ValueError("temperature must not require a gradient: losses.recall has none for it")
    rank_temperature = check.check_above_0("rank_temperature", given["rank_temperature"])
    mixup = check.check_mixup(given["mixup"], given["generator"], given["group"], given["reduction"])
    own = {"k": check.check_ranks(given["k"]), "rank_temperature": rank_temperature}
    if mixup is not None and labels.index is not None:  # else every document has a query of its own
        own["mixup"] = Mixup.of(mixup, labels.index, documents, scores_dtype(Q), given["generator"])
    return own


def _learns(number: Any) -> bool:
    return isinstance(number, Tensor) and number.requires_grad


# ---- what the blocks need done beforehand ----


def _prepared(call: Call, normalize: bool, listed: bool) -> Call:
    """Prepare the tokens for the operators, and choose these.

    Packed tokens, single ones and those of listed pairs are normalized here, others by the operators. Tokens
    of listed pairs lose what a mask leaves out, if any process has a mask.
    """
    call, ring = _without_left_out(call), call.ring
    here = normalize and (call.q.is_packed or ring.single or listed)
    if here:
        call = _mapped(call, _normalized)
    if listed and ring.any_mask:  # the host waits for the device
        call = _mapped(call, lambda x: with_bounds("tokens", x.pack()))
    if call.d.is_packed and ring.group is not None:
        call = replace(call, ring=ring.with_packed(call.d))
    if normalize or not call.whole:
        kernels = choose(call.q, ring.single, normalize and not here, call.kernels.precision)
        call = replace(call, kernels=kernels)
    return call


def _mapped(call: Call, function: Any) -> Call:
    h = None if call.h is None else function(call.h)
    return replace(call, q=function(call.q), d=function(call.d), h=h)


def _without_left_out(call: Call) -> Call:
    """Zero the queries without a label and their hard negatives, since a weight of 0 times NaN is NaN.

    A symmetric loss still compares documents with these queries. A GPU's labels are not waited for: any may
    leave a query out.
    """
    left_out = call.labels.left_out
    if left_out is None or (left_out.device.type == "cpu" and not bool(left_out.any())):
        return call
    h = None if call.h is None else zeroed(call.h, left_out.repeat_interleave(call.each))
    return replace(call, q=call.q if call.symmetric else zeroed(call.q, left_out), h=h)


def _normalized(x: Tokens) -> Tokens:
    values = x.values if x.mask is None else x.values.masked_fill(~x.mask.unsqueeze(-1), 0.0)
    return with_values(x, unit(values))


# ---- process groups ----


def _joined(call: Call, given: dict[str, Any]) -> Call:
    """Agree on the call with all processes. Options are compared as read, so that 1 and 1.0 are the same."""
    name, group = call.name, given["group"]
    agreed = {
        "loss": name,
        "temperature": _shown(call.temperature, given["symmetric"]),
        "symmetric": given["symmetric"],
        "normalize": given["normalize"],
        "label_smoothing": call.smoothing,
        "tail": call.tail,
        "multi_positive": call.multi_positive,
        "exclude_above": call.candidates.margin,
        "reduction": call.reduction,
        "precision": call.kernels.precision,
        "scale_by_world": given["scale_by_world"],
        "bias": _shown(call.bias, given["symmetric"]),
        "k": call.k,
        "rank_temperature": call.rank_temperature,
    }
    ring = join(name, group, call, agreed, call.q.device)
    scale = float(ring.world) if given["scale_by_world"] else 1.0
    return replace(_same_on_device(call, group), ring=ring, scale=scale)


def _shown(number: Tensor | float, symmetric: bool) -> str:
    """Show a number for comparison between processes, which exchange sums if a symmetric loss learns it."""
    if not isinstance(number, Tensor):
        return repr(number)
    value = repr(number.item()) if has_values_on_cpu(number) else f"a number on {number.device.type}"
    learned = symmetric and number.requires_grad and torch.is_grad_enabled()
    return f"{value}, which requires a gradient" if learned else value


def _same_on_device(call: Call, group: Any) -> Call:
    """Turn a GPU's temperature or bias, which the host does not wait for, into NaN if processes differ."""
    numbers = {"temperature": call.temperature, "bias": call.bias}
    on_device = {k: x for k, x in numbers.items() if isinstance(x, Tensor) and not has_values_on_cpu(x)}
    if not on_device:
        return call
    own = torch.stack([x.detach() for x in on_device.values()])
    every = gathered(call.name, group, own, " and ".join(on_device))
    differ = (every != every[0]).any(0)
    found = {k: x.masked_fill(differ[i], math.nan) for i, (k, x) in enumerate(on_device.items())}
    return replace(call, **found)  # type: ignore[arg-type]
