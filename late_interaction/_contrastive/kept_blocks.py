"""Scores and winners of the blocks that are kept for the backward, if a batch is too large to keep all.

The backward takes the blocks that were kept, and computes the others again. Both give the same bits, so what
is kept decides how long a step takes and not what it returns.
"""

from dataclasses import dataclass, field

from torch import Tensor

from late_interaction._contrastive.kernels import Kernels
from late_interaction._contrastive.sequences import Block
from late_interaction._host_memory import available_bytes
from late_interaction.ops.winners import packed_winner_dtype, winner_dtype
from late_interaction.tokens import Tokens

_Key = tuple[int, Block, Block]  # shard, queries, documents
_AHEAD = 64 << 20  # bytes after which memory is looked at again, which takes 0.3 ms


@dataclass
class KeptBlocks:
    """Blocks in the order of the forward, as long as there is room for them."""

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
