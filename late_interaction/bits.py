"""Codes of 1 and 4 bits a dim, and their MaxSim, for inference: a first pass over a large corpus.

A token of 128 dims takes 16 bytes with 1 bit a dim and 64 with 4 bits; in float32 it takes 512. Such scores
rank roughly. :func:`late_interaction.search` with ``coarse=`` scores the best documents again from their
embeddings.

Codes lie in uint8, the lowest bits of a byte first: bits as ``numpy.packbits(..., bitorder="little")`` packs
them, and of two 4-bit codes the even dim in the low half. The bits behind the last dim of a token are 0::

    codes, scale = to_bits(D)  # 1 bit a dim
    scores = maxsim_asymmetric(Q, codes, scale, nbits=1)  # queries as int8, documents as bits
    scores = maxsim_hamming(to_bits(Q)[0], codes, Q.shape[-1])  # both as bits
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.options import check_positive
from late_interaction._checks.packed_codes import check_asymmetric, check_hamming, check_packed
from late_interaction._checks.quantized import check_codes
from late_interaction._checks.tensors import check_rows
from late_interaction._scoring import quantized
from late_interaction._torch import _AutoDispatchBelowAutograd
from late_interaction.int8 import quantize_int8_per_token
from late_interaction.ops.packed_codes import unpack_codes

__all__ = ["from_bits", "from_int4", "maxsim_asymmetric", "maxsim_hamming", "to_bits", "to_int4"]

_LARGEST = 7


def to_bits(X: Tensor) -> tuple[Tensor, Tensor]:
    """The signs of ``X``, 8 to a byte, with a scale for each token: the root mean square of its dims, so that
    what the codes stand for has the token's norm.

    The mean magnitude would be nearer to the token, but it ranks worse: it is smaller for tokens whose dims
    differ much in size, so these lose against others of the same norm.

    Args:
        X: ``[..., d]`` embeddings; bfloat16, float16, float32 or float64.

    Returns:
        ``(codes, scale)``: ``codes`` uint8, ``[..., ceil(d / 8)]``, a bit set where a dim is greater than 0;
        ``scale`` float32, >= 0, of the shape of ``X`` without ``d``. Outside autograd. A row of zeros has no
        bit set and the scale 0. A row with a NaN or an infinity has no bit set and the scale NaN.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``X`` has no dim ``d``, or ``d`` is 0.

    Example:
        >>> import torch
        >>> from late_interaction.bits import to_bits
        >>> to_bits(torch.tensor([[1.0, -7.0, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0]]))
        (tensor([[13],
                [ 0]], dtype=torch.uint8), tensor([5., 0.]))
    """
    check_rows("X", X)
    with torch.no_grad():
        norm = torch.linalg.vector_norm(X, dim=-1, dtype=torch.float64)  # squares would overflow float32
        scale = (norm / X.shape[-1] ** 0.5).to(torch.float32)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        return _pack(X > 0, 1).masked_fill_(scale.isnan().unsqueeze(-1), 0), scale


def from_bits(codes: Tensor, scale: Tensor, d: int) -> Tensor:
    """What codes of :func:`to_bits` stand for: ``scale`` where a bit is set, ``-scale`` elsewhere.

    Args:
        codes: ``[..., ceil(d / 8)]``.
        scale: the shape of ``codes`` without its last dim.
        d: dims of a token.

    Returns:
        float32, ``[..., d]``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Example:
        >>> import torch
        >>> from late_interaction.bits import from_bits, to_bits
        >>> from_bits(*to_bits(torch.tensor([[1.0, -7.0, 5.0, 5.0]])), 4)
        tensor([[ 5., -5.,  5.,  5.]])
    """
    check_positive("d", d)
    check_packed("codes", codes, d, 1)
    check_codes("codes", codes, scale, dtypes=(torch.uint8,))
    return unpack_codes(codes, 1, d) * scale.unsqueeze(-1)


def to_int4(X: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 4 bits in -7 .. 7, two to a byte, with a scale for each token, which maps its largest
    magnitude to 7.

    Args:
        X: ``[..., d]`` embeddings; bfloat16, float16, float32 or float64.

    Returns:
        ``(codes, scale)``: ``codes`` uint8, ``[..., ceil(d / 2)]``, each half of a byte a code + 8, the even
        dim in the low one; ``scale`` float32, > 0, of the shape of ``X`` without ``d``. Outside autograd. A
        row of zeros becomes zeros. A row with a NaN or an infinity becomes zeros with the scale NaN, and the
        scores that it reaches are NaN.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``X`` has no dim ``d``, or ``d`` is 0.

    Example:
        >>> import torch
        >>> from late_interaction.bits import to_int4
        >>> to_int4(torch.tensor([[7.0, -3.0, 0.0]]))
        (tensor([[95,  8]], dtype=torch.uint8), tensor([1.]))
    """
    check_rows("X", X)
    with torch.no_grad():
        scale = quantized.scale_for(X.abs().amax(-1), _LARGEST)
        codes = (X.to(torch.float32) / scale.unsqueeze(-1)).nan_to_num_(0.0).round_()
        return _pack(codes.clamp_(-_LARGEST, _LARGEST) + 8, 4), scale


