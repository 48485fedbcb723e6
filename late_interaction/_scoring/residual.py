"""Scores of residual-compressed documents, and of their centroids alone."""

from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.plaid import check_approx_score
from late_interaction._scoring.precision import multiplying_now
from late_interaction._torch import _AutoDispatchBelowAutograd
from late_interaction.ops import _oom


def score(args: tuple[Any, ...], normalize: bool, precision: str | None = None) -> Tensor:
    """Scores of checked arguments of the operator, up to ``nbits``."""
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
