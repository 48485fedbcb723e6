"""Shards over the memory of Arrow arrays."""

from itertools import accumulate
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from late_interaction._checks.options import check_positive
from late_interaction.corpus._columns import import_pyarrow
from late_interaction.corpus._shards import Shard


def shards_of(documents: Any, d: int | None, first_row: int = 0) -> tuple[list[Shard], int]:
    """Make a shard for each chunk of a column, and find d. Messages count rows from first_row."""
    pa = import_pyarrow()
    if not isinstance(documents, (pa.Array, pa.ChunkedArray)):
        raise TypeError(
            f"documents must be a pyarrow.Array or pyarrow.ChunkedArray, got {type(documents).__name__}"
        )
    if d is not None:
        check_positive("d", d)
    own, dtype = check_type(pa, documents.type, len(documents))
    if own is not None and d is not None and own != d:
        raise ValueError(f"d must be that of the lists, {own}, or None, got {d}")
    d = own or d
    chunks = documents.chunks if isinstance(documents, pa.ChunkedArray) else [documents]
    rows = accumulate(map(len, chunks), initial=first_row)
    if d is None:
        d = find_d(chunks) if len(documents) else 0
    filled = [_shard(chunk, row, d, dtype) for chunk, row in zip(chunks, rows, strict=False) if len(chunk)]
    if not filled:
        none = torch.zeros(1, dtype=torch.int64, device="cpu")
        filled = [Shard(torch.empty(0, d, dtype=dtype, device="cpu"), none)]
    return filled, d


def check_type(pa: Any, found: Any, rows: int) -> tuple[int | None, torch.dtype]:
    """Return the d of a column's type, if that says it, and the dtype of its values.

    A column without rows may have no type.
    """
    if not rows and pa.types.is_null(found):
        return None, torch.float32
    lists = (pa.types.is_list, pa.types.is_large_list)
    if any(is_list(found) for is_list in lists):
        inner = found.value_type
        fixed = pa.types.is_fixed_size_list(inner)
        if fixed or any(is_list(inner) for is_list in lists):
            dtypes = {pa.float32(): torch.float32, pa.float16(): torch.float16}
            if inner.value_type in dtypes:
                return (inner.list_size if fixed else None), dtypes[inner.value_type]
    raise TypeError(
        "documents must be list<fixed_size_list<float>> or list<list<float>> of float32 or float16 (large"
        f" lists too), got {found}: cast it"
    )


def find_d(chunks: list[Any]) -> int:
    """Return the length of the first inner list that is there."""
    for chunk in chunks:
        tokens = chunk.flatten().drop_null()
        if len(tokens):
            return max(len(tokens[0]), 1)
    raise ValueError("d must be given for lists without a single token, got None")


def _shard(array: Any, row: int, d: int, dtype: torch.dtype) -> Shard:
    """Documents of one array, which share its memory. row: that of the first."""
    from pyarrow import compute

    if array.null_count:
        raise ValueError(f"row {row + first_null(array)} of documents must not be null")
    offsets = from_dlpack(array.offsets)
    offsets = offsets - offsets[0] if int(offsets[0]) else offsets

    def row_of(token: int) -> int:
        return row + int(torch.searchsorted(offsets, token, right=True)) - 1

    tokens = array.flatten()  # without nulls a view
    if tokens.null_count:
        raise ValueError(f"row {row_of(first_null(tokens))} of documents has a null for a token")
    if not hasattr(tokens.type, "list_size"):
        lengths = compute.list_value_length(tokens)
        bad = compute.not_equal(lengths, d).index(True).as_py()
        if bad >= 0:
            raise ValueError(
                f"row {row_of(bad)} of documents must have tokens of {d} values, got one of {lengths[bad]}"
            )
    values = tokens.flatten()
    if values.null_count:
        raise ValueError(f"row {row_of(first_null(values) // d)} of documents has a null for a value")
    if not len(values):
        return Shard(torch.empty(0, d, dtype=dtype, device="cpu"), offsets)
    return Shard(from_dlpack(values).view(-1, d), offsets)


def first_null(array: Any) -> int:
    return int(array.is_null().index(True).as_py())
