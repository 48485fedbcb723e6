"""Sentence Transformers' embeddings and masks, as the kernels take them.

A list of ``[L_i, d]`` embeddings is packed end to end. A ``[N, L, d]`` tensor is padded: without a mask its
all-zero rows are padding. (In a list they are tokens.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from late_interaction._torch import forward_ad, is_batchedtensor
from late_interaction.integrations._shared.compat import why_left
from late_interaction.integrations._shared.zero_padded import Ragged
from late_interaction.integrations.sentence_transformers._originals import PACKAGE, SIMILARITY, module


@dataclass(frozen=True)
class Padded:
    tokens: Tensor  # [N, L, d]
    mask: Tensor | None  # [N, L], as given

    def __len__(self) -> int:
        return len(self.tokens)


def side_of(embeddings: Any, mask: Any, name: str) -> Padded | Ragged | None:
    """Read one side of a call. None: Sentence Transformers' own function takes or refuses it."""
    similarity = module(SIMILARITY)
    embeddings, mask = similarity._canonicalize_side(embeddings, mask, name)
    if isinstance(embeddings, list):
        return _ragged(embeddings) if mask is None and embeddings else None
    tokens = similarity._convert_to_tensor(embeddings)
    if not tokens.is_floating_point():
        tokens = tokens.float()
    if tokens.dim() != 3 or tokens.layout != torch.strided or not len(tokens):
        return None
    mask = each(mask, tokens)
    return Padded(tokens, mask) if mask_fits(mask, tokens) else None


def each(mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Expand a mask that all sequences share to one of each."""
    if mask is not None and mask.shape == (1, *tokens.shape[1:-1]):
        return mask.expand(tokens.shape[:-1])
    return mask


def _ragged(embeddings: list[Any]) -> Ragged | None:
    convert = module(SIMILARITY)._convert_to_tensor
    items = [x if isinstance(x, Tensor) else convert(x) for x in embeddings]
    kinds = {(x.dtype, x.device, x.layout, x.shape[1:]) for x in items}
    if len(kinds) != 1 or items[0].dim() != 2 or items[0].layout != torch.strided:
        return None
    return Ragged(items if items[0].is_floating_point() else [x.float() for x in items])


def home_of(documents: Any, queries: Any) -> torch.device:
    """Return where scores go: the documents' device, or the queries' where the documents are arrays."""
    find = module(SIMILARITY)._embeddings_device
    return find(documents) or find(queries) or torch.device("cpu")


def score_dtype(tokens: Tensor, mask: Any) -> torch.dtype:
    """Return the dtype of scores: float32, but where the queries' mask is derived from float64 tokens.

    It has their dtype then, and multiplies the maxima.
    """
    return torch.float64 if mask is None and tokens.dtype == torch.float64 else torch.float32


def budget(chunk_elements: int | None) -> int:
    """Return how many elements of packed documents are copied at a time."""
    return chunk_elements if chunk_elements is not None else module(SIMILARITY)._MAXSIM_CHUNK_ELEMENT_BUDGET


def mask_fits(mask: Any, tokens: Tensor) -> bool:
    if mask is None:
        return True
    return isinstance(mask, Tensor) and mask.shape == tokens.shape[:-1] and mask.device == tokens.device


def unfit(Q: Tensor, D: Tensor) -> str | None:
    """Say why the kernels do not score these tokens now, if they do not.

    Forward-mode derivatives and vmap are reasons too.
    """
    reason = why_left(Q, D, PACKAGE)
    if reason is not None or torch.compiler.is_compiling():
        return reason
    if forward_ad._current_level >= 0 or is_batchedtensor(Q) or is_batchedtensor(D):
        return "forward-mode derivatives, or vmap"
    return None


def takes(Q: Tensor, D: Tensor) -> bool:
    return unfit(Q, D) is None


def learns(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def kept(tokens: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return which tokens a mask, or none, leaves. None: all, as a CPU can tell for nothing."""
    live = tokens.any(dim=-1) if mask is None else mask.bool()
    if live.device.type == "cpu" and not torch.compiler.is_compiling() and bool(live.all()):
        return None
    return live


def token_counts(scores: Tensor, a: Any, a_mask: Any) -> Tensor:
    """Return how many tokens each query counts, at least 1."""
    similarity = module(SIMILARITY)
    a, a_mask = similarity._canonicalize_side(a, a_mask, "a_mask")
    counts: Tensor = similarity._query_token_counts(a, a_mask)
    return counts.to(device=scores.device, dtype=scores.dtype)


def fill_empty(scores: Tensor, empty: Tensor) -> Tensor:
    """Scores of documents without a token that counts: Sentence Transformers' constant, and its warning."""
    return module(SIMILARITY)._fill_empty_document_scores(scores, empty)


def split_weights(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a query mask, by which the maxima are multiplied, into (what is kept, weights).

    One of both is None. On a CPU numbers that are all 0 or 1 are a mask; a GPU's are not waited for. Integers
    become float32 weights, as products with scores do.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    readable = mask.device.type == "cpu" and not mask.requires_grad and not torch.compiler.is_compiling()
    if readable and bool(((mask == 0) | (mask == 1)).all()):
        return mask.bool(), None
    return None, mask if mask.is_floating_point() else mask.float()
