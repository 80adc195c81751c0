"""Rows of a data set: what to read, what a reader of one kind of file offers, and what it hands out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from propagauss.errors import InputError, PropagaussError


class Columns(NamedTuple):
    """What to read: the columns that make the inputs, the one to copy, and the type the numbers are to have."""

    inputs: tuple[str, ...]  # of lists or of numbers; empty for an array
    widths: tuple[int, ...]  # numbers of a row in each; of an array, all
    id: str | None
    dtype: np.dtype

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return sum(self.widths)


class Piece(NamedTuple):
    """Consecutive rows."""

    values: np.ndarray  # [rows, width]
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
        """Each column: "number", "list" (of numbers), "twice" (two have this name) or "other"."""
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


def named_once(names: Sequence[str], kinds: dict[str, str]) -> dict[str, str]:
    """The kinds of columns, where a name that two of them have stands for neither."""
    return kinds | {name: "twice" for name, times in Counter(names).items() if times > 1}


@contextmanager
def reading(path: Path, where: str = "") -> Iterator[None]:
    """Errors of the libraries that read files, as ours."""
    try:
        yield
    except PropagaussError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read{where}: it is not UTF-8 ({error.reason}): save it as UTF-8") from error
    except Exception as error:  # damaged files bring many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise InputError(f"{path} cannot be read{where}: {reason}") from error
