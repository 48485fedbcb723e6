"""Ranges of documents whose copies in another dtype take bounded memory."""

from collections.abc import Iterator

from torch import Tensor

# The copy of some documents takes at most this many bytes (one document always fits).
_BYTES = 64 << 20


def ranges(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def slices(count: int, bytes_each: int) -> Iterator[slice]:
    """Yield ranges of items whose copies fit."""
    return ranges(count, max(_BYTES // max(bytes_each, 1), 1))


def blocks(D: Tensor, token_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of queries and documents whose copy fits. Every query meets in-batch documents."""
    document, N = token_bytes * D.shape[-2], D.shape[-3]
    queries = [slice(None)] if D.dim() == 3 else slices(D.shape[0], N * document)
    for own in queries:
        for documents in slices(N, document):
            yield own, documents
