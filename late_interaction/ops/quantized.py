"""The operators on quantized tokens.

``maxsim_quantized(Q, D, scale_Q, scale_D, q_mask, d_mask) -> scores``
    ``Q`` and ``D`` hold codes, both float8_e4m3fn, float8_e5m2 or int8; scales are float32, 0-dim (one for
    all tokens) or shaped as masks (one a token), finite and not negative: another one makes the scores that
    it reaches NaN. Not differentiable.
``maxsim_quantized_packed(Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d) -> scores``
    The same of packed documents: ``D`` is ``[tokens, d]``, ``scale_D`` 0-dim or ``[tokens]``, and document
    ``j`` the tokens from ``cu_seqlens_d[j]`` (int32) up to ``cu_seqlens_d[j + 1]``. Queries are padded.
``maxsim_dequantized(...those of maxsim_quantized...) -> scores``
    ``maxsim_quantized`` by way of float32 copies, written here. That calls it where a GPU has no kernel for
    the call (rows that are no whole number of 16 bytes; more than 256 dims on GPUs without wgmma, and
    thousands with short queries on others).
``quantize_rows_(rows, codes, scale)``
    On CUDA alone. Writes codes of ``rows`` ``[..., d]``, and the scale of each row, float32 ``[...]``.

What the copies cost: TF32 keeps 11 significant bits, so a product errs by at most 2^-10 of itself, and errors
of both signs average out over a dot product. Quantization itself erred by up to 2^-4 of a value (e4m3), 2^-3
(e5m2) or 1/254 of the row's largest (int8).
"""

import torch
from torch import Tensor

from late_interaction._checks.quantized import check_quantized
from late_interaction._checks.tensors import CODES
from late_interaction.ops._arguments import check_scales_and_masks
from late_interaction.ops._blocks import blocks
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import fake_nothing, register_helper, register_without_gradients
from late_interaction.ops.dense import fake_packed_scores, fake_scores


def _usable(scale: Tensor) -> Tensor:
    """Turn a scale that is negative or infinite to NaN, so that no score hides it."""
    return torch.where((scale >= 0) & scale.isfinite(), scale, torch.nan)


def maxsim_dequantized(
    Q: Tensor, D: Tensor, scale_Q: Tensor, scale_D: Tensor, q_mask: Tensor | None, d_mask: Tensor | None
) -> Tensor:
    if Q.dim() != 3 or D.dim() not in (3, 4):
        raise ValueError("late_interaction: Q must be [Nq, Lq, d] and D [Nd, Ld, d] or [Nq, K, Ld, d]")
    check_scales_and_masks(Q, scale_Q, scale_D, q_mask, d_mask)
    Q, D, scale_Q, scale_D, q_mask, d_mask = check_quantized(Q, D, scale_Q, scale_D, q_mask, d_mask, CODES)
    scale_Q, scale_D = _usable(scale_Q), _usable(scale_D)
    in_batch, per_token = D.dim() == 3, scale_D.dim() > 0
    # Every factor is >= 0 or NaN, so it may move inside the maximum; one that all documents share goes to Q.
    factor = scale_Q if per_token else scale_Q * scale_D
    queries = Q.to(torch.float32) * factor.unsqueeze(-1)
    scores = Q.new_empty((Q.shape[0], D.shape[-3]), dtype=torch.float32)
    with torch.autocast(Q.device.type, enabled=False):
        for i, j in blocks(D, 4 * D.shape[-1]):
            at = j if in_batch else (i, j)
            documents = D[at].to(torch.float32, memory_format=torch.contiguous_format)
            if per_token:
                documents *= scale_D[at].unsqueeze(-1)
            masks = None if q_mask is None else q_mask[i], None if d_mask is None else d_mask[at]
            scores[i, j] = operators.maxsim.default(queries[i], documents, *masks, False, "high")
    return scores


register_without_gradients("maxsim_quantized", fake_scores)
register_without_gradients("maxsim_dequantized", fake_scores)
register_without_gradients("maxsim_quantized_packed", fake_packed_scores, packed=True)
register_helper(operators.quantize_rows_.default, fake_nothing)
library.impl("maxsim_dequantized", maxsim_dequantized, "CompositeExplicitAutograd")
