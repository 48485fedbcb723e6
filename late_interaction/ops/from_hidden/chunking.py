"""How many documents a chunk of hidden states has, and how many splits the weight gradient."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch

# The share of the L2 cache that a chunk of projected tokens may fill, and the cache that a CPU has for it.
_FORWARD_SHARE, _BACKWARD_SHARE = 0.9, 0.7
_CPU_CACHE = 8 << 20
# The memory that a chunk of projected tokens may take; that converted hidden states may take; and that flags
# and norms of tokens, and winners, may take beside a chunk which lies in the memory of gradients.
_MOST_PROJECTED, _MOST_CONVERTED, _MOST_BESIDE = 56 << 20, 24 << 20, 7 << 20
# The tile that a block of wgrad_splitk_ owns, and the tokens that are worth a split of its sum.
_TILE_ROWS, _TILE_COLUMNS, _SPLIT_TOKENS = 128, 256, 256
# The rows of a tile of project_rows_, the query tokens of a tile of MaxSim's kernel; and the products that
# both could compute while they start and end.
_PROJECTED_TILE, _SCORED_TILE, _LAUNCH_PRODUCTS = 384, 256, 1 << 18
# The query tokens, in all, that project_scores takes.
SCORED_ROWS = 64


class Sizes(NamedTuple):
    """Sizes of a call."""

    Nd: int
    Ld: int
    d: int
    d_model: int
    itemsize: int  # bytes of an element that multiplies
    query_tokens: int

    def fit_wgrad_kernel(self) -> bool:
        """Tell whether wgrad_splitk_ takes them: half precision in whole 16-byte vectors."""
        return self.itemsize == 2 and self.d % 8 == 0 and self.d_model % 8 == 0


class Gpu(NamedTuple):
    """Describe a GPU by what the sizes of chunks depend on."""

    l2_bytes: int
    sm_count: int


@cache
def gpu_of(index: int | None) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(properties.L2_cache_size, properties.multi_processor_count)


def documents_that_fit(Nd: int, token_bytes: int, Ld: int, memory: float) -> int:
    """At least one."""
    return max(1, min(Nd, int(memory / max(1, Ld * token_bytes))))


def documents_at_a_time(Nd: int, token_bytes: int, Ld: int, memory: float) -> int:
    """Count the documents that fit, in chunks of equal size."""
    most = documents_that_fit(Nd, token_bytes, Ld, memory)
    return -(-Nd // -(-Nd // most)) if Nd else 1


def converted_bytes(in_place: bool, wgrad_kernel: bool, itemsize: int, backward: bool) -> int:
    """Bytes of an element of converted hidden states; 0 where the kernels read them in place."""
    if in_place and (wgrad_kernel or not backward):
        return 0
    return max(itemsize, 4) if backward else itemsize


def chunk_size(sizes: Sizes, converted: int, gpu: Gpu | None, backward: bool) -> int:
    """Documents of a chunk. converted: from converted_bytes. gpu: None for the CPU."""
    Nd, Ld, d, d_model, itemsize, query_tokens = sizes
    cache_bytes = _CPU_CACHE if gpu is None else gpu.l2_bytes
    memory = min(_MOST_PROJECTED, cache_bytes * (_BACKWARD_SHARE if backward else _FORWARD_SHARE))
    if gpu and Nd and itemsize == 2 and not (backward or converted):
        most = documents_that_fit(Nd, d * itemsize, Ld, memory)
        return documents_in_waves(Nd, Ld, d_model, query_tokens, most, gpu.sm_count)
    size = documents_at_a_time(Nd, d * itemsize, Ld, memory)
    return min(size, documents_at_a_time(Nd, d_model * converted, Ld, _MOST_CONVERTED)) if converted else size


@lru_cache
def documents_in_waves(Nd: int, Ld: int, d_model: int, query_tokens: int, most: int, sm_count: int) -> int:
    """Documents of a forward's chunk, `most` at most.

    The kernels that project and score deal tiles to the multiprocessors: a chunk takes as long as a
    multiprocessor with one tile more than the others.
    """

    def work(documents: int) -> int:  # products for each dim of an embedding
        if documents == 0:
            return 0
        projected = -(-documents * Ld // (sm_count * _PROJECTED_TILE)) * _PROJECTED_TILE * d_model
        tiles = -(-query_tokens // _SCORED_TILE)
        scored = -(-documents * tiles // sm_count) * min(query_tokens, _SCORED_TILE) * Ld
        return projected + scored + _LAUNCH_PRODUCTS

    if most >= Nd:
        return Nd
    return min(range(most, most // 2, -max(1, most // 64)), key=lambda n: Nd // n * work(n) + work(Nd % n))


def documents_that_alias(left: int, Ld: int, d: int, d_model: int, query_tokens: int) -> int:
    """Count the documents left whose projected tokens fit in the memory of the others' gradients.

    They are to take little memory beside it.
    """
    return min(left * d_model // (d + d_model), _MOST_BESIDE // max(1, 5 * Ld + 4 * query_tokens))


def planned_chunks(sizes: Sizes, gpu: Gpu) -> dict[str, int]:
    """Documents of the largest chunk, by direction, of hidden states that are read in place."""
    kernel = sizes.fit_wgrad_kernel()
    forward, backward = (
        chunk_size(sizes, converted_bytes(True, kernel, sizes.itemsize, backward), gpu, backward)
        for backward in (False, True)
    )
    Nd, Ld, d, d_model, _, query_tokens = sizes
    if kernel and backward < Nd:
        backward = max(backward, documents_that_alias(Nd, Ld, d, d_model, query_tokens))
    return {"forward": forward, "backward": backward}


def weight_grad_splits(d: int, d_model: int, tokens: int, sm_count: int) -> int:
    """Count the splits that give every multiprocessor a tile, of a few hundred tokens at least."""
    tiles = -(-d // _TILE_ROWS) * -(-d_model // _TILE_COLUMNS)
    return max(1, min(sm_count // tiles, max(1, tokens // _SPLIT_TOKENS)))
