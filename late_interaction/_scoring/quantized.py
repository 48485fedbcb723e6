"""Scores of codes: of fp8 and int8 tokens, which share scales, and of residual-compressed documents."""

from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.dense import as_given
from late_interaction._checks.plaid import check_approx_score
from late_interaction._checks.quantized import check_quantized
from late_interaction._scoring.precision import multiplying_now
from late_interaction._torch import _are_functorch_transforms_active, _AutoDispatchBelowAutograd
from late_interaction.ops import _oom
from late_interaction.ops._library import operators


def scale_for(amax: Tensor, largest_code: float) -> Tensor:
    """Return the float32 scale that maps ``amax`` to the largest code; NaN where ``amax`` is not finite."""
    # At least 1e-30, so that no scale becomes 0 or denormal. (Not a constant of the module: torch.compile
    # with dynamic=True would make that an input of the graph.)
    scale = amax.to(torch.float32).clamp_min(1e-30) / largest_code
    return torch.where(scale.isfinite(), scale, torch.nan)


def rows_by_kernel(X: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Quantize each row of the last dim in one launch. The same bits as by PyTorch's operators.

    None where something intercepts a call, or where there is no kernel.
    """
    if not X.is_cuda or ops.cuda_missing is not None or torch.compiler.is_compiling():
        return None
    if type(X) not in (Tensor, torch.nn.Parameter) or _are_functorch_transforms_active():
        return None
    codes = torch.empty(X.shape, dtype=dtype, device=X.device)
    scale = torch.empty(X.shape[:-1], dtype=torch.float32, device=X.device)
    with _AutoDispatchBelowAutograd():  # there is nothing to differentiate
        operators.quantize_rows_.default(X.contiguous(), codes, scale)
    return codes, scale


def quantize_rows(X: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return int8 or fp8 codes of the shape of ``X``, and a float32 scale for each row of the last dim.

    A scale maps the row's largest magnitude to the largest code; that of a row that is not finite is NaN.
    """
    if (found := rows_by_kernel(X, dtype)) is not None:
        return found
    X, whole = X.detach(), dtype == torch.int8
    largest = 127.0 if whole else torch.finfo(dtype).max
    scale = scale_for(X.abs().amax(-1), largest)
    codes = X.to(torch.float32) / scale.unsqueeze(-1)
    if whole:
        codes = codes.nan_to_num_(0.0).round_()
    # Rounding may carry a row's largest value past the largest code, which e4m3 has no infinity for.
    return codes.clamp_(-largest, largest).to(dtype).contiguous(), scale


def maxsim(
    Q: Tensor,
    D: Tensor,
    scale_Q: Tensor,
    scale_D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> Tensor:
    """Scores of quantized tokens in one of ``dtypes``; a 2-D Q or D drops its dim of the result."""
    args = check_quantized(Q, D, scale_Q, scale_D, q_mask, d_mask, dtypes)
    return as_given(call_without_gradients(ops.maxsim_quantized, *args), Q, D)


def call_without_gradients(op: Any, Q: Tensor, D: Tensor, *rest: Any) -> Tensor:
    try:
        if torch.compiler.is_compiling():
            return op(Q, D, *rest)
        with _AutoDispatchBelowAutograd():
            scores = op(Q, D, *rest)
        return scores
    except RuntimeError as error:
        # Packed documents have offsets, the one int32 tensor.
        offsets = [x for x in rest if isinstance(x, Tensor) and x.dtype == torch.int32]
        documents = len(offsets[0]) - 1 if D.dim() == 2 else D.shape[-3]
        _oom.codes_failed(error, Q, documents)
        raise


def score(args: tuple[Any, ...], normalize: bool, precision: str | None = None) -> Tensor:
    """Scores of residual-compressed documents: of checked arguments of the operator, up to ``nbits``."""
    op: Any = ops.maxsim_residual
    try:
        scores: Tensor = op(*args, normalize, precision or multiplying_now(args[0]))
    except RuntimeError as error:
        documents = args[3].shape[0] - (args[1].dim() == 1)
        _oom.codes_failed(error, args[0], documents)
        raise
    return scores


def approximate(query_centroid_scores: Tensor, codes: Any, doc_lengths: Any) -> Tensor:
    """Compute ``sum_s max_t query_centroid_scores[codes[j, t], s]`` of each document, checked."""
    args = check_approx_score(query_centroid_scores, codes, doc_lengths)
    op: Any = ops.plaid_approx_score
    if torch.compiler.is_compiling():
        return op(*args)
    with _AutoDispatchBelowAutograd():  # there is nothing to differentiate
        scores = op(*args)
    return scores
