"""How float32 inputs multiply when the caller does not say (PyTorch's own switches), and calls that ask."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from late_interaction._checks.options import Precision, check_precision
from late_interaction._checks.tensors import is_autocasting
from late_interaction._torch import _are_functorch_transforms_active, _AutoDispatchBelowAutograd

# How float32 tokens multiply under autocast.
AUTOCAST_PRECISION = {torch.bfloat16: "medium", torch.float16: "fp16"}
HALF = {precision: dtype for dtype, precision in AUTOCAST_PRECISION.items()}

# The switches that torch >= 2.9 adds beside torch.set_float32_matmul_precision.
_NEW_NAMES: dict[str, Precision] = {"ieee": "highest", "tf32": "high", "bf16": "medium"}


def float32_precision(device_type: str) -> Precision:
    """Return "highest", "high" or "medium", for float32 matrix products on devices of this type."""
    turn = _switch.turn
    if (before := _switch.before) is not None:  # a call multiplies otherwise for a while
        return before
    try:
        found = cast("Precision", torch.get_float32_matmul_precision())
    except RuntimeError:  # the newer switches are in use, and PyTorch will not read both
        backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        found = _NEW_NAMES.get(backend.matmul.fp32_precision, "highest")
    return found if turn == _switch.turn else float32_precision(device_type)


# A compiled graph keeps what it was compiled under. torch.compiler.assume_constant_result sets this mark, but
# calling it would import all of torch._dynamo with this package.
float32_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def product_dtype(precision: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tokens of a dtype multiply."""
    return HALF.get(precision, dtype) if dtype is torch.float32 else dtype


def multiplying(Q: Tensor) -> Precision:
    """Say how queries multiply unless the caller does: float32 as PyTorch is told, others as they are."""
    return float32_precision(Q.device.type) if Q.dtype is torch.float32 else "highest"


def multiplying_now(Q: Tensor) -> str:
    """Say so where no kernel of an Autocast key does: float32 as autocast has it, if that is on."""
    if Q.dtype is torch.float32 and is_autocasting(Q):
        return AUTOCAST_PRECISION[torch.get_autocast_dtype(Q.device.type)]
    return multiplying(Q)


def asked(
    Q: Tensor, D: Tensor, precision: Precision | None
) -> tuple[Precision, AbstractContextManager[object]]:
    """Check the precision that a caller asks for, and return how tokens multiply, and within what.

    The caller's choice comes before autocast, unless autocast makes one dtype of two.
    """
    if precision is None:
        return multiplying(Q), nullcontext()
    check_precision(precision)
    beats = is_autocasting(Q) and Q.dtype is D.dtype
    return precision, torch.autocast(Q.device.type, enabled=False) if beats else nullcontext()


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast off, on devices of a type that has it (meta has not)."""
    return torch.autocast(device_type, enabled=False) if device_type in ("cpu", "cuda") else nullcontext()


class _Switch:
    """PyTorch's switch, which all threads of the process share, for the time of some calls.

    Threads that want the same precision hold it together; others wait until these are done and it is what it
    was before.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._own = threading.local()  # within: whether this thread holds it
        self._holders = 0
        self._held = ""
        self.before: Precision | None = None  # what the caller of the first holder had
        self.turn = 0  # grows whenever the switch is about to be thrown

    @contextmanager
    def hold(self, device_type: str, precision: str) -> Iterator[None]:
        if getattr(self._own, "within", False):  # of a finalizer, say: this thread cannot wait for itself
            torch.set_float32_matmul_precision(precision)
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(self._held)
            return
        with self._free:
            self._free.wait_for(lambda: not self._holders or self._held == precision)
            if not self._holders:
                self._held, self.before = precision, float32_precision(device_type)
                if self._held != self.before:
                    self.turn += 1
                    torch.set_float32_matmul_precision(precision)
            self._holders += 1
        self._own.within = True
        try:
            yield
        finally:
            self._own.within = False
            with self._free:
                self._holders -= 1
                if not self._holders:
                    self.release()
                    self._free.notify_all()

    def release(self) -> None:
        if self.before is not None and self.before != self._held:
            torch.set_float32_matmul_precision(self.before)
        self.before = None


_switch = _Switch()


def _forked() -> None:
    """Drop the switch in a new process: the threads that held it are not there."""
    global _switch
    _switch.release()
    _switch = _Switch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def float32_products(device_type: str, precision: str) -> AbstractContextManager[None]:
    """Matrix products of float32 tensors multiply like this."""
    return _switch.hold(device_type, precision)


def call_packed(op: Any, inputs: tuple[Any, ...], precision: Precision | None, learns: bool) -> Any:
    """Call ``op(*inputs, precision)``, whose inputs begin with Q and D; a precision of None is PyTorch's.

    learns: whether the call needs a gradient.
    """
    precision, context = asked(inputs[0], inputs[1], precision)
    below = not (learns or torch.compiler.is_compiling() or _are_functorch_transforms_active())
    with context, _AutoDispatchBelowAutograd() if below else nullcontext():
        return op(*inputs, precision)
