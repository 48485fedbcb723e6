"""Distillation of a teacher's scores of each query's own documents into MaxSim: :func:`distill_kl_div_loss`,
:func:`margin_mse_loss`, and a module for each. :func:`late_interaction.maxsim` and
:func:`late_interaction.score_pairs.score_pairs_packed` score them.
"""

from late_interaction.distillation.losses import (
    DistillKLDivLoss,
    MarginMSELoss,
    distill_kl_div_loss,
    margin_mse_loss,
)

__all__ = ["DistillKLDivLoss", "MarginMSELoss", "distill_kl_div_loss", "margin_mse_loss"]
