"""The functions and methods that the patch of Sentence Transformers exchanges.

Its scoring functions keep their identity and run other code. So models, losses, evaluators and partial
functions that hold them are reached whenever they were built. The losses over all pairs of a batch and the
retrieval evaluator get a method each.
"""

from collections.abc import Callable
from typing import Any

from late_interaction.integrations._shared.places import Library, Place, calling, code_of, patch_places
from late_interaction.integrations.sentence_transformers import (
    _chunks,
    _colbert,
    _losses,
    _ranking,
    _similarity,
    _xtr,
)
from late_interaction.integrations.sentence_transformers._originals import (
    COLBERT,
    EXCHANGES,
    PACKAGE,
    SIMILARITY,
    XTR,
)

_LIBRARY = Library(PACKAGE, "Sentence Transformers", "6.0 to 6.2")
_LOSSES = "sentence_transformers.multi_vector_encoder.losses"
_EVALUATION = "sentence_transformers.multi_vector_encoder.evaluation"


unpatch, places = EXCHANGES.restore, EXCHANGES.places


def patch() -> str | None:
    return patch_places(_LIBRARY, _SURFACE, EXCHANGES)


# ---- where they are put ----


def _code_of(function: Callable[..., Any]) -> Callable[[Any, str], bool]:
    return code_of(EXCHANGES, calling(function))


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
    (SIMILARITY, "maxsim", _code_of(_similarity.maxsim)),
    (SIMILARITY, "maxsim_pairwise", _code_of(_similarity.maxsim_pairwise)),
    (SIMILARITY, "_maxsim_score_documents", _code_of(_chunks.score_chunk)),
    (SIMILARITY, "_maxsim_score_pairs", _code_of(_chunks.score_pairs)),
    (COLBERT, "colbert_scores", _code_of(_colbert.colbert_scores)),
    (COLBERT, "colbert_kd_scores", _code_of(_colbert.colbert_kd_scores)),
    (XTR, "xtr_scores", _code_of(_xtr.xtr_scores)),  # which its other functions and its classes call
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
