"""Applies the autograd functions of losses over a batch, of which torch.func has no transforms."""

from collections.abc import Callable
from typing import Any

from torch.autograd import Function

from late_interaction._torch import _are_functorch_transforms_active


def applied(function: type[Function]) -> Callable[..., Any]:
    """Return ``function.apply``, with an error that says what to call under ``torch.func``."""
    plain: Any = function.apply

    def apply(*args: Any) -> Any:
        if _are_functorch_transforms_active():
            raise NotImplementedError(
                "torch.func (grad, vjp, jacrev, vmap, ...) does not transform this loss, which passes over "
                "the batch in parts by an autograd function of its own; take loss.backward() or "
                "torch.autograd.grad, or the loss of a matrix of late_interaction.maxsim's scores"
            )
        return plain(*args)

    return apply
