"""How the rows are divided: parts of equal numbers of rows, each finished by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from propagauss.predict.reading.data import reader
from propagauss.predict.reading.rows import Segment

PART_BYTES, PART_ROWS, FEW_ROWS, PARTS = 1 << 24, 1 << 16, 256, 64
BATCH_BYTES, BATCH_ROWS, FEW_IN_BATCH = 1 << 22, 4096, 16


@dataclass(frozen=True)
class Part:
    """Rows `start` to `start + rows` of the data set, which may begin in one file and end in another."""

    index: int
    start: int
    rows: int
    segments: tuple[Segment, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(stored: dict[str, Any]) -> Part:
        segments = tuple(Segment(**each) for each in stored["segments"])
        return Part(stored["index"], stored["start"], stored["rows"], segments)


def default_batch(row_bytes: int) -> int:
    """Rows in a batch: some megabytes."""
    return min(max(BATCH_BYTES // row_bytes, FEW_IN_BATCH), BATCH_ROWS)


def default_part_rows(paths: list[Path], row_bytes: int) -> int:
    """Rows in a part: not so many that a stop loses much, nor so few that parts cost more than they keep."""
    shared = math.ceil(sum(reader(path).estimate(path) for path in paths) / PARTS)
    return max(FEW_ROWS, min(PART_BYTES // row_bytes, PART_ROWS, max(shared, BATCH_BYTES // row_bytes)))


def divide(paths: list[Path], part_rows: int) -> list[Part]:
    """Count the rows of all files and divide them."""
    segments: dict[int, list[Segment]] = {}
    start = 0
    for i, path in enumerate(paths):
        first = part_rows - start % part_rows
        rows, offsets = reader(path).count(path, first, part_rows)
        cuts = [0, *range(first, rows, part_rows), rows]
        bounds = offsets or [0] * len(cuts)
        for a, b, begin, end in zip(cuts, cuts[1:], bounds, bounds[1:], strict=False):
            if a < b:
                segments.setdefault((start + a) // part_rows, []).append(Segment(i, a, b - a, begin, end))
        start += rows
    return [
        Part(index, index * part_rows, sum(each.rows for each in found), tuple(found))
        for index, found in sorted(segments.items())
    ]


def consecutive(parts: Sequence[Part], most: int | None = None) -> Iterator[list[Part]]:
    """Runs of parts that follow each other, of at most so many parts."""
    run: list[Part] = []
    for part in parts:
        if run and (part.index != run[-1].index + 1 or len(run) == most):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def joined(parts: Sequence[Part]) -> list[Segment]:
    """The segments of a run, those of one file as one unless they are found by place (CSV): each is counted again."""
    found: list[Segment] = []
    for segment in (each for part in parts for each in part.segments):
        last = found[-1] if found else None
        if last and last.file == segment.file and not segment.end:
            found[-1] = Segment(last.file, last.first, last.rows + segment.rows)
        else:
            found.append(segment)
    return found
