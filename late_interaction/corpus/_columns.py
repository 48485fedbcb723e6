"""Columns of metadata: rows of an Arrow file, in memory or mapped, and what a filter says of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from late_interaction._checks.messages import abbreviate


def import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("Arrow arrays need pyarrow: pip install 'late-interaction[arrow]'") from error
    return pyarrow


@dataclass(frozen=True)
class Columns:
    """A row for each document. data: the bytes of an Arrow IPC file. places: its rows, or None for all."""

    data: Tensor
    places: Tensor | None = None

    def select(self, places: Tensor) -> "Columns":
        return replace(self, places=places if self.places is None else self.places[places])

    def table(self) -> Any:
        found = self._stored()
        return found if self.places is None else found.take(self.places.numpy())

    def where(self, condition: Any) -> Tensor:
        """Tell which rows meet a condition: bool, on the CPU."""
        pa, table = import_pyarrow(), self._stored()
        from pyarrow import compute, dataset

        if not isinstance(condition, compute.Expression):
            raise TypeError(f"filter must be a pyarrow.compute.Expression, got {abbreviate(condition)}")
        found = dataset.dataset(table).to_table(columns={"kept": condition})["kept"].combine_chunks()
        if not pa.types.is_boolean(found.type):
            raise TypeError(f"filter must be a condition, whose type is bool, got one of {found.type}")
        kept = torch.from_numpy(found.fill_null(False).to_numpy(zero_copy_only=False))
        return kept if self.places is None else kept[self.places]

    def _stored(self) -> Any:
        pa = import_pyarrow()
        buffer = pa.foreign_buffer(self.data.data_ptr(), self.data.nbytes, base=self.data)
        return pa.ipc.open_file(buffer).read_all()


def of_table(table: Any) -> Columns:
    pa = import_pyarrow()
    sink = pa.BufferOutputStream()
    table = table.unify_dictionaries().combine_chunks()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    data = sink.getvalue()
    return Columns(from_dlpack(pa.Array.from_buffers(pa.uint8(), data.size, [None, data])))


def stacked(parts: Sequence[Columns | None]) -> Any:
    """Return the rows of several, one after the other, as a pyarrow.Table."""
    return import_pyarrow().concat_tables([part.table() for part in parts if part is not None])


def of_documents(columns: Any, documents: int) -> Columns:
    pa = import_pyarrow()
    if not isinstance(columns, (pa.Table, pa.RecordBatch, dict)):
        raise TypeError(f"columns must be a pyarrow.Table or a dict of lists, got {abbreviate(columns)}")
    table = pa.table(columns).replace_schema_metadata(None)
    if len(table) != documents:
        raise ValueError(f"columns must have a row for each of the {documents} documents, got {len(table)}")
    return of_table(table)


def cast(columns: Columns, like: Columns) -> Columns:
    """Cast columns to the types of those of other documents."""
    table, schema = columns.table(), like._stored().schema
    if sorted(table.column_names) != sorted(schema.names):
        names, wanted = ", ".join(table.column_names), ", ".join(schema.names)
        raise ValueError(f"columns must be {wanted}, as those of the documents before, got {names}")
    return of_table(table.select(schema.names).cast(schema))
