"""Fewer vectors a document, by clusters of its tokens, by :mod:`late_interaction.ops.pooling`:
:func:`pool_tokens`.

The method is that of Clavié, Chaffin and Adams (https://arxiv.org/abs/2409.14683): tokens that resemble each
other are replaced by their mean, when a document is indexed; queries and scoring stay as they are.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, overload

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.pooling import Method, check_finite, check_pool_tokens, check_pooling
from late_interaction.ops.pooling import cluster_means

__all__ = ["pool_tokens"]

_MOST_ITERATIONS = (1 << 63) - 1  # an operator takes int64


@overload
def pool_tokens(
    D: Sequence[Tensor], pool_factor: float = ..., *, method: Method = ..., protected_tokens: int = ...,
    normalize: bool = ..., iterations: int = ...,
) -> list[Tensor]: ...  # fmt: skip
@overload
def pool_tokens(
    D: Tensor, pool_factor: float = ..., *, method: Method = ..., d_mask: Tensor,
    protected_tokens: int = ..., normalize: bool = ..., iterations: int = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def pool_tokens(
    D: Tensor, pool_factor: float = ..., *, method: Method = ..., cu_seqlens: Tensor,
    protected_tokens: int = ..., normalize: bool = ..., iterations: int = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def pool_tokens(
    D: Tensor, pool_factor: float = ..., *, method: Method = ..., d_mask: None = ..., cu_seqlens: None = ...,
    protected_tokens: int = ..., normalize: bool = ..., iterations: int = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def pool_tokens(
    D: Tensor | Sequence[Tensor],
    pool_factor: float = 2,
    *,
    method: Method = "ward",
    d_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    protected_tokens: int = 1,
    normalize: bool = False,
    iterations: int = 10,
) -> Any:
    """Replaces the tokens of each document by the means of about ``1 / pool_factor`` as many clusters.

    With ``method="ward"`` clusters and their order are those of PyLate 1.6 and Sentence Transformers 6.2:
    Ward's hierarchical clustering of ``1 - similarity`` as scipy computes it, cut into at most
    ``n // pool_factor`` clusters, of the ``n`` tokens that are not protected. ``normalize=False`` returns
    what PyLate returns, ``normalize=True`` what Sentence Transformers does by default.

    Args:
        D: documents, bfloat16, float16, float32 or float64, with tokens of unit length, as a model makes them
            for MaxSim by cosine: a list of ``[L_i, d]``; packed, ``[tokens, d]`` with ``cu_seqlens``; padded,
            ``[Nd, Ld, d]``; or one document, ``[L, d]``. Differentiable.
        pool_factor: at least 1; 1 keeps all tokens. Fractions are allowed.
        method: ``"ward"``, or ``"kmeans"``: Lloyd's algorithm from centers spaced evenly over the document,
            the same on every run. An empty cluster is dropped.
        d_mask: ``[Nd, Ld]``, bool (or integer, nonzero = True), True = keep, for padded documents.
        cu_seqlens: ``[documents + 1]``, int32 (or int64), for packed documents. Tokens before the first and
            behind the last document are dropped.
        protected_tokens: the first so many tokens of each document stay what they are, in front of the
            means; 1 is the ``[CLS]`` token.
        normalize: every token of the result is scaled to unit length, the protected ones, too.
        iterations: of k-means, at most.

    Returns:
        Pooled documents in the form of ``D``, in its dtype and on its device: a list; ``(tokens,
        cu_seqlens)``; ``(padded, d_mask)``, the padding at the end and 0; or one tensor. What takes the form
        takes them: ``maxsim`` with masks, ``search`` as Tokens, ``maxsim_varlen``, a corpus's ``add`` a list.

    Raises:
        TypeError: an argument of a wrong kind or dtype.
        ValueError: shapes or options that do not fit, or tokens that are not finite.

    Of tokens and clusters that are equally near, those of lower index are joined first, as scipy does it;
    where distances of the cut are equal there are fewer clusters than asked for, as in both packages. Equal
    tokens never raise (PyLate's distances may be negative by rounding, which scipy refuses). Distances are
    those of float32 products (float64 for float64 tokens), clustered in float64. A sum of products rounds
    differently on another number of threads or another BLAS: where two distances differ by no more than that,
    clusters may, in the packages as here. Means are summed in float32 and rounded once; the packages
    sum float16 and bfloat16 in that dtype.

    Complexity: for ``n`` tokens ``n * n * d`` multiply-adds, and for Ward about ``4 * n * n`` steps and
    ``8 * n * n`` bytes a thread, one document a thread; for k-means ``n * n / pool_factor * d``
    multiply-adds an iteration. A GPU clusters hundreds of documents at a time, by the same rules for ties as
    a CPU, but its products round differently. Without the CUDA library its tokens are clustered by Ward's
    method on the CPU, with a copy there and back. The host waits for the device.

    Example:
        >>> import torch
        >>> from late_interaction import pool_tokens
        >>> cls, cat, dog = torch.eye(3)
        >>> pool_tokens(torch.stack([cls, cat, dog, cat, dog]), pool_factor=2)
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
        >>> documents = torch.stack([cls, cat, dog, cat, dog, cls, cat, cat])
        >>> tokens, cu_seqlens = pool_tokens(documents, 2, cu_seqlens=torch.tensor([0, 5, 8]))
        >>> cu_seqlens
        tensor([0, 3, 5], dtype=torch.int32)
    """
    d_mask, cu_seqlens = check_pool_tokens(D, d_mask, cu_seqlens)
    check_pooling(pool_factor, method, protected_tokens, normalize, iterations)
    tokens, lengths = _packed(D, d_mask, cu_seqlens)
    check_finite(tokens)
    rows, pooled_lengths = _rows(tokens, lengths, pool_factor, protected_tokens, (method, iterations))
    real = tokens if tokens.dtype == torch.float64 else tokens.float()
    pooled = cluster_means(real, rows, sum(pooled_lengths))
    if normalize:
        pooled = torch.nn.functional.normalize(pooled, dim=-1)
    return _in_the_form_of(D, cu_seqlens is not None, pooled.to(tokens.dtype), pooled_lengths)


def _packed(D: Any, d_mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, list[int]]:
    """All tokens that count, end to end, and the documents' lengths."""
    if isinstance(D, (list, tuple)):
        return torch.cat(tuple(D)), [len(x) for x in D]
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        return D[offsets[0] : offsets[-1]], [b - a for a, b in pairwise(offsets)]
    if D.dim() == 2:
        return D, [len(D)]
    if d_mask is None:
        return D.flatten(0, 1), [D.shape[1]] * len(D)
    return D[d_mask], d_mask.sum(1).tolist()


def _rows(
    tokens: Tensor, lengths: list[int], pool_factor: float, protected_tokens: int, how: tuple[str, int]
) -> tuple[Tensor, list[int]]:
    """``[tokens]``: which row of the result each token belongs to; and the lengths of the results."""
    device = tokens.device
    kept = [min(protected_tokens, length) for length in lengths]
    others = [length - k for length, k in zip(lengths, kept, strict=True)]
    clusters = [max(int(n // pool_factor), 1) for n in others]
    starts, ends = (torch.tensor(x, dtype=torch.int64, device=device) for x in (kept, lengths))
    document = torch.arange(len(lengths), device=device).repeat_interleave(ends, output_size=len(tokens))
    place = torch.arange(len(tokens), device=device) - (ends.cumsum(0) - ends)[document]
    pooled = place >= starts[document]
    cu_seqlens = torch.tensor([0, *accumulate(others)], dtype=torch.int32, device=device)
    wanted = torch.tensor(clusters, dtype=torch.int32, device=device)
    method, iterations = how
    rest = tokens.detach()[pooled]
    if method == "ward":
        labels, found = ops.ward_labels(rest, cu_seqlens, wanted)
    else:
        labels, found = ops.kmeans_labels(rest, cu_seqlens, wanted, min(iterations, _MOST_ITERATIONS))
    place[pooled] = labels.long() + starts[document[pooled]]
    sizes = found + starts
    return place + (sizes.cumsum(0) - sizes)[document], sizes.tolist()


def _in_the_form_of(D: Any, packed: bool, pooled: Tensor, lengths: list[int]) -> Any:
    if isinstance(D, Tensor) and D.dim() == 2 and not packed:
        return pooled
    if packed:
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=pooled.device)
        return pooled, offsets
    if not isinstance(D, Tensor):
        return list(pooled.split(lengths))
    longest, device = max(lengths, default=0), D.device
    each = torch.tensor(lengths, dtype=torch.int64, device="cpu").to(device)
    mask = torch.arange(longest, device=device) < each.unsqueeze(1)
    if not lengths:
        return D.new_empty(0, 0, D.shape[2]), mask.view(0, 0)
    if lengths == [longest] * len(lengths):
        return pooled.view(len(lengths), longest, pooled.shape[-1]), mask
    document = torch.arange(len(lengths), device=device).repeat_interleave(each, output_size=len(pooled))
    place = torch.arange(len(pooled), device=device) - (each.cumsum(0) - each)[document]
    padded = pooled.new_zeros(len(lengths), longest, pooled.shape[-1])
    return padded.index_put((document, place), pooled), mask
