"""Matrix products of embeddings whose results are float32 (float64 for float64 inputs)."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    if a.dtype.itemsize >= 4:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def add_product(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype.itemsize >= 4:
        return torch.addmm(sums, a, b, out=sums)
    if a.is_cuda:
        return torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    return torch.addmm(sums, a.float(), b.float(), out=sums)
