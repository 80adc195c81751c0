"""The arguments of `predict`, checked, and what it says in the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from propagauss.errors import InputError, nearest

OUT = (".parquet", ".csv")
ENGINES = ("local", "ray")
ON_NAN = ("error", "skip", "keep")


@dataclass(frozen=True)
class Options:
    """See `predict`."""

    model: Path
    data: Path
    out: Path
    columns: tuple[str, ...] | None = None
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
        for name in ("batch", "workers", "threads", "part_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        if self.engine == "local" and (self.workers or self.address):
            raise InputError("workers and address belong to the engine 'ray'; the local one takes threads")
        self._check_out()

    def _check_out(self) -> None:
        if self.out.suffix not in OUT:
            raise InputError(f"the output '{self.out.name}' must end in {' or '.join(OUT)}")
        if not self.out.parent.is_dir():
            raise InputError(f"there is no folder {self.out.parent}")
        if self.out.is_dir():
            raise InputError(f"the output {self.out} is a folder")
        if self.out == self.data or self.data in self.out.parents:
            raise InputError(f"the output {self.out} would be among the data: write it somewhere else")

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

    @property
    def rate(self) -> float:
        """Rows of the data that this run did in a second."""
        return (self.rows + self.skipped - self.resumed) / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        resumed = f", {self.resumed:,} from an earlier run" if self.resumed else ""
        return f"{self.out}: {self.rows:,} rows, {self.skipped:,} skipped{resumed}; {self.rate:,.0f} rows/s"
