"""The gradient strategies, callable by themselves from a saved argmax.

:mod:`late_interaction.autograd` picks one through ``backward=``.
"""

from late_interaction.backward.lowmem import maxsim_backward_lowmem
from late_interaction.backward.unified import maxsim_backward_unified, maxsim_backward_unified_reference

__all__ = ["maxsim_backward_lowmem", "maxsim_backward_unified", "maxsim_backward_unified_reference"]
