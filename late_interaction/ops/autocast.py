"""Autocast: float32 inputs stay float32 and multiply in the autocast dtype, so gradients come in float32.

A cast would keep a half-precision copy of Q and D alive until the backward and round their gradients. Inputs
of two dtypes (half and float32) are cast to the autocast dtype; float64 is left alone, as everywhere in
autocast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

_PRECISION = {torch.bfloat16: "medium", torch.float16: "fp16"}
_library = torch.library.Library("late_interaction", "IMPL")


def _kernel(op: Any, device_type: str, key: DispatchKey) -> Callable[..., Any]:
    exclude = DispatchKeySet(key)
    defaults = [argument.default_value for argument in op._schema.arguments]
    at = [argument.name for argument in op._schema.arguments].index("precision") - 2  # behind Q and D

    def autocast(Q: Tensor, D: Tensor, *given: Any) -> Any:
        rest = [*given, *defaults[2 + len(given) :]]
        dtype = torch.get_autocast_dtype(device_type)
        if Q.dtype != D.dtype and torch.float64 not in (Q.dtype, D.dtype):
            Q, D = Q.to(dtype), D.to(dtype)
        elif Q.dtype == torch.float32:
            rest[at] = _PRECISION.get(dtype, rest[at])
        with _ExcludeDispatchKeyGuard(exclude):
            return op(Q, D, *rest)

    return autocast


def _from_hidden(op: Any, device_type: str, key: DispatchKey) -> Callable[..., Any]:
    """Inputs keep their dtypes: the operator converts a chunk of documents at a time."""
    exclude = DispatchKeySet(key)

    def autocast(*args: Any) -> Any:
        tensors, options = args[:6], args[6:]
        defaults: tuple[Any, ...] = (True, "highest")
        normalize, precision = *options, *defaults[len(options) :]
        precision = _PRECISION.get(torch.get_autocast_dtype(device_type), precision)
        with _ExcludeDispatchKeyGuard(exclude):
            return op(*tensors, normalize, precision)

    return autocast


_KEYS = (("cpu", DispatchKey.AutocastCPU), ("cuda", DispatchKey.AutocastCUDA))


def register_forward(op: Any) -> None:
    """Of an operator that takes ``(Q, D, ..., precision, ...)``."""
    for device_type, key in _KEYS:
        _library.impl(op, _kernel(op, device_type, key), key.name)


def register() -> None:
    ops = torch.ops.late_interaction
    for op in (ops.maxsim.default, ops.maxsim_winners.default):
        register_forward(op)
    for device_type, key in _KEYS:
        for op in (ops.maxsim_from_hidden.default, ops.maxsim_from_hidden_winners.default):
            _library.impl(op, _from_hidden(op, device_type, key), key.name)
