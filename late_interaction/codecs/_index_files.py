"""What index files of PLAID hold otherwise: :func:`reverse_bits`."""

import torch
from torch import Tensor


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
