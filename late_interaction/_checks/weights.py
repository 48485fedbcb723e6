"""Checks of query-token weights."""

import torch
from torch import Tensor

from late_interaction._checks.messages import shape_of
from late_interaction._checks.tensors import FLOATS, check_device, refuse_tokens


def check_weights(weights: Tensor | None, tokens_name: str, tokens: Tensor) -> Tensor | None:
    """Weights of the tokens' shape without d, in the dtype of the scores; 1-D ones as a batch of one."""
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or weights.dtype not in FLOATS or weights.layout != torch.strided:
        refuse_tokens("q_weights", weights)
    check_device("q_weights", weights, tokens_name, tokens.device)
    fitted = weights.unsqueeze(0) if weights.dim() == 1 and tokens.dim() == 3 else weights
    if fitted.shape != tokens.shape[:-1]:
        raise ValueError(
            f"q_weights must be {list(tokens.shape[:-1])}, the shape of {tokens_name} without d,"
            f" got {shape_of(weights)}"
        )
    return fitted.to(torch.float64 if tokens.dtype == torch.float64 else torch.float32)
