"""``late_interaction_kernels.backward``: gradients from a saved argmax, by ``ops.maxsim_backward``."""

from late_interaction.lik.backward.lowmem import maxsim_backward_lowmem
from late_interaction.lik.backward.unified import maxsim_backward_unified, maxsim_backward_unified_reference

__all__ = ["maxsim_backward_lowmem", "maxsim_backward_unified", "maxsim_backward_unified_reference"]
