"""Parts made: rows read, checked, predicted and written. The same for every engine, so that all give the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from propagauss.errors import InputError
from propagauss.predict.models.model import Input, Model
from propagauss.predict.plan import Part, joined
from propagauss.predict.reading.data import cut, reader
from propagauss.predict.reading.rows import Piece
from propagauss.predict.select import Selection
from propagauss.predict.writing import outputs
from propagauss.predict.writing.store import Store

EXACT = 2.0**53  # whole numbers up to here are read exactly
REMEDY = (
    "correct the data, or leave such rows out with --on-nan skip, or give them NaN with --on-nan keep; finished parts "
    "are kept"
)


@dataclass(frozen=True)
class Task:
    """All that a worker has to know."""

    model: Path
    threads: int | None
    paths: list[Path]
    selection: Selection
    batch: int
    on_nan: str
    folder: Path
    key: str
    lists: bool  # many outputs are one column


class Worker:
    """Makes parts with a model that is loaded once."""

    def __init__(self, task: Task, model: Model):
        self.task, self.model = task, model
        self.store = Store(task.folder, task.key)
        columns, shapes, id_type = task.selection
        example = model(*(np.zeros((1, *s), i.dtype) for s, i in zip(shapes, model.inputs, strict=True)))
        self.empty = {name: value[:0] for name, value in example.items()}
        self.schema = outputs.schema(outputs.complete(example, model.columns), columns.id, id_type, task.lists)

    def run(
        self, parts: Sequence[Part], tell: Callable[[int], object] = lambda rows: None
    ) -> Iterator[tuple[Part, int]]:
        """Make consecutive parts in one pass over the data; each with the number of rows it got."""
        pieces = cut(self._pieces(parts), (size for part in parts for size in self._sizes(part)))
        for part in parts:
            yield part, self.store.write(part.index, self.schema, self._batches(part, pieces, tell))

    def _sizes(self, part: Part) -> Iterator[int]:
        # batches begin with the part, whatever run it is in: its numbers are the same to the last bit
        return (min(self.task.batch, part.rows - done) for done in range(0, part.rows, self.task.batch))

    def _pieces(self, parts: Sequence[Part]) -> Iterator[Piece]:
        columns, _, id_type = self.task.selection
        for segment in joined(parts):
            path = self.task.paths[segment.file]
            for piece in reader(path).read(path, segment, columns, self.task.batch):
                yield Piece(piece.values, None if piece.ids is None else _cast(piece.ids, id_type, path))

    def _batches(self, part: Part, pieces: Iterator[Piece], tell: Callable[[int], object]) -> Iterator[pa.RecordBatch]:
        row = part.start
        for _ in self._sizes(part):
            piece = next(pieces)
            yield self._batch(row, piece)
            tell(len(piece.values))
            row += len(piece.values)

    def _batch(self, row: int, piece: Piece) -> pa.RecordBatch:
        """Rows with a value that is not finite, in the data or in what the model makes of it, are treated alike."""
        values = piece.values
        good = outputs.finite({"": values}, len(values))
        if self.task.on_nan == "error" and not good.all():
            raise self._bad_input(row, values, good)
        found = self._predicted(values[good] if not good.all() else values, row)
        fine = outputs.finite(found, int(good.sum()))
        if not fine.all():
            if self.task.on_nan == "error":
                raise self._bad_output(row, values, found, fine)
            found = {name: value[fine] for name, value in found.items()}
            good[good] = fine
        found = outputs.complete(found, self.model.columns)
        first = pa.array(np.arange(row, row + len(good))) if piece.ids is None else piece.ids
        if self.task.on_nan == "keep" and not good.all():
            found = outputs.in_rows(found, good)
        elif not good.all():
            first = first.filter(pa.array(good))
        return outputs.batch(self.schema, first, found, self.task.lists)

    def _predicted(self, values: np.ndarray, row: int) -> dict[str, np.ndarray]:
        if not len(values):
            return self.empty
        arrays, start = [], 0
        for shape, wanted in zip(self.task.selection.shapes, self.model.inputs, strict=True):
            stop = start + math.prod(shape)
            arrays.append(self._typed(values[:, start:stop], wanted, row).reshape(len(values), *shape))
            start = stop
        return self.model(*arrays)

    def _typed(self, values: np.ndarray, wanted: Input, row: int) -> np.ndarray:
        if wanted.dtype.kind == "f":
            return np.ascontiguousarray(values, wanted.dtype)
        with np.errstate(invalid="ignore"):  # what is too large is found by comparing
            x = np.ascontiguousarray(values, wanted.dtype)
        if (x != values).any() or (np.abs(values) > EXACT).any():
            raise InputError(
                f"from row {row}: {self.model.name} takes {wanted.dtype} as '{wanted.name}', but some are not such "
                "numbers"
            )
        return x

    def _bad_input(self, row: int, values: np.ndarray, good: np.ndarray) -> InputError:
        i = int(np.argmin(good))
        j = int(np.argmin(np.isfinite(values[i])))
        what = f"{self._place(j)} is {values[i, j]} in {values.dtype}"
        return InputError(f"row {row + i}, {what}{_more(good, row)}: {REMEDY}")

    def _bad_output(self, row: int, values: np.ndarray, found: dict[str, np.ndarray], fine: np.ndarray) -> InputError:
        i = int(np.argmin(fine))
        name = next(name for name, value in found.items() if not outputs.finite({name: value[i : i + 1]}, 1).all())
        j = int(np.argmax(np.abs(values[i])))
        largest = f"{self._place(j)}, its largest value, is {values[i, j]:.3g}"
        what = f"what the model returns as '{name}' is not finite ({largest}){_more(fine, row)}"
        return InputError(f"row {row + i}: {what}: {REMEDY}")

    def _place(self, entry: int) -> str:
        columns = self.task.selection.columns
        if not columns.inputs:
            return f"entry {entry}"
        ends = np.cumsum(columns.widths)
        i = int(np.searchsorted(ends, entry, "right"))
        inside = f", entry {entry - (int(ends[i]) - columns.widths[i])}" if columns.widths[i] > 1 else ""
        return f"column '{columns.inputs[i]}'{inside}"


def _more(good: np.ndarray, row: int) -> str:
    bad = int((~good).sum())
    return f" (and {bad - 1} more in the {len(good)} rows from row {row})" if bad > 1 else ""


def _cast(ids: pa.Array, wanted: pa.DataType | None, path: Path) -> pa.Array:
    try:
        return ids if ids.type == wanted else ids.cast(wanted)
    except pa.ArrowException as error:
        raise InputError(f"{path}: the ids are {ids.type}, but {wanted} in the first file ({error})") from error
