"""``late_interaction_kernels.fp8``: MaxSim of fp8 tokens."""

from late_interaction.fp8 import (
    dequantize_fp8_per_tensor,
    dequantize_fp8_per_token,
    maxsim_inference_fp8,
    quantize_fp8_per_tensor,
    quantize_fp8_per_token,
)

__all__ = [
    "dequantize_fp8_per_tensor",
    "dequantize_fp8_per_token",
    "maxsim_inference_fp8",
    "quantize_fp8_per_tensor",
    "quantize_fp8_per_token",
]
