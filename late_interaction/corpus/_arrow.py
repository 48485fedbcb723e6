"""Shards over the memory of Arrow arrays, and parquet files written to a corpus a row group at a time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from late_interaction._checks.options import check_positive
from late_interaction.corpus._shards import Shard

if TYPE_CHECKING:
    import os

# Rows of a parquet file that are decoded at a time.
_ROWS = 1024


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("Arrow arrays need pyarrow: pip install 'late-interaction[arrow]'") from error
    return pyarrow


def shards_of(documents: Any, d: int | None, first_row: int = 0) -> tuple[list[Shard], int]:
    """A shard for each chunk of a column, and d. Rows are counted from first_row in messages."""
    pa = _pyarrow()
    if not isinstance(documents, (pa.Array, pa.ChunkedArray)):
        raise TypeError(
            f"documents must be a pyarrow.Array or pyarrow.ChunkedArray, got {type(documents).__name__}"
        )
    if d is not None:
        check_positive("d", d)
    own, dtype = _check_type(pa, documents.type)
    if own is not None and d is not None and own != d:
        raise ValueError(f"d must be that of the lists, {own}, or None, got {d}")
    d = own or d
    chunks = documents.chunks if isinstance(documents, pa.ChunkedArray) else [documents]
    rows = [first_row]
    for chunk in chunks:
        rows.append(rows[-1] + len(chunk))
    if d is None:
        d = _find_d(chunks)
    filled = [_shard(chunk, row, d, dtype) for chunk, row in zip(chunks, rows, strict=False) if len(chunk)]
    empty = Shard(torch.empty(0, d, dtype=dtype, device="cpu"), _integers(()))
    return filled or [empty], d


def _check_type(pa: Any, found: Any) -> tuple[int | None, torch.dtype]:
    """The d of a column's type, if that says it, and the dtype of its values."""
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


def _find_d(chunks: list[Any]) -> int:
    """The length of the first inner list that is there."""
    for chunk in chunks:
        offsets = _integers(chunk.offsets)
        tokens = chunk.values[int(offsets[0]) : int(offsets[-1])].drop_null()
        if len(tokens):
            return max(len(tokens[0]), 1)
    raise ValueError("d must be given for lists without a single token, got None")


def _integers(array: Any) -> Tensor:
    return from_dlpack(array) if len(array) else torch.zeros(1, dtype=torch.int64, device="cpu")


def _shard(array: Any, row: int, d: int, dtype: torch.dtype) -> Shard:
    """Documents of one array, which share its memory. row: that of the first."""
    if array.null_count:
        raise ValueError(f"row {row + _first_null(array)} of documents must not be null")
    offsets = _integers(array.offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    tokens = array.values[first:last]
    offsets = offsets - first if first else offsets

    def row_of(token: int) -> int:
        return row + int(torch.searchsorted(offsets, token, right=True)) - 1

    if tokens.null_count:
        raise ValueError(f"row {row_of(_first_null(tokens))} of documents has a null for a token")
    values = _values_of(tokens, d, row_of)
    if values.null_count:
        raise ValueError(f"row {row_of(_first_null(values) // d)} of documents has a null for a value")
    if not len(values):
        return Shard(torch.empty(0, d, dtype=dtype, device="cpu"), offsets)
    return Shard(from_dlpack(values).view(-1, d), offsets)


def _values_of(tokens: Any, d: int, row_of: Any) -> Any:
    """The values of an array of tokens, end to end, once every token is known to have d of them."""
    if hasattr(tokens.type, "list_size"):
        return tokens.values[tokens.offset * d : (tokens.offset + len(tokens)) * d]
    if not len(tokens):
        return tokens.values[:0]
    offsets = _integers(tokens.offsets)
    bad = (offsets.diff() != d).nonzero()
    if len(bad):
        token = int(bad[0])
        raise ValueError(
            f"row {row_of(token)} of documents must have tokens of {d} values, got one of"
            f" {int(offsets[token + 1] - offsets[token])}"
        )
    return tokens.values[int(offsets[0]) : int(offsets[-1])]


def _first_null(array: Any) -> int:
    return int(array.is_null().index(True).as_py())


def copy_parquet(
    source: Any, path: "str | os.PathLike[str]", column: str, id_column: str | None, options: dict[str, Any]
) -> None:
    """Writes columns of a parquet file to a folder; what the folder has already is not read again."""
    _pyarrow()
    import pyarrow.parquet as pq

    from late_interaction.corpus.corpus import Corpus

    with pq.ParquetFile(source) as file:
        for name in (column, *([id_column] if id_column else [])):
            if name not in file.schema_arrow.names:
                raise KeyError(f"the file has no column {name!r}, only {', '.join(file.schema_arrow.names)}")
        d = options.pop("d", None) or _check_type(_pyarrow(), file.schema_arrow.field(column).type)[0]
        if d is None:
            batches = (batch.column(0) for batch in file.iter_batches(_ROWS, columns=[column]))
            d = next((_find_d([x]) for x in batches if x.flatten().drop_null()), None)
            if d is None:
                raise ValueError("d must be given for lists without a single token, got None")
        with Corpus.create(path, d=d, **{"total": file.metadata.num_rows} | options) as builder:
            for row, batch in _batches(file, column, id_column, builder.documents):
                ids = None if id_column is None else _ids(batch.column(1), row)
                shards, _ = shards_of(batch.column(0), d, row)
                for shard in shards:
                    builder._add_shard(Shard(shard.tokens, shard.offsets, None, ids), column, False, row)


def _batches(file: Any, column: str, id_column: str | None, done: int) -> Iterator[tuple[int, Any]]:
    """Batches of the rows from `done` on, each with the number of its first row."""
    row = group = 0
    while group < file.num_row_groups and row + file.metadata.row_group(group).num_rows <= done:
        row += file.metadata.row_group(group).num_rows
        group += 1
    names = [column] if id_column is None else [column, id_column]
    for batch in file.iter_batches(_ROWS, row_groups=range(group, file.num_row_groups), columns=names):
        batch = batch.select(names)
        skipped = min(max(done - row, 0), len(batch))
        if skipped < len(batch):
            yield row + skipped, batch.slice(skipped)
        row += len(batch)


def _ids(column: Any, row: int) -> list[str]:
    if column.null_count:
        raise ValueError(f"row {row + _first_null(column)} of the ids must not be null")
    return [x if isinstance(x, str) else str(x) for x in column.to_pylist()]
