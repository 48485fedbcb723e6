"""Keep fewer vectors a document, by clusters of its tokens: :func:`pool_tokens`.

By :mod:`late_interaction.ops.pooling`.

The method is that of Clavié, Chaffin and Adams (https://arxiv.org/abs/2409.14683): tokens that resemble each
other are replaced by their mean, when a document is indexed; queries and scoring stay as they are.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor

from late_interaction import ops
from late_interaction._checks.messages import abbreviate
from late_interaction._checks.options import check_flag, check_integer, check_one_of, check_positive
from late_interaction._checks.tensors import check_not_meta
from late_interaction._scoring.sequences import all_as_tokens
from late_interaction.ops.pooling import cluster_means
from late_interaction.tokens import Tokens, TokensLike

__all__ = ["pool_tokens"]

Method = Literal["ward", "kmeans"]
METHODS: tuple[Method, ...] = get_args(Method)

_MOST_ITERATIONS = (1 << 63) - 1  # an operator takes int64


@overload
def pool_tokens(
    D: Sequence[Tensor], pool_factor: float = ..., *, method: Method = ..., protected_tokens: int = ...,
    normalize: bool = ..., iterations: int = ...,
) -> list[Tensor]: ...  # fmt: skip
@overload
def pool_tokens(
    D: Tokens, pool_factor: float = ..., *, method: Method = ..., protected_tokens: int = ...,
    normalize: bool = ..., iterations: int = ...,
) -> Tokens: ...  # fmt: skip
@overload
def pool_tokens(
    D: Tensor, pool_factor: float = ..., *, method: Method = ..., protected_tokens: int = ...,
    normalize: bool = ..., iterations: int = ...,
) -> Tensor | Tokens: ...  # fmt: skip
def pool_tokens(
    D: TokensLike,
    pool_factor: float = 2,
    *,
    method: Method = "ward",
    protected_tokens: int = 1,
    normalize: bool = False,
    iterations: int = 10,
) -> Any:
    """Replace the tokens of each document by the means of about ``1 / pool_factor`` as many clusters.

    With ``method="ward"`` clusters and their order are those of PyLate 1.6 and Sentence Transformers 6.2:
    Ward's hierarchical clustering of ``1 - similarity`` as scipy computes it, cut into at most
    ``n // pool_factor`` clusters, of the ``n`` tokens that are not protected. ``normalize=False`` returns
    what PyLate returns, ``normalize=True`` what Sentence Transformers does by default.

    Args:
        D: documents, bfloat16, float16, float32 or float64, with tokens of unit length, as a model makes them
            for MaxSim by cosine: :class:`~late_interaction.Tokens`, a list of ``[L_i, d]``, ``[Nd, Ld, d]``,
            or one document, ``[L, d]``. Differentiable.
        pool_factor: at least 1; 1 keeps all tokens. Fractions are allowed.
        method: ``"ward"``, or ``"kmeans"``: Lloyd's algorithm from centers spaced evenly over the document,
            the same on every run. An empty cluster is dropped.
        protected_tokens: the first so many tokens of each document stay what they are, in front of the
            means; 1 is the ``[CLS]`` token.
        normalize: every token of the result is scaled to unit length, the protected ones, too.
        iterations: of k-means, at most.

    Returns:
        Pooled documents in the dtype of ``D`` and on its device: Tokens in the layout of Tokens, padded ones
        of ``[Nd, Ld, d]``, a list of a list, and one tensor of one.

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
        >>> from late_interaction import Tokens, pool_tokens
        >>> cls, cat, dog = torch.eye(3)
        >>> pool_tokens(torch.stack([cls, cat, dog, cat, dog]), pool_factor=2)
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
        >>> pool_tokens(Tokens.from_list([torch.stack([cls, cat, dog, cat, dog]), torch.stack([cls, cat])]))
        Tokens(2 sequences, 5 tokens packed, d=3, float32, cpu, max_length=3)
    """
    check_pooling(pool_factor, method, protected_tokens, normalize, iterations)
    documents = all_as_tokens("D", D)
    check_not_meta("D", documents.values)
    documents = documents.pack()
    lengths = documents.lengths.tolist()
    tokens = documents.values[: sum(lengths)]  # a GPU's offsets may leave tokens out
    check_finite(tokens)
    rows, pooled_lengths = _rows(tokens, lengths, pool_factor, protected_tokens, (method, iterations))
    real = tokens if tokens.dtype == torch.float64 else tokens.float()
    pooled = cluster_means(real, rows, sum(pooled_lengths))
    if normalize:
        pooled = torch.nn.functional.normalize(pooled, dim=-1)
    return _in_the_form_of(D, pooled.to(tokens.dtype), pooled_lengths)


def _rows(
    tokens: Tensor, lengths: list[int], pool_factor: float, protected_tokens: int, how: tuple[str, int]
) -> tuple[Tensor, list[int]]:
    """Find ``[tokens]``: which row of the result each token belongs to; and the lengths of the results."""
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


def _in_the_form_of(D: Any, pooled: Tensor, lengths: list[int]) -> Any:
    if isinstance(D, Tensor) and D.dim() == 2:
        return pooled
    if not isinstance(D, (Tensor, Tokens)):
        return list(pooled.split(lengths))
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=pooled.device)
    room = pooled.detach().new_empty((max(lengths, default=0), 0))
    packed = Tokens._made(pooled, None, offsets, room)
    return packed if isinstance(D, Tokens) and D.is_packed else packed.to_padded()


def check_pooling(
    pool_factor: Any, method: Any, protected_tokens: Any, normalize: Any, iterations: Any
) -> None:
    """Check the options of pool_tokens."""
    number = isinstance(pool_factor, (int, float)) and not isinstance(pool_factor, bool)
    if not number:
        raise TypeError(f"pool_factor must be a number, got {type(pool_factor).__name__}")
    if not 1 <= pool_factor < math.inf:
        raise ValueError(f"pool_factor must be at least 1 and finite, got {pool_factor}")
    check_one_of("method", method, METHODS)
    check_integer("protected_tokens", protected_tokens)
    if protected_tokens < 0:
        raise ValueError(f"protected_tokens must not be negative, got {abbreviate(protected_tokens)}")
    check_flag("normalize", normalize)
    check_positive("iterations", iterations)


def check_finite(tokens: Tensor) -> None:
    """Refuse NaN and infinity, with which clusters have no meaning. Waits for the device."""
    finite = torch.isfinite(tokens)
    if not bool(finite.all()):
        bad = int((~finite.all(-1)).sum())
        raise ValueError(f"D must be finite, got {bad} of {len(tokens)} tokens with NaN or infinity")