def from_int4(codes: Tensor, scale: Tensor, d: int) -> Tensor:
    """``code * scale`` in float32: the inverse of :func:`to_int4`.

    Args:
        codes: ``[..., ceil(d / 2)]``.
        scale: the shape of ``codes`` without its last dim.
        d: dims of a token.

    Returns:
        float32, ``[..., d]``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Example:
        >>> import torch
        >>> from late_interaction.bits import from_int4, to_int4
        >>> from_int4(*to_int4(torch.tensor([[7.0, -3.0, 0.0]])), 3)
        tensor([[ 7., -3.,  0.]])
    """
    check_positive("d", d)
    check_packed("codes", codes, d, 4)
    check_codes("codes", codes, scale, dtypes=(torch.uint8,))
    return unpack_codes(codes, 4, d) * scale.unsqueeze(-1)


def maxsim_hamming(
    Q: Tensor, D: Tensor, d: int, *, q_mask: Tensor | None = None, d_mask: Tensor | None = None
) -> Tensor:
    """MaxSim of bits: ``score = sum_s max_t (d - 2 * hamming(Q[s], D[t]))``.

    A similarity is the inner product of two vectors of +1 and -1, an integer in ``-d .. d``. A score is a sum
    of such integers: exact, and equal on every device, while it is below 2^24.

    Args:
        Q: bits of queries, ``[Nq, Lq, ceil(d / 8)]`` or ``[Lq, ceil(d / 8)]``, uint8, of :func:`to_bits`.
            Any order of the bits will do if that of ``D`` is the same.
        D: bits of documents, likewise: ``[Nd, Ld, ceil(d / 8)]`` or ``[Ld, ceil(d / 8)]`` (every query meets
            every document), or ``[Nq, K, Ld, ceil(d / 8)]`` (each query meets its own ``K``). On the device
            of ``Q``.
        d: dims of a token. The bits behind them are 0.
        q_mask: ``[Nq, Lq]``, True = keep. A masked query token adds 0.
        d_mask: ``[Nd, Ld]`` or ``[Nq, K, Ld]``, True = keep. A query token that meets no valid document token
            adds 0.

    Returns:
        float32 scores, ``[Nq, Nd]`` or ``[Nq, K]``; a 2-D ``Q`` drops the first dim, a 2-D ``D`` the second.

    Raises:
        TypeError: an argument that is no tensor, or of a wrong dtype.
        ValueError: shapes or devices that do not fit.

    Example:
        >>> import torch
        >>> from late_interaction.bits import maxsim_hamming, to_bits
        >>> Q, _ = to_bits(torch.tensor([[[1.0, -1.0, 1.0]]]))
        >>> D, _ = to_bits(torch.tensor([[[1.0, -2.0, 3.0]], [[1.0, 1.0, 1.0]]]))
        >>> maxsim_hamming(Q, D, 3)
        tensor([[3., 1.]])
    """
    args = check_hamming(Q, D, d, q_mask, d_mask)
    return _squeezed(_call(ops.maxsim_hamming, args[0], args[1], d, *args[2:]), Q, D)


