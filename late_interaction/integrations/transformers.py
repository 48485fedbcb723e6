"""Transformers 4.57 to 5.24 on these kernels: the processors of ColPali, ColQwen2 and ColModernVBERT.

Their method ``score_retrieval`` pads queries and passages by zeros, 128 at a time, and lets the padding take
part in the maximum. It is exchanged in their classes, so processors that were built before are reached too.
Lists are packed, not padded, and no similarity is stored. Scores stay Transformers' to rounding: passages
that it would pad score at least 0 for each query token, as they do there. Half-precision similarities are not
rounded before the maximum and the sum, as its einsum rounds them.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from late_interaction.integrations._shared import calls, zero_padded
from late_interaction.integrations._shared.compat import why_left
from late_interaction.integrations._shared.exchange import Exchanges
from late_interaction.integrations._shared.places import Library, Place, attribute_of, patch_places

__all__: list[str] = []

_LIBRARY = Library("transformers", "Transformers", "4.57 to 5.24")
_EXCHANGES = Exchanges()

# Its processors that score, by the modules that define them; not every release has all.
_PROCESSORS = {
    "transformers.models.colpali.processing_colpali": "ColPaliProcessor",
    "transformers.models.colqwen2.processing_colqwen2": "ColQwen2Processor",
    "transformers.models.colmodernvbert.processing_colmodernvbert": "ColModernVBertProcessor",
}


unpatch, places = _EXCHANGES.restore, _EXCHANGES.places


def patch() -> str | None:
    return patch_places(_LIBRARY, _places(), _EXCHANGES)


def _places() -> list[Place]:
    patch = attribute_of(_EXCHANGES, _scoring, _PARAMETERS)
    there = [module for module in _PROCESSORS if _exists(module)]
    return [(module, f"{_PROCESSORS[module]}.score_retrieval", patch) for module in there or _PROCESSORS]


def _exists(module: str) -> bool:
    """Tell whether this release of Transformers has the module; whether it imports is another question."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that would hold it
        return False


_PARAMETERS = [
    "self",
    "query_embeddings",
    "passage_embeddings",
    "batch_size",
    "output_dtype",
    "output_device",
]


def _scoring(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute ``score_retrieval`` on the kernels, where they serve the call."""

    @functools.wraps(original)
    def score_retrieval(
        self: Any,
        query_embeddings: Any,
        passage_embeddings: Any,
        batch_size: int = 128,
        output_dtype: torch.dtype | None = None,
        output_device: torch.device | str = "cpu",
    ) -> Tensor:
        scores = _scores(query_embeddings, passage_embeddings, batch_size)
        if isinstance(scores, str):
            calls.left(_LIBRARY.package, f"{type(self).__name__}.score_retrieval", scores)
            return original(
                self, query_embeddings, passage_embeddings, batch_size, output_dtype, output_device
            )
        calls.scored(_LIBRARY.package)
        return scores.to(output_dtype or query_embeddings[0].dtype).to(output_device)

    return score_retrieval


def _scores(query_embeddings: Any, passage_embeddings: Any, batch_size: int) -> Tensor | str:
    """Scores, or why the kernels do not serve this call."""
    queries, passages = _side(query_embeddings), _side(passage_embeddings)
    if queries is None or passages is None or batch_size <= 0:
        return "arguments of another form"
    padded_to = _padded_to(passages, batch_size)
    reason = why_left(queries[0], passages[0], _LIBRARY.package)
    if reason is not None or not all(padded_to):
        return reason or "empty passages"
    return zero_padded.scores(queries, passages, padded_to, passages[0].device)


def _side(embeddings: Any) -> zero_padded.Side | None:
    """Embeddings as the kernels may take them."""
    if isinstance(embeddings, Tensor):
        return embeddings if embeddings.dim() == 3 and len(embeddings) else None
    if not isinstance(embeddings, list) or not all(
        isinstance(x, Tensor) and x.dim() == 2 for x in embeddings
    ):
        return None
    kinds = {(x.dtype, x.device, x.layout, x.shape[1]) for x in embeddings}
    return embeddings if len(kinds) == 1 else None


def _padded_to(passages: zero_padded.Side, batch_size: int) -> list[int]:
    """Return how long Transformers pads each passage of a list: to the longest of its batch."""
    if isinstance(passages, Tensor):
        return []
    lengths = [*map(len, passages)]
    longest = [max(lengths[j : j + batch_size]) for j in range(0, len(lengths), batch_size)]
    return [longest[i // batch_size] for i in range(len(lengths))]
