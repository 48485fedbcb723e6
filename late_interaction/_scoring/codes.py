"""Scores of queries with documents that come as Codes."""

from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag, check_precision
from late_interaction._checks.tensors import check_device, check_mask, check_no_forward_ad, check_size
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.normalized import per_token
from late_interaction._scoring.sequences import as_tokens
from late_interaction.codes import Codes
from late_interaction.tokens import Tokens


def score_codes(name: str, Q: Any, D: Codes, q_mask: Any, d_mask: Any, options: dict[str, Any]) -> Tensor:
    """Scores of :func:`late_interaction.maxsim` or, by its name, of maxsim_pairs."""
    paired = name == "maxsim_pairs"
    if d_mask is not None:
        raise ValueError(
            "d_mask must be None where D is Codes, which say which tokens there are, got"
            f" {abbreviate(d_mask)}"
        )
    for option in ("backward", "winners", "q_weights"):
        if options[option] is not None:
            raise ValueError(f"{option} must be None where D is Codes, got {abbreviate(options[option])}")
    for flag in ("normalize", "mean"):
        check_flag(flag, options[flag])
    check_precision(options["precision"])
    q = _queries(Q, q_mask, paired)
    check_device("D", D.values, "Q", q.device)
    if q.d != D.d:
        raise ValueError(f"Q and D must share an embedding dim d, got {q.d} and {D.d}")
    if paired or D.values.dim() == 4:
        check_size(
            q._count == D._count,
            lambda: f"D must hold documents for each of the {len(q)} queries, got those of {len(D)}",
        )
    if paired and D.values.dim() == 4:
        raise ValueError(f"D must be one document a query, got values {shape_of(D.values)}")
    scores: Tensor = D.codec._score(q, D, paired, options["normalize"], options["precision"])
    if options["mean"]:
        scores = per_token(scores, q.values, q.mask, None)
    if isinstance(q, Tokens) and not options["normalize"]:
        look(name, q.values, q.mask)
    if paired:
        return scores.squeeze(1)
    return scores.squeeze(0) if isinstance(Q, Tensor) and Q.dim() == 2 else scores


def _queries(Q: Any, q_mask: Any, paired: bool) -> Tokens | Codes:
    if isinstance(Q, Codes):
        if q_mask is not None or Q.values.dim() == 4:
            got = "q_mask" if q_mask is not None else f"values {shape_of(Q.values)}"
            raise ValueError(f"Q must be Codes [N, L, w] or packed, without q_mask, got {got}")
        return Q.to_padded()
    q = as_tokens("Q", Q, q_mask=q_mask)
    if isinstance(q, Tokens):
        return q.to_padded()
    if q.dim() not in ((3,) if paired else (2, 3)) or q.shape[-1] == 0:
        raise ValueError(f"Q must be [Nq, Lq, d]{'' if paired else ' or [Lq, d]'}, got {shape_of(q)}")
    q = q.unsqueeze(0) if q.dim() == 2 else q
    return Tokens._made(q, check_mask("q_mask", q_mask, "Q", q))


def check_precision_of_codes(codec: object, normalize: bool, precision: Any) -> None:
    """Refuse what codes that are multiplied as they are have no use for."""
    if normalize:
        raise ValueError(f"normalize must be False for {codec}: encode normalized tokens instead")
    if precision is not None:
        raise ValueError(f"precision must be None for {codec}, got {abbreviate(precision)}")


def check_gradients(codec: object, Q: Tensor) -> None:
    """Refuse queries that want gradients of scores that have none."""
    check_no_forward_ad("maxsim", Q)
    if Q.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"Q must not require a gradient, for scores of {codec} have none: detach it, or call under"
            " torch.no_grad()"
        )
