"""Losses over MaxSim scores: functions of queries and documents, and a module for each.

Over all pairs of a batch, in memory that does not grow with their number: :func:`contrastive`,
:func:`pairwise`, :func:`sigmoid` and :func:`recall`. Over each query's own documents and a teacher's scores
of them: :func:`distill_kl_div` and :func:`margin_mse`. Queries and documents are tensors, lists or
:class:`~late_interaction.Tokens`, which hold masks and offsets.
"""

from late_interaction.losses._cached import cached_contrastive_step
from late_interaction.losses._contrastive import Contrastive, contrastive
from late_interaction.losses._distillation import DistillKLDiv, MarginMSE, distill_kl_div, margin_mse
from late_interaction.losses._pairwise import Pairwise, pairwise
from late_interaction.losses._recall import Recall, recall
from late_interaction.losses._sigmoid import Sigmoid, sigmoid

__all__ = [
    "Contrastive",
    "DistillKLDiv",
    "MarginMSE",
    "Pairwise",
    "Recall",
    "Sigmoid",
    "cached_contrastive_step",
    "contrastive",
    "distill_kl_div",
    "margin_mse",
    "pairwise",
    "recall",
    "sigmoid",
]
