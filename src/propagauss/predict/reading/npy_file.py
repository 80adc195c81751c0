"""An array in an `.npy` file, mapped into memory: rows are read as they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from propagauss.errors import InputError
from propagauss.predict.reading.rows import Columns, Counted, Piece, Segment


class NpyReader:
    """`[rows, ...]`, without columns."""

    def kinds(self, path: Path) -> dict[str, str]:
        return {}

    def shape(self, path: Path, column: str | None) -> tuple[int, ...]:
        return _mapped(path).shape[1:]

    def estimate(self, path: Path) -> int:
        return len(_mapped(path))

    def count(self, path: Path, first: int, step: int) -> Counted:
        return Counted(len(_mapped(path)), [])

    def read(self, path: Path, segment: Segment, columns: Columns, batch: int) -> Iterator[Piece]:
        array = _mapped(path)
        stop = segment.first + segment.rows
        for start in range(segment.first, stop, batch):
            with np.errstate(over="ignore"):  # what becomes infinite is found with the other bad values
                yield Piece(np.array(array[start : min(start + batch, stop)], columns.dtype, order="C"), None)

    def id_type(self, path: Path, column: str) -> pa.DataType:
        raise InputError(f"{path.name} is an array, without columns")


def _mapped(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} cannot be read as an array, it may be damaged or cut short ({reason})") from error
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise InputError(f"{path} holds {array.dtype} of shape {array.shape}; it must hold numbers, [rows, ...]")
    return array
