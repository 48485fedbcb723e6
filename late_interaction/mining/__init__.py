"""Mine hard negatives of multi-vector models, exact over a whole corpus.

:func:`hard_negatives` takes embeddings, :func:`mine_hard_negatives` texts.
"""

from late_interaction.mining.negatives import HardNegatives, hard_negatives
from late_interaction.mining.texts import mine_hard_negatives

__all__ = ["HardNegatives", "hard_negatives", "mine_hard_negatives"]
