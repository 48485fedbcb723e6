"""Says what would run on a GPU for a call, and why: :func:`explain_plan`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import (
    Backward,
    Precision,
    check_backward,
    check_flag,
    check_integer,
    check_positive,
    check_precision,
)
from late_interaction._checks.plaid import check_nbits
from late_interaction._scoring.precision import float32_precision, product_dtype
from late_interaction.ops.from_hidden.chunking import SCORED_ROWS, Gpu, Sizes, planned_chunks

__all__ = ["explain_plan"]

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
_H200 = (90, 132, False)  # compute capability, multiprocessors, GeForce: where no GPU is at hand
_H200_L2 = 60 << 20
_LARGEST_SIZE = 1 << 31


def explain_plan(
    Q: Tensor | Sequence[int],
    D: Tensor | Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    winners: bool = True,
    d_mask: bool = False,
    normalize: bool = False,
    precision: Precision | None = None,
    backward: Backward | None = None,
    d_model: int | None = None,
    nbits: int | None = None,
    packed: bool = False,
    sm: int | None = None,
    sm_count: int | None = None,
    geforce: bool | None = None,
) -> str:
    """Explain which kernels, tiles and grids a call of :func:`late_interaction.maxsim` gets on a GPU.

    Args:
        Q, D: the tensors of the call, or their shapes: ``[Nq, Lq, d]`` with ``[Nd, Ld, d]`` or
            ``[Nq, K, Ld, d]`` (2-D ones count as a batch of one).
        dtype: of Q and D; None takes it from the tensors, or bfloat16 with shapes. float8_e4m3fn,
            float8_e5m2 and int8 are the codes of quantized tokens, with a scale a token and no backward:
            what :class:`late_interaction.codecs.Fp8` and :class:`~late_interaction.codecs.Int8` make.
        winners: whether there is a backward to plan, too.
        d_mask: whether documents have a mask.
        normalize, precision, backward: as in :func:`late_interaction.maxsim`.
        d_model: the documents are projected from hidden states of so many dims, as by
            :func:`late_interaction.fused_head.maxsim_from_hidden`: how, and what a chunk of them gets.
        nbits: the documents are residual-compressed with so many bits a dim (1, 2, 4 or 8), as
            :class:`late_interaction.codecs.Residual` makes them. They have no mask and, in a backward,
            no gradient.
        packed: the sequences are packed, as :class:`~late_interaction.Tokens`, and the
            shapes those of padded ones of mean length. They have no masks and one backward, which is
            ``"lowmem"``.
        sm: compute capability as ``10 * major + minor``, 90 for Hopper; 75 at least.
        sm_count: multiprocessors.
        geforce: whether the GPU is a GeForce, whose tensor cores take twice as long for 16-bit products with
            float32 sums; None: not with an ``sm``. Where ``sm`` or ``sm_count`` is None, the current GPU's is
            taken; without a GPU, an H200's.

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
    check_flag("winners", winners)
    check_flag("d_mask", d_mask)
    check_flag("normalize", normalize)
    check_flag("packed", packed)
    check_precision(precision)
    strategy = check_backward(backward)
    q_shape, d_shape = _shape("Q", Q, (2, 3)), _shape("D", D, (2, 3, 4))
    if q_shape[-1] != d_shape[-1] or (len(d_shape) == 4 and d_shape[0] != (1, *q_shape)[-3]):
        raise ValueError(
            "Q and D must share d, and Nq if D is [Nq, K, Ld, d], got Q"
            f" {list(q_shape)} and D {list(d_shape)}"
        )
    if q_shape[-1] == 0:
        raise ValueError(f"Q and D need an embedding dim d of at least 1, got {list(q_shape)}")
    dtype, names = _dtype(Q, D, dtype), _DTYPES | _CODES
    if dtype in _CODES and normalize:
        raise ValueError(f"normalize must be False for codes, got True and {dtype}: normalize first")
    sm, sm_count, geforce = _device(sm, sm_count, geforce)
    Nq, Lq, d = (1, *q_shape)[-3:]
    N, Ld = (1, *d_shape)[-3:-1]
    products = float32_precision("cuda") if precision is None else precision
    lines = [f"device       compute capability {sm / 10}, {sm_count} multiprocessors"]
    if nbits is not None:
        check_nbits(nbits)
        if len(d_shape) == 4 or dtype in _CODES or d_mask or packed or d_model is not None:
            raise ValueError(
                f"nbits={nbits} wants documents [Nd, Ld, d] of bfloat16, float16, float32 or float64 tokens"
                f" without d_mask, d_model and packed, got {dtype} {list(d_shape)}"
            )
        text: str = ops.explain_residual_plan(
            Nq, N, Lq, Ld, d, names[dtype], products, nbits, winners, sm, sm_count
        )
        return "\n".join([*lines, *_compressed(text, winners, Nq * Lq)])

    if packed:
        if len(d_shape) == 4 or dtype in _CODES or d_mask or normalize or d_model is not None:
            raise ValueError(
                "packed=True wants documents [Nd, Ld, d] of bfloat16, float16, float32 or float64 tokens"
                f" without d_mask, normalize and d_model, got {dtype} {list(d_shape)}"
            )
        for step in ("forward", "backward") if winners else ("forward",):
            text = ops.explain_packed_plan(
                Nq, N, Lq, Ld, d, names[dtype], products, step, sm, sm_count, geforce
            )
            lines += [step, *_indented(text)]
        return "\n".join(lines)

    reason = "asked for"
    if strategy == "auto":
        reason = "the faster for such a shape, as measured"
        if torch.are_deterministic_algorithms_enabled():
            strategy, reason = "lowmem", "torch.use_deterministic_algorithms is on"
    chunks = {"forward": N, "backward": N}
    if d_model is not None:
        check_positive("d_model", d_model)
        if d_model >= _LARGEST_SIZE:
            raise ValueError(f"d_model must be below 2**31, got {d_model}")
        if len(d_shape) == 4 or dtype in _CODES:
            raise ValueError(
                f"d_model={d_model} wants documents [Nd, Ld, d] of bfloat16, float16, float32 or float64"
                f" tokens, got {dtype} {list(d_shape)}"
            )
        dtype = product_dtype(products, dtype)
        sizes, gpu = Sizes(N, Ld, d, d_model, dtype.itemsize, Nq * Lq), Gpu(_l2_bytes(), sm_count)
        chunks = planned_chunks(sizes, gpu)
        lines += ["hidden states", *_projected(sizes, chunks, dtype, normalize, sm)]
        normalize = False  # the projection has normalized them before MaxSim
    for step in ("forward", "backward") if winners and dtype in _DTYPES else ("forward",):
        shape = (len(d_shape) == 4, Nq, chunks[step], Lq, Ld, d)
        options = (names[dtype], products, d_mask, normalize, step, strategy)
        text = ops.explain_plan(*shape, *options, sm, sm_count, geforce)
        lines += [step, *_indented(text)]
        if step == "backward" and "method" in text:
            lines.append(f"  why        {reason}")
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _compressed(text: str, winners: bool, query_tokens: int) -> list[str]:
    lines = ["forward", *_indented(text)]
    if winners and "grid" in text:
        blocks = f"{query_tokens} blocks of 8 warps, one a query token: of grad_Q alone"
        lines += ["backward", f"  gather     {blocks}"]
    return lines


