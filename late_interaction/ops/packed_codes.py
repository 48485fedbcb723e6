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
and bits of more than 2,048 dims, are unpacked to int8 there.
"""

from late_interaction.ops._registration import register_without_gradients
from late_interaction.ops.dense import fake_packed_scores, fake_scores

register_without_gradients("maxsim_hamming", fake_scores)
register_without_gradients("maxsim_asymmetric", fake_scores)
register_without_gradients("maxsim_hamming_packed", fake_packed_scores, packed=True)
register_without_gradients("maxsim_asymmetric_packed", fake_packed_scores, packed=True)
