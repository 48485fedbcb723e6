"""What a corpus stores of a token: floats, or the codes of a codec."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate
from late_interaction._checks.tensors import scores_dtype
from late_interaction.codecs import Codec, Fp8, Int8, Residual
from late_interaction.codes import Codes

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


NAMES = {name_of(dtype): dtype for dtype in FLOATS}
# Codecs without tensors, by the name of what they store.
CODECS: dict[str, Codec] = {name_of(codec.stored): codec for codec in (Fp8(), Int8())}


def check_codec(codec: object, of: str = "codec") -> Codec:
    """Require a codec whose codes a corpus can search."""
    if not (isinstance(codec, Residual) or codec in CODECS.values()):
        known = f"{', '.join(map(str, CODECS.values()))} or a Residual"
        raise TypeError(f"{of} must be{' of' * (of != 'codec')} {known}, got {abbreviate(codec)}")
    assert isinstance(codec, Codec)
    return codec


def unit(tokens: Tensor) -> Tensor:
    """Tokens divided by max(norm, 1e-12): computed in float32, in the dtype of the tokens."""
    floats = tokens.to(torch.float32)
    norms = torch.linalg.vector_norm(floats, dim=-1, keepdim=True).clamp_min(1e-12)
    return floats / norms if floats is tokens else floats.div_(norms).to(tokens.dtype)


@dataclass(frozen=True)
class Stored:
    """Say how a corpus stores tokens of d dims: as dtype, or as codes of a codec, on the CPU, in dtype."""

    d: int
    dtype: torch.dtype
    codec: Codec | None = None

    @property
    def name(self) -> str:
        return "residuals" if isinstance(self.codec, Residual) else name_of(self.dtype)

    @property
    def width(self) -> int:
        return self.codec.width(self.d) if self.codec else self.d

    @property
    def beside(self) -> str | None:
        """Name the kind of file of what is stored beside each token."""
        return None if self.codec is None else "codes" if isinstance(self.codec, Residual) else "scales"

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize + (4 if self.beside else 0)


def encode(tokens: Tensor, stored: Stored, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Tokens as a corpus stores them, contiguous, and what it stores beside each: a scale, or a centroid.

    Both are where the tokens are, which encodes them there.
    """
    if normalize:
        tokens = unit(tokens.to(torch.float32))
    if stored.codec is None:
        return tokens.to(stored.dtype).contiguous(), None
    codes = stored.codec.to(tokens.device).encode(tokens)
    beside = codes.scales if codes.centroids is None else codes.centroids
    return codes.values.squeeze(0), None if beside is None else beside.squeeze(0)


def decode(tokens: Tensor, beside: Tensor | None, codec: Codec | None) -> Tensor:
    """Floats as they are, or the float32 tokens that codes stand for."""
    if codec is None or beside is None:
        return tokens
    scales, centroids = (None, beside[None]) if isinstance(codec, Residual) else (beside[None], None)
    codec = codec.to(tokens.device)
    return codec.decode(Codes(codec, tokens[None], scales, centroids)).values.squeeze(0)


def find_unusable(tokens: Tensor, stored: Stored, normalize: bool) -> int | None:
    """Find the first of these rows that a corpus cannot store so.

    That is one with NaN, an infinity, or a value (a norm, if it is normalized) beyond the largest finite one.
    """
    largest = torch.finfo(torch.float32 if normalize or stored.codec else stored.dtype).max
    if not tokens.numel():
        return None
    # One fast pass finds that all are usable, as they mostly are. NaN fails each comparison.
    low, high = (float(x) for x in torch.aminmax(tokens))
    most = (largest / tokens.shape[1]) ** 0.5 if normalize else largest
    if -most <= low and high <= most:
        return None
    order = 2 if normalize else float("inf")
    wide = scores_dtype(tokens)
    size = torch.linalg.vector_norm(tokens, order, dim=-1, dtype=wide)
    bad = ~(size <= largest)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None
