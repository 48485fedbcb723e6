"""``late_interaction_kernels.colpali_compat``: the patch of colpali-engine."""

from late_interaction.integrations.colpali_engine import patched_score_multi_vector
from late_interaction.integrations.patches import patch, unpatch

__all__ = ["patch_colpali_engine", "patched_score_multi_vector", "unpatch_colpali_engine"]


def patch_colpali_engine() -> None:
    """Call ``late_interaction.patch("colpali-engine")``."""
    patch("colpali-engine")


def unpatch_colpali_engine() -> None:
    """Call ``late_interaction.unpatch("colpali-engine")``."""
    unpatch("colpali-engine")
