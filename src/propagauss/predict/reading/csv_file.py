"""CSV: one pass finds where rows begin, so that any of them can be read without those before."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv
from pyarrow import types

from propagauss.errors import InputError
from propagauss.predict.reading.rows import Columns, Counted, Piece, Segment, named_once, reading

BLOCK = 1 << 20
HEAD = 1 << 22  # a header and every row have to fit in it
NEWLINE, RETURN, QUOTE = b'\n\r"'


class CsvReader:
    """Comma-separated, UTF-8, names in the first line; what stands between quotes may hold commas and line ends."""

    def kinds(self, path: Path) -> dict[str, str]:
        names, begin = _header(path)
        with reading(path), path.open("rb") as file:
            file.seek(begin)
            head = file.read(HEAD)
            if len(head) == HEAD:
                ends, _ = _line_ends(np.frombuffer(head, np.uint8), 0)
                head = head[: ends[-1] + 1 if len(ends) else 0]
                if not head:
                    raise _too_long(path, 0)
            if not head.strip():
                return named_once(names, dict.fromkeys(names, "number"))
            found = _rows(pa.BufferReader(head), names, HEAD, arrow_csv.ConvertOptions()).schema
        return named_once(names, {field.name: _kind(field.type) for field in found})

    def shape(self, path: Path, column: str | None) -> tuple[int, ...]:
        raise InputError(f"{path.name}: a CSV file has no columns of lists")

    def estimate(self, path: Path) -> int:
        _, begin = _header(path)
        with path.open("rb") as file:
            file.seek(begin)
            head = file.read(BLOCK)
        if not head.strip():
            return 0
        return max(head.count(b"\n") * (path.stat().st_size - begin) // len(head), 1)

    def count(self, path: Path, first: int, step: int) -> Counted:
        _, begin = _header(path)
        return _count(path, begin, first, step)

    def read(self, path: Path, segment: Segment, columns: Columns, batch: int) -> Iterator[Piece]:
        names, _ = _header(path)
        wanted = {name: pa.float64() for name in columns.inputs} | ({columns.id: pa.string()} if columns.id else {})
        convert = arrow_csv.ConvertOptions(include_columns=list(wanted), column_types=wanted)
        try:
            with pa.OSFile(str(path)) as file:
                found = _rows(file.get_stream(segment.begin, segment.end - segment.begin), names, HEAD, convert)
                yield from _exactly(segment.rows, (_piece(each, columns) for each in found))
        except pa.ArrowInvalid as error:
            raise InputError(f"{path}: {_located(str(error), names, segment.first)}") from error
        except Miscounted as error:
            rows = f"rows {segment.first} to {segment.first + segment.rows - 1}"
            raise InputError(f"{path}: {rows} are read as {error} rows: look for a quote without its pair") from error

    def id_type(self, path: Path, column: str) -> pa.DataType:
        return pa.string()  # as it is written: 007 stays 007


class Miscounted(Exception):
    """Arrow divides lines into rows in another way than we do."""


def _exactly(rows: int, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """These pieces; the last one only when they are known to be so many rows."""
    held, count = None, 0
    for piece in pieces:
        count += len(piece.values)
        if count > rows:
            raise Miscounted(f"{count} or more")
        if held is not None:
            yield held
        held = piece
    if held is None or count != rows:
        raise Miscounted(str(count))
    yield held


def _header(path: Path) -> tuple[list[str], int]:
    """The names of the columns, and where the line ends that holds them."""
    with reading(path), path.open("rb") as file:
        for length in (BLOCK >> 4, HEAD):
            file.seek(0)
            head = file.read(length)
            for end in [*_ends(head), *([len(head)] if len(head) < length else [])]:
                line = head[:end].decode("utf-8-sig").strip("\r\n")
                if "\r" in line:
                    raise InputError(f"{path}: lines end in \\r alone; convert them to \\n first")
                if line:
                    return _names(path, line), end
    raise InputError(f"{path} has no header: the first line of a CSV file must name its columns")


def _names(path: Path, line: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise InputError(f"{path}: the header cannot be read ({error})") from error


def _ends(block: bytes) -> Iterator[int]:
    """Where lines end, the newline included, quoted ones left out."""
    inside = False
    for found in re.finditer(rb'["\n]', block):
        if found.group() == b'"':
            inside = not inside
        elif not inside:
            yield found.end()


def _rows(
    file: pa.NativeFile, names: list[str], block: int, convert: arrow_csv.ConvertOptions
) -> arrow_csv.CSVStreamingReader:
    return arrow_csv.open_csv(
        file,
        read_options=arrow_csv.ReadOptions(column_names=names, block_size=block, use_threads=False),
        parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
        convert_options=convert,
    )


def _kind(of: pa.DataType) -> str:
    number = types.is_integer(of) or types.is_floating(of) or types.is_null(of)
    return "number" if number else "other"


def _piece(found: pa.RecordBatch, columns: Columns) -> Piece:
    values = np.empty((len(found), columns.width), columns.dtype)
    with np.errstate(over="ignore"):  # what becomes infinite is found with the other bad values
        for i, name in enumerate(columns.inputs):
            values[:, i] = found.column(name).to_numpy(zero_copy_only=False)
    return Piece(values, found.column(columns.id) if columns.id else None)


def _located(reason: str, names: list[str], first: int) -> str:
    """Arrow's words with the name of the column and the row of the file."""
    found = re.match(r"In CSV column #(\d+): Row #(\d+): .*invalid value (.*)", reason, re.DOTALL)
    if not found:
        remedy = "; save the file as UTF-8" if "UTF8" in reason else ""
        return f"after row {first}: {reason.splitlines()[0][:300]}{remedy}"
    column, row = names[int(found[1])], first + int(found[2]) - 1
    return f"row {row}, column '{column}' holds {found[3].splitlines()[0][:60]}, which is not a number"


