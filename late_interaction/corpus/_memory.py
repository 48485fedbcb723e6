"""Shards over memory that is there already: PyTorch's and NumPy's."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, no_tensor, shape_of
from late_interaction._checks.tensors import check_integers, check_not_meta, check_rising
from late_interaction.codes import Codes
from late_interaction.corpus import _shards, _tokens
from late_interaction.corpus._ids import check_ids
from late_interaction.corpus._intake import Intake
from late_interaction.corpus._options import SHARD_BYTES


def from_array(name: str, array: Any) -> Tensor:
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy.ndarray, got {type(array).__name__}")
    wanted = ("float32", "float16") if name == "tokens" else ("int32", "int64")
    if array.dtype.name not in wanted:
        raise TypeError(f"{name} must be {' or '.join(wanted)}, got {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be in C order, got strides {array.strides}: numpy.ascontiguousarray copies"
        )
    with warnings.catch_warnings():
        # NumPy arrays may be read-only, as those of mapped files are. Nothing here writes to them.
        warnings.filterwarnings("ignore", ".*not writable", UserWarning)
        return torch.from_numpy(array)


def packed_shard(tokens: Tensor, offsets: Tensor, ids: Sequence[str] | None) -> _shards.Shard:
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a torch.Tensor, got {no_tensor('tokens', tokens)}")
    if tokens.dtype not in _tokens.FLOATS:
        raise TypeError(f"tokens must be of one of {', '.join(_tokens.NAMES)}, got {tokens.dtype}")
    return with_ids([_shards.Shard(tokens.detach(), _checked_offsets(tokens, offsets, "d"))], ids)[0]


def shard_of_codes(codes: Codes, ids: Sequence[str] | None) -> _shards.Shard:
    if not isinstance(codes, Codes):
        raise TypeError(f"codes must be late_interaction.Codes, got {abbreviate(codes)}")
    codec = _tokens.check_codec(codes.codec, "codes")
    packed = codes.pack()
    offsets = _checked_offsets(packed.values, packed.offsets, "w")
    beside = packed.scales if packed.centroids is None else packed.centroids
    assert beside is not None
    return with_ids([_shards.Shard(packed.values, offsets, beside.contiguous(), None, codec)], ids)[0]


def _checked_offsets(tokens: Tensor, offsets: Any, width: str) -> Tensor:
    """Offsets on the CPU, for tokens that are rows of one block of memory."""
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens must be [tokens, {width}] with {width} of at least 1, got {shape_of(tokens)}"
        )
    if not tokens.is_contiguous():
        raise ValueError(
            f"tokens must be contiguous, got strides {tokens.stride()}: tokens.contiguous() copies"
        )
    check_not_meta("tokens", tokens)
    if isinstance(offsets, Tensor):
        check_not_meta("offsets", offsets)
        offsets = offsets.cpu()
    check_integers("offsets", offsets, 1, "[documents + 1]", "the host", torch.device("cpu"))
    if not len(offsets):
        raise ValueError("offsets must be [documents + 1], got [0]")
    check_rising("offsets", offsets, tokens.shape[0])
    return offsets


def with_ids(shards: list[_shards.Shard], ids: Sequence[str] | None) -> list[_shards.Shard]:
    if ids is None:
        return shards
    check_ids(ids, sum(shard.documents for shard in shards))
    ends = list(accumulate(shard.documents for shard in shards))
    return [
        replace(shard, ids=list(ids[end - shard.documents : end]))
        for shard, end in zip(shards, ends, strict=True)
    ]


class MemoryWriter:
    """Changes documents in memory: makes the shards of a corpus that takes the place of the one before.

    Attributes:
        shards: of that corpus.
        blocks: of the one before.
        intake: what checks documents, and knows their ids.
    """

    def __init__(self, documents: Any) -> None:
        self.blocks = documents.shards
        self.shards: list[_shards.Shard] = list(documents.shards)
        codec = None if documents.codec is None else documents.codec.to("cpu")
        stored = _tokens.Stored(documents.d, documents.dtype, codec)
        columns = any(shard.columns is not None for shard in self.shards)
        has: dict[str, bool | None] = {"ids": None, "columns": None}
        if len(documents):
            has = {"ids": documents.ids is not None, "columns": columns}
        ids = {x: i for i, x in enumerate(documents.ids or ())}
        self.intake = Intake(stored, documents.normalized, self.shards, has, ids)

    def write(self, block: _shards.Shard) -> None:
        device = self.blocks[0].tokens.device if self.blocks else torch.device("cpu")
        beside = None if block.beside is None else block.beside.to(device)
        self.shards.append(replace(block, tokens=block.tokens.to(device), beside=beside).compact())

    def delete(self, numbers: list[int]) -> None:
        dead = torch.zeros(sum(x.documents for x in self.shards), dtype=torch.bool, device="cpu")
        dead[numbers] = True
        self.shards = _shards.without(self.shards, dead)

    def numbers_at(self, indices: Tensor, _: object) -> list[int]:
        """Return indices: here they are the numbers."""
        return indices.tolist()

    def commit(self) -> None:
        """Do nothing: the shards are those of the corpus to be."""

    def compact(self) -> None:
        """Copy shards that hold deleted documents to memory without them, small ones joined."""
        self.shards = [shard for shard in self.shards if shard.documents]
        whole = [shard.starts is None for shard in self.shards]
        kept = _shards.to_keep(self.shards, whole, self.intake.stored.row_bytes, SHARD_BYTES)
        groups = groupby(zip(self.shards, kept, strict=True), key=itemgetter(1))
        runs = ((keep, [shard for shard, _ in run]) for keep, run in groups)
        self.shards = [x for keep, run in runs for x in (run if keep else [_shards.joined(run)])]
