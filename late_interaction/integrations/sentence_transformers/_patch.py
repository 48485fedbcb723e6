"""The functions and methods that the patch of Sentence Transformers exchanges.

Its scoring functions keep their identity and run other code. So models, losses, evaluators and partial
functions that hold them are reached whenever they were built. The losses over all pairs of a batch and the
retrieval evaluator get a method each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from late_interaction.integrations._shared.places import Library, Place, code_of, patch_places
from late_interaction.integrations.sentence_transformers import _losses, _ranking
from late_interaction.integrations.sentence_transformers._originals import (
    COLBERT,
    EXCHANGES,
    PACKAGE,
    SIMILARITY,
    XTR,
)

__all__ = ["patch", "places", "unpatch"]

_LIBRARY = Library(PACKAGE, "Sentence Transformers", "6.0 to 6.2")
_LOSSES = "sentence_transformers.multi_vector_encoder.losses"
_EVALUATION = "sentence_transformers.multi_vector_encoder.evaluation"


unpatch, places = EXCHANGES.restore, EXCHANGES.places


def patch() -> str | None:
    return patch_places(_LIBRARY, _SURFACE, EXCHANGES)


# ---- the code that functions run instead: in Sentence Transformers' namespace, with its signatures ----


def _maxsim(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: Any = None,
    length_normalize: Any = False,
    device: Any = None,
) -> Tensor:
    from late_interaction.integrations.sentence_transformers import _similarity

    return _similarity.maxsim(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)


def _maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: Any = None,
    length_normalize: Any = False,
    device: Any = None,
) -> Tensor:
    from late_interaction.integrations.sentence_transformers import _similarity

    return _similarity.maxsim_pairwise(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)


def _score_documents(a: Any, b: Any, a_mask: Any, b_mask: Any) -> Tensor:
    from late_interaction.integrations.sentence_transformers import _chunks

    return _chunks.score_chunk(a, b, a_mask, b_mask)


def _score_pairs(a: Any, b: Any, a_mask: Any, b_mask: Any) -> Tensor:
    from late_interaction.integrations.sentence_transformers import _chunks

    return _chunks.score_pairs(a, b, a_mask, b_mask)


def _colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: Any = None,
    length_normalize: Any = False,
) -> Tensor:
    from late_interaction.integrations.sentence_transformers import _colbert

    return _colbert.colbert_scores(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements,
        length_normalize,
    )  # fmt: skip


def _colbert_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: Any = None,
    length_normalize: Any = False,
) -> Tensor:
    from late_interaction.integrations.sentence_transformers import _colbert

    return _colbert.colbert_kd_scores(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements,
        length_normalize,
    )  # fmt: skip


def _xtr_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: Any = 256,
    chunk_elements: Any = None,
) -> Tensor:
    from late_interaction.integrations.sentence_transformers import _xtr

    return _xtr.xtr_scores(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, top_k, chunk_elements
    )


# ---- where they are put ----

_code_of = partial(code_of, EXCHANGES)


def _method(
    name: str, replacement: Callable[[Any], Any], fits: Callable[[Any], bool]
) -> Callable[[Any, str], bool]:
    """Give the class a method in the place of what it has or inherits."""

    def patch(module: Any, class_name: str) -> bool:
        holder = getattr(module, class_name, None)
        original = getattr(holder, name, None)
        if not isinstance(holder, type) or not fits(original):
            return False
        EXCHANGES.attribute(holder, name, replacement(original))
        return True

    return patch


_SURFACE: list[Place] = [
    (SIMILARITY, "maxsim", _code_of(_maxsim)),
    (SIMILARITY, "maxsim_pairwise", _code_of(_maxsim_pairwise)),
    (SIMILARITY, "_maxsim_score_documents", _code_of(_score_documents)),
    (SIMILARITY, "_maxsim_score_pairs", _code_of(_score_pairs)),
    (COLBERT, "colbert_scores", _code_of(_colbert_scores)),
    (COLBERT, "colbert_kd_scores", _code_of(_colbert_kd_scores)),
    (XTR, "xtr_scores", _code_of(_xtr_scores)),  # which its other functions and its classes call
    (
        _LOSSES,
        "MultiVectorMultipleNegativesRankingLoss",
        _method("forward", _losses.by_blocks, _losses.namespace_fits),
    ),
    (
        _LOSSES,
        "CachedMultiVectorMultipleNegativesRankingLoss",
        _method("calculate_loss", _losses.by_blocks, _losses.namespace_fits),
    ),
    (
        _EVALUATION,
        "MultiVectorInformationRetrievalEvaluator",
        _method("compute_all_metrics", _ranking.ranked_on_the_device, _ranking.signature_fits),
    ),
]
