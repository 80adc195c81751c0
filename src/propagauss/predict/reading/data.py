"""Data sets as files: which there are, who reads them, and rows in exact numbers."""

from __future__ import annotations

import os
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

READERS: dict[str, type[Reader]] = {
    ".parquet": ParquetReader,
    ".pq": ParquetReader,
    ".parq": ParquetReader,
    ".csv": CsvReader,
    ".npy": NpyReader,
}
ENDINGS = tuple(READERS)
SHOWN = 5


def reader(path: Path) -> Reader:
    """The one for the ending of this file."""
    return READERS[path.suffix.lower()]()


def files(data: Path) -> list[Path]:
    """The file, or all files of the folder and those below it, by name; only hidden ones are left out."""
    if data.is_dir():
        return _in_folder(data)
    if not data.is_file():
        raise InputError(f"{data} is neither a file nor a folder" if data.exists() else f"there is no data at {data}")
    if data.suffix.lower() not in READERS:
        raise InputError(f"the data '{data.name}' must end in {', '.join(ENDINGS)} or be a folder of such files")
    return [data]


def _in_folder(data: Path) -> list[Path]:
    found = sorted(_walk(data))
    strange = [str(p.relative_to(data)) for p in found if p.suffix.lower() not in READERS or not p.is_file()]
    if strange:
        more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
        raise InputError(
            f"the folder {data} holds {', '.join(strange[:SHOWN])}{more}, which cannot be read (only "
            f"{', '.join(ENDINGS)}): convert or decompress them, or move them away (names that begin with . or _ are "
            "left out)"
        )
    if not found:
        raise InputError(f"the folder {data} holds no files that end in {', '.join(ENDINGS)}")
    by_kind = {type(reader(path)): path for path in reversed(found)}
    if len(by_kind) > 1:
        one, other, *_ = sorted(path.name for path in by_kind.values())
        raise InputError(f"the folder {data} holds files of different kinds ({one}, {other}): keep one in a folder")
    return found


def _walk(data: Path) -> Iterator[Path]:
    """Files that are not hidden. Links to folders are followed, and each folder is entered once."""
    seen = {_place(data)}
    for folder, below, names in os.walk(data, followlinks=True, onerror=_unreadable):
        for name in sorted(below):
            place = _place(Path(folder, name))
            if name[0] in "._" or place in seen:
                below.remove(name)
            else:
                seen.add(place)
        yield from (Path(folder, name) for name in names if name[0] not in "._")


def _place(folder: Path) -> tuple[int, int]:
    """The same for all names of a folder."""
    found = folder.stat()
    return found.st_dev, found.st_ino


def _unreadable(error: OSError) -> None:
    raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error


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
