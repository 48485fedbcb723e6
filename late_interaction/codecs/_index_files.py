"""What index files of PLAID hold otherwise: :func:`reverse_bits`, and how it is scored as it is."""

import torch
from torch import Tensor

from late_interaction.codecs._residual import Residual


def reverse_bits(residuals: Tensor) -> Tensor:
    """Reverse the bits of every byte of packed residuals.

    The index files of ColBERTv2 and fast-plaid hold a token's bits from the highest bit of a byte down;
    :class:`Residual` wants them from the lowest up. Its own inverse.

    Args:
        residuals: uint8, any shape.

    Returns:
        uint8 of the same shape.

    Raises:
        TypeError: another dtype.

    Example:
        >>> import torch
        >>> from late_interaction.codecs import reverse_bits
        >>> reverse_bits(torch.tensor([0b10000000, 0b11010000], dtype=torch.uint8))
        tensor([ 1, 11], dtype=torch.uint8)
    """
    if not isinstance(residuals, Tensor) or residuals.dtype != torch.uint8:
        got = residuals.dtype if isinstance(residuals, Tensor) else type(residuals).__name__
        raise TypeError(f"residuals must be a uint8 tensor, got {got}")
    x = residuals
    for shift, low in ((1, 0x55), (2, 0x33), (4, 0x0F)):
        x = ((x >> shift) & low) | ((x & low) << shift)
    return x


def mirror(codec: Residual) -> Residual:
    """Give the float32 codec whose tokens, in mirrored dims, the bytes of an index file stand for.

    What is a byte of its lowest bits first to a kernel has the last of its dims first then, and the bits of
    each bucket backwards. Inner products do not depend on the order of dims.
    """
    buckets = torch.arange(2**codec.nbits, dtype=torch.uint8, device=codec.centroids.device)
    backwards = (reverse_bits(buckets) >> (8 - codec.nbits)).long()
    centroids = mirror_dims(codec.centroids.to(torch.float32), codec.nbits)
    return Residual._made(centroids, codec.bucket_cutoffs, codec.bucket_weights[backwards])


def mirror_dims(tokens: Tensor, nbits: int) -> Tensor:
    """Reverse the dims ``[..., d]`` that share a byte. Its own inverse."""
    return tokens.unflatten(-1, (-1, 8 // nbits)).flip(-1).flatten(-2)
