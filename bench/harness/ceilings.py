"""What a machine does at best, measured in the same run, and how near a call comes to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.harness.results import Row
from bench.harness.shape import Shape
from bench.harness.timing import Effort, gpu_time, wall_time

# What bounds a call: the letters of records, and the names in tables.
NAMES = {"C": "cuBLAS bf16", "T": "cuBLAS TF32", "R": "reads"}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}


def shape_of(row: Row) -> Shape:
    return Shape(row["shape"], row["Nq"], row["Nd"], row["Lq"], row["Ld"], row["d"], row["layout"])


def _bytes_moved(row: Row) -> int:
    """The fewest bytes of a forward: every input read once, every output written once."""
    shape = shape_of(row)
    moved = shape.bytes_moved("fwd", _BYTES[row["dtype"]])
    if row.get("variant") == "winners":
        moved += 2 * shape.Nq * shape.Nd * shape.Lq
    if str(row.get("variant")).endswith("per token"):  # a float32 scale each
        moved += 4 * (shape.Nq * shape.Lq + shape.documents * shape.Ld)
    return moved


def reached(row: Row, header: Row) -> tuple[float, str] | None:
    """(the share of the ceiling that a forward reaches, which ceiling it is). The ceiling is the larger of
    two times: FLOPs of real tokens over the rate of cuBLAS (bf16, or TF32 for float32 inputs), and bytes over
    the rate of a large read."""
    products = "T" if row["dtype"] == "float32" else "C"
    tflops = header.get("cublas_tf32_tflops" if products == "T" else "cublas_tflops")
    bandwidth = header.get("read_tbps")
    # The gather of centroids from L2 bounds compressed documents.
    if row["op"] != "fwd" or row["dtype"] not in _BYTES or (row.get("nbits") or 0) > 0:
        return None
    if not tflops or not bandwidth or not (row.get("gpu_us") or 0) > 0:
        return None
    compute, read = shape_of(row).flops / tflops * 1e-6, _bytes_moved(row) / bandwidth * 1e-6
    return max(compute, read) / row["gpu_us"], products if compute >= read else "R"


def floor_us(row: Row, header: Row) -> float | None:
    """The least time of a forward or step by the ceilings of its run: the larger of the times for the
    products at cuBLAS' rate and for moving every byte once."""
    if not header.get("cublas_tflops") or not header.get("read_tbps"):
        return None
    flops, bandwidth = 1e12 * header["cublas_tflops"], 1e12 * header["read_tbps"]
    return shape_of(row).floor_us(row["op"], _BYTES[row["dtype"]], flops, bandwidth)


@dataclass(frozen=True)
class Ceilings:
    """What this machine does at best, measured in the same run. None on a CPU, where nothing is measured."""

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
    """PyTorch's own float32 matrix products in this precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product_tflops(dtype: torch.dtype, n: int, effort: Effort) -> float:
    """What cuBLAS reaches on an n^3 product of random matrices."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.float32).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    return 2 * n**3 / gpu_time([lambda: torch.mm(a, b, out=c)], effort).us * 1e-6


def measure_ceilings(effort: Effort, n: int = 8192, gib: float = 4.0) -> Ceilings:
    """cuBLAS on an n^3 product, a large reduction (bytes read), a large copy (read + written), and the host's
    share of the smallest call and step."""
    product = _product_tflops(torch.bfloat16, n, effort)
    with float32_products("high"):
        tf32 = _product_tflops(torch.float32, n, effort)
    source = torch.randn(int(gib * 2**28), device="cuda")
    target = torch.empty_like(source)
    copy = gpu_time([lambda: target.copy_(source)], effort).us
    matrix = source.view(-1, 1 << 16)
    read = min(gpu_time([call], effort).us for call in (source.sum, matrix.amax, lambda: matrix.sum(1)))
    a, b, grad = (torch.randn(32, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    forward = wall_time([lambda: a * b], effort, a.device)
    step = wall_time([lambda: torch.autograd.grad(leaves[0] * leaves[1], leaves, grad)], effort, a.device)
    return Ceilings(
        product, tf32, source.nbytes / read * 1e-6, 2 * source.nbytes / copy * 1e-6, forward, step
    )
