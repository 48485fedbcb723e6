"""Query and document tokens as they multiply in a block of similarities."""

from dataclasses import dataclass

import torch
from torch import Tensor

_EPS = 1e-12  # of a norm


@dataclass(frozen=True)
class Tokens:
    """Tokens ``[..., d]`` in the dtype of products and sums, divided by their norms if they should be."""

    rows: Tensor  # contiguous
    norms: Tensor | None  # [..., 1], at least _EPS

    @staticmethod
    def of(x: Tensor, normalize: bool, dtype: torch.dtype) -> "Tokens":
        x = x.to(dtype).contiguous()
        if not normalize:
            return Tokens(x, None)
        norms = x.norm(dim=-1, keepdim=True).clamp_min_(_EPS)
        return Tokens(x / norms, norms)

    def write_gradient(self, out: Tensor, grad: Tensor, mask: Tensor | None) -> None:
        """Write the gradient of tokens, 0 where they are masked, from the one of ``rows``: overwrites it."""
        if self.norms is not None:
            along = (grad * self.rows).sum(-1, keepdim=True)
            along.masked_fill_(self.norms <= _EPS, 0.0)  # a norm that was raised to _EPS is a constant
            grad.sub_(self.rows * along).div_(self.norms)
        out.copy_(grad if mask is None else grad.masked_fill_(~mask.unsqueeze(-1), 0.0))


def queries(x: Tensor, mask: Tensor | None, normalize: bool, dtype: torch.dtype) -> Tokens:
    """Masked tokens are zeros: what they hold reaches no product."""
    x = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)
    return Tokens.of(x, normalize, dtype)


@dataclass(frozen=True)
class Documents:
    """Some documents of each group, ``[groups, documents, Ld, d]``.

    A mask costs no pass over similarities: the product adds half of the least finite number to those of
    masked tokens. These hold a token of the same document that counts, so their similarity is not above its
    similarity, whatever it is, and never above the maximum. Tokens of a document without one are zeros.
    """

    tokens: Tokens
    bias: Tensor | None  # [groups, 1, documents * Ld], added to similarities / tau
    some: Tensor | None  # [groups, 1, documents]: whether a token counts

    @staticmethod
    def of(x: Tensor, mask: Tensor | None, normalize: bool, dtype: torch.dtype) -> "Documents":
        if mask is None:
            return Documents(Tokens.of(x, normalize, dtype), None, None)
        some = mask.any(-1, keepdim=True)
        first = mask.to(torch.uint8).argmax(-1, keepdim=True)
        source = torch.arange(mask.shape[-1], device=x.device).where(mask, first)
        x = x.gather(-2, source.unsqueeze(-1).expand(x.shape)).masked_fill_(~some.unsqueeze(-1), 0.0)
        bias = torch.zeros(mask.shape, dtype=dtype, device=x.device)
        bias.masked_fill_(~mask, torch.finfo(dtype).min / 2)
        tokens = Tokens.of(x, normalize, dtype)
        return Documents(tokens, bias.flatten(1).unsqueeze(1), some.squeeze(-1).unsqueeze(1))

    @property
    def columns(self) -> Tensor:
        """View all documents' tokens as ``[groups, documents * Ld, d]``."""
        return self.tokens.rows.flatten(1, 2)
