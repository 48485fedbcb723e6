"""The losses of a batch while torch.compile traces them: one operator, which runs a loss as eager calls do.

``batch_loss(name, options, Q, D, H, temperature, bias, beside, needs, grad=None)
-> (loss, grad_Q, grad_D, grad_H, grad_temperature, grad_bias)``
    ``options``: literals as text. ``beside``: masks and offsets of ``Q``, ``D`` and ``H``, ``labels``,
    ``exclude`` (two tensors each) and ``candidate_mask``. ``needs``: which gradients; the others have no
    elements. ``grad``: what losses of queries are multiplied by, where they are not reduced.

A loss that is reduced has its gradients computed with it, and the backward multiplies them by a number: so
scores are computed as often as in eager calls.
"""

import ast
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from late_interaction._checks.losses import check_above_0, check_number
from late_interaction._checks.tensors import is_autocasting, scores_dtype
from late_interaction._scoring.norm_warning import unwatched
from late_interaction._scoring.sequences import as_tokens
from late_interaction._scoring.traced import leave_untraced
from late_interaction._torch import recording, register_fake
from late_interaction.ops._library import library, operators, qualified
from late_interaction.ops._registration import call_in_function, differentiable
from late_interaction.tokens import Tokens

_P = ParamSpec("_P")
_functions: dict[str, Callable[..., Tensor]] = {}

torch.library.define(
    qualified("batch_loss"),
    "(str name, str options, Tensor Q, Tensor D, Tensor? H, Tensor? temperature, Tensor? bias,"
    " Tensor?[] beside, bool[] needs, Tensor? grad=None)"
    " -> (Tensor loss, Tensor grad_Q, Tensor grad_D, Tensor grad_H, Tensor grad_temperature,"
    " Tensor grad_bias)",
    tags=(torch.Tag.cudagraph_unsafe,),  # a tail or packed tokens are waited for
)
_op = operators.batch_loss.default


