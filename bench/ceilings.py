"""How near a forward comes to what the card does at best, by the ceilings measured in the same run."""

from __future__ import annotations

from typing import Any

from .shapes import Shape

Row = dict[str, Any]  # as in results, which imports this

# What bounds a call, as tables say it.
NAMES = {"C": "cuBLAS bf16", "T": "cuBLAS TF32", "R": "reads"}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}


def shape_of(row: Row) -> Shape:
    return Shape(row["shape"], row["Nq"], row["Nd"], row["Lq"], row["Ld"], row["d"], row["layout"])


def bytes_moved(row: Row) -> int:
    """The fewest bytes of a forward: every input read once, every output written once."""
    shape = shape_of(row)
    moved = shape.bytes_moved("fwd", _BYTES[row["dtype"]])
    if row.get("variant") == "winners":
        moved += 2 * shape.Nq * shape.Nd * shape.Lq
    if str(row.get("variant")).endswith("per token"):  # a float32 scale each
        moved += 4 * (shape.Nq * shape.Lq + shape.documents * shape.Ld)
    return moved


def reached(row: Row, header: Row) -> tuple[float, str] | None:
    """(fraction of the ceiling, which one): the ceiling is the larger of two times, FLOPs of real tokens over
    what cuBLAS reaches (bf16; TF32 for float32 inputs) and bytes over a large read."""
    products = "T" if row["dtype"] == "float32" else "C"
    tflops = header.get("cublas_tf32_tflops" if products == "T" else "cublas_tflops")
    if row["op"] != "fwd" or not row.get("gpu_us") or row["dtype"] not in _BYTES:
        return None
    if row.get("nbits"):  # compressed documents: the gather of centroids from L2 bounds those
        return None
    if not tflops or not header.get("read_tbps"):
        return None
    compute = shape_of(row).flops / tflops * 1e-6
    read = bytes_moved(row) / header["read_tbps"] * 1e-6
    return max(compute, read) / row["gpu_us"], products if compute >= read else "R"


def floor_us(row: Row, header: Row) -> float | None:
    """The least time of a forward or step by the ceilings of its run: products at cuBLAS' rate, or every byte
    moved once, whichever takes longer."""
    if not header.get("cublas_tflops") or not header.get("read_tbps"):
        return None
    flops, bandwidth = 1e12 * header["cublas_tflops"], 1e12 * header["read_tbps"]
    return shape_of(row).floor_us(row["op"], _BYTES[row["dtype"]], flops, bandwidth)
