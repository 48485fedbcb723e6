"""Sentence Transformers 6.0 to 6.2 on these kernels: its functions without a patch, and all of it with one.

Each function has the name, the arguments and the semantics of the one that it stands for, forward and
backward, on a CPU and a GPU, and goes where Sentence Transformers takes a function::

    from late_interaction.integrations import sentence_transformers as st

    loss = MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=st.colbert_scores)
    loss = MultiVectorDistillKLDivLoss(model, similarity_fct=st.colbert_kd_scores)
    loss = MultiVectorMarginMSELoss(model, similarity_fct=st.colbert_scores_pairwise)
    loss = MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=partial(st.xtr_scores, top_k=128))
    evaluator = MultiVectorInformationRetrievalEvaluator(..., score_functions={"maxsim": st.maxsim})
    evaluator = MultiVectorDistillationEvaluator(..., similarity_fct=st.maxsim_pairwise)
    evaluator = MultiVectorRerankingEvaluator(..., similarity_fct=st.maxsim)

``late_interaction.patch("sentence-transformers")`` reaches all of it at once, models and losses that were
built before included: similarities, all four losses and the evaluators. A loss over all pairs of a large
batch is :func:`late_interaction.losses.contrastive` then. Losses, gradients and rankings stay Sentence
Transformers' to rounding: half-precision similarities are not rounded before the maximum here. Gradients of
lists of embeddings cannot be differentiated again.

A list of ``[L_i, d]`` embeddings, as ``encode`` returns it, is packed end to end, not padded; no similarity
is stored. Scores are float32, on the documents' device. A document without a token that counts scores -1e9, a
query mask multiplies the maxima, and in a ``[N, L, d]`` tensor without a mask all-zero rows are padding. A
call that the kernels do not serve goes by Sentence Transformers' own code, and so does every call while the
environment variable ``LATE_INTERACTION_DISABLE`` is 1 or names sentence-transformers.

Arguments: ``a`` and ``b`` (``queries_embeddings``, ``documents_embeddings``), masks, ``chunk_elements`` (how
many elements of packed documents are copied at a time), ``length_normalize`` (divide by the query's number of
tokens) and ``device`` (where to score), as Sentence Transformers documents them.
"""

from late_interaction.integrations.sentence_transformers._colbert import (
    colbert_kd_scores,
    colbert_scores,
    colbert_scores_pairwise,
    mean_colbert_kd_scores,
    mean_colbert_scores,
    mean_colbert_scores_pairwise,
)
from late_interaction.integrations.sentence_transformers._similarity import (
    maxsim,
    maxsim_pairwise,
    mean_maxsim,
    mean_maxsim_pairwise,
)
from late_interaction.integrations.sentence_transformers._xtr import (
    xtr_kd_scores,
    xtr_scores,
    xtr_scores_pairwise,
)

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
    "xtr_kd_scores",
    "xtr_scores",
    "xtr_scores_pairwise",
]
