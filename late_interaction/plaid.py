"""MaxSim of compressed documents, by :mod:`late_interaction.ops.plaid`: the format of PLAID and ColBERTv2.

Documents are stored as centroids and residuals. A token is ``centroids[code]`` plus, in every dim, one of
``2**nbits`` bucket weights (https://arxiv.org/abs/2112.01488, https://arxiv.org/abs/2205.09707): with 2 bits
and d = 128, 36 bytes instead of 256. GPUs decompress tokens in registers, CPUs into a
buffer in their caches::

    approximate = plaid_approx_score(centroids @ Q.T, codes, doc_lengths)  # by centroids alone, to prune
    scores = maxsim_residual(Q, codes, residuals, doc_lengths, centroids, bucket_weights, nbits=2)

A byte of residuals holds the buckets of ``8 / nbits`` neighbouring dims, the first in the lowest bits. Index
files of ColBERTv2 and of fast-plaid fill a byte from its highest bit down: read them through
:func:`reverse_bits`.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.options import check_flag
from late_interaction._checks.plaid import check_approx_score, check_compressed
from late_interaction._checks.tensors import has_values, is_autocasting
from late_interaction._scoring.norm_warning import look
from late_interaction._scoring.precision import float32_precision
from late_interaction._torch import _AutoDispatchBelowAutograd
from late_interaction.ops import _oom

__all__ = [
    "maxsim_residual",
    "maxsim_residual_varlen",
    "plaid_approx_score",
    "reverse_bits",
]

_AUTOCAST = {torch.bfloat16: "medium", torch.float16: "fp16"}


def plaid_approx_score(query_centroid_scores: Tensor, codes: Tensor, doc_lengths: Tensor) -> Tensor:
    """MaxSim with every document token replaced by its centroid: PLAID's pruning step.

    ``score[j] = sum_s max_t query_centroid_scores[codes[j, t], s]``, without the gathered ``[B, Ld, Lq]``.

    Args:
        query_centroid_scores: ``[n_centroids, Lq]``, ``centroids @ Q.T`` of one query. Computed with in
            float32 (float64 where it is).
        codes: integers, ``[B, Ld]``: each token's centroid. One that is out of range counts as 0.
        doc_lengths: integers, ``[B]``: a document's first so many tokens count. An empty one scores 0.

    Returns:
        ``[B]`` scores, float32 (float64 for float64). They have no gradient.

    Raises:
        TypeError, ValueError: arguments that do not fit, or scores of centroids that want a gradient.

    Example:
        >>> import torch
        >>> from late_interaction.plaid import plaid_approx_score
        >>> scores = torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]])
        >>> plaid_approx_score(scores, torch.tensor([[0, 1, 2], [0, 2, 2]]), torch.tensor([2, 1]))
        tensor([3., 1.])
    """
    args = check_approx_score(query_centroid_scores, codes, doc_lengths)
    op: Any = ops.plaid_approx_score
    if torch.compiler.is_compiling():
        scores: Tensor = op(*args)
        return scores
    with _AutoDispatchBelowAutograd():  # there is nothing to differentiate
        scores = op(*args)
    return scores


def maxsim_residual(
    Q: Tensor,
    codes: Tensor,
    residuals: Tensor,
    doc_lengths: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    *,
    normalize: bool = False,
) -> Tensor:
    """MaxSim of residual-compressed documents, padded at the end. Differentiable in ``Q``.

    Work grows as ``Nq * Lq`` times the tokens; memory with the scores, and where ``Q`` wants a gradient with
    the winners. On a GPU the documents are read once for every 64 query tokens (32 with a gradient), long
    ones in pieces by several blocks.

    Args:
        Q: ``[Nq, Lq, d]`` or ``[Lq, d]``; bfloat16, float16, float32 or float64. Decompressed tokens are
            rounded to its dtype and multiply in it; float32 follows autocast and
            ``torch.get_float32_matmul_precision()``, as in :func:`late_interaction.maxsim`.
        codes: integers, ``[Nd, Ld]``: each token's centroid. One that is out of range counts as 0. int32 is
            read as it is, others are converted on every call.
        residuals: uint8, ``[Nd, Ld, ceil(d * nbits / 8)]``.
        doc_lengths: integers, ``[Nd]``: a document's first so many tokens count. An empty one scores 0.
        centroids: ``[n_centroids, d]``, converted on every call where its dtype is not that of ``Q``.
        bucket_weights: ``[2**nbits]``, float32.
        nbits: bits a bucket: 1, 2, 4 or 8.
        normalize: divide tokens of ``Q`` and decompressed tokens by their L2 norm (eps 1e-12).

    Returns:
        ``[Nq, Nd]`` scores (``[Nd]`` for a 2-D ``Q``), float32 (float64 for float64 ``Q``). Their gradient
        goes to ``Q`` alone, the same bits in every run; an index is frozen.

    Raises:
        TypeError, ValueError: arguments that do not fit. ValueError for an empty document where ``Q`` wants a
            gradient: finding out waits for the GPU.

    Example:
        >>> import torch
        >>> from late_interaction.plaid import maxsim_residual
        >>> centroids, weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 0.1, 0.2, 0.3])
        >>> residuals = torch.tensor([[[0b0001], [0b1100]]], dtype=torch.uint8)  # (0.1, 0) and (0, 0.3)
        >>> maxsim_residual(
        ...     torch.tensor([[1.0, 1.0]]), torch.tensor([[0, 1]]), residuals, torch.tensor([2]),
        ...     centroids, weights, nbits=2)
        tensor([1.3000])
    """
    args = check_compressed(
        Q,
        ("codes", codes),
        ("residuals", residuals),
        ("doc_lengths", doc_lengths),
        centroids,
        bucket_weights,
        nbits,
    )
    if _wants_gradient(Q) and bool((args[3] < 1).any()):
        raise _empty("doc_lengths")
    return _score("maxsim_residual", Q, args, normalize)


def maxsim_residual_varlen(
    Q: Tensor,
    codes_flat: Tensor,
    residuals_flat: Tensor,
    cu_seqlens_d: Tensor,
    centroids: Tensor,
    bucket_weights: Tensor,
    nbits: int,
    *,
    max_seqlen_d: int | None = None,
    normalize: bool = False,
) -> Tensor:
    """:func:`maxsim_residual` of documents that lie end to end, as index files hold them.

    Args:
        Q, centroids, bucket_weights, nbits, normalize: as in :func:`maxsim_residual`.
        codes_flat: integers, ``[tokens]``.
        residuals_flat: uint8, ``[tokens, ceil(d * nbits / 8)]``.
        cu_seqlens_d: integers, ``[Nd + 1]``: document ``j`` is tokens
            ``cu_seqlens_d[j] : cu_seqlens_d[j + 1]``.
        max_seqlen_d: not needed, and cuts nothing: documents are as long as the offsets say.

    Returns:
        ``[Nq, Nd]`` scores (``[Nd]`` for a 2-D ``Q``), differentiable as those of :func:`maxsim_residual`.

    Raises:
        TypeError, ValueError: as :func:`maxsim_residual`.

    Example:
        >>> import torch
        >>> from late_interaction.plaid import maxsim_residual_varlen
        >>> centroids, weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 0.1, 0.2, 0.3])
        >>> residuals = torch.tensor([[0b0001], [0b1100]], dtype=torch.uint8)
        >>> maxsim_residual_varlen(
        ...     torch.tensor([[1.0, 1.0]]), torch.tensor([0, 1]), residuals, torch.tensor([0, 1, 2]),
        ...     centroids, weights, nbits=2)
        tensor([1.1000, 1.3000])
    """
    if max_seqlen_d is not None and (isinstance(max_seqlen_d, bool) or not isinstance(max_seqlen_d, int)):
        raise TypeError(f"max_seqlen_d must be an int or None, got {type(max_seqlen_d).__name__}")
    args = check_compressed(
        Q,
        ("codes_flat", codes_flat),
        ("residuals_flat", residuals_flat),
        ("cu_seqlens_d", cu_seqlens_d),
        centroids,
        bucket_weights,
        nbits,
    )
    if _wants_gradient(Q) and bool((args[3].diff() < 1).any()):
        raise _empty("cu_seqlens_d")
    return _score("maxsim_residual_varlen", Q, args, normalize)


def reverse_bits(residuals: Tensor) -> Tensor:
    """Packed residuals with the bits of every byte in the other order.

    The index files of ColBERTv2 and fast-plaid hold a token's bits from the highest bit of a byte down; the
    functions here want them from the lowest up. Its own inverse.

    Args:
        residuals: uint8, any shape.

    Returns:
        uint8 of the same shape.

    Raises:
        TypeError: another dtype.

    Example:
        >>> import torch
        >>> from late_interaction.plaid import reverse_bits
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


def _wants_gradient(Q: Tensor) -> bool:
    # A traced graph cannot look at values. There an empty document scores 0 and sends no gradient.
    return Q.requires_grad and torch.is_grad_enabled() and has_values(Q)


def _empty(name: str) -> ValueError:
    return ValueError(
        f"{name} holds a zero-length document, which has no gradient for Q: leave it out, or call under"
        " torch.no_grad(), where it scores 0"
    )


def _precision(Q: Tensor) -> str:
    if Q.dtype != torch.float32:
        return "highest"
    if is_autocasting(Q):
        return _AUTOCAST.get(torch.get_autocast_dtype(Q.device.type), "highest")
    return float32_precision(Q.device.type)


def _score(name: str, Q: Tensor, args: tuple[Any, ...], normalize: bool) -> Tensor:
    check_flag("normalize", normalize)
    op: Any = ops.maxsim_residual
    try:
        scores: Tensor = op(*args, normalize, _precision(Q))
    except RuntimeError as error:
        documents = args[3].shape[0] - (args[1].dim() == 1)
        _oom.residual_failed(error, args[0], documents)
        raise
    if not normalize:
        look(name, Q)
    return scores.squeeze(0) if Q.dim() == 2 else scores
