"""Checks of single tensors, and of two that meet: shared by the checks of all operators."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from late_interaction._checks.messages import describe_bad_entries, describe_bad_lengths, no_tensor, shape_of
from late_interaction._torch import _get_dispatch_mode, _TorchDispatchModeKey, forward_ad, is_fake

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INDICES = (torch.int32, torch.int64)


def refuse_tokens(name: str, x: Any, wanted: tuple[torch.dtype, ...] = FLOATS) -> NoReturn:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {no_tensor(name, x)}")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{name} must be a dense (strided) tensor, got a {kind} one")
    *others, last = (str(dtype).removeprefix("torch.") for dtype in wanted)
    raise TypeError(f"{name} must be {', '.join(others)}{' or ' * bool(others)}{last}, got {x.dtype}")


def check_embeddings(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Require a dense tensor of one of these dtypes, which the kernels take."""
    if not isinstance(x, Tensor) or x.dtype not in dtypes or x.layout != torch.strided or x.is_nested:
        refuse_tokens(name, x, dtypes)


def check_not_sharded(caller: str, name: str, x: Tensor) -> None:
    """Refuse a DTensor: for what exchanges shards by a process group of its own."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(x, module.DTensor):
        raise TypeError(
            f"{caller} takes the tokens of each process, got a DTensor as {name}: pass {name}.to_local(),"
            f" with group={name}.device_mesh.get_group() for the documents of all processes"
        )


def check_rows(name: str, x: Tensor) -> None:
    """Embeddings with a dim d of at least 1."""
    check_embeddings(name, x)
    check_has_d(name, x)


def check_has_d(name: str, x: Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} must be [..., d] with d of at least 1, got {shape_of(x)}")


def is_autocasting(x: Tensor) -> bool:
    kind = x.device.type  # PyTorch has no autocast for meta
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def scores_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scores and sums of such tokens."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def has_values(x: Tensor) -> bool:
    """Tell whether x holds values: false while a graph is traced, and for fake and meta tensors."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    if _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
        return False
    return type(x) in (Tensor, torch.nn.Parameter) or not is_fake(x)


def check_not_meta(name: str, x: Tensor) -> None:
    """For what is read on the host."""
    if x.is_meta:
        raise ValueError(f"{name} must hold values, got a meta tensor")


def has_values_on_cpu(x: Tensor) -> bool:
    """Tell whether the values of x can be read without waiting for a device."""
    return x.is_cpu and has_values(x)


def check_size(holds: Any, message: Callable[[], str]) -> None:
    """Raise a ValueError unless a condition on sizes holds.

    A traced graph asserts a condition on sizes that depend on data.
    """
    if holds is True:  # sizes that are plain numbers
        return
    if torch.compiler.is_compiling():
        torch._check(holds)
    elif not isinstance(holds, bool):
        torch._check(holds, message)
    elif not holds:
        raise ValueError(message())


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)``, without the cost of that call where x has the dtype already."""
    return x if x.dtype is dtype else x.to(dtype)


def check_device(name: str, x: Tensor, of: str, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} must be on the device of {of}, {device}, got {x.device}")


def check_same_kind(Q: Tensor, D: Tensor, q_name: str = "Q", d_name: str = "D") -> None:
    """Q and D have one device, one dtype (unless autocast converts them) and one d."""
    if Q.device != D.device:
        raise ValueError(f"{q_name} and {d_name} must be on the same device, got {Q.device} and {D.device}")
    check_same_dtype_and_d(Q, D, q_name, d_name)


def check_same_dtype_and_d(Q: Tensor, D: Tensor, q_name: str = "Q", d_name: str = "D") -> None:
    if Q.dtype != D.dtype and not (is_autocasting(Q) and torch.float64 not in (Q.dtype, D.dtype)):
        raise TypeError(f"{q_name} and {d_name} must share a dtype, got {Q.dtype} and {D.dtype}")
    d = Q.shape[-1]
    if d != D.shape[-1] or d == 0:
        raise ValueError(
            f"{q_name} and {d_name} must share an embedding dim d (their last) of at least 1,"
            f" got {shape_of(Q)} and {shape_of(D)}"
        )


def check_mask_kind(name: str, m: Any, of: str, device: torch.device) -> None:
    """Require a dense bool or integer tensor on that device."""
    if not isinstance(m, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {no_tensor(name, m)}")
    if m.dtype not in MASK_DTYPES or m.layout != torch.strided:
        raise TypeError(f"{name} must be a dense bool (or integer) tensor, got {m.dtype}, {m.layout}")
    check_device(name, m, of, device)


def check_mask(name: str, m: Tensor | None, tokens_name: str, tokens: Tensor) -> Tensor | None:
    """Return a bool mask of the tokens' shape without d: integers count as bool, 1-D as a batch of one."""
    if m is None:
        return None
    check_mask_kind(name, m, tokens_name, tokens.device)
    fitted = m.unsqueeze(0) if m.dim() == 1 else m
    if fitted.shape != tokens.shape[:-1]:
        raise ValueError(
            f"{name} must be {list(tokens.shape[:-1])}, the shape of {tokens_name} without d,"
            f" got {shape_of(m)}"
        )
    return fitted if fitted.dtype == torch.bool else fitted != 0


def check_integers(
    name: str, x: Any, dims: int, shape: str, of: str, device: torch.device,
    dtypes: tuple[torch.dtype, ...] = INDICES,
) -> None:  # fmt: skip
    """Require integers of so many dims, whose shape is written like this, on the device of ``of``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {no_tensor(name, x)}")
    if x.dtype not in dtypes or x.layout != torch.strided:
        wanted = "int32 or int64" if dtypes is INDICES else "integers"
        raise TypeError(f"{name} must be a dense tensor of {wanted}, got {x.dtype}, {x.layout}")
    if x.dim() != dims:
        raise ValueError(f"{name} must be {shape}, got {shape_of(x)}")
    check_device(name, x, of, device)


def check_rising(name: str, cu: Tensor, total: int) -> None:
    """Offsets that do not decrease and lie within [0, total]. Waits for the device."""
    # Compared, not subtracted: the difference of two int64 wraps. Where none decreases, the ends say all.
    if int(cu[0]) >= 0 and int(cu[-1]) <= total and not bool((cu[1:] < cu[:-1]).any()):
        return
    falls = torch.cat((torch.zeros_like(cu[:1], dtype=torch.bool), cu[1:] < cu[:-1]))
    bad = (cu < 0) | (cu > total) | falls
    got = describe_bad_entries(name, cu, bad, after=True)
    raise ValueError(f"{name} must not decrease and lie within [0, {total}], got {got}")


def check_lengths(name: str, lengths: Tensor, least: int, longest: int) -> None:
    """Lengths within [least, longest]. Waits for the device."""
    # On the CPU two reductions cost less than the four operations below.
    on_cpu = lengths.is_cpu and lengths.numel() > 0
    if on_cpu and int(lengths.min()) >= least and int(lengths.max()) <= longest:
        return
    if bool((bad := (lengths < least) | (lengths > longest)).any()):
        raise ValueError(describe_bad_lengths(name, lengths, bad, least, longest))


def check_no_forward_ad(name: str, *tensors: Tensor | None) -> None:
    """Refuse dual tensors.

    An operator without a rule for tangents would drop them, and the result would read as a derivative of
    zero.
    """
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"{name} has no forward-mode derivative (jvp): use reverse mode, as backward() does"
        )
