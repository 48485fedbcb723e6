"""``late_interaction_kernels.pylate_compat``: the patch of PyLate."""

from late_interaction.integrations.patches import patch, unpatch
from late_interaction.integrations.pylate import (
    _ORIGINAL,
    patched_colbert_kd_scores,
    patched_colbert_scores,
    patched_colbert_scores_pairwise,
)

__all__ = [
    "_ORIGINAL",
    "patch_pylate",
    "patched_colbert_kd_scores",
    "patched_colbert_scores",
    "patched_colbert_scores_pairwise",
    "unpatch_pylate",
]


def patch_pylate() -> None:
    """Call ``late_interaction.patch("pylate")``."""
    patch("pylate")


def unpatch_pylate() -> None:
    """Call ``late_interaction.unpatch("pylate")``."""
    unpatch("pylate")
