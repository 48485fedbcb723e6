"""Scores of residual-compressed documents, and of their centroids alone."""

from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.plaid import check_approx_score
from late_interaction._checks.tensors import is_autocasting
from late_interaction._scoring.precision import float32_precision
from late_interaction._torch import _AutoDispatchBelowAutograd
from late_interaction.ops import _oom

_AUTOCAST = {torch.bfloat16: "medium", torch.float16: "fp16"}


def score(args: tuple[Any, ...], normalize: bool, precision: str | None = None) -> Tensor:
    """Scores of checked arguments of the operator, up to ``nbits``."""
    op: Any = ops.maxsim_residual
    try:
        scores: Tensor = op(*args, normalize, precision or multiplying(args[0]))
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
        scores: Tensor = op(*args)
        return scores
    with _AutoDispatchBelowAutograd():  # there is nothing to differentiate
        scores = op(*args)
    return scores


def multiplying(Q: Tensor) -> str:
    """Say how queries multiply unless the caller says it: float32 as PyTorch is told, others as they are."""
    if Q.dtype != torch.float32:
        return "highest"
    if is_autocasting(Q):
        return _AUTOCAST.get(torch.get_autocast_dtype(Q.device.type), "highest")
    return float32_precision(Q.device.type)
