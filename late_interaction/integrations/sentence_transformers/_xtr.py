"""Score groups of documents as Sentence Transformers' ``scoring.xtr`` does.

The functions are those of ``sentence_transformers.multi_vector_encoder.scoring.xtr`` on the kernels, with its
signatures: XTR scores without the grid of all similarities.

What the kernels do not take goes through Sentence Transformers' own code.
"""

from typing import Any

import torch
from torch import Tensor

from late_interaction import xtr
from late_interaction.integrations._shared import calls
from late_interaction.integrations.sentence_transformers._inputs import (
    each,
    fill_empty,
    kept,
    mask_fits,
    unfit,
)
from late_interaction.integrations.sentence_transformers._originals import (
    PACKAGE,
    SIMILARITY,
    XTR,
    module,
    own,
)


def xtr_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
) -> Tensor:
    """XTR scores of every query with the documents of all queries, differentiable.

    Args:
        queries_embeddings: ``[Nq, Lq, d]``.
        documents_embeddings: ``[Nd, N, Ld, d]``: ``N`` documents of each query.
        queries_mask: ``[Nq, Lq]``: a bool mask, or numbers that multiply each query token's maximum. None:
            rows of zeros are padding.
        documents_mask: ``[Nd, N, Ld]``, nonzero = keep. None: rows of zeros are padding.
        top_k: how many of all tokens of the batch each query token selects.
        chunk_elements: as in Sentence Transformers, for a call that is left to it.

    Returns:
        ``[Nq, Nd * N]``, float32: document ``n`` of query ``j`` is column ``j * N + n``. A document without a
        token that counts scores -1e9.

    Example:
        >>> import torch
        >>> from late_interaction.integrations import sentence_transformers as st
        >>> st.xtr_scores(torch.ones(1, 4, 2), torch.ones(1, 3, 5, 2), top_k=7)
        tensor([[2., 2., 0.]])
    """
    given = (queries_embeddings, documents_embeddings, queries_mask, documents_mask, top_k)
    found = _scores(*given)
    return calls.scores_or_own(
        PACKAGE, "xtr_scores", found, lambda: own(XTR, "xtr_scores")(*given, chunk_elements)
    )


def xtr_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
) -> Tensor:
    """Score each query with its own documents as :func:`xtr_scores` does, for distillation.

    Args:
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, top_k, chunk_elements: as in
            :func:`xtr_scores`, as many groups of documents as queries.

    Returns:
        ``[Nq, N]``, as :func:`xtr_scores`.

    Example:
        >>> import torch
        >>> from late_interaction.integrations import sentence_transformers as st
        >>> st.xtr_kd_scores(torch.ones(2, 4, 2), torch.ones(2, 3, 5, 2), top_k=20)
        tensor([[2., 2., 2.],
                [2., 0., 0.]])
    """
    return own(XTR, "xtr_kd_scores", {"xtr_scores": xtr_scores})(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, top_k, chunk_elements
    )


def xtr_scores_pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
) -> Tensor:
    """Score the pairs ``(query i, document i)`` as :func:`xtr_scores` does.

    Args:
        queries_embeddings, queries_mask, top_k, chunk_elements: as in :func:`xtr_scores`.
        documents_embeddings: ``[Nq, Ld, d]``.
        documents_mask: ``[Nq, Ld]``, nonzero = keep.

    Returns:
        ``[Nq]``, as :func:`xtr_scores`.

    Example:
        >>> import torch
        >>> from late_interaction.integrations import sentence_transformers as st
        >>> st.xtr_scores_pairwise(torch.ones(2, 4, 2), torch.ones(2, 5, 2), top_k=5)
        tensor([2., 0.])
    """
    return own(XTR, "xtr_scores_pairwise", {"xtr_kd_scores": xtr_kd_scores})(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, top_k, chunk_elements
    )


def _scores(Q: Any, D: Any, q_mask: Any, d_mask: Any, top_k: Any) -> Tensor | str:
    """Return the scores of a call, or why the kernels do not make them."""
    convert = module(SIMILARITY)._convert_to_tensor
    Q, D = ((x if x.is_floating_point() else x.float()) for x in (convert(Q), convert(D)))
    reason = unfit(Q, D)
    if reason is not None:
        return reason
    if Q.dim() != 3 or D.dim() != 4:
        return f"queries of {Q.dim()} dims and documents of {D.dim()}"
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        return "a top_k that is no positive int"
    D = D.flatten(0, 1)
    if isinstance(d_mask, Tensor) and d_mask.numel() == D.shape[:2].numel():
        d_mask = d_mask.reshape(D.shape[:2])
    q_mask = each(q_mask, Q)
    if not mask_fits(q_mask, Q) or not mask_fits(d_mask, D):
        return "masks of another form"
    options: dict[str, Any] = {}
    if q_mask is None or q_mask.dtype == torch.bool:
        options["q_mask"], dtype = kept(Q, q_mask), torch.float32
    else:  # the maxima are float32, and the mask multiplies them
        dtype = torch.promote_types(torch.float32, q_mask.dtype)
        options["q_weights"] = q_mask if q_mask.is_floating_point() else q_mask.to(dtype)
    live = kept(D, d_mask)
    scores = xtr.xtr_scores(Q, D, top_k, d_mask=live, **options).to(dtype)
    return scores if live is None else fill_empty(scores, ~live.any(dim=-1))
