"""The arguments of `predict`, checked, and what it says in the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from propagauss.errors import InputError, nearest

OUT = (".parquet", ".csv")
ENGINES = ("local", "ray")
ON_NAN = ("error", "skip", "keep")
MOST_ROWS = 1 << 31  # at a time
MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))  # each of them takes memory
COUNTS = {"batch": MOST_ROWS, "part_rows": MOST_ROWS, "threads": MOST_THREADS, "workers": 1 << 16}


@dataclass(frozen=True)
class Options:
    """See `predict`."""

    model: Path
    data: Path
    out: Path
    columns: tuple[str, ...] | Mapping[str, tuple[str, ...]] | None = None
    id: str | None = None
    batch: int | None = None
    engine: str = "local"
    workers: int | None = None
    threads: int | None = None
    on_nan: str = "error"
    restart: bool = False
    overwrite: bool = False
    part_rows: int | None = None
    address: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name, known in (("engine", ENGINES), ("on_nan", ON_NAN)):
            value = getattr(self, name)
            if value not in known:
                raise InputError(f"{name} is {value!r}{nearest(str(value), known)} (there are {', '.join(known)})")
        for name, most in COUNTS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise InputError(f"{name} is {value!r}; it must be a whole number, at least 1 and at most {most:,}")
        if self.id is not None and not isinstance(self.id, str):
            raise InputError(f"id is {self.id!r}; it must be the name of a column")
        self._check_columns()
        if self.engine == "local" and (self.workers or self.address):
            raise InputError("workers and address belong to the engine 'ray'; the local one takes threads")
        self._check_out()

    def _check_columns(self) -> None:
        groups = self.columns.values() if isinstance(self.columns, Mapping) else [self.columns or ()]
        wrong = [name for names in groups for name in names if not isinstance(name, str)]
        if wrong or (self.columns is not None and not self.columns):
            raise InputError(f"columns are {self.columns!r}; they must be names of columns, at least one")

    def _check_out(self) -> None:
        if self.ending not in OUT:
            raise InputError(f"the output '{self.out.name}' must end in {' or '.join(OUT)}")
        if not self.out.parent.is_dir():
            raise InputError(f"there is no folder {self.out.parent}")
        if self.out.is_dir():
            raise InputError(f"the output {self.out} is a folder")
        if self.out == self.data or self.data in self.out.parents:
            raise InputError(f"the output {self.out} would be among the data: write it somewhere else")

    @property
    def ending(self) -> str:
        """Of the output."""
        return self.out.suffix.lower()

    @property
    def folder(self) -> Path:
        """Of the parts."""
        return self.out.parent / f".{self.out.name}.parts"


@dataclass(frozen=True)
class Summary:
    """What a run wrote."""

    out: Path
    columns: tuple[str, ...]  # that made the input
    rows: int  # in the output
    skipped: int  # rows left out, with values that are not finite
    resumed: int  # rows of the data that an earlier run had done
    seconds: float
    files: int = 1  # of the data
    without: int = 0  # rows kept, but without a prediction, since values are not finite
    complete: bool = False  # an earlier run wrote it, and there was nothing to do

    @property
    def rate(self) -> float:
        """Rows of the data that this run did in a second."""
        return (self.rows + self.skipped - self.resumed) / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        without = f", {self.without:,} without a prediction" if self.without else ""
        resumed = f", {self.resumed:,} from an earlier run" if self.resumed else ""
        what = f"{self.out}: {self.rows:,} rows, {self.skipped:,} skipped{without}{resumed}"
        if self.complete:
            return f"{what}; complete already, nothing to do (--overwrite makes it again)"
        data = f"{self.rows + self.skipped:,} rows found in {self.files:,} file{'s' if self.files != 1 else ''}"
        return f"{what}; {data}, {self.rate:,.0f} rows/s"
