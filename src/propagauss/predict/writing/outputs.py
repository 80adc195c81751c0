"""Columns of the output: what the model returns, and what its likelihood wants to be made of that."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from propagauss.errors import InputError

MANY = 32  # outputs: more of them are one column of lists, where the file can hold that
NAMES = {"probabilities": "probability"}
Arrays = Mapping[str, np.ndarray]


def complete(found: Arrays, columns: Mapping[str, str]) -> dict[str, np.ndarray]:
    """With the columns in front that the likelihood wants to be made of its outputs: {name: "entropy of ..."}."""
    made = {}
    for name, how in columns.items():
        function, _, source = how.partition(" of ")
        if function not in DERIVED or source not in found:
            raise InputError(
                f"the model asks for a column '{name}' ({how}), which is not known here: upgrade propagauss"
            )
        made[name] = DERIVED[function](found[source])
    return {**made, **found}


def _argmax(p: np.ndarray) -> np.ndarray:
    return p.astype(np.float64).argmax(axis=-1).astype(np.int32)


def _entropy(p: np.ndarray) -> np.ndarray:
    """In nats."""
    q = p.astype(np.float64)
    return -np.sum(q * np.log(np.where(q > 0, q, 1.0)), axis=-1).astype(p.dtype)


def _round(p: np.ndarray) -> np.ndarray:
    """Of a yes or no: 1 if it is more probable than not."""
    return (p > 0.5).astype(np.int32)


def _binary_entropy(p: np.ndarray) -> np.ndarray:
    """Of a yes or no, in nats."""
    return _entropy(np.stack([p.astype(np.float64), 1 - p.astype(np.float64)], axis=-1)).astype(p.dtype)


DERIVED = {"argmax": _argmax, "entropy": _entropy, "round": _round, "binary_entropy": _binary_entropy}


def finite(found: Arrays, rows: int) -> np.ndarray:
    """Which rows hold numbers only, `[rows]`."""
    good = np.ones(rows, bool)
    for value in found.values():
        if value.dtype.kind == "f" and not _all_finite(value):
            good &= np.isfinite(value).reshape(rows, -1).all(axis=1)
    return good


def _all_finite(value: np.ndarray) -> bool:
    """A sum that is finite shows it, and is quicker to make; one that is not may only have overflowed."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(value.sum(dtype=np.float32 if value.itemsize < 4 else None)))


def in_rows(found: Arrays, there: np.ndarray) -> dict[str, np.ndarray]:
    """In the rows that are `there`; the others are NaN, or masked where there is no NaN."""
    return {name: _in_rows(value, there) for name, value in found.items()}


def _in_rows(value: np.ndarray, there: np.ndarray) -> np.ndarray:
    if value.dtype.kind == "f":
        full = np.full((len(there), *value.shape[1:]), np.nan, value.dtype)
    else:
        full = np.ma.array(np.zeros((len(there), *value.shape[1:]), value.dtype), mask=True)
    full[there] = value
    return full


def schema(example: Arrays, id: str | None, id_type: pa.DataType | None, lists: bool) -> pa.Schema:
    """Of the output, from what the model returns for any input."""
    first = pa.field(id, id_type) if id is not None else pa.field("row", pa.int64())
    fields = [pa.field(name, values.type) for name, values in _columns(example, lists)]
    if first.name in {field.name for field in fields}:
        raise InputError(f"the id column '{first.name}' has the name of a column of the output: rename it")
    return pa.schema([first, *fields])


def batch(schema: pa.Schema, first: pa.Array, found: Arrays, lists: bool) -> pa.RecordBatch:
    """Rows of the output."""
    return pa.RecordBatch.from_arrays([first, *(values for _, values in _columns(found, lists))], schema=schema)


def _columns(found: Arrays, lists: bool) -> list[tuple[str, pa.Array]]:
    return [pair for name, value in found.items() for pair in _split(NAMES.get(name, name), value, lists)]


def _split(name: str, value: np.ndarray, lists: bool) -> list[tuple[str, pa.Array]]:
    """One number a row: a column of that name; some: numbered columns; many: lists."""
    flat = value.reshape(len(value), int(np.prod(value.shape[1:])))
    width = flat.shape[1]
    if flat.dtype == np.float16:  # CSV writers do not know it
        flat = flat.astype(np.float32)
    if width == 1:
        return [(name, _array(flat[:, 0]))]
    if lists and width > MANY:
        return [(name, pa.FixedSizeListArray.from_arrays(_array(flat.reshape(-1)), width))]
    return [(f"{name}_{i}", _array(flat[:, i])) for i in range(width)]


def _array(values: np.ndarray) -> pa.Array:
    if isinstance(values, np.ma.MaskedArray):
        return pa.array(values.data, mask=np.ma.getmaskarray(values))
    return pa.array(np.ascontiguousarray(values))
