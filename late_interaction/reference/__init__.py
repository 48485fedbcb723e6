"""MaxSim in plain PyTorch: the definitions that the kernels are held to.

Slow, and they store every similarity. They run on any device, differentiate twice, and keep float64.
"""

from late_interaction.reference.compressed import (
    maxsim_residual_reference,
    maxsim_residual_varlen_reference,
    plaid_approx_score_reference,
    unpack_residuals_reference,
)
from late_interaction.reference.dense import (
    NEG_INF,
    maxsim_from_hidden_reference,
    maxsim_reference,
    maxsim_with_winners_reference,
    smooth_maxsim_reference,
)
from late_interaction.reference.muvera import muvera_reference
from late_interaction.reference.packed import (
    maxsim_padded_reference,
    maxsim_reference_scatter,
    maxsim_reference_varlen,
)
from late_interaction.reference.quantized import (
    maxsim_asymmetric_reference,
    maxsim_hamming_reference,
    maxsim_quantized_reference,
)
from late_interaction.reference.xtr import xtr_scores_reference

__all__ = [
    "NEG_INF",
    "maxsim_asymmetric_reference",
    "maxsim_from_hidden_reference",
    "maxsim_hamming_reference",
    "maxsim_padded_reference",
    "maxsim_quantized_reference",
    "maxsim_reference",
    "maxsim_reference_scatter",
    "maxsim_reference_varlen",
    "maxsim_residual_reference",
    "maxsim_residual_varlen_reference",
    "maxsim_with_winners_reference",
    "muvera_reference",
    "plaid_approx_score_reference",
    "smooth_maxsim_reference",
    "unpack_residuals_reference",
    "xtr_scores_reference",
]
