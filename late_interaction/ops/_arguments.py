"""Check the arguments of kernels in Python, as csrc/common/tensors.h does those of kernels in C++.

Callers of ``torch.ops.late_interaction.*`` meet these checks; the functions of the package check before.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from late_interaction._checks.tensors import scores_dtype

MAX_TOKENS = 1 << 30  # csrc/common/tensors.h


def check_tensor(
    name: str,
    x: Tensor | None,
    sizes: Sequence[int | None] | None,
    dtypes: Collection[torch.dtype],
    beside: Tensor | None = None,
    contiguous: bool = False,
) -> None:
    """Require a dense tensor of these sizes in one of these dtypes, on the device of ``beside``.

    A size of None is any; x is None where it was not given.
    """
    if x is None:
        return
    fits = x.dtype in dtypes and x.layout is torch.strided and (beside is None or x.device == beside.device)
    fits = fits and (x.is_contiguous() or not contiguous)
    if fits and (sizes is None or x.shape == sizes or _fit(x.shape, sizes)):
        return
    wanted = "contiguous " * contiguous + " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if sizes is not None:
        wanted += f" [{', '.join('any' if size is None else str(size) for size in sizes)}]"
    where = "" if beside is None else f" on {beside.device}"
    got = f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
    if x.layout is not torch.strided:
        got += f" of layout {x.layout}"
    elif contiguous:
        got += f" with strides {x.stride()}"
    raise RuntimeError(f"late_interaction: {name} must be {wanted}{where}, got {got} on {x.device}")


def _fit(shape: torch.Size, sizes: Sequence[int | None]) -> bool:
    return len(shape) == len(sizes) and all(b is None or a == b for a, b in zip(shape, sizes, strict=True))


def check_sums(name: str, sums: Tensor | None, of: Tensor) -> None:
    """On the CPU what the CUDA operators ask of sums that a gradient of ``of`` is added to."""
    wanted = scores_dtype(of)
    if sums is not None and not (
        sums.numel() == of.numel() and sums.is_contiguous() and sums.dtype is wanted
    ):
        raise RuntimeError(
            f"late_interaction: {name} must be contiguous, with {of.numel()} elements of {wanted},"
            f" got {tuple(sums.shape)} of {sums.dtype} with strides {sums.stride()}"
        )


def check_choice(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise RuntimeError(f"late_interaction: {name} must be one of {known}, got {value[:40]!r}")


def check_scales_and_masks(
    Q: Tensor, scale_Q: Tensor, scale_D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None
) -> None:
    """Check as the kernels do, which read them where they lie: public functions convert them."""
    for name, x, dtype in (
        ("scale_Q", scale_Q, torch.float32),
        ("scale_D", scale_D, torch.float32),
        ("q_mask", q_mask, torch.bool),
        ("d_mask", d_mask, torch.bool),
    ):
        check_tensor(name, x, None, (dtype,), Q)


# ---- ranks, of tensors without values too ----


def check_form(name: str, x: Tensor, *forms: str) -> None:
    """Require the rank of one of these forms, of which each says its dims: ``"[Nq, Lq, d]"``."""
    torch._check(
        x.dim() in [form.count(",") + 1 for form in forms],
        lambda: f"late_interaction: {name} must be {' or '.join(forms)}, got rank {x.dim()}",
    )


def check_packed(Q: Tensor, D: Tensor) -> None:
    """Require packed queries and documents."""
    torch._check(
        Q.dim() == 2 and D.dim() == 2,
        lambda: f"late_interaction: Q and D must be [tokens, d], got ranks {Q.dim()} and {D.dim()}",
    )
