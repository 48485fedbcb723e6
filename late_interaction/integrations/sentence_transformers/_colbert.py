"""Score groups of documents as the six functions of Sentence Transformers' ``scoring.colbert`` do.

They are those of ``sentence_transformers.multi_vector_encoder.scoring.colbert``, on the kernels, with its
signatures.

What the kernels do not take goes through Sentence Transformers' own code.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction import _maxsim
from late_interaction.integrations._shared import calls
from late_interaction.integrations.sentence_transformers._chunks import dense
from late_interaction.integrations.sentence_transformers._inputs import (
    mask_fits,
    score_dtype,
    takes,
    token_counts,
)
from late_interaction.integrations.sentence_transformers._originals import (
    COLBERT,
    PACKAGE,
    SIMILARITY,
    disabled,
    module,
    own,
)
from late_interaction.integrations.sentence_transformers._similarity import maxsim, maxsim_pairwise, mean_of


def colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Score every query with the documents of all queries, for a loss over all pairs of a batch.

    All groups of documents are one call of the kernels.

    Args:
        queries_embeddings: ``[Nq, Lq, d]``.
        documents_embeddings: ``[Nd, N, Ld, d]``: ``N`` documents of each query.
        queries_mask: ``[Nq, Lq]``, as ``a_mask`` in :func:`maxsim`.
        documents_mask: ``[Nd, N, Ld]``, nonzero = keep.
        chunk_elements, length_normalize: as in :func:`maxsim`.

    Returns:
        ``[Nq, Nd * N]``: document ``n`` of query ``j`` is column ``j * N + n``.

    Example:
        >>> import torch
        >>> from late_interaction.integrations import sentence_transformers as st
        >>> st.colbert_scores(torch.ones(1, 4, 2), torch.ones(1, 3, 5, 2))
        tensor([[8., 8., 8.]])
    """
    options = (chunk_elements, length_normalize)
    if not disabled():
        Q, D = _tensors(queries_embeddings, documents_embeddings)
        if D.dim() == 4 and mask_fits(documents_mask, D):
            mask = None if documents_mask is None else documents_mask.flatten(0, 1)
            return maxsim(Q, D.flatten(0, 1), queries_mask, mask, *options)
    theirs = own(COLBERT, "colbert_scores", {"maxsim": maxsim})
    return theirs(queries_embeddings, documents_embeddings, queries_mask, documents_mask, *options)


def colbert_scores_pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Score the pairs ``(query i, document i)``.

    Args:
        queries_embeddings, queries_mask: as in :func:`colbert_scores`.
        documents_embeddings: ``[Nq, Ld, d]``.
        documents_mask: ``[Nq, Ld]``, nonzero = keep.
        chunk_elements, length_normalize: as in :func:`maxsim_pairwise`.

    Returns:
        ``[Nq]``, as :func:`maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.integrations import sentence_transformers as st
        >>> st.colbert_scores_pairwise(torch.ones(2, 4, 2), torch.ones(2, 5, 2))
        tensor([8., 8.])
    """
    return maxsim_pairwise(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements,
        length_normalize,
    )  # fmt: skip


def colbert_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Score each query with its own documents, for distillation, in one call of the kernels.

    Args:
        queries_embeddings, queries_mask: as in :func:`colbert_scores`.
        documents_embeddings: ``[Nq, N, Ld, d]``.
        documents_mask: ``[Nq, N, Ld]``, nonzero = keep.
        chunk_elements, length_normalize: as in :func:`maxsim_pairwise`.

    Returns:
        ``[Nq, N]``, as :func:`maxsim`.

    Example:
        >>> import torch
        >>> from late_interaction.integrations import sentence_transformers as st
        >>> st.colbert_kd_scores(torch.ones(2, 4, 2), torch.ones(2, 3, 5, 2))
        tensor([[8., 8., 8.],
                [8., 8., 8.]])
    """
    if not disabled():
        Q, D = _tensors(queries_embeddings, documents_embeddings)
        if _is_kd(Q, D, queries_mask) and mask_fits(documents_mask, D) and takes(Q, D):
            calls.scored(PACKAGE)
            scores = dense(_maxsim.maxsim, Q, D, queries_mask, documents_mask)
            scores = scores.to(score_dtype(Q, queries_mask))
            return scores / token_counts(scores, Q, queries_mask).unsqueeze(1) if length_normalize else scores
    theirs = own(COLBERT, "colbert_kd_scores", {"maxsim_pairwise": maxsim_pairwise})
    return theirs(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements,
        length_normalize,
    )  # fmt: skip


mean_colbert_scores = mean_of(colbert_scores)
mean_colbert_scores_pairwise = mean_of(colbert_scores_pairwise)
mean_colbert_kd_scores = mean_of(colbert_kd_scores)


def _is_kd(Q: Tensor, D: Tensor, q_mask: Any) -> bool:
    boolean = q_mask is None or (isinstance(q_mask, Tensor) and q_mask.dtype == torch.bool)
    return Q.dim() == 3 and D.dim() == 4 and len(Q) == len(D) and boolean and mask_fits(q_mask, Q)


def _tensors(Q: Any, D: Any) -> tuple[Tensor, Tensor]:
    convert = module(SIMILARITY)._convert_to_tensor
    return convert(Q), convert(D)
