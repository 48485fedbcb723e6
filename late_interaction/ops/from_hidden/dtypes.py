"""Which dtype the operators on hidden states multiply in, and which they add up in."""

import torch
from torch import Tensor

_HALF = {"medium": torch.bfloat16, "fp16": torch.float16}


def product_dtype(precision: str, dtype: torch.dtype) -> torch.dtype:
    return _HALF.get(precision, dtype) if dtype == torch.float32 else dtype


def working_dtype(precision: str, *tensors: Tensor | None) -> torch.dtype:
    """Return the dtype that everything multiplies in.

    It is the tensors' own if they agree; else, or if precision says so of float32, the half precision among
    them.
    """
    found = {x.dtype for x in tensors if x is not None}
    if len(found) > 1 and torch.float64 in found:
        pass
    elif torch.float32 in found and precision in _HALF:
        return _HALF[precision]
    elif len(halves := found - {torch.float32}) == 1:
        return halves.pop()
    elif not halves:
        return torch.float32
    names = ", ".join(sorted(str(dtype) for dtype in found))
    raise TypeError(
        f"Q, H_d, W and b must share a dtype, or mix float32 with one half precision, got {names}"
    )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def converted(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # even a `to` that changes nothing takes microseconds
