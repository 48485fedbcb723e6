"""What would run on a GPU for a call, and why: :func:`explain_plan`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from late_interaction import _checks, ops
from late_interaction._precision import float32_precision

__all__ = ["explain_plan"]

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
_H200 = (90, 132)  # compute capability and multiprocessors, where no GPU is at hand


def explain_plan(
    Q: Tensor | Sequence[int],
    D: Tensor | Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    winners: bool = True,
    d_mask: bool = False,
    normalize: bool = False,
    precision: str | None = None,
    backward: str | None = None,
    sm: int | None = None,
    sm_count: int | None = None,
) -> str:
    """Which kernels, tiles and grids a call of :func:`late_interaction.maxsim` gets on a GPU, in words.

    Args:
        Q, D: the tensors of the call, or their shapes: ``[Nq, Lq, d]`` with ``[Nd, Ld, d]`` or
            ``[Nq, K, Ld, d]`` (2-D ones count as a batch of one).
        dtype: of Q and D; None takes it from the tensors, or bfloat16 with shapes. float8_e4m3fn,
            float8_e5m2 and int8 are the codes of quantized tokens, with a scale a token and no backward:
            what :mod:`late_interaction.fp8` and :mod:`late_interaction.int8` score.
        winners: whether there is a backward to plan, too.
        d_mask: whether documents have a mask.
        normalize, precision, backward: as in :func:`late_interaction.maxsim`.
        sm: compute capability as ``10 * major + minor``, 90 for Hopper.
        sm_count: multiprocessors. Where ``sm`` or ``sm_count`` is None, the current GPU's is taken; without
            a GPU, an H200's.

    Returns:
        The device, then one line a decision, first the forward's, then the backward's: kernel, tile, grid and
        why.

    Raises:
        TypeError, ValueError: shapes, dtype or strategy that no call could have.

    Example:
        >>> from late_interaction import explain_plan
        >>> plan = explain_plan((32, 32, 128), (32, 300, 128), backward="lowmem", sm=90, sm_count=132)
        >>> [line for line in plan.splitlines() if "method" in line]
        ['  method     lowmem']
    """
    _checks.flag("winners", winners)
    _checks.flag("d_mask", d_mask)
    _checks.flag("normalize", normalize)
    _checks.known_precision(precision)
    strategy = _checks.strategy(backward)
    q_shape, d_shape = _shape("Q", Q, (2, 3)), _shape("D", D, (2, 3, 4))
    if q_shape[-1] != d_shape[-1] or (len(d_shape) == 4 and d_shape[0] != q_shape[0]):
        raise ValueError(f"no call has Q {list(q_shape)} with D {list(d_shape)}")
    if dtype is None:
        dtype = Q.dtype if isinstance(Q, Tensor) else torch.bfloat16
    names = _DTYPES | _CODES
    if dtype not in names:
        raise TypeError(
            "dtype must be bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2 or int8,"
            f" got {dtype}"
        )
    sm, sm_count = _device(sm, sm_count)
    Nq, Lq, d = (1, *q_shape)[-3:]
    N, Ld = (1, *d_shape)[-3:-1]

    if precision is None:
        precision = float32_precision("cuda")

    reason = "asked for"
    if strategy == "auto":
        reason = "the faster for such a shape, as measured"
        if torch.are_deterministic_algorithms_enabled():
            strategy, reason = "lowmem", "torch.use_deterministic_algorithms is on"

    lines = [f"device       compute capability {sm / 10}, {sm_count} multiprocessors"]
    for step in ("forward", "backward") if winners and dtype in _DTYPES else ("forward",):
        text: str = ops.explain_plan(
            len(d_shape) == 4,
            Nq,
            N,
            Lq,
            Ld,
            d,
            names[dtype],
            precision,
            d_mask,
            normalize,
            step,
            strategy,
            sm,
            sm_count,
        )
        lines += [step, *(f"  {line}" for line in text.splitlines())]
        if step == "backward" and "method" in text:
            lines.append(f"  why        {reason}")
    return "\n".join(lines)


def _shape(name: str, x: Tensor | Sequence[int], ranks: tuple[int, ...]) -> tuple[int, ...]:
    shape = tuple(x.shape if isinstance(x, Tensor) else x)
    if len(shape) not in ranks or not all(isinstance(size, int) and size >= 0 for size in shape):
        wanted = " or ".join(map(str, ranks))
        raise ValueError(f"{name} must be a tensor or a shape of {wanted} sizes, got {list(shape)}")
    return shape


def _device(sm: int | None, sm_count: int | None) -> tuple[int, int]:
    for name, value in (("sm", sm), ("sm_count", sm_count)):
        if value is not None:
            _checks.positive(name, value)
    if sm is not None and sm_count is not None:
        return sm, sm_count
    here = _H200
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()
        capability = 10 * properties.major + properties.minor
        if ops.cuda_missing is None:
            capability = ops.cuda_capability()  # a test may have forced an older one
        here = (capability, properties.multi_processor_count)
    return sm or here[0], sm_count or here[1]
