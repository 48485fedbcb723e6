"""``late_interaction_kernels.colpali_compat``: the patch of colpali-engine."""

from late_interaction.colpali_compat import (
    patch_colpali_engine,
    patched_score_multi_vector,
    unpatch_colpali_engine,
)

__all__ = ["patch_colpali_engine", "patched_score_multi_vector", "unpatch_colpali_engine"]
