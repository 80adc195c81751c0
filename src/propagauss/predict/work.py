"""Parts made: rows read, checked, predicted and written. The same for every engine, so that all give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from propagauss.errors import InputError
from propagauss.predict.model import Model
from propagauss.predict.plan import Part, joined
from propagauss.predict.reading.data import cut, reader
from propagauss.predict.reading.rows import Piece
from propagauss.predict.select import Selection
from propagauss.predict.writing import outputs
from propagauss.predict.writing.store import Store


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
        columns, shape, id_type = task.selection
        example = model(np.zeros((1, *shape), model.dtype))
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
        values = piece.values.reshape(len(piece.values), -1)
        good: np.ndarray = np.isfinite(values).all(axis=1)  # type: ignore[assignment]
        if self.task.on_nan == "error" and not good.all():
            raise self._bad(row, values, good)
        first = pa.array(np.arange(row, row + len(good))) if piece.ids is None else piece.ids
        found = outputs.complete(self._predicted(values[good], row), self.model.columns)
        if self.task.on_nan == "keep" and not good.all():
            found = outputs.in_rows(found, good)
        elif not good.all():
            first = first.filter(pa.array(good))
        return outputs.batch(self.schema, first, found, self.task.lists)

    def _predicted(self, values: np.ndarray, row: int) -> dict[str, np.ndarray]:
        if not len(values):
            return self.empty
        x = values.reshape(len(values), *self.task.selection.shape).astype(self.model.dtype, copy=False)
        if self.model.dtype.kind != "f" and (x.reshape(values.shape) != values).any():
            raise InputError(
                f"from row {row}: {self.model.name} takes {self.model.dtype}, but some are not such numbers"
            )
        return self.model(x)

    def _bad(self, row: int, values: np.ndarray, good: np.ndarray) -> InputError:
        i = int(np.argmin(good))
        j = int(np.argmin(np.isfinite(values[i])))
        more = (
            f" (and {int((~good).sum()) - 1} more in the {len(good)} rows from row {row})" if (~good).sum() > 1 else ""
        )
        return InputError(
            f"row {row + i}, {self._place(j)} is {values[i, j]} in {values.dtype}{more}: correct the data, or leave "
            "such rows out with --on-nan skip, or give them NaN with --on-nan keep; finished parts are kept"
        )

    def _place(self, entry: int) -> str:
        names = self.task.selection.columns.inputs
        if len(names) > 1 or (names and self.task.selection.columns.width == 1):
            return f"column '{names[entry]}'"
        return f"column '{names[0]}', entry {entry}" if names else f"entry {entry}"


def _cast(ids: pa.Array, wanted: pa.DataType | None, path: Path) -> pa.Array:
    try:
        return ids if ids.type == wanted else ids.cast(wanted)
    except pa.ArrowException as error:
        raise InputError(f"{path}: the ids are {ids.type}, but {wanted} in the first file ({error})") from error
