"""Documents in codes of a few bits, for a first pass: the ``coarse=`` of :func:`late_interaction.search`.

A corpus that is searched more than once is encoded once::

    codes = encode(D, "1bit")  # 20 bytes a token of 128 dims
    scores, indices = li.search(Q, D, coarse=codes)
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from late_interaction._checks.messages import abbreviate, shape_of
from late_interaction._checks.options import check_flag, check_positive, is_one_of
from late_interaction._checks.packed_codes import check_packed
from late_interaction._checks.quantized import check_scale
from late_interaction._checks.tensors import check_embeddings
from late_interaction._scoring.norm_warning import look
from late_interaction._search.rescore import fitting
from late_interaction.codecs import Bits

__all__ = ["Codes", "encode"]

# What each kind keeps of a dim, in bits.
Kind = Literal["hamming", "1bit", "4bit"]
KINDS: dict[Kind, int] = {"hamming": 1, "1bit": 1, "4bit": 4}

# Documents that are encoded at a time have at most so many bytes.
_BYTES = 256 << 20
# A CPU encodes so many bytes of float32 at a time, which stay in its caches from step to step.
_CACHED_BYTES = 4 << 20


@dataclass(frozen=True)
class Codes:
    """A corpus in a few bits a dim. :func:`encode` makes it; its attributes, saved, make it again.

    Args:
        kind: ``"hamming"``, ``"1bit"`` or ``"4bit"``.
        tokens: uint8, ``[Nd, Ld, bytes]``, as :class:`late_interaction.codecs.Bits` packs them.
        scale: float32, ``[Nd, Ld]``; None for ``"hamming"``.
        d: dims of a token.

    Raises:
        TypeError, ValueError: an attribute of a wrong type or shape, or an unknown ``kind``.

    Example:
        >>> import torch
        >>> from late_interaction.coarse import Codes, encode
        >>> codes = encode(torch.randn(20, 30, 128), "hamming")
        >>> Codes("hamming", codes.tokens.clone(), None, 128).tokens.shape
        torch.Size([20, 30, 16])
    """

    kind: Kind
    tokens: Tensor
    scale: Tensor | None
    d: int

    def __post_init__(self) -> None:
        check_kind("kind", self.kind)
        check_positive("d", self.d)
        check_packed("tokens", self.tokens, self.d, KINDS[self.kind])
        if self.tokens.dim() != 3:
            raise ValueError(f"tokens must be [Nd, Ld, bytes], got {shape_of(self.tokens)}")
        if self.kind == "hamming":
            if self.scale is not None:
                raise ValueError("scale must be None for kind='hamming', whose scores have none")
        elif self.scale is None:
            raise TypeError(f"scale must be a torch.Tensor for kind={self.kind!r}, got None")
        else:
            check_scale("scale", self.scale, "tokens", self.tokens)

    def to(self, device: torch.device | str) -> "Codes":
        """The same codes on another device."""
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, tokens=self.tokens.to(device), scale=scale)


def encode(D: Tensor, kind: Kind, *, normalize: bool = False) -> Codes:
    """The codes of a corpus, made a part at a time.

    Args:
        D: ``[Nd, Ld, d]`` or ``[Ld, d]`` embeddings; bfloat16, float16, float32 or float64.
        kind: ``"hamming"`` (signs without a scale: queries become signs too), ``"1bit"`` (signs with a scale
            for each token: queries become int8) or ``"4bit"`` (4 bits a dim, likewise).
        normalize: L2-normalize every token first, as the search will.

    Returns:
        Codes on the device of ``D``. Outside autograd.

    Raises:
        TypeError: ``D`` is no floating-point tensor, or ``normalize`` no bool.
        ValueError: an unknown ``kind``, or a ``D`` of another rank.

    Example:
        >>> import torch
        >>> from late_interaction.coarse import encode
        >>> codes = encode(torch.randn(20, 30, 128), "1bit")
        >>> codes.tokens.shape, codes.scale.shape
        (torch.Size([20, 30, 16]), torch.Size([20, 30]))
    """
    check_embeddings("D", D)
    check_kind("kind", kind)
    check_flag("normalize", normalize)
    if D.dim() not in (2, 3) or D.shape[-1] == 0:
        raise ValueError(f"D must be [Nd, Ld, d] or [Ld, d] with d of at least 1, got {shape_of(D)}")
    D = D.unsqueeze(0) if D.dim() == 2 else D
    if not normalize:
        look("coarse.encode", D, called="D")
    Nd, Ld, d = D.shape
    tokens = torch.empty(Nd, Ld, -(-d * KINDS[kind] // 8), dtype=torch.uint8, device=D.device)
    scale = None if kind == "hamming" else torch.empty(Nd, Ld, dtype=torch.float32, device=D.device)
    size = fitting(4 * Ld * d, _CACHED_BYTES if D.is_cpu else _BYTES)
    for start in range(0, Nd, size):
        at = slice(start, start + size)
        tokens[at], scales = _codes_of(D[at], kind, normalize)
        if scale is not None and scales is not None:
            scale[at] = scales
    return Codes(kind, tokens, scale, d)


def _codes_of(D: Tensor, kind: Kind, normalize: bool) -> tuple[Tensor, Tensor | None]:
    D = as_float(D, normalize and kind != "hamming")  # a norm changes no sign
    codes = codec_of(kind).encode(D)
    return codes.values, codes.scales


def codec_of(kind: Kind) -> Bits:
    return Bits(4) if kind == "4bit" else Bits(1, scales=kind == "1bit")


def as_float(x: Tensor, normalize: bool) -> Tensor:
    return unit_rows(x.to(torch.float32), dim=-1, eps=1e-12) if normalize else x


def check_kind(name: str, kind: Any) -> None:
    if not is_one_of(kind, KINDS):
        raise ValueError(f"{name} must be one of {tuple(KINDS)}, got {abbreviate(kind)}")
