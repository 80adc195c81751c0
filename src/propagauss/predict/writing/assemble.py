"""The output in one file, written part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv
from pyarrow import types

from propagauss.errors import InputError

GROUP_ROWS, GROUP_BYTES = 1 << 16, 1 << 26


def check(out: Path, ending: str, schema: pa.Schema) -> None:
    """Refuse what cannot be written before anything is predicted."""
    raw = [field for field in schema if ending == ".csv" and _is_bytes(field.type)]
    if raw:
        raise InputError(f"column '{raw[0].name}' holds bytes, which {out.name} cannot: write .parquet instead")
    row = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
    write(pa.BufferOutputStream(), ending, schema, [row], dict)


def write(
    file: Any,
    ending: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    entry: Callable[[], dict[str, str]],
) -> None:
    """All rows, never more than a group of them in memory; and what `entry` says then, where the file can hold it."""
    try:
        with _writer(file, ending, schema) as writer:
            for table in _groups(batches):
                writer.write_table(table)
                del table  # before the next is made
            if isinstance(writer, pq.ParquetWriter):
                writer.add_key_value_metadata(entry())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"a {ending} file cannot hold the columns of the output ({reason})") from error


def _writer(file: Any, ending: str, schema: pa.Schema) -> Any:
    if ending == ".csv":
        return arrow_csv.CSVWriter(file, schema)
    repeated = [field.name for field in schema if not types.is_floating(field.type) and not types.is_nested(field.type)]
    options: dict[str, Any] = {"use_dictionary": repeated}  # hardly a prediction is there twice
    return pq.ParquetWriter(file, schema, **options)


def _is_bytes(of: pa.DataType) -> bool:
    return any(test(of) for test in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary))


class Counter:
    """Counts rows on their way, and those without a prediction among them (`--on-nan keep`)."""

    def __init__(self, schema: pa.Schema):
        self.rows = self.without = 0
        self._shown = next((i for i, each in enumerate(schema) if i and not types.is_nested(each.type)), None)

    def counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.rows += batch.num_rows
            if self._shown is not None:
                self.without += batch.column(self._shown).is_null(nan_is_null=True).true_count
            yield batch


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield pa.Table.from_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held)
