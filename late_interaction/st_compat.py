"""Sentence Transformers 6.0 to 6.2 on these kernels: :func:`patch_sentence_transformers` and its undoing.

Its scoring functions keep their identity and run other code. So models, losses, evaluators and partial
functions that hold them are reached whenever they were built. The losses over all pairs of a batch and the
retrieval evaluator get a method each.

A call that the kernels do not serve (another device, another dtype) runs Sentence Transformers' own code, and
so does every call while the environment variable ``LATE_INTERACTION_DISABLE`` is 1 or names
sentence-transformers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from late_interaction._patches.compat import off
from late_interaction._patches.places import Library, Place, code_of, patch_places
from late_interaction._st import losses, ranking
from late_interaction._st.originals import COLBERT, EXCHANGES, SIMILARITY, XTR

__all__ = ["patch_sentence_transformers", "unpatch_sentence_transformers"]

_LIBRARY = Library(
    "sentence-transformers", "Sentence Transformers", "6.0 to 6.2", "patch_sentence_transformers"
)
_LOSSES = "sentence_transformers.multi_vector_encoder.losses"
_EVALUATION = "sentence_transformers.multi_vector_encoder.evaluation"


def patch_sentence_transformers() -> None:
    """Has Sentence Transformers score multi-vector embeddings by these kernels: ``MultiVectorEncoder``'s
    similarities, all four losses and the evaluators, with models and losses that exist already.

    Ragged embeddings are packed, not padded; no similarity is stored; a loss over all pairs of a large batch
    is :func:`late_interaction.contrastive_loss`. Losses, gradients and rankings stay Sentence Transformers'
    to rounding: half-precision similarities are not rounded before the maximum here. Gradients cannot be
    differentiated again. A second call changes nothing.

    Args:
        None: ``LATE_INTERACTION_DISABLE=1`` (or ``=sentence-transformers``) in the environment turns the
            patch off, call by call.

    Returns:
        None.

    Raises:
        ImportError: Sentence Transformers is not installed, does not import or has no ``MultiVectorEncoder``;
            the message says why.

    Warns:
        RuntimeWarning: Sentence Transformers lacks something that was to be patched, or the environment turns
            the patch off.

    Example:
        >>> from late_interaction import patch_sentence_transformers, unpatch_sentence_transformers
        >>> patch_sentence_transformers()                      # doctest: +SKIP
        >>> scores = model.similarity(queries, documents)      # doctest: +SKIP
        >>> unpatch_sentence_transformers()
    """
    if not EXCHANGES and not off(_LIBRARY.patch, _LIBRARY.package):
        patch_places(_LIBRARY, _SURFACE, EXCHANGES)


def unpatch_sentence_transformers() -> None:
    """Gives Sentence Transformers its own code back. Does nothing where nothing is patched.

    Args:
        None.

    Returns:
        None.

    Example:
        >>> from late_interaction import unpatch_sentence_transformers
        >>> unpatch_sentence_transformers()
    """
    EXCHANGES.restore()


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
    from late_interaction._st import similarity

    return similarity.maxsim(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)


def _maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: Any = None,
    length_normalize: Any = False,
    device: Any = None,
) -> Tensor:
    from late_interaction._st import similarity

    return similarity.maxsim_pairwise(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)


def _score_documents(a: Any, b: Any, a_mask: Any, b_mask: Any) -> Tensor:
    from late_interaction._st import chunks

    return chunks.score_chunk(a, b, a_mask, b_mask)


def _score_pairs(a: Any, b: Any, a_mask: Any, b_mask: Any) -> Tensor:
    from late_interaction._st import chunks

    return chunks.score_pairs(a, b, a_mask, b_mask)


def _colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: Any = None,
    length_normalize: Any = False,
) -> Tensor:
    from late_interaction._st import colbert

    return colbert.colbert_scores(
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
    from late_interaction._st import colbert

    return colbert.colbert_kd_scores(
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
    from late_interaction._st import xtr

    return xtr.xtr_scores(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, top_k, chunk_elements
    )


# ---- where they are put ----

_code_of = partial(code_of, EXCHANGES)


def _method(
    name: str, replacement: Callable[[Any], Any], fits: Callable[[Any], bool]
) -> Callable[[Any, str], bool]:
    """The class gets a method in the place of what it has or inherits."""

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
        _method("forward", losses.by_blocks, losses.namespace_fits),
    ),
    (
        _LOSSES,
        "CachedMultiVectorMultipleNegativesRankingLoss",
        _method("calculate_loss", losses.by_blocks, losses.namespace_fits),
    ),
    (
        _EVALUATION,
        "MultiVectorInformationRetrievalEvaluator",
        _method("compute_all_metrics", ranking.ranked_on_the_device, ranking.signature_fits),
    ),
]
