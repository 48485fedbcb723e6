"""Parquet files, written to a corpus a row group at a time."""

from collections.abc import Callable, Iterator
from typing import Any

from late_interaction.corpus._arrow import check_type, find_d, first_null, shards_of
from late_interaction.corpus._columns import import_pyarrow
from late_interaction.corpus._shards import Shard
from late_interaction.corpus.builder import CorpusBuilder

# Rows of a file that are decoded at a time.
_ROWS = 1024


def copy(
    source: Any, column: str, id_column: str | None, create: Callable[..., CorpusBuilder], d: int | None
) -> None:
    """Write columns of a parquet file to a folder; what the folder has already is not read again.

    create: makes the builder, from d and total. d: that of the tokens, where the file need not say it.
    """
    import_pyarrow()
    import pyarrow.parquet as pq

    with pq.ParquetFile(source) as file:
        for name in (column, *([id_column] if id_column else [])):
            if name not in file.schema_arrow.names:
                raise KeyError(f"the file has no column {name!r}, only {', '.join(file.schema_arrow.names)}")
        rows = file.metadata.num_rows
        d = d or check_type(import_pyarrow(), file.schema_arrow.field(column).type, rows)[0]
        if d is None and rows:
            batches = (batch.column(0) for batch in file.iter_batches(_ROWS, columns=[column]))
            d = next((find_d([x]) for x in batches if x.flatten().drop_null()), None)
            if d is None:
                raise ValueError("d must be given for lists without a single token, got None")
        with create(d=d or 0, total=rows) as builder:
            for row, batch in _batches(file, column, id_column, builder.documents):
                ids = None if id_column is None else ids_of(batch.column(1), row)
                (shard,), _ = shards_of(batch.column(0), d, row)
                builder._add_shards([Shard(shard.tokens, shard.offsets, None, ids)], column, row)


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


def ids_of(column: Any, row: int) -> list[str]:
    if column.null_count:
        raise ValueError(f"row {row + first_null(column)} of the ids must not be null")
    return [x if isinstance(x, str) else str(x) for x in column.to_pylist()]
