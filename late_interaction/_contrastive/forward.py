"""The forward pass over one shard of documents, panel by panel; hard negatives; and scores of labels."""

from collections.abc import Callable

import torch
from torch import Tensor

from late_interaction._contrastive.blocks import Grid, KeptBlocks
from late_interaction._contrastive.call import Call
from late_interaction._contrastive.sequences import Block, as_packed, even_blocks, longest, mean_bytes, part
from late_interaction.ops._library import operators as _ops
from late_interaction.tokens import Tokens

_OWN_BYTES = 16 << 20

# Takes a panel: the logits of a block of queries with a run of blocks of documents.
Taker = Callable[[Tensor, Block, list[Block]], None]


def score_shard(call: Call, grid: Grid, take: Taker, kept: KeptBlocks | None) -> None:
    """Score every query with every document of the shard, a panel at a time; keep blocks for the backward."""
    for rows, queries in zip(grid.q_blocks, grid.q_parts, strict=True):
        first = 0
        for run in grid.runs:
            documents = grid.d_parts[first : first + len(run)]
            first += len(run)
            take(_panel(call, (queries, rows), list(zip(documents, run, strict=True)), kept), rows, run)


def _panel(
    call: Call, row: tuple[Tokens, Block], run: list[tuple[Tokens, Block]], kept: KeptBlocks | None
) -> Tensor:
    (queries, rows), T = row, call.temperature
    first, panel = run[0][1][0], None
    for documents, (begin, end) in run:
        if kept is not None and kept.has_room(queries, documents):
            scores, winners = call.kernels.scores_and_winners(queries, documents)
            kept.keep(rows, (begin, end), scores, winners)
        else:
            scores = call.kernels.scores(queries, documents)
        if len(run) == 1:
            return scores.div_(T) if kept is None else scores / T
        if panel is None:
            panel = scores.new_empty(scores.shape[0], run[-1][1][1] - first)
        torch.div(scores, T, out=panel[:, begin - first : end - first])
    assert panel is not None
    return panel


def score_own(call: Call, take: Callable[[Tensor, Block], None]) -> None:
    """Score the queries' hard negatives, a block of queries at a time."""
    if call.h is not None and call.each:
        for block, queries, negatives, _ in own_blocks(call):
            scores, _ = call.kernels.own_scores(queries, negatives, call.each)
            take(call.candidates.of_own(scores.div_(call.temperature), block), block)


def own_blocks(call: Call) -> list[tuple[Block, Tokens, Tokens, Block]]:
    """Split the queries and their hard negatives into blocks with about 16 MiB of hard negatives."""
    assert call.h is not None
    found = []
    for block in even_blocks(len(call.q), int(_OWN_BYTES / max(1.0, call.each * mean_bytes(call.h)))):
        own = block[0] * call.each, block[1] * call.each
        found.append((block, part(call.q, block), part(call.h, own), own))
    return found


def label_logits(call: Call, grid: Grid, like: Tensor) -> Tensor:
    """Return the logits of all queries with their labels, ``[queries, P]``, NaN where there is no label."""
    n, index = len(grid.q), call.labels.index
    logits = torch.full_like(like, torch.nan)
    for block in even_blocks(n if index is not None else min(n, len(grid.d)), max(grid.most_queries, 1)):
        for place in range(call.labels.most):
            own = None if index is None else index[slice(*block), place]
            scores = _scores_of_labels(call, grid, block, own)
            if own is not None:
                scores = scores.masked_fill(own < 0, torch.nan)
            logits[slice(*block), place] = scores / call.temperature
    return logits


def _scores_of_labels(call: Call, grid: Grid, block: Block, index: Tensor | None) -> Tensor:
    """Score query ``i`` of a block with document ``index[i]``; None: with the document of its own number."""
    kernels, q, d = call.kernels, part(grid.q, block), grid.d
    if index is None:
        d = part(d, block)
    else:
        index = index.clamp(0, len(d) - 1)
    if d.mask is None and q.mask is None and not kernels.normalize:
        q, d = as_packed(q), grid.packed[1] if index is not None else as_packed(d)
        rows = torch.arange(len(q), dtype=torch.int32, device=q.device)
        documents = rows if index is None else index.int()
        packed = (q.values, d.values, q.offsets, d.offsets, rows, documents, longest(q), kernels.precision)
        return _ops.maxsim_pairs_packed.default(*packed)
    values, mask = d.values, d.mask
    if index is not None:
        values, mask = values[index], None if mask is None else mask[index]
    options = (kernels.normalize, kernels.precision, "auto", True)
    return _ops.maxsim.default(q.values, values, q.mask, mask, *options)
