"""Codecs of 8 bits a dim: :class:`Int8` and :class:`Fp8`."""

from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.messages import abbreviate
from late_interaction._scoring.codes import check_gradients, check_precision_of_codes
from late_interaction._scoring.quantized import call_without_gradients, quantize_rows
from late_interaction.codecs._codec import Codec, register
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
        if not isinstance(dtype, torch.dtype) or dtype not in _FP8:
            raise TypeError(
                f"dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got {abbreviate(dtype)}"
            )
        self.dtype = dtype
        self._dtypes = (dtype,)

    def _options(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    def __repr__(self) -> str:
        return f"Fp8({self.dtype})"
