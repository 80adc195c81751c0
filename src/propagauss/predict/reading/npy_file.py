"""An array in an `.npy` file, read as it is needed; not mapped, or a file that is cut short would kill the process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy

from propagauss.errors import InputError
from propagauss.predict.reading.rows import Columns, Counted, Piece, Segment, reading

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
ZIPPED = b"PK\x03\x04"


class Header(NamedTuple):
    """Where the numbers are, and how they lie."""

    shape: tuple[int, ...]
    fortran: bool  # the first index runs fastest
    dtype: np.dtype
    begin: int


class NpyReader:
    """`[rows, ...]`, without columns."""

    def kinds(self, path: Path) -> dict[str, str]:
        return {}

    def shape(self, path: Path, column: str | None) -> tuple[int, ...]:
        return _header(path).shape[1:]

    def estimate(self, path: Path) -> int:
        return _header(path).shape[0]

    def count(self, path: Path, first: int, step: int) -> Counted:
        return Counted(_header(path).shape[0], [])

    def read(self, path: Path, segment: Segment, columns: Columns, batch: int) -> Iterator[Piece]:
        header = _header(path)
        stop = segment.first + segment.rows
        if stop > header.shape[0] or math.prod(header.shape[1:]) != columns.width:
            raise InputError(f"{path} is of shape {list(header.shape)} now: it must not change while it is read")
        with reading(path), path.open("rb", buffering=0) as file:
            for start in range(segment.first, stop, batch):
                found = _rows(file, header, start, min(batch, stop - start))
                with np.errstate(over="ignore"):  # what becomes infinite is found with the other bad values
                    yield Piece(found.astype(columns.dtype, order="C", copy=False), None)

    def id_type(self, path: Path, column: str) -> pa.DataType:
        raise InputError(f"{path.name} is an array, without columns")


def _header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(4) == ZIPPED:
                raise ValueError("it is an .npz file: save one array of it with numpy.save")
            file.seek(0)
            version = npy.read_magic(file)
            if version not in HEADERS:
                raise ValueError(f"its version {version} is not known")
            shape, fortran, dtype = HEADERS[version](file)
            begin = file.tell()
    except (ValueError, OSError, EOFError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} cannot be read as an array, it may be damaged or cut short ({reason})") from error
    if not shape or dtype.kind not in "biuf" or dtype.hasobject:
        raise InputError(f"{path} holds {dtype} of shape {shape}; it must hold numbers, [rows, ...]")
    if min(shape) < 0 or size - begin < math.prod(shape) * dtype.itemsize:
        raise InputError(f"{path} is cut short: {math.prod(shape):,} numbers are said to be in {size - begin:,} bytes")
    return Header(shape, fortran, dtype, begin)


def _rows(file: IO[bytes], header: Header, start: int, rows: int) -> np.ndarray:
    """`[rows, width]`, row by row."""
    width = math.prod(header.shape[1:])
    if not header.fortran:
        return _numbers(file, header, start * width, rows * width).reshape(rows, width)
    columns = np.empty((width, rows), header.dtype)
    for i in range(width):
        columns[i] = _numbers(file, header, i * header.shape[0] + start, rows)
    return columns.T.reshape((rows, *header.shape[1:]), order="F").reshape(rows, width)


def _numbers(file: IO[bytes], header: Header, first: int, count: int) -> np.ndarray:
    found = np.empty(count, header.dtype)
    left = found.data.cast("B") if count else memoryview(b"")
    file.seek(header.begin + first * header.dtype.itemsize)
    while left:
        done = file.readinto(left)  # type: ignore[attr-defined]
        if not done:
            raise InputError("the data was cut short while it was read: run again when it is whole")
        left = left[done:]
    return found
