"""The forward pass over one shard of documents: running sums of the softmax, block by block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from late_interaction._contrastive import tail
from late_interaction._contrastive.blocks import panels
from late_interaction._contrastive.problem import Grid, Problem
from late_interaction._contrastive.softmax import RunningSoftmax
from late_interaction._contrastive.tokens import Block, Tokens, even_blocks

_OWN_BYTES = 16 << 20


@dataclass
class Pass:
    """What the forward over a shard fills: sums of the queries' rows and of the documents' columns, and the
    list of pairs where one is wanted."""

    rows: RunningSoftmax
    columns: RunningSoftmax | None
    found: tail.PairList | None
    own: bool  # the documents are those that labels speak of


def score_shard(p: Problem, grid: Grid, to: Pass) -> None:
    """Scores every query with every document of the shard."""
    starts = _label_logits(p, grid, to) if to.found is not None else None
    runs = panels(grid.d_blocks, max((b - a for a, b in grid.q_blocks), default=0))
    for rows, queries in zip(grid.q_blocks, grid.q_parts, strict=True):
        first = 0
        for run in runs:
            documents = grid.d_parts[first : first + len(run)]
            first += len(run)
            logits = _panel(p, queries, documents, run)
            _update(p, logits, (rows, run), to, starts)


def _panel(p: Problem, queries: Tokens, documents: list[Tokens], run: list[Block]) -> Tensor:
    """The logits of a block of queries with a run of blocks of documents."""
    panel: Tensor | None = None
    for part, (begin, end) in zip(documents, run, strict=True):
        scores = p.kernels.scores(queries, part)
        if len(run) == 1:
            return scores.div_(p.temperature)
        if panel is None:
            panel = scores.new_empty(scores.shape[0], run[-1][1] - run[0][0])
        torch.div(scores, p.temperature, out=panel[:, begin - run[0][0] : end - run[0][0]])
    assert panel is not None
    return panel


def _update(
    p: Problem,
    logits: Tensor,
    at: tuple[Block, list[Block]],
    to: Pass,
    starts: tuple[Tensor, Tensor | None] | None,
) -> None:
    rows, run = at
    columns = (run[0][0], run[-1][1])
    to.rows.add(rows[0], logits)
    if to.own:
        p.labels.read(to.rows.target, logits, rows, columns)
    if to.columns is not None:
        to.columns.add(columns[0], logits.t())
        if to.own and p.column_labels is not None:
            p.column_labels.read(to.columns.target, logits.t(), columns, rows)
    if to.found is not None and starts is not None:
        marks = tail.mark(p, logits, (to.rows, to.columns), starts, (rows, columns), to.own)
        to.found.add_panel(marks, logits, rows, run)


def score_own(p: Problem, q: Tokens, h: Tokens, rows: RunningSoftmax) -> None:
    """Adds the hard negatives of the queries to the sums of their rows."""
    for block in own_blocks(q, h, p.each):
        scores, _ = p.kernels.own_scores(q.part(block), h.part(own_part(block, p.each)), p.each)
        rows.add(block[0], scores.div_(p.temperature))


def own_blocks(q: Tokens, h: Tokens, each: int) -> list[Block]:
    """Blocks of queries whose hard negatives take some 16 MiB."""
    return even_blocks(len(q), int(_OWN_BYTES / max(1.0, each * h.mean_bytes)))


def own_part(block: Block, each: int) -> Block:
    return block[0] * each, block[1] * each


def _label_logits(p: Problem, grid: Grid, to: Pass) -> tuple[Tensor, Tensor | None]:
    """The logits of queries with their labels, and of documents with theirs. They are part of every sum in
    the end, and known before it begins. For documents of another process they have been read already."""
    columns = to.columns.target if to.columns is not None else None
    if not to.own:
        return to.rows.target, columns
    n = len(grid.q)
    logits = torch.full_like(to.rows.target, float("nan"))
    if p.labels.index is None:
        n = min(n, len(grid.d))
    for block in even_blocks(n, max((b - a for a, b in grid.q_blocks), default=1)):
        part = slice(*block)
        q, index = grid.packed_q.part(block), p.labels.index
        if index is None:
            documents = torch.arange(len(q), device=logits.device)
            scores = _listed(p, q, grid.packed_d.part(block), documents)
        else:
            scores = _listed(p, q, grid.packed_d, index[part].clamp(0, len(grid.d) - 1))
            scores = scores.masked_fill(index[part] < 0, float("nan"))
        logits[part] = scores / p.temperature
    if columns is not None and p.column_labels is not None:
        index = p.column_labels.index
        columns = logits if index is None else logits[index.clamp_min(0)].masked_fill(index < 0, float("nan"))
    return logits, columns


def _listed(p: Problem, q: Tokens, d: Tokens, documents: Tensor) -> Tensor:
    """Scores of query ``i`` with document ``documents[i]``, of packed tokens."""
    rows = torch.arange(len(q), dtype=torch.int32, device=q.values.device)
    args = (q.values, d.values, q.offsets, d.offsets, rows, documents.int(), q.longest, p.kernels.precision)
    scores: Tensor = torch.ops.late_interaction.maxsim_pairs_packed.default(*args)
    return scores
