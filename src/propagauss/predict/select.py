"""Which columns of the data make the input of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from propagauss.errors import InputError, nearest
from propagauss.predict.model import Model, describe, fit
from propagauss.predict.reading.data import reader
from propagauss.predict.reading.rows import Columns, Reader

SHOWN = 12


class Selection(NamedTuple):
    """What is read, the shape it takes for the model, and the type of the id."""

    columns: Columns
    shape: tuple[int, ...]
    id_type: pa.DataType | None


def select(model: Model, paths: list[Path], names: Sequence[str] | None, id: str | None) -> Selection:
    """Find the columns, in every file; complain before anything is read."""
    path = next((path for path in paths if reader(path).estimate(path)), paths[0])  # rows show what columns hold
    source = reader(path)
    kinds = source.kinds(path)
    if not kinds and (names or id):
        raise InputError(f"{path.name} is an array, without columns: leave --columns and --id out")
    copied = [id] if id else []
    _check(path, kinds, [*(names or []), *copied])
    _check_numbers(path, kinds, names or [])
    if names and id in names:
        raise InputError(f"column '{id}' cannot be both the id and an input")
    chosen = _named(kinds, names) if names else _fitting(model, source, path, kinds, id)
    shape = _shape(model, source, path, chosen, kinds)
    for other in paths:
        found = reader(other).kinds(other)
        _check(other, found, [*chosen, *copied])
        _check_numbers(other, found, chosen)
    dtype = model.dtype if model.dtype.kind == "f" else np.dtype(np.float64)  # so that NaN is seen
    columns = Columns(tuple(chosen), math.prod(shape), id, dtype)
    return Selection(columns, shape, _id_type(source, path, id))


def _check(path: Path, kinds: dict[str, str], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in kinds]
    if missing and kinds:
        hint = nearest(missing[0], kinds) if len(missing) == 1 else ""
        there = f"there are {_listed(list(kinds))}"
        raise InputError(f"{path.name} has no column {_listed(missing)}{hint} ({there})")


def _check_numbers(path: Path, kinds: dict[str, str], chosen: Sequence[str]) -> None:
    wrong = [name for name in chosen if kinds[name] == "other"]
    if wrong:
        remedy = "leave it out, or encode it as in training"
        raise InputError(f"column {_listed(wrong)} of {path.name} does not hold numbers: {remedy}")


def _named(kinds: dict[str, str], names: Sequence[str]) -> list[str]:
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise InputError(f"column {_listed(twice)} is named more than once")
    if len(names) > 1 and any(kinds[name] == "list" for name in names):
        raise InputError("a column of lists is the whole input: name it alone, or only columns of numbers")
    return list(names)


def _fitting(model: Model, source: Reader, path: Path, kinds: dict[str, str], id: str | None) -> list[str]:
    """All columns of numbers, or the one of lists: whichever the model takes."""
    if not kinds:
        return []
    numbers = [name for name, kind in kinds.items() if kind == "number" and name != id]
    lists = [name for name, kind in kinds.items() if kind == "list" and name != id]
    candidates = [numbers] * bool(numbers) + [[name] for name in lists]
    if not candidates:
        raise InputError(f"{path.name} has no columns of numbers (there are {_listed(list(kinds))})")
    if len(candidates) == 1:
        return candidates[0]
    fits = [each for each in candidates if fit(_raw_shape(source, path, each, kinds), model.shape)]
    if len(fits) == 1:
        return fits[0]
    raise InputError(
        f"{path.name} has {len(numbers)} columns of numbers and lists in {_listed(lists)}; {model.name} takes "
        f"{describe(model.shape)}: say which with --columns"
    )


def _raw_shape(source: Reader, path: Path, chosen: list[str], kinds: dict[str, str]) -> tuple[int, ...]:
    if chosen and kinds[chosen[0]] == "number":
        return (len(chosen),)
    return source.shape(path, chosen[0] if chosen else None)


def _shape(model: Model, source: Reader, path: Path, chosen: list[str], kinds: dict[str, str]) -> tuple[int, ...]:
    raw = _raw_shape(source, path, chosen, kinds)
    shape = fit(raw, model.shape)
    if shape is not None:
        return shape
    if chosen and kinds[chosen[0]] == "number":
        n = len(chosen)
        has = f"{n} column{'s' if n > 1 else ''} of numbers were chosen: {_listed(chosen)}"
        raise InputError(f"{model.name} takes an input of shape {describe(model.shape)}, but {has}; use --columns")
    what = f"column '{chosen[0]}' has lists" if chosen else "has samples"
    raise InputError(
        f"{model.name} takes an input of shape {describe(model.shape)}, but {path.name} {what} of shape {describe(raw)}"
    )


def _id_type(source: Reader, path: Path, id: str | None) -> pa.DataType | None:
    if id is None:
        return None
    found = source.id_type(path, id)
    if pa.types.is_nested(found):
        raise InputError(f"column '{id}' holds {found}, which cannot be an id")
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + more
