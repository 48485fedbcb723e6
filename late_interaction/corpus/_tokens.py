"""What a corpus stores of a token: floats, codes with a scale, or a centroid and a residual."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction.fp8 import quantize_fp8_per_token
from late_interaction.int8 import quantize_int8_per_token
from late_interaction.residual_codec import ResidualCodec

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CODES = (torch.float8_e4m3fn, torch.int8)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


NAMES = {name_of(dtype): dtype for dtype in FLOATS + CODES}


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATS + CODES:
        *others, last = (f"torch.{name}" for name in NAMES)
        raise TypeError(f"dtype must be {', '.join(others)} or {last}, got {abbreviate(dtype)}")


def unit(tokens: Tensor) -> Tensor:
    """Tokens divided by max(norm, 1e-12): computed in float32, in the dtype of the tokens."""
    floats = tokens.to(torch.float32)
    norms = torch.linalg.vector_norm(floats, dim=-1, keepdim=True).clamp_min(1e-12)
    return floats / norms if floats is tokens else floats.div_(norms).to(tokens.dtype)


def quantize(tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, and a float32 scale a token."""
    if dtype == torch.int8:
        return quantize_int8_per_token(tokens)
    return quantize_fp8_per_token(tokens, dtype)


@dataclass(frozen=True)
class Stored:
    """How a corpus stores tokens of d dims: as dtype, or as residuals (uint8) of a codec on the CPU."""

    d: int
    dtype: torch.dtype
    codec: ResidualCodec | None = None

    @property
    def name(self) -> str:
        return "residuals" if self.codec else name_of(self.dtype)

    @property
    def width(self) -> int:
        """The elements of a stored row."""
        return self.codec.bytes if self.codec else self.d

    @property
    def beside(self) -> str | None:
        """The kind of file of what is stored beside each token."""
        return "codes" if self.codec else "scales" if self.dtype in CODES else None

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize + (4 if self.beside else 0)

    @property
    def encoded(self) -> bool:
        """Whether codes or residuals are stored, which stand for tokens that differ a little."""
        return self.beside is not None


def encode(tokens: Tensor, stored: Stored, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Tokens as a corpus stores them, contiguous, and what it stores beside each."""
    if normalize:
        tokens = unit(tokens.to(torch.float32))
    if stored.codec:
        codes, residuals = stored.codec.compress(tokens)
        return residuals, codes
    if stored.dtype in CODES:
        return quantize(tokens, stored.dtype)
    return tokens.to(stored.dtype).contiguous(), None


def decode(tokens: Tensor, beside: Tensor | None, codec: ResidualCodec | None = None) -> Tensor:
    """Floats as they are, or the float32 tokens that codes or residuals stand for."""
    if beside is None:
        return tokens
    return codec.decompress(beside, tokens) if codec else tokens.to(torch.float32) * beside.unsqueeze(-1)


def find_unusable(tokens: Tensor, stored: Stored, normalize: bool) -> int | None:
    """The first of these rows that a corpus cannot store so: one with NaN, an infinity, or a value (a norm,
    if it is normalized) beyond the largest finite one."""
    largest = torch.finfo(torch.float32 if normalize or stored.encoded else stored.dtype).max
    order = 2 if normalize else float("inf")
    wide = torch.float64 if tokens.dtype == torch.float64 else torch.float32
    size = torch.linalg.vector_norm(tokens, order, dim=-1, dtype=wide)
    bad = ~(size <= largest)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None
