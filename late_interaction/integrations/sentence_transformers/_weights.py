"""Query masks that are weights: Sentence Transformers multiplies each query token's maximum by its mask."""

import torch
from torch import Tensor

__all__ = ["split"]


def split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A query mask as (what is kept, weights), one of which is None. On a CPU numbers that are all 0 or 1 are
    a mask; a GPU's are not waited for. Integers become float32 weights, as products with scores do."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    readable = mask.device.type == "cpu" and not mask.requires_grad and not torch.compiler.is_compiling()
    if readable and bool(((mask == 0) | (mask == 1)).all()):
        return mask.bool(), None
    return None, mask if mask.is_floating_point() else mask.float()
