"""Transformers 4.57 to 5.24 on these kernels: the processors of ColPali, ColQwen2 and ColModernVBERT.

Their method ``score_retrieval`` pads queries and passages by zeros, 128 at a time, and lets the padding take
part in the maximum. It is exchanged in their classes, so processors that were built before are reached too.
Lists are packed, not padded, and no similarity is stored. Scores stay Transformers' to rounding: passages
that it would pad score at least 0 for each query token, as they do there. Half-precision similarities are not
rounded before the maximum and the sum, as its einsum rounds them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from late_interaction.integrations._shared import calls, zero_padded
from late_interaction.integrations._shared.places import Patch, Place, attribute_of, module_exists

__all__: list[str] = []

_EXCHANGES = Patch("transformers", "Transformers", "4.57 to 5.24", lambda: _places())

# Its processors that score, by the modules that define them; not every release has all.
_PROCESSORS = {
    "transformers.models.colpali.processing_colpali": "ColPaliProcessor",
    "transformers.models.colqwen2.processing_colqwen2": "ColQwen2Processor",
    "transformers.models.colmodernvbert.processing_colmodernvbert": "ColModernVBertProcessor",
}
patch, unpatch, places = _EXCHANGES.patch, _EXCHANGES.restore, _EXCHANGES.places


def _places() -> list[Place]:
    patch = attribute_of(_EXCHANGES, _scoring, _PARAMETERS)
    there = [module for module in _PROCESSORS if module_exists(module)]
    return [(module, f"{_PROCESSORS[module]}.score_retrieval", patch) for module in there or _PROCESSORS]


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
        scores = zero_padded.scores_by_batches(
            query_embeddings, passage_embeddings, batch_size, _EXCHANGES.package
        )
        name = f"{type(self).__name__}.score_retrieval"
        arguments = (query_embeddings, passage_embeddings, batch_size, output_dtype, output_device)
        found = calls.scores_or_own(_EXCHANGES.package, name, scores, lambda: original(self, *arguments))
        return found.to(output_dtype or query_embeddings[0].dtype).to(output_device)

    return score_retrieval
