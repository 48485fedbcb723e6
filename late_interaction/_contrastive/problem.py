"""What one call of the loss computes, as its two passes need it."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from late_interaction._contrastive.blocks import Kernels, block_sizes, panels
from late_interaction._contrastive.labels import Labels
from late_interaction._contrastive.tokens import Block, Tokens

# Bytes that scores and winners of a whole batch may take to be kept from the forward to the backward.
KEPT_BYTES = {"cuda": 512 << 20, "cpu": 512 << 20}
# The same on a GPU where the backward takes listed pairs: from there on that is faster than one of all pairs.
KEPT_BYTES_WITH_LIST = 64 << 20
# Bytes that the list of pairs may take from the forward to the backward.
LIST_BYTES = 32 << 20


@dataclass(frozen=True)
class Problem:
    """The options of a call, and its sizes over all shards of documents."""

    kernels: Kernels
    temperature: Tensor | float
    labels: Labels  # of the queries, among the documents of this process
    column_labels: Labels | None  # of the documents, among the queries, where the loss is symmetric
    smoothing: float
    tail: float
    classes: int  # documents of all shards, and hard negatives of a query
    column_classes: int  # queries of all processes
    each: int  # hard negatives of a query
    needs_moment: bool  # the temperature has a gradient

    @property
    def symmetric(self) -> bool:
        return self.column_labels is not None

    def with_labels(self, labels: Labels) -> "Problem":
        return replace(self, labels=labels)


@dataclass(frozen=True)
class Grid:
    """The blocks of queries and of a shard of documents."""

    q: Tokens
    d: Tokens
    q_blocks: list[Block]
    d_blocks: list[Block]
    q_parts: list[Tokens]
    d_parts: list[Tokens]

    @staticmethod
    def of(kernels: Kernels, q: Tokens, d: Tokens) -> "Grid":
        queries, documents = block_sizes(kernels, q, d)
        blocks = q.blocks(queries), d.blocks(documents)
        parts = [[x.part(block) for block in found] for x, found in zip((q, d), blocks, strict=True)]
        return Grid(q, d, *blocks, *parts)

    @property
    def one_panel(self) -> bool:
        """Whether all pairs pass as one panel."""
        queries = self.q_blocks[-1][1] - self.q_blocks[-1][0] if self.q_blocks else 0
        return len(self.q_blocks) == 1 and len(panels(self.d_blocks, queries)) == 1

    @cached_property
    def packed_q(self) -> Tokens:
        return self.q.as_packed()

    @cached_property
    def packed_d(self) -> Tokens:
        return self.d.as_packed()


def sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
