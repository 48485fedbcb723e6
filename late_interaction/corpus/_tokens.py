"""What a corpus stores of a token: floats, or codes with a scale."""

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction.fp8 import quantize_fp8_per_token
from late_interaction.int8 import quantize_int8_per_token

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


def encode(tokens: Tensor, dtype: torch.dtype, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Tokens as a corpus of this dtype stores them, contiguous, and their scales."""
    if normalize:
        tokens = unit(tokens.to(torch.float32))
    if dtype in CODES:
        return quantize(tokens, dtype)
    return tokens.to(dtype).contiguous(), None


def decode(tokens: Tensor, scales: Tensor | None) -> Tensor:
    """Floats as they are; codes as the float32 tokens that they stand for."""
    return tokens if scales is None else tokens.to(torch.float32) * scales.unsqueeze(-1)


def find_unusable(tokens: Tensor, dtype: torch.dtype, normalize: bool) -> int | None:
    """The first of these rows that a corpus of this dtype cannot store: one with NaN, an infinity, or a value
    (a norm, if it is normalized) beyond the largest finite one."""
    largest = torch.finfo(torch.float32 if normalize or dtype in CODES else dtype).max
    order = 2 if normalize else float("inf")
    wide = torch.float64 if tokens.dtype == torch.float64 else torch.float32
    size = torch.linalg.vector_norm(tokens, order, dim=-1, dtype=wide)
    bad = ~(size <= largest)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None
