"""The actor that searches blocks of a dataset, and the documents of a block."""

from typing import Any

from torch import Tensor

from late_interaction.corpus import Corpus
from late_interaction.corpus._arrow import check_type


class Scorer:
    """The best documents of one block after another. Each worker of the cluster runs one.

    Args:
        queries: ``Q`` and ``q_mask``, on the CPU.
        column: the column of the documents.
        k: how many.
        options: of :meth:`late_interaction.Corpus.search`.
        device: where to score.
    """

    def __init__(
        self, queries: tuple[Tensor, Tensor | None], column: str, k: int, options: dict[str, Any], device: str
    ) -> None:
        self._Q, self._q_mask = (None if x is None else x.to(device) for x in queries)
        self._column, self._k, self._options = column, k, options

    def start(self) -> None:
        """Return once the actor runs."""

    def search(self, block: Any, first: int, stop: int) -> tuple[Any, Any]:
        """Scores and indices, as NumPy arrays, of rows of a block. Indices count from the row ``first``."""
        assert self._Q is not None
        corpus = corpus_of(block, self._column, first, stop, self._Q.shape[-1])
        scores, indices = corpus.search(self._Q, self._k, q_mask=self._q_mask, **self._options)
        return scores.cpu().numpy(), indices.cpu().numpy()


def corpus_of(block: Any, column: str, first: int, stop: int, d: int) -> Corpus:
    """Read the documents of some rows of a block: Arrow's lists as they lie, NumPy's arrays in a copy.

    d: that of the queries, for rows that have no token to say it.
    """
    import pyarrow as pa
    from ray.data.block import BlockAccessor

    table = BlockAccessor.for_block(block).to_arrow()
    if column not in table.column_names:
        raise ValueError(
            f"column must be one of the dataset's, {', '.join(map(repr, table.column_names))}, got {column!r}"
        )
    rows = table[column].slice(first, stop - first)
    if isinstance(rows.type, pa.BaseExtensionType):
        return _corpus_of_arrays([x for chunk in rows.chunks for x in _arrays(chunk)], column)
    own, _ = check_type(pa, rows.type, len(rows))
    return Corpus.from_arrow(rows, d=None if own else d)


def _arrays(chunk: Any) -> Any:
    if hasattr(chunk, "to_numpy_ndarray"):  # Arrow's own type for tensors of one shape; others are Ray's
        return chunk.to_numpy_ndarray()
    return chunk.to_numpy(zero_copy_only=False)


def _corpus_of_arrays(documents: list[Any], column: str) -> Corpus:
    import numpy as np

    shapes = sorted({x.shape[1:] if x.ndim == 2 else x.shape for x in documents})
    if len(shapes) != 1 or documents[0].ndim != 2:
        raise ValueError(f"column {column!r} must hold [L, d] arrays of one d, got shapes [..., {shapes}]")
    offsets = np.cumsum([0, *map(len, documents)])
    return Corpus.from_numpy(np.concatenate(documents), offsets)
