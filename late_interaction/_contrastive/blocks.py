"""Blocks of queries and documents: how large they are, and which of them are kept for the backward.

A block's embeddings stay in the L2 cache (or a CPU's last one) while its winners gather from them, so the
cost of a pair does not grow with the batch.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from late_interaction._contrastive.kernels import Kernels
from late_interaction._contrastive.sequences import Block, as_packed, blocks_of, longest, mean_bytes, part
from late_interaction._host_memory import available_bytes
from late_interaction.ops.winners import packed_winner_dtype, winner_dtype
from late_interaction.tokens import Tokens

# Bytes of a block: its queries, its documents, and what is kept of its pairs (winners, scores).
_CUDA_SHARES = (32 << 20, 12 << 20, 72 << 20)
_CPU_SHARES = (4 << 20, 12 << 20, 32 << 20)
_SHARED_TOKENS = 180  # up to which two documents share a thread block of grad_D's kernel
_LEAST = 16  # sequences of a block, if there are as many
_MATRIX_BLOCK = {"cuda": (4096, 2048), "cpu": (1024, 1024)}
_PANEL = 4 << 20  # logits of a panel, at most
_WINNER_BYTES = 32 << 20  # of one call on listed pairs


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
    def of(kernels: Kernels, q: Tokens, d: Tokens, together: int = 1) -> "Grid":
        """Split both sides into blocks, which end where a group of ``together`` sequences does."""
        q_blocks, d_blocks = (
            whole_groups(blocks_of(x, most), together)
            for x, most in zip((q, d), block_sizes(kernels, q, d), strict=True)
        )
        q_parts, d_parts = [part(q, block) for block in q_blocks], [part(d, block) for block in d_blocks]
        return Grid(q, d, q_blocks, d_blocks, q_parts, d_parts)

    @property
    def most_queries(self) -> int:
        return max((end - begin for begin, end in self.q_blocks), default=0)

    @cached_property
    def runs(self) -> list[list[Block]]:
        """Group the blocks of documents into runs, each with the columns of one panel."""
        return panels(self.d_blocks, self.most_queries)

    @cached_property
    def packed(self) -> tuple[Tokens, Tokens]:
        """Return both sides packed, as the operators on listed pairs take them."""
        return as_packed(self.q), as_packed(self.d)

    @cached_property
    def pairs_of_call(self) -> int:
        """Return how many listed pairs one call takes, so that their winners stay small."""
        return max(1, _WINNER_BYTES // max(1, 4 * longest(self.q)))


def block_sizes(kernels: Kernels, q: Tokens, d: Tokens) -> Block:
    """Choose how many queries and documents a block has."""
    on_gpu = q.values.is_cuda
    if kernels.way == "matrix":
        return _MATRIX_BLOCK["cuda" if on_gpu else "cpu"]
    of_queries, of_documents, of_pairs = _CUDA_SHARES if on_gpu else _CPU_SHARES
    queries = max(_LEAST, int(of_queries / max(mean_bytes(q), 1)))
    documents = max(_LEAST, int(of_documents / max(mean_bytes(d), 1)))
    queries = min(queries, max(len(q), 1))
    documents = min(documents, max(len(d), 1))
    pair = 2 * longest(q) + 8
    documents = min(documents, max(_LEAST, int(of_pairs / (queries * pair))))
    if on_gpu:
        documents = _whole_wave(documents, d)
    queries = min(queries, max(_LEAST, int(of_pairs / (documents * pair))))
    return queries, documents


def _whole_wave(documents: int, d: Tokens) -> int:
    """Take fewer documents where the last wave of grad_D's kernel would not fill the GPU.

    A thread block of it takes two documents, or a longer one (``csrc/plan/backward/tiled_grad_d.h``).
    """
    processors: int = torch.cuda.get_device_properties(d.values.device).multi_processor_count
    wave = processors * (2 if longest(d) <= _SHARED_TOKENS else 1)
    return documents if documents < wave else documents // wave * wave // 32 * 32


def whole_groups(blocks: list[Block], size: int) -> list[Block]:
    """Extend blocks to the ends of groups of ``size`` sequences, of which the last may be smaller."""
    if size == 1 or not blocks:
        return blocks
    last = blocks[-1][1]
    ends = sorted({min(-(-end // size) * size, last) for _, end in blocks})
    return list(pairwise([0, *ends]))


def panels(blocks: list[Block], queries: int) -> list[list[Block]]:
    """Group blocks of documents into runs, whose logits with so many queries are a panel of bounded size."""
    most = max(1, _PANEL // max(queries, 1))
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and block[1] - runs[-1][0][0] <= most:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


_Key = tuple[int, Block, Block]  # shard, queries, documents
_AHEAD = 64 << 20  # bytes after which memory is looked at again, which takes 0.3 ms


@dataclass
class KeptBlocks:
    """Scores and winners of blocks, in the order of the forward, as long as there is room for them.

    The backward takes the blocks that were kept, and computes the others again. Both give the same bits, so
    what is kept decides how long a step takes and not what it returns.
    """

    granted: int  # bytes that they may take
    by_memory: bool  # they may take more while as much memory remains available as they take
    taken: int = 0
    full: bool = False
    blocks: dict[_Key, tuple[Tensor, Tensor]] = field(default_factory=dict)
    shard: int = 0  # of the blocks that are kept or read now

    @staticmethod
    def of(kernels: Kernels, kept_bytes: int | None, device_type: str) -> "KeptBlocks | None":
        """Grant ``kept_bytes`` to blocks, or return None: nothing is kept.

        Single tokens have no winners. A GPU's memory is left to the caller, who may grant some of it.
        """
        if kernels.way == "matrix" or (kept_bytes is None and device_type != "cpu"):
            return None
        return KeptBlocks(kept_bytes or 0, kept_bytes is None)

    def of_shard(self, shard: int) -> "KeptBlocks":
        """Keep and read blocks of this shard from now on."""
        self.shard = shard
        return self

    def has_room(self, q: Tokens, d: Tokens) -> bool:
        """Tell whether the block of these queries and documents may be kept. Once one may not, none may."""
        if not self.full:
            need = self.taken + block_bytes(q, d)
            self.full = need > self.granted and not (self.by_memory and self._grant(need))
        return not self.full

    def _grant(self, need: int) -> bool:
        """Grant ``need`` bytes to all blocks, and some more, if there is memory for that."""
        free = available_bytes() + self.taken
        for wanted in (need + _AHEAD, need):
            if 2 * wanted <= free:
                self.granted = wanted
                return True
        return False

    def keep(self, rows: Block, columns: Block, scores: Tensor, winners: Tensor) -> None:
        self.taken += scores.nbytes + winners.nbytes
        self.blocks[self.shard, rows, columns] = scores, winners

    def get(self, rows: Block, columns: Block) -> tuple[Tensor, Tensor] | None:
        return self.blocks.get((self.shard, rows, columns))

    # ---- for autograd, which frees tensors that it saves when the backward is over ----

    def tensors(self) -> list[Tensor]:
        return [x for pair in self.blocks.values() for x in pair]

    def keys(self) -> list[_Key]:
        return list(self.blocks)

    @staticmethod
    def from_saved(keys: list[_Key], tensors: list[Tensor]) -> "KeptBlocks":
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return KeptBlocks(0, False, full=True, blocks=dict(zip(keys, pairs, strict=True)))


def block_bytes(q: Tokens, d: Tokens) -> int:
    """Return the bytes that the scores and winners of every query with every document take."""
    query_tokens = q.values.numel() // max(q.values.shape[-1], 1)
    score = 8 if q.values.itemsize == 8 else 4
    winner = packed_winner_dtype(d.values.shape[0]) if d.is_packed else winner_dtype(d.values.shape[1])
    return len(d) * (len(q) * score + query_tokens * winner.itemsize)