def maxsim_asymmetric(
    Q: Tensor,
    D: Tensor,
    scale_D: Tensor,
    *,
    nbits: int,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
) -> Tensor:
    """MaxSim of queries with documents of 1 or 4 bits a dim: the scores of :func:`late_interaction.maxsim` on
    ``quantize_int8_per_token(Q)`` and on what the codes stand for. No gradients.

    Args:
        Q: embeddings of queries, ``[Nq, Lq, d]`` or ``[Lq, d]``; they are quantized to int8 with a scale for
            each token.
        D: codes of :func:`to_bits` or :func:`to_int4`, uint8: ``[Nd, Ld, bytes]``, ``[Ld, bytes]`` or
            ``[Nq, K, Ld, bytes]``. On the device of ``Q``.
        scale_D: 0-dim or the shape of ``D`` without its last dim; finite and not negative, else the scores
            that it reaches are NaN.
        nbits: 1 or 4.
        q_mask, d_mask: as in :func:`maxsim_hamming`.

    Returns:
        float32 scores, ``[Nq, Nd]`` or ``[Nq, K]``; a 2-D ``Q`` drops the first dim, a 2-D ``D`` the second.

    Raises:
        TypeError: an argument that is no tensor, or of a wrong dtype.
        ValueError: shapes, devices or ``nbits`` that do not fit, or a scale that requires a gradient.

    Example:
        >>> import torch
        >>> from late_interaction.bits import maxsim_asymmetric, to_int4
        >>> D, scale_D = to_int4(torch.tensor([[[7.0, -3.0, 0.0]], [[0.0, 0.0, 14.0]]]))
        >>> maxsim_asymmetric(torch.tensor([[[127.0, 0.0, 1.0]]]), D, scale_D, nbits=4)
        tensor([[889.,  14.]])
    """
    check_rows("Q", Q)
    codes, scale_Q = quantize_int8_per_token(Q)
    args = check_asymmetric(codes, D, scale_Q, scale_D, q_mask, d_mask, nbits)
    return _squeezed(_call(ops.maxsim_asymmetric, *args, nbits), Q, D)


def _call(op: Any, *args: Any) -> Tensor:
    if torch.compiler.is_compiling():
        scores: Tensor = op(*args)
        return scores
    with _AutoDispatchBelowAutograd():  # there is nothing to differentiate
        scores = op(*args)
    return scores


def _squeezed(scores: Tensor, Q: Tensor, D: Tensor) -> Tensor:
    scores = scores.squeeze(1) if D.dim() == 2 else scores
    return scores.squeeze(0) if Q.dim() == 2 else scores


def _pack(fields: Tensor, nbits: int) -> Tensor:
    """Unsigned numbers below ``2**nbits`` to bytes, the first in the lowest bits."""
    fields = fields.view(torch.uint8) if fields.dtype == torch.bool else fields.to(torch.uint8)
    if fields.shape[-1] % (8 // nbits):
        fields = torch.nn.functional.pad(fields, (0, -fields.shape[-1] % (8 // nbits)))
    # What becomes one byte is one integer, whose parts are moved together.
    if nbits == 1:
        packed = fields.contiguous().view(torch.int64) * 0x0102040810204080 >> 56
    else:
        words = fields.contiguous().view(torch.int16)
        packed = words | words >> 4
    return (packed & 255).to(torch.uint8)