def traceable(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Have torch.compile see the operator in place of a loss, where it has no group."""
    _functions[function.__name__] = function

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        if is_compiling() and kwargs.get("group") is None and kwargs.get("generator") is None:
            labels = args[2] if len(args) > 2 else kwargs.get("labels")
            if not isinstance(labels, list) and not isinstance(kwargs.get("exclude"), list):
                return _traced(function.__name__, *args, **kwargs)
        return function(*args, **kwargs)

    untraced = "a loss with group= talks to other processes, and lists of labels and a generator are read"
    leave_untraced(function, untraced)
    return call


def _traced(
    name: str, Q: Any, D: Any, labels: Any = None, *, exclude: Any = None, hard_negatives: Any = None,
    candidate_mask: Any = None, temperature: Any = 1.0, bias: Any = 0.0, group: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    q, d = _opened("Q", Q), _opened("D", D)
    h = (None,) * 3 if hard_negatives is None else _opened("hard_negatives", hard_negatives)
    first = q[0]
    number = {"dtype": scores_dtype(first), "device": first.device}
    if not isinstance(temperature, Tensor):
        temperature = torch.full((), check_above_0("temperature", temperature), **number)
    if not isinstance(bias, Tensor):
        bias = torch.full((), check_number("bias", bias), **number)
    if is_autocasting(first):
        options["autocast"] = str(torch.get_autocast_dtype(first.device.type))
    literals = {key: tuple(x) if isinstance(x, range) else x for key, x in options.items()}
    text = "{" + ", ".join([f"{key!r}: {value!r}" for key, value in literals.items()]) + "}"
    beside = [*q[1:], *d[1:], *h[1:], *_pair(labels), *_pair(exclude), candidate_mask]
    needs = [False] * 5  # autograd knows
    return _op(name, text, q[0], d[0], h[0], temperature, bias, beside, needs)[0]


def _opened(name: str, x: Any) -> tuple[Any, Any, Any]:
    found = as_tokens(name, x)
    return (found.values, found.mask, found.offsets) if isinstance(found, Tokens) else (found, None, None)


def _pair(documents: Any) -> tuple[Any, Any]:
    return documents if isinstance(documents, tuple) else (documents, None)


# ---- the operator ----


def _batch_loss(
    name: str, options: str, Q: Tensor, D: Tensor, H: Tensor | None, temperature: Tensor | None,
    bias: Tensor | None, beside: list[Tensor | None], needs: list[bool], grad: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    given: dict[str, Any] = ast.literal_eval(options)
    autocast = given.pop("autocast", None)
    tensors = Q, D, H, temperature, bias
    leaves = [
        None if x is None else x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)
    ]
    q, d, h = (_closed(x, *beside[2 * i : 2 * i + 2]) for i, x in enumerate(leaves[:3]))
    labels, exclude = (a if b is None else (a, b) for a, b in (beside[6:8], beside[8:10]))
    given |= {"labels": labels, "exclude": exclude, "hard_negatives": h, "candidate_mask": beside[10]}
    given["temperature"] = leaves[3]
    if name == "sigmoid":
        given["bias"] = leaves[4]
    wanted = [x for x, need in zip(leaves, needs, strict=True) if need and x is not None]
    dtype = None if autocast is None else getattr(torch, autocast.removeprefix("torch."))
    under = nullcontext() if dtype is None else torch.autocast(Q.device.type, dtype)
    with recording(), torch.set_grad_enabled(bool(wanted)), under:
        loss = unwatched(_functions[name], q, d, **given)
        options_of = {"allow_unused": True, "materialize_grads": True}
        found = iter(torch.autograd.grad(loss, wanted, grad, **options_of) if wanted else ())
    return loss.detach(), *(next(found) if need else Q.new_empty(0) for need in needs)


leave_untraced(_batch_loss)


def _closed(x: Tensor | None, mask: Tensor | None, offsets: Tensor | None) -> Any:
    return x if mask is None and offsets is None else Tokens._made(x, mask, offsets)


def _is_reduced(options: str) -> bool:
    return bool(ast.literal_eval(options).get("reduction") != "none")


def _fake(
    name: str, options: str, Q: Tensor, D: Tensor, H: Tensor | None, temperature: Tensor | None,
    bias: Tensor | None, beside: list[Tensor | None], needs: list[bool], grad: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    offsets = beside[1]
    rows = () if _is_reduced(options) else (len(Q) if offsets is None else offsets.shape[0] - 1,)
    tensors = zip((Q, D, H, temperature, bias), needs, strict=True)
    grads = (torch.empty_like(x) if need and x is not None else Q.new_empty(0) for x, need in tensors)
    return Q.new_empty(rows, dtype=scores_dtype(Q)), *grads


class _BatchLoss(Function):
    @staticmethod
    def forward(ctx: Any, name: str, options: str, *args: Any) -> Tensor:
        *tensors, beside, _, _ = args
        ctx.name, ctx.options, ctx.reduced = name, options, _is_reduced(options)
        needs = list(ctx.needs_input_grad[2:7])
        now = needs if ctx.reduced else [False] * 5
        loss: Tensor
        loss, *grads = call_in_function(_op, name, options, *tensors, beside, now, None)
        ctx.save_for_backward(*(grads if ctx.reduced else (*tensors, *beside)))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs, saved = list(ctx.needs_input_grad[2:7]), ctx.saved_tensors
        if ctx.reduced:
            grads = [x * grad for x in saved]
        else:
            args = (*saved[:5], list(saved[5:]), needs, grad)
            grads = call_in_function(_op, ctx.name, ctx.options, *args)[1:]
        return None, None, *(x if need else None for x, need in zip(grads, needs, strict=True)), *[None] * 3


_apply: Any = _BatchLoss.apply


def _with_gradients(*args: Any) -> Any:
    loss: Tensor = _apply(*args)
    return loss, *(loss.new_empty(0) for _ in range(5))


register_fake(library, _op.name(), _fake)
library.impl(_op, _batch_loss, "CompositeExplicitAutograd")
library.impl(_op, differentiable(_op, _with_gradients), "Autograd")
