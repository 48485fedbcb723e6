"""The path of maxsim, maxsim_pairs and maxsim_with_winners as a drop-in; :mod:`late_interaction._maxsim` does
the work."""

from late_interaction._maxsim import maxsim, maxsim_pairs, maxsim_with_winners

__all__ = ["maxsim", "maxsim_pairs", "maxsim_with_winners"]
