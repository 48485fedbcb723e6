"""Columns of metadata: rows of an Arrow file, in memory or mapped, and what a filter says of them."""

from collections.abc import Sequence
from contextlib import suppress
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

    def where(self, condition: Any, types: Any) -> Tensor:
        """Tell which rows, cast to a schema, meet a condition: bool, on the CPU."""
        pa, table = import_pyarrow(), self._stored().cast(types)
        from pyarrow import compute, dataset

        if not isinstance(condition, compute.Expression):
            raise TypeError(f"filter must be a pyarrow.compute.Expression, got {abbreviate(condition)}")
        try:
            found = dataset.dataset(table).to_table(columns={"kept": condition})["kept"].combine_chunks()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            own = ", ".join(f"{x.name} ({x.type})" for x in types)
            raise ValueError(f"filter must be a condition on {own}, got {condition}: {error}") from None
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


def types_of(parts: Sequence[Columns]) -> Any:
    """Return the schema of the columns of all: what is null in some is of the type that it has in others."""
    return import_pyarrow().unify_schemas([part._stored().schema for part in parts])


def stacked(parts: Sequence[Columns | None]) -> Any:
    """Return the rows of several, one after the other, as a pyarrow.Table."""
    tables = [part.table() for part in parts if part is not None]
    return import_pyarrow().concat_tables(tables, promote_options="default")


def of_documents(columns: Any, documents: int) -> Columns:
    pa = import_pyarrow()
    if not isinstance(columns, (pa.Table, pa.RecordBatch, dict)):
        raise TypeError(f"columns must be a pyarrow.Table or a dict of lists, got {abbreviate(columns)}")
    table = pa.table(columns).replace_schema_metadata(None)
    if len(table) != documents:
        raise ValueError(f"columns must have a row for each of the {documents} documents, got {len(table)}")
    try:
        table.take(pa.array([], pa.int64()))
    except pa.ArrowNotImplementedError as error:
        raise TypeError(f"columns must be of types whose rows Arrow selects: {error}") from None
    return of_table(table)


def cast(columns: Columns, types: Any) -> tuple[Columns, Any]:
    """Cast columns to a schema, and return that with types for what was null alone before."""
    pa, table = import_pyarrow(), columns.table()
    if sorted(table.column_names) != sorted(types.names):
        names, wanted = ", ".join(table.column_names), ", ".join(types.names)
        raise ValueError(f"columns must be {wanted}, as those of the documents before, got {names}")
    table = table.select(types.names)
    for i, field in enumerate(types):
        with suppress(pa.ArrowException):  # they differ in more than what is null
            types = types.set(i, pa.unify_schemas([pa.schema([field]), pa.schema([table.field(i)])]).field(0))
    try:
        return of_table(table.cast(types)), types
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        wanted = ", ".join(f"{x.name} ({x.type})" for x in types)
        raise ValueError(
            f"columns must be {wanted}, as those of the documents before, got other values: {error}"
        ) from None
