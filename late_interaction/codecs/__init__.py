"""Turn tokens to smaller codes that are scored as they are, without gradients for documents.

    codes = codecs.Int8().encode(D)   # late_interaction.Codes: they pickle, move, are sliced
    scores = li.maxsim(Q, codes)      # Q: embeddings, quantized on the way
    tokens = codes.codec.decode(codes)

Each has ``encode(tokens) -> Codes`` and ``decode(codes) -> Tokens``. :class:`Residual` has ``train``, which
learns from a sample, and ``state_dict`` and ``load_state_dict`` for what it has learned; the others have no
state. :class:`late_interaction.Muvera` is none of them: it makes one vector of a sequence, and sequences of
queries and documents differ.
"""

from late_interaction.codecs._codec import Codec
from late_interaction.codecs._index_files import reverse_bits
from late_interaction.codecs._quantized import Bits, Fp8, Int8
from late_interaction.codecs._residual import Residual

__all__ = ["Bits", "Codec", "Fp8", "Int8", "Residual", "reverse_bits"]
