"""Offer the modules, functions, signatures and defaults of late-interaction-kernels 0.4.5.

Each is a thin adapter onto this package; its kernels for Apple's GPUs (``mps``) and its private helpers are
left out.

For those who move from it, and for :func:`late_interaction.install_as`, which gives these its name.
"""

from late_interaction._version import __version__
from late_interaction.lik import reference
from late_interaction.lik.autograd import maxsim, maxsim_pairs
from late_interaction.lik.colpali_compat import patch_colpali_engine, unpatch_colpali_engine
from late_interaction.lik.padded import maxsim_padded
from late_interaction.lik.pylate_compat import patch_pylate, unpatch_pylate
from late_interaction.lik.retrieve import MaxSimScorer, retrieve
from late_interaction.lik.varlen import maxsim_varlen

__all__ = [
    "MaxSimScorer",
    "__version__",
    "maxsim",
    "maxsim_padded",
    "maxsim_pairs",
    "maxsim_varlen",
    "patch_colpali_engine",
    "patch_pylate",
    "reference",
    "retrieve",
    "unpatch_colpali_engine",
    "unpatch_pylate",
]
