"""Tells whether PyTorch acts between a call and its operator."""

import torch
from torch import Tensor

from late_interaction._torch import _are_functorch_transforms_active, _is_any_autocast_enabled

PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def intercepted(Q: Tensor, D: Tensor) -> bool:
    """Tell whether something acts between a call and its operator.

    That is a subclass of Tensor, another device, autocast, or a transform of torch.func.
    """
    if type(Q) not in PLAIN_TYPES or type(D) not in PLAIN_TYPES:
        return True
    if not ((Q.is_cuda and D.is_cuda) or (Q.is_cpu and D.is_cpu)):
        return True
    return _is_any_autocast_enabled() or _are_functorch_transforms_active()
