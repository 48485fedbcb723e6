"""How a public function calls an operator on packed tokens."""

from contextlib import nullcontext
from typing import Any

import torch

from late_interaction._checks.choices import Precision
from late_interaction._scoring.precision import asked
from late_interaction._torch import _are_functorch_transforms_active, _AutoDispatchBelowAutograd


def call_packed(op: Any, inputs: tuple[Any, ...], precision: Precision | None, learns: bool) -> Any:
    """Call ``op(*inputs, precision)``, whose inputs begin with Q and D; a precision of None is PyTorch's.

    learns: whether the call needs a gradient.
    """
    precision, context = asked(inputs[0], inputs[1], precision)
    below = not (learns or torch.compiler.is_compiling() or _are_functorch_transforms_active())
    with context, _AutoDispatchBelowAutograd() if below else nullcontext():
        return op(*inputs, precision)
