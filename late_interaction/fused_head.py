"""MaxSim of hidden states, by :mod:`late_interaction.ops.from_hidden`: :func:`maxsim_from_hidden`."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from late_interaction import ops
from late_interaction._checks.dense import check_from_hidden
from late_interaction._checks.options import Precision, check_flag, check_precision
from late_interaction._checks.tensors import check_no_forward_ad, is_autocasting
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.precision import float32_precision
from late_interaction.ops.from_hidden.fallback import working_dtype

__all__ = ["maxsim_from_hidden"]


def maxsim_from_hidden(
    Q: Tensor,
    H_d: Tensor,
    W: Tensor,
    b: Tensor | None = None,
    d_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    q_mask: Tensor | None = None,
    project_Q: bool = False,
    precision: Precision | None = None,
) -> Tensor:
    """Compute ``maxsim(Q, linear(H_d, W, b))``, without the projected documents as a whole.

    Differentiable in ``Q``, ``H_d``, ``W`` and ``b``. A chunk of documents at a time is projected into a
    buffer that stays in the GPU's L2 cache, normalized if wanted, and scored; one kernel projects and
    normalizes in half precision with d up to 128 on compute capability 9.0. (Without gradients, and with up
    to 64 query tokens in all, one kernel scores tokens as it projects them.) The backward projects again, the
    tokens that won alone; it is deterministic, and adds up the gradient of ``W`` in float32, over those
    tokens too.
    Masked tokens, and documents without a valid token, reach neither a score nor a gradient.

    ``O(Nd Ld d (d_model + Nq Lq))`` operations; memory beside inputs, results and gradients is a few tens of
    MiB (one document, where that is more) and, for the backward, 2 bytes a score and query token.

    Args:
        Q: queries, ``[Nq, Lq, d]`` or ``[Lq, d]``, projected (and normalized, if they should be) already.
        H_d: the documents' hidden states, ``[Nd, Ld, d_model]``; bfloat16, float16, float32 or float64.
        W: ``[d, d_model]``, as ``torch.nn.Linear.weight``.
        b: ``[d]``, as ``torch.nn.Linear.bias``.
        d_mask: ``[Nd, Ld]``, bool (or integer, nonzero = True), True = keep.
        normalize: divide every projected document token by its L2 norm (eps 1e-12), with the exact gradient:
            what ColBERT models do.
        q_mask: ``[Nq, Lq]``, likewise; a masked query token adds 0.
        project_Q: ``Q`` holds hidden states too, ``[..., d_model]``, and goes through the same head.
        precision: how float32 inputs multiply in MaxSim, as in :func:`late_interaction.maxsim`;
            ``"medium"`` is bfloat16 throughout. The projection follows PyTorch's own switch otherwise.

    All tensors are on one device and of one dtype; or some are float32 and the others one half precision,
    which then is what multiplies. Under autocast that is the autocast dtype. Gradients have the dtypes of
    their inputs.

    Returns:
        ``[Nq, Nd]`` scores (``[Nd]`` for a 2-D ``Q``), float32 (float64 for float64 inputs).

    Raises:
        TypeError: an argument that is no tensor, or dtypes that do not mix.
        ValueError: shapes, devices or options that do not fit.

    Example:
        >>> import torch
        >>> from late_interaction.fused_head import maxsim_from_hidden
        >>> Q = torch.tensor([[1.0, 0.0]])
        >>> H_d = torch.tensor([[[3.0, 4.0, 7.0]], [[5.0, 0.0, 1.0]]])
        >>> maxsim_from_hidden(Q, H_d, torch.eye(2, 3), normalize=True)
        tensor([0.6000, 1.0000])
    """
    check_flag("normalize", normalize)
    check_flag("project_Q", project_Q)
    check_precision(precision)
    Q3, q_mask, d_mask = check_from_hidden(Q, H_d, W, b, q_mask, d_mask, project_Q)
    autocast, beats = is_autocasting(Q), precision is not None  # what the caller says beats autocast
    multiply = float32_precision(Q.device.type) if precision is None else precision
    with torch.autocast(Q.device.type, enabled=False) if autocast and beats else nullcontext():
        autocast = autocast and not beats
        if not autocast:
            dtype = working_dtype(multiply, Q3, H_d, W, b)
        if project_Q:
            if q_mask is not None:  # whatever a masked token holds reaches nothing, W's gradient included
                Q3 = Q3.masked_fill(~q_mask.unsqueeze(-1), 0.0)
            # Queries are few: PyTorch's own operators, and its own autocast.
            if autocast:
                Q3 = F.linear(Q3, W, b)
            else:
                Q3 = F.linear(Q3.to(dtype), W.to(dtype), None if b is None else b.to(dtype))
            Q3 = F.normalize(Q3, dim=-1, eps=1e-12) if normalize else Q3
        check_no_forward_ad("maxsim_from_hidden", Q3, H_d, W, b)
        scores: Tensor = ops.maxsim_from_hidden(Q3, H_d, W, b, q_mask, d_mask, normalize, multiply)
    if not normalize:
        tokens: dict[str, Any] = {"called": "the projected H_d", "project": lambda x: _linear(x, W, b)}
        look("maxsim_from_hidden", H_d, d_mask, **tokens)
    elif not project_Q:
        look("maxsim_from_hidden", Q3, q_mask, option=False)
    return scores.squeeze(0) if Q.dim() == 2 else scores


def _linear(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    return F.linear(x.to(W.dtype), W, None if b is None else b.to(W.dtype))
