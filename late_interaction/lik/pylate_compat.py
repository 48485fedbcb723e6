"""``late_interaction_kernels.pylate_compat``: the patch of PyLate."""

import sys

from late_interaction import pylate_compat
from late_interaction.pylate_compat import (
    patch_pylate,
    patched_colbert_kd_scores,
    patched_colbert_scores,
    patched_colbert_scores_pairwise,
    unpatch_pylate,
)

__all__ = [
    "patch_pylate",
    "patched_colbert_kd_scores",
    "patched_colbert_scores",
    "patched_colbert_scores_pairwise",
    "unpatch_pylate",
]

# The module itself: who sets what the patch keeps, as its own tests do, sets what its functions read.
sys.modules[__name__] = pylate_compat
