"""Rows of a data set: what to read, what a reader of one kind of file offers, and what it hands out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from propagauss.errors import InputError


class Columns(NamedTuple):
    """What to read: the columns that make the input, the one to copy, and the type the numbers are to have."""

    inputs: tuple[str, ...]  # one list column, or numbers; empty for an array
    width: int  # numbers in a row
    id: str | None
    dtype: np.dtype


class Piece(NamedTuple):
    """Consecutive rows."""

    values: np.ndarray  # [rows, ...]
    ids: pa.Array | None


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one file."""

    file: int
    first: int
    rows: int
    begin: int = 0  # CSV: where they are, in bytes
    end: int = 0


class Counted(NamedTuple):
    """The rows of a file, and where row `first`, `first + step`, ... begin; the last entry is the end."""

    rows: int
    offsets: list[int]


class Reader(Protocol):
    """What can be done with one kind of file."""

    def kinds(self, path: Path) -> dict[str, str]:
        """Each column: "number", "list" (of numbers) or "other"."""
        ...

    def shape(self, path: Path, column: str | None) -> tuple[int, ...]:
        """Of one sample, of an array or a list column."""
        ...

    def estimate(self, path: Path) -> int:
        """About how many rows there are, quickly."""
        ...

    def count(self, path: Path, first: int, step: int) -> Counted: ...

    def read(self, path: Path, segment: Segment, columns: Columns, batch: int) -> Iterator[Piece]: ...

    def id_type(self, path: Path, column: str) -> pa.DataType: ...


@contextmanager
def reading(path: Path, where: str = "") -> Iterator[None]:
    """Errors of the libraries that read files, as ours."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0][:300]
        raise InputError(f"{path} cannot be read{where}: {reason}") from error
