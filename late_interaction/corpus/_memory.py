"""Shards over memory that is there already: PyTorch's and NumPy's."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from late_interaction._checks.messages import abbreviate, no_tensor, shape_of
from late_interaction._checks.tensors import check_integers, check_not_meta, check_rising
from late_interaction.codes import Codes
from late_interaction.corpus import _shards, _tokens
from late_interaction.corpus._ids import check_ids


def from_array(name: str, array: Any) -> Tensor:
    """View the memory of a NumPy array as a tensor."""
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
    shard = _shards.Shard(tokens.detach(), _checked_offsets(tokens, offsets, "d"))
    return shard if ids is None else with_ids([shard], ids)[0]


def shard_of_codes(codes: Codes, ids: Sequence[str] | None) -> _shards.Shard:
    if not isinstance(codes, Codes):
        raise TypeError(f"codes must be late_interaction.Codes, got {abbreviate(codes)}")
    codec = _tokens.check_codec(codes.codec, "codes")
    packed = codes.pack()
    offsets = _checked_offsets(packed.values, packed.offsets, "w")
    beside = packed.scales if packed.centroids is None else packed.centroids
    assert beside is not None
    shard = _shards.Shard(packed.values, offsets, beside.contiguous(), None, codec)
    return shard if ids is None else with_ids([shard], ids)[0]


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
    checked: Tensor = offsets
    return checked


def with_ids(shards: list[_shards.Shard], ids: Sequence[str]) -> list[_shards.Shard]:
    """Share these ids out among the shards."""
    check_ids(ids, sum(shard.documents for shard in shards))
    ends = list(accumulate(shard.documents for shard in shards))
    return [
        replace(shard, ids=list(ids[end - shard.documents : end]))
        for shard, end in zip(shards, ends, strict=True)
    ]
