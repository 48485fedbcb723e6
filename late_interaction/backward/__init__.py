"""The gradient strategies from a saved argmax; ``late_interaction.ops.maxsim_backward`` computes them.

:func:`late_interaction.maxsim` chooses one by ``backward=``.
"""

from late_interaction.backward.lowmem import maxsim_backward_lowmem
from late_interaction.backward.unified import maxsim_backward_unified, maxsim_backward_unified_reference

__all__ = ["maxsim_backward_lowmem", "maxsim_backward_unified", "maxsim_backward_unified_reference"]
