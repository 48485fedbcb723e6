"""Hard negatives of multi-vector models, exact over a whole corpus: :func:`hard_negatives` of embeddings,
:func:`mine_hard_negatives` of texts."""

from late_interaction.mining.negatives import HardNegatives, hard_negatives
from late_interaction.mining.texts import mine_hard_negatives

__all__ = ["HardNegatives", "hard_negatives", "mine_hard_negatives"]
