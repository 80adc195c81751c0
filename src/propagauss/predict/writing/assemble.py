"""The output in one file, written part by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from propagauss.errors import InputError

GROUP_ROWS, GROUP_BYTES = 1 << 16, 1 << 26
WRITERS = {".parquet": pq.ParquetWriter, ".csv": arrow_csv.CSVWriter}


def check(out: Path, schema: pa.Schema) -> None:
    """Refuse what cannot be written before anything is predicted."""
    try:
        write(pa.BufferOutputStream(), out.suffix, schema, schema.empty_table().to_batches())
    except pa.ArrowException as error:
        raise InputError(f"{out.name} cannot hold the columns of the output ({error})") from error


def write(file: Any, ending: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """All rows, never more than a group of them in memory."""
    with WRITERS[ending](file, schema) as writer:
        for table in _groups(batches):
            writer.write_table(table)


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
