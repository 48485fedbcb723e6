"""How a public function calls an operator on packed tokens."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.choices import Precision
from late_interaction._checks.options import check_precision
from late_interaction._checks.tensors import is_autocasting
from late_interaction._scoring.precision import float32_precision
from late_interaction._torch import _are_functorch_transforms_active, _AutoDispatchBelowAutograd


def call_packed(op: Any, inputs: tuple[Any, ...], precision: Precision | None, learns: bool) -> Any:
    """Call ``op(*inputs, precision)``, whose inputs begin with Q and D; a precision of None is PyTorch's.

    learns: whether the call needs a gradient.
    """
    Q: Tensor = inputs[0]
    if precision is None:
        precision = float32_precision(Q.device.type) if Q.dtype is torch.float32 else "highest"
    else:
        check_precision(precision)
        if is_autocasting(Q) and Q.dtype is inputs[1].dtype:
            with torch.autocast(Q.device.type, enabled=False):  # what the caller says beats autocast
                return call_packed(op, inputs, precision, learns)
    if learns or torch.compiler.is_compiling() or _are_functorch_transforms_active():
        return op(*inputs, precision)
    with _AutoDispatchBelowAutograd():
        return op(*inputs, precision)
