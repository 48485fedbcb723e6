"""The functions and methods that the patch of Sentence Transformers exchanges.

Its scoring functions keep their identity and run other code. So models, losses, evaluators and partial
functions that hold them are reached whenever they were built. The losses over all pairs of a batch and the
retrieval evaluator get a method each.
"""

from functools import partial

from late_interaction.integrations._shared.places import Place, attribute_of, code_of
from late_interaction.integrations.sentence_transformers import (
    _chunks,
    _colbert,
    _losses,
    _ranking,
    _similarity,
    _xtr,
)
from late_interaction.integrations.sentence_transformers._originals import COLBERT, EXCHANGES, SIMILARITY, XTR

_LOSSES = "sentence_transformers.multi_vector_encoder.losses"
_EVALUATION = "sentence_transformers.multi_vector_encoder.evaluation"


patch, unpatch, places = EXCHANGES.patch, EXCHANGES.restore, EXCHANGES.places


# ---- where they are put ----


_code_of = partial(code_of, EXCHANGES)
_by_blocks = attribute_of(EXCHANGES, _losses.by_blocks, fits=_losses.namespace_fits)
SURFACE: list[Place] = [
    (SIMILARITY, "maxsim", _code_of(_similarity.maxsim)),
    (SIMILARITY, "maxsim_pairwise", _code_of(_similarity.maxsim_pairwise)),
    (SIMILARITY, "_maxsim_score_documents", _code_of(_chunks.score_chunk)),
    (SIMILARITY, "_maxsim_score_pairs", _code_of(_chunks.score_pairs)),
    (COLBERT, "colbert_scores", _code_of(_colbert.colbert_scores)),
    (COLBERT, "colbert_kd_scores", _code_of(_colbert.colbert_kd_scores)),
    (XTR, "xtr_scores", _code_of(_xtr.xtr_scores)),  # which its other functions and its classes call
    (_LOSSES, "MultiVectorMultipleNegativesRankingLoss.forward", _by_blocks),
    (_LOSSES, "CachedMultiVectorMultipleNegativesRankingLoss.calculate_loss", _by_blocks),
    (
        _EVALUATION,
        "MultiVectorInformationRetrievalEvaluator.compute_all_metrics",
        attribute_of(EXCHANGES, _ranking.ranked_on_the_device, fits=_ranking.signature_fits),
    ),
]
