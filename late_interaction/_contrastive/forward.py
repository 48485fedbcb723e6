"""The forward pass over one shard of documents, panel by panel, and running sums of the softmax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from late_interaction._contrastive import tail
from late_interaction._contrastive.blocks import panels
from late_interaction._contrastive.kept import KeptBlocks
from late_interaction._contrastive.problem import Grid, Problem
from late_interaction._contrastive.softmax import RunningSoftmax
from late_interaction._contrastive.tokens import Block, Tokens, even_blocks
from late_interaction.ops._library import operators as _ops

_OWN_BYTES = 16 << 20


class Taker(Protocol):
    """Takes the panels of a shard, one after another."""

    def take(self, p: Problem, logits: Tensor, rows: Block, run: list[Block]) -> None:
        """The logits of a block of queries with a run of blocks of documents."""


def score_shard(p: Problem, grid: Grid, to: Taker, kept: KeptBlocks | None = None) -> None:
    """Scores every query with every document of the shard, and keeps blocks for the backward."""
    runs = panels(grid.d_blocks, max((b - a for a, b in grid.q_blocks), default=0))
    for rows, queries in zip(grid.q_blocks, grid.q_parts, strict=True):
        first = 0
        for run in runs:
            documents = grid.d_parts[first : first + len(run)]
            first += len(run)
            blocks = list(zip(documents, run, strict=True))
            to.take(p, _panel(p, (queries, rows), blocks, kept), rows, run)


def _panel(
    p: Problem, row: tuple[Tokens, Block], run: list[tuple[Tokens, Block]], kept: KeptBlocks | None
) -> Tensor:
    """The logits of a block of queries with a run of blocks of documents."""
    queries, rows = row
    first, panel = run[0][1][0], None
    for part, (begin, end) in run:
        if kept is not None and kept.has_room(queries, part):
            scores, winners = p.kernels.scores_and_winners(queries, part)
            kept.keep(rows, (begin, end), scores, winners)
        else:
            scores = p.kernels.scores(queries, part)
        if len(run) == 1:
            return scores.div_(p.temperature) if kept is None else scores / p.temperature
        if panel is None:
            panel = scores.new_empty(scores.shape[0], run[-1][1][1] - first)
        torch.div(scores, p.temperature, out=panel[:, begin - first : end - first])
    assert panel is not None
    return panel


@dataclass
class SoftmaxPass:
    """What the forward of the cross entropy fills over a shard: sums of the queries' rows and of the
    documents' columns, and the list of pairs where one is wanted."""

    rows: RunningSoftmax
    columns: RunningSoftmax | None
    found: tail.PairList | None
    own: bool  # the documents are those that labels speak of
    # Logits of the labels, where pairs are listed. They are found behind the first panel's scores: a device
    # has these to do meanwhile.
    find_starts: Callable[[], tuple[Tensor, Tensor | None]] | None = None
    starts: tuple[Tensor, Tensor | None] | None = None
    holds: bool = False  # the one panel, until the sums over all shards are known
    held: tuple[Tensor, Block, list[Block]] | None = None

    def take(self, p: Problem, logits: Tensor, rows: Block, run: list[Block]) -> None:
        columns = (run[0][0], run[-1][1])
        self.rows.add(rows[0], logits)
        if self.own:
            p.labels.read(self.rows.target, logits, rows, columns)
        if self.columns is not None:
            self.columns.add(columns[0], logits.t())
            if self.own and p.column_labels is not None:
                p.column_labels.read(self.columns.target, logits.t(), columns, rows)
        if self.holds:
            self.held = logits, rows, run
        elif self.find_starts is not None:
            self.starts = self.find_starts() if self.starts is None else self.starts
            self._list(p, logits, rows, run, self.starts)

    def list_held(self, p: Problem) -> None:
        """Lists the pairs of the panel that was held, by the sums of all shards."""
        if self.held is not None:
            columns = None if self.columns is None else self.columns.target
            self._list(p, *self.held, (self.rows.target, columns))
            self.held = None

    def _list(
        self,
        p: Problem,
        logits: Tensor,
        rows: Block,
        run: list[Block],
        of_labels: tuple[Tensor, Tensor | None],
    ) -> None:
        if self.found is not None:
            at = (rows, (run[0][0], run[-1][1]))
            marks = tail.mark(p, logits, (self.rows, self.columns), of_labels, at, self.own)
            self.found.add_panel(marks, logits, rows, run)


def score_own(p: Problem, q: Tokens, h: Tokens, take: Callable[[int, Tensor], None]) -> None:
    """Hands on the logits of the queries' hard negatives: a block of queries at a time, by its first one."""
    for block in own_blocks(q, h, p.each):
        scores, _ = p.kernels.own_scores(q.part(block), h.part(own_part(block, p.each)), p.each)
        take(block[0], scores.div_(p.temperature))


def own_blocks(q: Tokens, h: Tokens, each: int) -> list[Block]:
    """Blocks of queries whose hard negatives take some 16 MiB."""
    return even_blocks(len(q), int(_OWN_BYTES / max(1.0, each * h.mean_bytes)))


def own_part(block: Block, each: int) -> Block:
    return block[0] * each, block[1] * each


def label_logits(p: Problem, grid: Grid, to: SoftmaxPass) -> tuple[Tensor, Tensor | None]:
    """The logits of queries with their labels, and of documents with theirs. They are part of every sum in
    the end, and known before it begins. For documents of another process they have been read already."""
    columns = to.columns.target if to.columns is not None else None
    if not to.own:
        return to.rows.target, columns
    logits = own_logits(p, grid, to.rows.target)
    if columns is not None and p.column_labels is not None:
        index = p.column_labels.index
        columns = logits if index is None else logits[index.clamp_min(0)].masked_fill(index < 0, float("nan"))
    return logits, columns


def own_logits(p: Problem, grid: Grid, like: Tensor) -> Tensor:
    """The logit of every query with the document that is its label; NaN for a query that is left out."""
    n = len(grid.q)
    logits = torch.full_like(like, float("nan"))
    if p.labels.index is None:
        n = min(n, len(grid.d))
    for block in even_blocks(n, max((b - a for a, b in grid.q_blocks), default=1)):
        part = slice(*block)
        index = None if p.labels.index is None else p.labels.index[part]
        scores = _scores_of_labels(p, grid, block, index)
        if index is not None:
            scores = scores.masked_fill(index < 0, float("nan"))
        logits[part] = scores / p.temperature
    return logits


def _scores_of_labels(p: Problem, grid: Grid, block: Block, index: Tensor | None) -> Tensor:
    """Scores of a block of queries with document ``index[i]`` each; None: with that of the same number."""
    q, d = grid.q.part(block), grid.d
    if index is None:
        d = d.part(block)
    else:
        index = index.clamp(0, len(d) - 1)
    if d.mask is None and q.mask is None and not p.kernels.normalize:
        q, d = q.as_packed(), grid.packed_d if index is not None else d.as_packed()
        rows = torch.arange(len(q), dtype=torch.int32, device=q.values.device)
        documents = rows if index is None else index.int()
        packed = (q.values, d.values, q.offsets, d.offsets, rows, documents, q.longest, p.kernels.precision)
        return _tensor(_ops.maxsim_pairs_packed.default(*packed))
    values, mask = d.values, d.mask
    if index is not None:
        values, mask = values[index], None if mask is None else mask[index]
    options = (p.kernels.normalize, p.kernels.precision, "auto", True)
    return _tensor(_ops.maxsim.default(q.values, values, q.mask, mask, *options))


def _tensor(x: Any) -> Tensor:
    found: Tensor = x
    return found
