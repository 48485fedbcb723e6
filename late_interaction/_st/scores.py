"""Sentence Transformers' scoring functions on the kernels, with its signatures and to its semantics.

Scores are float32, on the documents' device. A document without a token that counts scores -1e9. A query mask
multiplies the maxima. What the kernels do not take goes through Sentence Transformers' own code.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction import _maxsim
from late_interaction._st.chunks import dense, grid, pairs, theirs
from late_interaction._st.inputs import mask_fits, score_dtype, takes
from late_interaction._st.originals import COLBERT, SIMILARITY, disabled, module, own

__all__ = [
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "maxsim",
    "maxsim_pairwise",
    "mean_colbert_kd_scores",
    "mean_colbert_scores",
    "mean_colbert_scores_pairwise",
    "mean_maxsim",
    "mean_maxsim_pairwise",
]

Device = str | torch.device | None


def maxsim(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: Device = None,
) -> Tensor:
    scores = None if disabled() else grid(a, b, a_mask, b_mask, chunk_elements, device)
    if scores is None:
        scores = theirs("maxsim")(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)
        return scores
    return scores / _counts(scores, a, a_mask).unsqueeze(1) if length_normalize else scores


def maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: Device = None,
) -> Tensor:
    scores = None if disabled() else pairs(a, b, a_mask, b_mask, chunk_elements, device)
    if scores is None:
        scores = theirs("maxsim_pairwise")(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)
        return scores
    return scores / _counts(scores, a, a_mask) if length_normalize else scores


def colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """All groups of documents are one batch: document ``n`` of group ``j`` is number ``j * N + n`` of it."""
    options = (chunk_elements, length_normalize)
    if not disabled():
        Q, D = _tensors(queries_embeddings, documents_embeddings)
        if D.dim() == 4 and mask_fits(documents_mask, D):
            mask = None if documents_mask is None else documents_mask.flatten(0, 1)
            return maxsim(Q, D.flatten(0, 1), queries_mask, mask, *options)
    theirs = own(COLBERT, "colbert_scores", {"maxsim": maxsim})
    scores: Tensor = theirs(queries_embeddings, documents_embeddings, queries_mask, documents_mask, *options)
    return scores


def colbert_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Each query meets its own documents in one call."""
    if not disabled():
        Q, D = _tensors(queries_embeddings, documents_embeddings)
        if _is_kd(Q, D, queries_mask) and mask_fits(documents_mask, D) and takes(Q, D):
            scores = dense(_maxsim.maxsim, Q, D, queries_mask, documents_mask)
            scores = scores.to(score_dtype(Q, queries_mask))
            return scores / _counts(scores, Q, queries_mask).unsqueeze(1) if length_normalize else scores
    theirs = own(COLBERT, "colbert_kd_scores", {"maxsim_pairwise": maxsim_pairwise})
    kd_scores: Tensor = theirs(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements,
        length_normalize,
    )  # fmt: skip
    return kd_scores


def mean_maxsim(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    device: Device = None,
) -> Tensor:
    """:func:`maxsim` divided by each query's number of tokens."""
    return maxsim(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)


def mean_maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    device: Device = None,
) -> Tensor:
    """:func:`maxsim_pairwise` divided by each query's number of tokens."""
    return maxsim_pairwise(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)


def colbert_scores_pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Scores ``[B]`` of the pairs ``(query i, document i)``."""
    return maxsim_pairwise(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements,
        length_normalize,
    )  # fmt: skip


def mean_colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """:func:`colbert_scores` divided by each query's number of tokens."""
    return colbert_scores(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements,
        length_normalize,
    )  # fmt: skip


def mean_colbert_scores_pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """:func:`colbert_scores_pairwise` divided by each query's number of tokens."""
    return maxsim_pairwise(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements,
        length_normalize,
    )  # fmt: skip


def mean_colbert_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """:func:`colbert_kd_scores` divided by each query's number of tokens."""
    return colbert_kd_scores(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements,
        length_normalize,
    )  # fmt: skip


def _counts(scores: Tensor, a: Any, a_mask: Any) -> Tensor:
    """How many tokens each query counts, at least 1."""
    similarity = module(SIMILARITY)
    a, a_mask = similarity._canonicalize_side(a, a_mask, "a_mask")
    counts: Tensor = similarity._query_token_counts(a, a_mask)
    return counts.to(device=scores.device, dtype=scores.dtype)


def _is_kd(Q: Tensor, D: Tensor, q_mask: Any) -> bool:
    boolean = q_mask is None or (isinstance(q_mask, Tensor) and q_mask.dtype == torch.bool)
    return Q.dim() == 3 and D.dim() == 4 and len(Q) == len(D) and boolean and mask_fits(q_mask, Q)


def _tensors(Q: Any, D: Any) -> tuple[Tensor, Tensor]:
    convert = module(SIMILARITY)._convert_to_tensor
    return convert(Q), convert(D)
