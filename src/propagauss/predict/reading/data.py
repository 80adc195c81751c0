"""Data sets as files: which there are, who reads them, and rows in exact numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from propagauss.errors import InputError
from propagauss.predict.reading.csv_file import CsvReader
from propagauss.predict.reading.npy_file import NpyReader
from propagauss.predict.reading.parquet_file import ParquetReader
from propagauss.predict.reading.rows import Piece, Reader

READERS: dict[str, type[Reader]] = {".parquet": ParquetReader, ".csv": CsvReader, ".npy": NpyReader}
ENDINGS = tuple(READERS)


def reader(path: Path) -> Reader:
    """The one for the ending of this file."""
    return READERS[path.suffix]()


def files(data: Path) -> list[Path]:
    """The file, or the Parquet or CSV files of the folder and those below it, by name; hidden ones are left out."""
    if data.is_file():
        if data.suffix not in ENDINGS:
            raise InputError(f"the data '{data.name}' must end in {', '.join(ENDINGS)} or be a folder of such files")
        return [data]
    if not data.is_dir():
        raise InputError(f"there is no data at {data}")
    inside = [path for path in data.rglob("*") if path.is_file() and path.suffix in ENDINGS[:2]]
    found = sorted(path for path in inside if not any(p[0] in "._" for p in path.relative_to(data).parts))
    if not found:
        raise InputError(f"the folder {data} holds no .parquet and no .csv files")
    if len({path.suffix for path in found}) > 1:
        raise InputError(f"the folder {data} holds both .parquet and .csv files: keep one kind in a folder")
    return found


def fingerprint(data: Path, paths: list[Path]) -> list[list[Any]]:
    """Name, size and time of change of every file: what tells whether the data is still the same."""
    stats = [path.stat() for path in paths]
    base = data if data.is_dir() else data.parent
    return [[str(p.relative_to(base)), s.st_size, s.st_mtime_ns] for p, s in zip(paths, stats, strict=True)]


def cut(pieces: Iterable[Piece], sizes: Iterable[int]) -> Iterator[Piece]:
    """The same rows in pieces of exactly these sizes."""
    source, held = iter(pieces), []
    for size in sizes:
        taken, missing = [], size
        while missing:
            piece = held.pop() if held else next(source, None)
            if piece is None:
                raise InputError("the data has fewer rows than were counted at first: it must not change meanwhile")
            taken.append(Piece(piece.values[:missing], None if piece.ids is None else piece.ids[:missing]))
            if len(piece.values) > missing:
                held.append(Piece(piece.values[missing:], None if piece.ids is None else piece.ids[missing:]))
            missing -= len(taken[-1].values)
        yield taken[0] if len(taken) == 1 else _joined(taken)


def _joined(pieces: list[Piece]) -> Piece:
    ids = [piece.ids for piece in pieces if piece.ids is not None]
    return Piece(np.concatenate([piece.values for piece in pieces]), pa.concat_arrays(ids) if ids else None)
