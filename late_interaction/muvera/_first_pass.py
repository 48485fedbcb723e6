"""Make the first pass of a search over MUVERA's encodings, for :func:`late_interaction.search`.

It takes the inner products with all of them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from late_interaction._checks.messages import shape_of
from late_interaction._scoring.precision import without_autocast
from late_interaction._search.rescore import fitting
from late_interaction._search.selection import MOST_SCORES
from late_interaction._search.stream import chunks
from late_interaction.muvera.encoder import Encodings, Muvera
from late_interaction.tokens import Tokens

# Encodings that are scored, or embeddings that are encoded, at a time have at most so many bytes.
_BYTES = 256 << 20


class MuveraPass:
    """Queries as encodings, and their products with chunks of documents."""

    def __init__(self, Q: Tensor, q_mask: Tensor | None, coarse: Muvera | Encodings, normalize: bool) -> None:
        self.encodings = coarse.documents if isinstance(coarse, Encodings) else None
        self.muvera = coarse.muvera if isinstance(coarse, Encodings) else coarse
        self.normalize = normalize
        self.Q = self.muvera.encode_queries(Tokens._made(self._unit(Q), q_mask))

    def _unit(self, x: Tensor) -> Tensor:
        return unit_rows(x.float(), dim=-1, eps=1e-12) if self.normalize else x

    def scored(
        self, D: Tensor, d_mask: Tensor | None, chunk_bytes: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the first document's index of each chunk, and scores, on the device of the queries."""
        most = max(MOST_SCORES // max(len(self.Q), 1), 1)
        if self.encodings is not None:
            size = min(most, fitting(4 * self.muvera.dim, chunk_bytes or _BYTES))
            for start, some, _ in chunks(self.encodings, (), size, self.Q.device):
                yield start, self._scores(some)
            return
        document = 4 * max(self.muvera.dim, D.shape[1] * D.shape[2])
        size = min(most, fitting(document, chunk_bytes or _BYTES))
        for start, some, (mask,) in chunks(D, (d_mask,), size, self.Q.device):
            yield start, self._scores(self.muvera.encode_documents(Tokens._made(self._unit(some), mask)))

    def _scores(self, documents: Tensor) -> Tensor:
        with without_autocast(self.Q.device.type):
            return torch.mm(self.Q, documents.float().t())


def check_encodings(coarse: Muvera | Encodings, D: Tensor) -> None:
    """Check that encodings are those of a corpus of this shape, and lie on its device."""
    muvera = coarse if isinstance(coarse, Muvera) else coarse.muvera
    if muvera.d != D.shape[2]:
        raise ValueError(f"coarse must be for tokens of D {shape_of(D)}, got one for d = {muvera.d}")
    if isinstance(coarse, Muvera):
        return
    if len(coarse.documents) != len(D):
        raise ValueError(f"coarse must hold the encodings of {len(D)} documents, got {len(coarse.documents)}")
    if coarse.documents.device != D.device:
        raise ValueError(f"coarse must be on the device of D, {D.device}, got {coarse.documents.device}")
