"""How near a call comes to what its machine does at best, which was measured in the same run."""

from bench.harness.shape import Shape

# What bounds a call: the letters of records, and the names in tables.
NAMES = {"C": "cuBLAS bf16", "T": "cuBLAS TF32", "R": "reads"}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}


def shape_of(row):
    return Shape(row["shape"], row["Nq"], row["Nd"], row["Lq"], row["Ld"], row["d"], row["layout"])


def _bytes_moved(row):
    """The fewest bytes of a forward: every input read once, every output written once."""
    shape = shape_of(row)
    moved = shape.bytes_moved("fwd", _BYTES[row["dtype"]])
    if row.get("variant") == "winners":
        moved += 2 * shape.Nq * shape.Nd * shape.Lq
    if str(row.get("variant")).endswith("per token"):  # a float32 scale each
        moved += 4 * (shape.Nq * shape.Lq + shape.documents * shape.Ld)
    return moved


def reached(row, header):
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


def least_us(shape, op, itemsize, rates):
    """The least time of a call by the ceilings of its run: the larger of the times for the products at
    cuBLAS' rate and for moving every byte once."""
    if not rates.get("cublas_tflops") or not rates.get("read_tbps"):
        return None
    products = shape.arithmetic(op) / rates["cublas_tflops"]
    return 1e-6 * max(products, shape.bytes_moved(op, itemsize) / rates["read_tbps"])


def floor_us(row, header):
    return least_us(shape_of(row), row["op"], _BYTES[row["dtype"]], header)
