"""Panels of weights that come straight from the product of queries and documents, without scores in memory.

Weights lack the scale of their rows, ``factor / sum`` of the softmax, which is known when a panel is done.
The gradient of the queries is multiplied by it, and so are the queries before they multiply the weights.
"""

import torch
from torch import Tensor

from late_interaction._contrastive.panels import Batch, Sums
from late_interaction._contrastive.sequences import Block
from late_interaction.ops._library import operators as _ops

_WEIGHT_BYTES, _LEAST_ROWS = 256 << 20, 1024  # of a panel of weights
_TILE = 256  # panels have a multiple of this many rows
_LEAST_PAIRS = 3 << 22  # below, panels of scores are as fast


def takes(batch: Batch) -> bool:
    """Tell whether the batch goes this way: bf16 on compute capability 9.0, without smoothing, and large."""
    if batch.call.smoothing or not batch.Q.is_cuda or len(batch.Q) * len(batch.D) < _LEAST_PAIRS:
        return False
    return _ops.can_softmax_product_rows.default(batch.Q, batch.D)


def add_panels(
    batch: Batch, needs: tuple[bool, ...], factor: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Sums]:
    """Return the sums of rows, as the operator returns them, and the gradients of Q and D."""
    panels = _blocks(batch)
    sums, of_rows = Sums.of(batch, needs, dtype), []
    weights = batch.buffer(panels, batch.Q.dtype)
    rows = batch.Q.new_empty((panels[0][1], batch.Q.shape[1])) if needs[1] else None
    for begin, end in panels:
        panel, n = slice(begin, end), end - begin
        q, given = batch.Q[panel], (*batch.labels((begin, end)), factor[panel])
        to = weights[:n, : len(batch.D)]
        scaled = None if rows is None else rows[:n]
        found = _ops.softmax_product_rows_.default(q, batch.D, batch.inverse, *given, to, scaled)
        of_rows.append(found)
        sums.add(batch, (begin, end), to, (found[5], scaled))
    return of_rows[0] if len(of_rows) == 1 else torch.cat(of_rows, 1), sums


def _blocks(batch: Batch) -> list[Block]:
    """Split the queries into panels of equal height, in whole tiles."""
    queries = len(batch.Q)
    most = max(_LEAST_ROWS, _WEIGHT_BYTES // (batch.Q.itemsize * batch.pitch()))
    size = -(-queries // -(-queries // most))
    size = -(-size // _TILE) * _TILE
    return [(begin, min(begin + size, queries)) for begin in range(0, queries, size)]
