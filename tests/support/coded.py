"""Codes as tensors of any shape, for tests."""

import numpy as np
import torch

import late_interaction as li
from late_interaction import Codes, codecs

INT8, FP8, BITS, FOUR = codecs.Int8(), codecs.Fp8(), codecs.Bits(1), codecs.Bits(4)


def codec_of(dtype):
    return codecs.Int8() if dtype == torch.int8 else codecs.Fp8(dtype)


def encoded(codec, X):
    """Values and scales of the dims of ``X`` ``[..., d]``."""
    codes = codec.encode(X.reshape(-1, X.shape[-1]))
    return codes.values.view(*X.shape[:-1], codes.values.shape[-1]), codes.scales.view(X.shape[:-1])


def decoded(codec, values, scales, d=None):
    """Tokens of values ``[..., w]``."""
    codes = Codes(codec, values.reshape(1, -1, values.shape[-1]), scales.reshape(1, -1), d=d)
    return codec.decode(codes).values.view(*values.shape[:-1], codes.d)


def scored(codec, Q, values, scales, q_mask=None, d_mask=None, d=None):
    """Scores of queries, or of ``(values, scales)`` of them, with documents ``[..., L, w]``."""
    q = Codes(codec, *Q, mask=q_mask) if isinstance(Q, tuple) else Q
    return li.maxsim(
        q, Codes(codec, values, scales, mask=d_mask, d=d), None if isinstance(Q, tuple) else q_mask
    )


def packed(shape, d, nbits, device):
    """Random codes of every value, and zeros behind the last dim, by NumPy's own packing."""
    bits = torch.randint(2, (*shape, d * nbits)).numpy().astype(np.uint8)
    packed = np.packbits(bits, axis=-1, bitorder="little") if bits.size else bits[..., : -(-d * nbits // 8)]
    return torch.from_numpy(packed).to(device)
