"""Centroids and buckets of a sample of tokens, for :class:`late_interaction.codecs.Residual`."""

from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.messages import shape_of
from late_interaction._checks.options import check_positive, check_seed
from late_interaction._checks.plaid import check_nbits
from late_interaction._checks.tensors import check_not_meta, check_rows
from late_interaction._scoring.sequences import as_tokens
from late_interaction.codecs._codec import check_dtype
from late_interaction.ops.winners import widen

# Tokens meet the centroids as queries of _QUERY, and are encoded BLOCK at a time.
_QUERY, BLOCK = 512, 1 << 16
# Buckets are quantiles of at most this many residuals.
_SAMPLE = 1 << 22


def check_training(
    nbits: int, iterations: int, seed: int, dtype: torch.dtype
) -> tuple[int, int, int, torch.dtype]:
    check_nbits(nbits)
    check_positive("iterations", iterations)
    check_dtype(dtype, (torch.float32, torch.float16, torch.bfloat16))
    return nbits, iterations, check_seed(seed), dtype


def trained(
    sample: Tensor, count: int | None, nbits: int, iterations: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Centroids of a sample ``[tokens, d]``, and cutoffs and weights of its buckets."""
    if count is None:
        count = _default_count(len(sample))
    check_positive("n_centroids", count)
    if count > len(sample):
        raise ValueError(f"n_centroids must be at most {len(sample)}, one a token, got {count}")
    centroids = _spherical_k_means(sample, count, iterations, seed).to(dtype)
    codes = nearest(sample, centroids.to(torch.float32))[0]
    return centroids, *_buckets(sample, codes, centroids, nbits)


def _default_count(tokens: int) -> int:
    if not tokens:
        raise ValueError("tokens must be at least one, got none")
    wanted = min(16 * tokens**0.5, max(tokens / 8, 1))
    return 1 << (int(wanted).bit_length() - 1)


def _queries(tokens: Tensor) -> list[Tensor]:
    """Tokens as queries [queries, tokens, d] of MaxSim, in order."""
    whole = len(tokens) // _QUERY * _QUERY
    parts = tokens[:whole].view(-1, _QUERY, tokens.shape[1]), tokens[whole:].unsqueeze(0)
    return [part for part in parts if part.numel()]


def nearest(tokens: Tensor, centroids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Find the centroid with the largest inner product with each token, int32, and those of each query.

    It is the document token that wins a query token.
    """
    kept = [ops.maxsim_winners(part, centroids.unsqueeze(0), None, None)[1] for part in _queries(tokens)]
    codes = [widen(winners, len(centroids)).flatten() for winners in kept]
    return (torch.cat(codes) if codes else tokens.new_empty(0, dtype=torch.int32)), kept


def _sums(tokens: Tensor, centroids: Tensor, kept: list[Tensor]) -> Tensor:
    """Sum each centroid's tokens: the gradient of MaxSim's document, in an order that is fixed."""
    total = torch.zeros_like(centroids)
    for part, winners in zip(_queries(tokens), kept, strict=True):
        ones = torch.ones(winners.shape[:2], dtype=torch.float32, device=tokens.device)
        total += ops.maxsim_backward(ones, part, centroids.unsqueeze(0), winners, need_grad_Q=False)[1][0]
    return total


def _spherical_k_means(tokens: Tensor, count: int, iterations: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    first = torch.randperm(len(tokens), generator=generator, device="cpu")[:count].sort().values
    centroids, before = tokens[first.to(tokens.device)], None
    for _ in range(iterations):
        codes, kept = nearest(tokens, centroids)
        if before is not None and torch.equal(codes, before):
            break
        before = codes
        following = torch.nn.functional.normalize(_sums(tokens, centroids, kept), dim=-1, eps=1e-12)
        empty = torch.bincount(codes, minlength=count) == 0
        if bool(empty.any()):
            following[empty] = tokens[_farthest(tokens, centroids, codes, int(empty.sum()))]
        centroids = following
    return centroids


def _farthest(tokens: Tensor, centroids: Tensor, codes: Tensor, count: int) -> Tensor:
    """Find the tokens farthest from their own centroids, by inner product, the lowest of equals first."""
    blocks = zip(tokens.split(BLOCK), codes.split(BLOCK), strict=True)
    similarity = torch.cat([torch.linalg.vecdot(x, centroids.index_select(0, own)) for x, own in blocks])
    return similarity.sort(stable=True).indices[:count]


def _buckets(tokens: Tensor, codes: Tensor, centroids: Tensor, nbits: int) -> tuple[Tensor, Tensor]:
    """Cutoffs that share the residuals out equally, and the median of each bucket."""
    every = max(tokens.numel() // _SAMPLE, 1)
    rest = tokens[::every] - centroids.index_select(0, codes[::every]).to(torch.float32)
    values = rest.flatten().sort().values
    at = torch.arange(1, 2 ** (nbits + 1), dtype=torch.float32, device=tokens.device)
    quantiles = values[(at / 2 ** (nbits + 1) * (len(values) - 1)).round().to(torch.int64)]
    return quantiles[1::2].contiguous(), quantiles[::2].contiguous()


def rows_of(tokens: Any) -> Tensor:
    """Return ``[tokens, d]`` of a sample, without those that a mask leaves out."""
    if isinstance(tokens, Tensor) and tokens.dim() == 2:
        check_rows("tokens", tokens)
        return tokens
    given = as_tokens("tokens", tokens)
    if isinstance(given, Tensor):
        raise ValueError(f"tokens must be [tokens, d], Tokens or a list, got {shape_of(given)}")
    return given.pack().values


def finite(tokens: Tensor) -> Tensor:
    """Tokens in float32, all of them finite."""
    check_not_meta("tokens", tokens)
    floats: Tensor = tokens.detach().to(torch.float32)
    if not bool(floats.isfinite().all()):
        raise ValueError("tokens must be finite in float32, got NaN or an infinity")
    return floats