def _l2_bytes() -> int:
    if not torch.cuda.is_available():
        return _H200_L2
    return torch.cuda.get_device_properties().L2_cache_size


def _projected(
    sizes: Sizes, chunks: dict[str, int], dtype: torch.dtype, normalize: bool, sm: int
) -> list[str]:
    N, _, d, d_model, _, query_tokens = sizes
    chunk = ", ".join(f"{size} of {N} documents in the {step}" for step, size in chunks.items())
    stay = f"the projected tokens of a chunk stay in {_l2_bytes() >> 20} MiB of L2"
    if chunks["backward"] > chunks["forward"]:
        stay += "; in the backward they lie in the memory of gradients that are written later"
    kernel = sm == 90 and d <= 128 and sizes.fit_wgrad_kernel()
    done = (
        "project_rows" if kernel else "PyTorch's product" + (", then l2_normalize_rows" if normalize else "")
    )
    scored = ["  scores     without gradients: project_scores, in one pass over all documents"]
    return [
        *(scored if kernel and query_tokens <= SCORED_ROWS else []),
        f"  chunk      {chunk}",
        f"  projection {done}, {d_model} to {d} dims in {_DTYPES[dtype]}; in the backward, of "
        + ("the tokens that won" if kernel else "all tokens"),
        f"  why        {stay}",
    ]


def _shape(name: str, x: Tensor | Sequence[int], ranks: tuple[int, ...]) -> tuple[int, ...]:
    wanted = f"{name} must be a tensor or a shape of {' or '.join(map(str, ranks))} sizes"
    if not isinstance(x, (Tensor, Sequence)) or isinstance(x, (str, bytes)):
        raise TypeError(f"{wanted}, got {type(x).__name__}")
    shape = tuple(x.shape if isinstance(x, Tensor) else x)
    for size in shape:
        check_integer(f"a size of {name}", size)
    if len(shape) not in ranks or not all(0 <= size < _LARGEST_SIZE for size in shape):
        raise ValueError(f"{wanted} from 0 up to 2**31, got {abbreviate(list(shape))}")
    return tuple(map(int, shape))


def _dtype(Q: Any, D: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that was asked for; without one, that of the tensors; without tensors, bfloat16."""
    if dtype is None:
        found = [x.dtype for x in (Q, D) if isinstance(x, Tensor)] or [torch.bfloat16]
        if found[0] != found[-1]:
            raise TypeError(f"Q and D must share a dtype, got {found[0]} and {found[1]}")
        dtype = found[0]
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES | _CODES:
        raise TypeError(
            "dtype must be bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2 or int8,"
            f" got {abbreviate(dtype)}"
        )
    return dtype


def _device(sm: int | None, sm_count: int | None, geforce: bool | None) -> tuple[int, int, bool]:
    for name, value in (("sm", sm), ("sm_count", sm_count)):
        if value is not None:
            check_positive(name, value)
    if sm is not None and not 75 <= sm < 1000:
        raise ValueError(
            f"sm must be a compute capability of at least 7.5, as 10 * major + minor (75, 90, ...), got {sm}"
        )
    if sm_count is not None and sm_count >= 10_000:
        raise ValueError(f"sm_count must be below 10000, got {sm_count}")
    if geforce is not None:
        check_flag("geforce", geforce)
    if sm is not None and sm_count is not None:
        return sm, sm_count, bool(geforce)
    here = _H200
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()
        capability = 10 * properties.major + properties.minor
        if ops.cuda_missing is None:
            capability = ops.cuda_capability()  # a test may have forced an older one
        here = (capability, properties.multi_processor_count, "GeForce" in properties.name)
    return sm or here[0], sm_count or here[1], (here[2] and sm is None) if geforce is None else geforce
