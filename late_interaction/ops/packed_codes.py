"""The operators on packed codes, several dims to a byte, the lowest bits of a byte first.

``maxsim_hamming(Q, D, d, q_mask, d_mask) -> scores``
    ``Q`` and ``D`` hold bits, uint8 of ``ceil(d / 8)`` bytes a token; the bits behind the last dim are 0. A
    similarity is ``d - 2 * (bits that differ)``.
``maxsim_asymmetric(Q, D, scale_Q, scale_D, q_mask, d_mask, nbits) -> scores``
    ``Q`` holds int8 codes, ``D`` codes of ``nbits`` (1: +1 where set, else -1; 4: the value - 8), uint8 of
    ``ceil(d * nbits / 8)`` bytes a token. Scales as in ``maxsim_quantized``.
``maxsim_hamming_packed(Q, D, d, q_mask, cu_seqlens_d) -> scores``
``maxsim_asymmetric_packed(Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d, nbits) -> scores``
    The same of packed documents, as those of ``maxsim_quantized_packed``.

None is differentiable. CPUs have kernels for all of them. GPUs do too, but 1-bit documents of int8 queries,
and bits of more than 2,048 dims, are unpacked to int8 there. Where the CUDA library is missing, functions of
this module do what the first two do: they unpack the documents to int8, at most 64 MiB at a time, and call
``maxsim_quantized``.
"""

import torch
from torch import Tensor

from late_interaction._checks.quantized import check_asymmetric, check_hamming
from late_interaction.ops._arguments import check_scales_and_masks, check_tensor
from late_interaction.ops._blocks import blocks
from late_interaction.ops._library import library, operators
from late_interaction.ops._registration import register_without_gradients
from late_interaction.ops.dense import fake_packed_scores, fake_scores_of_codes


def unpack_codes(packed: Tensor, nbits: int, d: int) -> Tensor:
    """Unpack ``d`` int8 codes of each token: bits as +1 and -1, four bits as the value - 8."""
    each = 8 // nbits  # codes of a byte, looked up as one integer
    codes = _codes_of_bytes(nbits, packed.device).view(torch.int64 if each == 8 else torch.int16)
    found = codes.flatten().index_select(0, packed.flatten().to(torch.int32))
    unpacked: Tensor = found.view(torch.int8).view(*packed.shape[:-1], packed.shape[-1] * each)
    return unpacked[..., :d]


def _codes_of_bytes(nbits: int, device: torch.device) -> Tensor:
    """Tabulate the codes of each byte: int8 [256, codes of a byte]."""
    values = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1)
    shifts = torch.arange(0, 8, nbits, dtype=torch.uint8, device=device)
    fields = ((values >> shifts) & (2**nbits - 1)).to(torch.int8)
    codes: Tensor = fields * 2 - 1 if nbits == 1 else fields - 8
    return codes


def _unpacked(
    Q: Tensor,
    D: Tensor,
    scale_Q: Tensor,
    scale_D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    nbits: int,
) -> Tensor:
    """Scores of int8 queries by way of int8 documents."""
    d = Q.shape[-1]
    scores = Q.new_empty((Q.shape[0], D.shape[-3]), dtype=torch.float32)
    for i, j in blocks(D, d):
        at = j if D.dim() == 3 else (i, j)
        scores[i, j] = operators.maxsim_quantized.default(
            Q[i],
            unpack_codes(D[at], nbits, d),
            scale_Q[i] if scale_Q.dim() else scale_Q,
            scale_D[at] if scale_D.dim() else scale_D,
            None if q_mask is None else q_mask[i],
            None if d_mask is None else d_mask[at],
        )
    return scores


def _maxsim_hamming(Q: Tensor, D: Tensor, d: int, q_mask: Tensor | None, d_mask: Tensor | None) -> Tensor:
    check_tensor("q_mask", q_mask, None, (torch.bool,), Q)
    check_tensor("d_mask", d_mask, None, (torch.bool,), Q)
    Q, D, q_mask, d_mask = check_hamming(Q, D, d, q_mask, d_mask)
    one = torch.ones((), dtype=torch.float32, device=Q.device)
    return _unpacked(unpack_codes(Q, 1, d), D, one, one, q_mask, d_mask, 1)


def _maxsim_asymmetric(
    Q: Tensor,
    D: Tensor,
    scale_Q: Tensor,
    scale_D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    nbits: int,
) -> Tensor:
    check_scales_and_masks(Q, scale_Q, scale_D, q_mask, d_mask)
    args = check_asymmetric(Q, D, scale_Q, scale_D, q_mask, d_mask, nbits)
    return _unpacked(*args, nbits)


register_without_gradients("maxsim_hamming", fake_scores_of_codes)
register_without_gradients("maxsim_asymmetric", fake_scores_of_codes)
register_without_gradients("maxsim_hamming_packed", fake_packed_scores(4), packed=True)
register_without_gradients("maxsim_asymmetric_packed", fake_packed_scores(5), packed=True)
library.impl("maxsim_hamming", _maxsim_hamming, "CompositeExplicitAutograd")
library.impl("maxsim_asymmetric", _maxsim_asymmetric, "CompositeExplicitAutograd")
