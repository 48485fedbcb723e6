"""How a public function calls an operator on packed tokens."""

from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _AutoDispatchBelowAutograd

from late_interaction._checks.options import check_precision
from late_interaction._checks.tensors import is_autocasting
from late_interaction._precision import float32_precision


def learns(Q: Tensor, D: Tensor) -> bool:
    return (Q.requires_grad or D.requires_grad) and torch.is_grad_enabled()


def call_packed(op: Any, Q: Tensor, D: Tensor, *rest: Any, precision: str | None) -> Any:
    """``op(Q, D, *rest, precision)``; a precision of None is PyTorch's own."""
    if precision is None:
        precision = float32_precision(Q.device.type) if Q.dtype is torch.float32 else "highest"
    else:
        check_precision(precision)
        if is_autocasting(Q) and Q.dtype is D.dtype:
            with torch.autocast(Q.device.type, enabled=False):  # what the caller says beats autocast
                return _call(op, Q, D, *rest, precision)
    return _call(op, Q, D, *rest, precision)


def _call(op: Any, Q: Tensor, D: Tensor, *rest: Any) -> Any:
    if learns(Q, D) or torch.compiler.is_compiling() or _are_functorch_transforms_active():
        return op(Q, D, *rest)
    with _AutoDispatchBelowAutograd():
        return op(Q, D, *rest)
