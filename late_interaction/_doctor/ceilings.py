"""The ceilings of a machine: rates of products, reads and copies, and the host's share of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from late_interaction._doctor.timing import Call, Effort, gpu_time, wall_time


@dataclass(frozen=True)
class Ceilings:
    """What this machine does at best, measured in the same run; None is not measured."""

    cublas_tflops: float | None = None
    cublas_tf32_tflops: float | None = None
    read_tbps: float | None = None
    copy_tbps: float | None = None
    # Wall time of PyTorch's own product of two small tensors, without and with both gradients: an eager call
    # or step spends at least that on the host.
    product_us: float | None = None
    product_step_us: float | None = None


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def microseconds(call: Call, effort: Effort, device: torch.device) -> float:
    """Return the time of a call by the device's own clock: a GPU's, or that on the wall."""
    if device.type == "cuda":
        return gpu_time([call], effort).us
    call()  # warms up
    return wall_time([call], effort, device)


def product_tflops(dtype: torch.dtype, n: int, effort: Effort, device: torch.device) -> float:
    """Return what PyTorch (cuBLAS on a GPU) reaches on an n^3 product of random matrices."""
    a, b = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    return 2 * n**3 / microseconds(lambda: torch.mm(a, b, out=c), effort, device) * 1e-6


def measure_ceilings(effort: Effort, device: torch.device, n: int = 8192, gib: float = 4.0) -> Ceilings:
    """Measure an n^3 product, a large reduction, a large copy, and the host's share of a call.

    The reduction counts bytes read, the copy bytes read and written; the host's share is the time of the
    smallest call and step.
    """
    product = product_tflops(torch.bfloat16, n, effort, device)
    with float32_products("high"):
        tf32 = product_tflops(torch.float32, n, effort, device)
    source = torch.randn(int(gib * 2**28), device=device)
    target = torch.empty_like(source)
    copy = microseconds(lambda: target.copy_(source), effort, device)
    matrix = source.view(-1, 1 << 16)
    reads = (source.sum, matrix.amax, lambda: matrix.sum(1))
    read = min(microseconds(call, effort, device) for call in reads)
    a, b, grad = (torch.randn(32, 32, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    forward = wall_time([lambda: a * b], effort, a.device)
    step = wall_time([lambda: torch.autograd.grad(leaves[0] * leaves[1], leaves, grad)], effort, a.device)
    return Ceilings(
        product, tf32, source.nbytes / read * 1e-6, 2 * source.nbytes / copy * 1e-6, forward, step
    )
