"""Encode all tokens of a query or document as one vector, by MUVERA.

The inner product of two such fixed dimensional encodings approximates their MaxSim (Dhulipala et al.,
https://arxiv.org/abs/2405.19504). Made by :mod:`late_interaction.ops.muvera`.

Any index of inner products finds candidates by them. Exact scores rank these:
:func:`late_interaction.search` takes :class:`Encodings` of a corpus as ``coarse=``.
"""

from late_interaction.muvera.encoder import Encodings, Muvera

__all__ = ["Encodings", "Muvera"]
