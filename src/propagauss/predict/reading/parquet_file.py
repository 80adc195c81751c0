"""Parquet: numbers in columns of their own, or samples in one column of lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from propagauss.errors import InputError
from propagauss.predict.reading.rows import Columns, Counted, Piece, Segment, named_once, reading

BUFFER = 1 << 20  # pages are read through it: a column of a row group need not fit in memory


class ParquetReader:
    def kinds(self, path: Path) -> dict[str, str]:
        with reading(path), _open(path) as file:
            schema = file.schema_arrow
            if not schema.names:
                raise InputError(f"{path} has no columns")
            return named_once(schema.names, {field.name: _kind(field.type) for field in schema})

    def shape(self, path: Path, column: str | None) -> tuple[int, ...]:
        with reading(path), _open(path) as file:
            fixed = _fixed_shape(file.schema_arrow.field(column).type)
            if fixed is not None:
                return fixed
            for batch in file.iter_batches(64, columns=[column]):
                lists = batch.column(column).drop_null()
                if len(lists):
                    return (flat(lists[:1], np.dtype(float)).shape[1],)
        raise InputError(f"{path.name}: column '{column}' holds no lists at all")

    def estimate(self, path: Path) -> int:
        with reading(path), _open(path) as file:
            return file.metadata.num_rows

    def count(self, path: Path, first: int, step: int) -> Counted:
        return Counted(self.estimate(path), [])

    def read(self, path: Path, segment: Segment, columns: Columns, batch: int) -> Iterator[Piece]:
        names = [*columns.inputs, *([columns.id] if columns.id else [])]
        stop = segment.first + segment.rows
        with reading(path, f" (rows {segment.first} to {stop - 1} of the file)"), _open(path) as file:
            groups, row = _groups(file, segment.first, stop)
            for found in file.iter_batches(batch, row_groups=groups, columns=names):
                begin, end = max(segment.first - row, 0), min(stop - row, len(found))
                if begin < end:
                    yield _piece(found.slice(begin, end - begin), columns, f"{path.name}, row {row + begin}")
                row += len(found)

    def id_type(self, path: Path, column: str) -> pa.DataType:
        with reading(path), _open(path) as file:
            found = file.schema_arrow.field(column).type
        return found.value_type if isinstance(found, pa.DictionaryType) else found


def _open(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True)


def _groups(file: pq.ParquetFile, first: int, stop: int) -> tuple[list[int], int]:
    """The row groups that hold these rows, and the first row of theirs."""
    ends = np.cumsum([file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)])
    begin, end = int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, stop, "left"))
    return list(range(begin, end + 1)), int(ends[begin - 1]) if begin else 0


def _kind(of: pa.DataType) -> str:
    inner = _storage(of)
    while _is_list(inner):
        inner = inner.value_type
    tests = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_null)
    if not any(test(inner) for test in tests):
        return "other"
    return "list" if _is_list(_storage(of)) else "number"


def _storage(of: pa.DataType) -> Any:
    return of.storage_type if isinstance(of, pa.BaseExtensionType) else of


def _is_list(of: pa.DataType) -> bool:
    return types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of)


def _fixed_shape(of: pa.DataType) -> tuple[int, ...] | None:
    """Of a column of fixed-size lists, or of tensors."""
    if isinstance(of, pa.FixedShapeTensorType):
        return tuple(of.shape)
    sizes = []
    while _is_list(of):
        if not types.is_fixed_size_list(of):
            return None
        sizes.append(of.list_size)
        of = of.value_type
    return tuple(sizes)


def _piece(found: pa.RecordBatch, columns: Columns, where: str) -> Piece:
    ids = found.column(columns.id) if columns.id else None
    if ids is not None and pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    values = np.empty((len(found), columns.width), columns.dtype)
    start = 0
    for name, width in zip(columns.inputs, columns.widths, strict=True):
        try:
            each = flat(found.column(name), columns.dtype)
        except ValueError as error:
            raise InputError(f"{where} and after: {error} in column '{name}'; pad or cut them to one length") from error
        empty = each.shape[1] == 0 and found.column(name).null_count == len(found)  # all lists are null
        if each.shape[1] != width and not empty:
            entries = f"lists of {each.shape[1]} entries, not of {width}"
            raise InputError(f"{where} and after: {entries} in column '{name}'")
        values[:, start : start + width] = np.nan if empty else each
        start += width
    return Piece(values, ids)


def flat(array: pa.Array, dtype: np.dtype) -> np.ndarray:
    """The numbers of every row, `[rows, n]`, lists of lists row by row; NaN for what is null."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not _is_list(array.type):
        plain = types.is_integer(array.type) or types.is_floating(array.type)
        values = (array if plain else array.cast(pa.float64())).to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):  # what becomes infinite is found with the other bad values
            return values.astype(dtype, copy=False)[:, None]
    lengths = np.unique(array.value_lengths().drop_null().to_numpy())
    if len(lengths) > 1:
        raise ValueError(f"lists of {lengths[0]} and of {lengths[-1]} entries")
    inner = flat(array.flatten(), dtype)
    width = int(lengths.sum()) * inner.shape[1]
    found = np.full((len(array), width), np.nan, dtype)
    if width:
        found[array.is_valid().to_numpy(zero_copy_only=False)] = inner.reshape(-1, width)
    return found