def _count(path: Path, begin: int, first: int, step: int) -> Counted:
    """Rows are lines that are not empty; row `k` begins where row `k - 1` ends."""
    rows, offsets, last, inside = 0, [begin], begin, 0
    for base, data in _blocks(path, begin):
        lines, inside = _line_ends(data, inside)
        ends = lines + base + 1
        lengths = np.diff(ends, prepend=last)
        empty = (lengths == 1) | ((lengths == 2) & (data[lines - 1] == RETURN))
        last = int(ends[-1]) if len(ends) else last
        if max(lengths.max(initial=0), base + len(data) - last) > HEAD:
            raise _too_long(path, rows)
        ends = ends[~empty]
        due = np.arange(first + (len(offsets) - 1) * step, rows + len(ends) + 1, step)
        offsets += ends[due - 1 - rows].tolist()
        rows += len(ends)
    if inside:
        raise InputError(f"{path}: a quote opens and does not close before the end of the file")
    size = path.stat().st_size
    rows += size > last  # the last line, without a newline
    kept = offsets[: 1 + max(0, -(-(rows - first) // step))]  # a row after the last does not begin
    return Counted(rows, [*kept, size])


def _line_ends(data: np.ndarray, inside: int) -> tuple[np.ndarray, int]:
    """Newlines that are not quoted, and whether a quote is open after `data`, as one may be before."""
    lines, quotes = np.flatnonzero(data == NEWLINE), np.flatnonzero(data == QUOTE)
    if len(quotes) or inside:
        lines = lines[(inside + np.searchsorted(quotes, lines)) % 2 == 0]
    return lines, (inside + len(quotes)) % 2


def _too_long(path: Path, row: int) -> InputError:
    remedy = "shorten it, or look for a quote without its pair"
    return InputError(f"{path}: row {row} or one after it is longer than {HEAD:,} bytes: {remedy}")


def _blocks(path: Path, begin: int) -> Iterator[tuple[int, np.ndarray]]:
    """The bytes of the file and where they are; no block begins between a return and its newline."""
    with reading(path), path.open("rb") as file:
        file.seek(begin)
        base = begin
        while block := file.read(HEAD):
            if block.endswith(b"\r"):
                block += file.read(1)
            yield base, np.frombuffer(block, np.uint8)
            base += len(block)
