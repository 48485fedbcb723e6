"""Codecs of 8 bits a dim, :class:`Int8` and :class:`Fp8`, and of 1 and 4 bits, :class:`Bits`."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import check_flag
from late_interaction._checks.quantized import check_nbits
from late_interaction._scoring.codes import check_gradients, check_precision_of_codes
from late_interaction._scoring.quantized import call_without_gradients, quantize_rows, scale_for
from late_interaction.codecs._codec import Codec, check_dtype, register
from late_interaction.codes import Codes
from late_interaction.tokens import Tokens


class Quantized(Codec):
    """Codes of one dtype with a float32 scale a token."""

    def _encoded(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, None]:
        return *quantize_rows(x, self.stored), None

    def _decoded(self, codes: Codes) -> Tensor:
        assert codes.scales is not None
        return codes.values.to(torch.float32) * codes.scales.unsqueeze(-1)

    def width(self, d: int) -> int:
        return d

    def _score(self, q: Tokens | Codes, D: Codes, paired: bool, normalize: bool, precision: Any) -> Tensor:
        check_precision_of_codes(self, normalize, precision)
        if isinstance(q, Tokens):
            check_gradients(self, q.values)
            q = self._encode_queries(q)
        self._check_own("Q", q)
        D, packed, extents = D._as_documents(paired)
        op = getattr(ops, f"maxsim_quantized{packed}")
        return call_without_gradients(op, q.values, D.values, q.scales, D.scales, q.mask, extents)


@register
class Int8(Quantized):
    """Store 8-bit integers in -127 .. 127 with a float32 scale a token.

    The scale maps a token's largest magnitude to 127 (symmetric: no zero point, as in
    https://arxiv.org/abs/2004.09602). A token is ``code * scale``.

    A quarter of float32's memory; at least 99% of the ten best documents are those that bfloat16 finds.
    Queries are quantized likewise, products are exact, and sums in int32. Scores have no gradients. A token
    of zeros stays zeros. One with a NaN or an infinity becomes zeros with the scale NaN, and so do the scores
    that it reaches.

    Example:
        >>> import torch
        >>> import late_interaction as li
        >>> codes = li.codecs.Int8().encode(torch.tensor([[127.0, -3.0], [0.0, -0.5]]))
        >>> codes.values, codes.scales
        (tensor([[[ 127,   -3],
                 [   0, -127]]], dtype=torch.int8), tensor([[1.0000, 0.0039]]))
        >>> codes.codec.decode(codes).values
        tensor([[[127.0000,  -3.0000],
                 [  0.0000,  -0.5000]]])
    """

    _dtypes = (torch.int8,)

    def _options(self) -> dict[str, Any]:
        return {}

    def __repr__(self) -> str:
        return "Int8()"


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@register
class Fp8(Quantized):
    """Store 8-bit floats (https://arxiv.org/abs/2209.05433) with a float32 scale a token.

    The scale maps a token's largest magnitude to the largest code. A token is ``code * scale``.

    They err by up to 2^-4 of a value (e4m3) or 2^-3 (e5m2), int8 by 1/254 of the token's largest. Queries are
    quantized likewise. A CPU multiplies codes as they are, and so does a GPU with ``d`` a multiple of 16 (of
    compute capability 9.0 and at most 2048, if no more than 64 query tokens meet a document; of others at
    most 256). Other calls make float32 copies of at most 64 MiB at a time, and multiply in TF32. The tensor
    cores of compute capability 9.0 keep fewer bits of a sum of such products than float32 has. Scores have no
    gradients. A token of zeros stays zeros. One with a NaN or an infinity gets the scale NaN, and so do the
    scores that it reaches.

    Args:
        dtype: ``torch.float8_e4m3fn`` (3 bits of mantissa) or ``torch.float8_e5m2`` (2, and a wider range).

    Raises:
        TypeError: another dtype.

    Example:
        >>> import torch
        >>> import late_interaction as li
        >>> codes = li.codecs.Fp8().encode(torch.tensor([[1.0, -7.0], [0.0, 448.0]]))
        >>> codes.values.float(), codes.scales
        (tensor([[[  64., -448.],
                 [   0.,  448.]]]), tensor([[0.0156, 1.0000]]))
    """

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        check_dtype(dtype, _FP8)
        self.dtype = dtype
        self._dtypes = (dtype,)

    def _options(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    def __repr__(self) -> str:
        return f"Fp8({self.dtype})"


_LARGEST = 7
# So many bytes of float32 are encoded at a time; on a CPU they stay in its caches from step to step.
_BYTES, _CACHED_BYTES = 256 << 20, 4 << 20


@register
class Bits(Codec):
    """Codes of 1 or 4 bits a dim, for a first pass over a large corpus: their scores rank roughly.

    A token of 128 dims takes 16 bytes with 1 bit a dim and 64 with 4, its scale 4 more; in float32 it takes
    512. Codes lie in uint8, the lowest bits of a byte first: bits as ``numpy.packbits(...,
    bitorder="little")`` packs them, and of two 4-bit codes the even dim in the low half. The bits behind the
    last dim of a token are 0.

    With 1 bit a token becomes the signs of its dims, a bit set where one is greater than 0, times a scale:
    the root mean square of its dims, so that what the codes stand for has the token's norm. (The mean
    magnitude would be nearer to the token, but it ranks worse: it is smaller for tokens whose dims differ
    much in size.) With 4 bits it becomes codes in -7 .. 7, stored as the code + 8, times a scale that maps
    its largest magnitude to 7. A token with a NaN or an infinity becomes codes of 0 with the scale NaN, and
    so do the scores that it reaches.

    Queries are quantized to int8 with a scale a token (:class:`Int8`), or come as such codes. Scores are
    those of what the codes stand for, and have no gradients. Queries that come as codes of ``Bits(1)`` meet
    documents of 1 bit as bits, and so do all queries where these have no scales: a similarity is then ``d - 2
    * (bits that differ)``, the inner product of two vectors of +1 and -1, and scores are exact, and equal on
    every device, while they are below 2^24.

    Args:
        nbits: 1 or 4.
        scales: store a scale for each token. False, for 1 bit alone, stores the signs.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value.

    Example:
        >>> import torch
        >>> import late_interaction as li
        >>> D = torch.tensor([[[7.0, -3.0, 0.0]], [[0.0, 0.0, 14.0]]])
        >>> codes = li.codecs.Bits(4).encode(D)
        >>> codes.values, codes.scales
        (tensor([[[ 95,   8]],
        <BLANKLINE>
                [[136,  15]]], dtype=torch.uint8), tensor([[1.],
                [2.]]))
        >>> li.maxsim(torch.tensor([[[127.0, 0.0, 1.0]]]), codes)
        tensor([[889.,  14.]])
        >>> li.maxsim(torch.ones(1, 3), li.codecs.Bits(1, scales=False).encode(D))
        tensor([-1., -1.])
    """

    def __init__(self, nbits: Literal[1, 4] = 1, *, scales: bool = True) -> None:
        check_nbits(nbits)
        check_flag("scales", scales)
        if nbits == 4 and not scales:
            raise ValueError("scales must be True for nbits = 4, got False")
        self.nbits, self.scales = nbits, scales

    def __repr__(self) -> str:
        return f"Bits({self.nbits}{'' if self.scales else ', scales=False'})"

    def _options(self) -> dict[str, Any]:
        return {"nbits": self.nbits, "scales": self.scales}

    def width(self, d: int) -> int:
        return (d * self.nbits + 7) // 8

    def _dims(self, width: int) -> int:
        return width * 8 // self.nbits

    def _encoded(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        make = _signs if self.nbits == 1 else _nibbles
        codes, scales = _in_parts(make, x)
        return codes, scales if self.scales else None, None

    def _decoded(self, codes: Codes) -> Tensor:
        values = _unpack(codes.values, self.nbits, codes.d)
        return values.to(torch.float32) if codes.scales is None else values * codes.scales.unsqueeze(-1)

    def _checked_scales(self, values: Tensor, scales: Any) -> Tensor | None:
        if self.scales:
            return super()._checked_scales(values, scales)
        if scales is not None:
            raise ValueError(f"scales must be None for {self}, got {abbreviate(scales)}")
        return None

    def _encode_queries(self, q: Tokens) -> Codes:
        return (Int8() if self.scales else self).encode(q)

    def _met(self, q: Tokens, normalize: bool, precision: Any) -> Tokens:
        return (Int8()._met if self.scales else super()._met)(q, normalize, precision)

    def _score(self, q: Tokens | Codes, D: Codes, paired: bool, normalize: bool, precision: Any) -> Tensor:
        check_precision_of_codes(self, normalize, precision)
        if isinstance(q, Tokens):
            check_gradients(self, q.values)
            q = self._encode_queries(q)
        as_bits = isinstance(q.codec, Bits) and q.codec.nbits == self.nbits == 1
        if not (as_bits or (self.scales and isinstance(q.codec, Int8))):
            wanted = f"Int8(){' or Bits(1)' * (self.nbits == 1)}" if self.scales else "Bits(1)"
            raise ValueError(f"Q must be embeddings or codes of {wanted} for D of {self}, got {q.codec}")
        D, packed, extents = D._as_documents(paired)
        if as_bits:
            op = getattr(ops, f"maxsim_hamming{packed}")
            return call_without_gradients(op, q.values, D.values, D.d, q.mask, extents)
        op = getattr(ops, f"maxsim_asymmetric{packed}")
        rest = q.scales, D.scales, q.mask, extents, self.nbits
        return call_without_gradients(op, q.values, D.values, *rest)


def _in_parts(make: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of tokens ``[..., d]``, some at a time."""
    if torch.compiler.is_compiling():
        return make(x)
    rows = x.flatten(0, -2)
    at_once = max((_CACHED_BYTES if x.is_cpu else _BYTES) // (4 * x.shape[-1]), 1)
    made = [make(part) for part in rows.split(at_once)]
    codes, scales = made[0] if len(made) == 1 else map(torch.cat, zip(*made, strict=True))
    return codes.view(*x.shape[:-1], codes.shape[-1]), scales.view(x.shape[:-1])


def _signs(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)  # squares would overflow float32
    scales = (norm / x.shape[-1] ** 0.5).to(torch.float32)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return _pack(x > 0, 1).masked_fill_(scales.isnan().unsqueeze(-1), 0), scales


def _nibbles(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = scale_for(x.abs().amax(-1), _LARGEST)
    codes = (x.to(torch.float32) / scales.unsqueeze(-1)).nan_to_num_(0.0).round_()
    return _pack(codes.clamp_(-_LARGEST, _LARGEST) + 8, 4), scales


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


def _unpack(packed: Tensor, nbits: int, d: int) -> Tensor:
    """Unpack ``d`` int8 codes of each token: bits as +1 and -1, four bits as the value - 8."""
    each = 8 // nbits  # codes of a byte, looked up as one integer
    codes = _codes_of_bytes(nbits, packed.device).view(torch.int64 if each == 8 else torch.int16)
    found = codes.flatten().index_select(0, packed.flatten().to(torch.int32))
    unpacked: Tensor = found.view(torch.int8).view(*packed.shape[:-1], packed.shape[-1] * each)
    return unpacked[..., :d]


def _codes_of_bytes(nbits: int, device: torch.device) -> Tensor:
    """Tabulate the codes of each byte: int8 [256, codes of a byte]."""
    values = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1)
    shifts = torch.arange(0, 8, nbits, dtype=torch.uint8, device=device)
    fields = ((values >> shifts) & (2**nbits - 1)).to(torch.int8)
    return fields * 2 - 1 if nbits == 1 else fields - 8
