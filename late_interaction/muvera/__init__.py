"""MUVERA's fixed dimensional encodings, by :mod:`late_interaction.ops.muvera`: one vector for each query and
document, whose inner product approximates their MaxSim (Dhulipala et al., https://arxiv.org/abs/2405.19504).

Any index of inner products finds candidates by them. Exact scores rank these:
:func:`late_interaction.search` takes :class:`Encodings` of a corpus as ``coarse=``.
"""

from late_interaction.muvera.encoder import Encodings, Muvera

__all__ = ["Encodings", "Muvera"]
