"""How float32 inputs multiply when the caller does not say: PyTorch's own switches."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# The switches that torch >= 2.9 adds beside torch.set_float32_matmul_precision.
_NEW_NAMES = {"ieee": "highest", "tf32": "high", "bf16": "medium"}


def float32_precision(device_type: str) -> str:
    """ "highest", "high" or "medium", for float32 matrix products on devices of this type."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer switches are in use, and PyTorch will not read both
        backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        return _NEW_NAMES.get(backend.matmul.fp32_precision, "highest")


# A compiled graph keeps what it was compiled under. torch.compiler.assume_constant_result sets this mark, but
# calling it would import all of torch._dynamo with this package.
float32_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast off, on devices of a type that has it (meta has not)."""
    return torch.autocast(device_type, enabled=False) if device_type in ("cpu", "cuda") else nullcontext()


@contextmanager
def float32_products(device_type: str, precision: str) -> Iterator[None]:
    """Matrix products of float32 tensors multiply like this."""
    before = float32_precision(device_type)
    if before == precision:
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
