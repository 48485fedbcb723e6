"""Score by the short way of maxsim and maxsim_pairs while torch.compile or torch.export traces them.

A compiled function checks its guards on every call. Each global, each default and each function that the
trace reads adds some; the properties of a tensor add none, because Dynamo guards them anyway. So
:func:`traced_scores` asks the tensors, reads few names, and leaves each call that it does not know to
:mod:`late_interaction._checks`.
"""

from contextlib import suppress
from typing import Any

from torch import Tensor, is_grad_enabled, strided
from torch import bool as boolean

from late_interaction._scoring.precision import float32_precision
from late_interaction._torch import skip_frames
from late_interaction.ops import maxsim, maxsim_winners


def traced_scores(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    normalize: object,
    backward: object,
    precision: object,
    paired: bool,
    weights: object,
) -> Tensor | None:
    """Scores of batched inputs and bool masks that fit, with default options; None for any other call."""
    if backward is not None or precision is not None or weights is not None:
        return None
    if not isinstance(Q, Tensor) or not isinstance(D, Tensor):
        return None
    if not (Q.is_floating_point() and Q.element_size() > 1):  # a float8 has one byte
        return None
    if Q.dtype != D.dtype or Q.device != D.device or Q.layout != strided or D.layout != strided:
        return None
    if Q.is_nested or D.is_nested or Q.dim() != 3 or D.dim() < 3 or D.dim() > (3 if paired else 4):
        return None
    if Q.shape[-1] != D.shape[-1] or Q.shape[-1] == 0:
        return None
    if (paired or D.dim() == 4) and Q.shape[0] != D.shape[0]:
        return None
    if (q_mask is not None and not _fits(q_mask, Q)) or (d_mask is not None and not _fits(d_mask, D)):
        return None
    if normalize is not False and normalize is not True:
        return None
    multiply = float32_precision(Q.device.type) if Q.element_size() == 4 else "highest"
    options = (normalize, multiply, "auto", paired)
    result: Tensor
    if (Q.requires_grad or D.requires_grad) and is_grad_enabled():
        result, _ = maxsim_winners(Q, D, q_mask, d_mask, *options)
    else:
        result = maxsim(Q, D, q_mask, d_mask, *options)
    return result


def _fits(mask: Tensor, tokens: Tensor) -> bool:
    return (
        isinstance(mask, Tensor)
        and mask.dtype == boolean
        and mask.layout == strided
        and mask.device == tokens.device
        and mask.shape == tokens.shape[:-1]
    )


def leave_untraced(function: Any, why: str | None = None) -> None:
    """Make a call of ``function`` a graph break, and have Dynamo trace nothing that the call runs.

    torch.compiler.disable does so too, but would import all of torch._dynamo with this package. The mark
    breaks the graph of a caller. The strategy keeps Dynamo from the function's own frame and from the frames
    below; without it, Dynamo compiles dozens of them for one loss.
    """
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, why
    with suppress(ImportError):  # names that PyTorch does not document
        skip_frames(function.__code__)
